"""Answers that are generated in shards: every prompt once, the same after a kill, and read again by
the jobs that train on them.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from helpers.tiny_runs import MakeRecipe
from postgrad.cli.main import main
from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import finite
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.tools import generate as module
from postgrad.tools.generate import Extent, generate
from postgrad.tools.selection import RowSelection, select
from postgrad.training.rows import training

QUIET = Console("quiet")
EXTENT = Extent(samples=2, rows=12, shard=2)


@pytest.fixture
def recipe(make_recipe: MakeRecipe, models: Callable[[int], str]) -> Recipe:
    """Of RL, with a model that is there: 40 prompts, 4 samples each."""
    return make_recipe("rl", model={"path": models(0), "init": None})


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "shards").iterdir())}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for data in shards(folder).values() for line in data.splitlines()]


def test_every_prompt_is_answered_and_scored(recipe: Recipe, tmp_path: Path) -> None:
    generated = generate(recipe, tmp_path / "to", QUIET, Extent(samples=3, shard=16))
    samples = lines(tmp_path / "to")
    rows = len({sample["row"] for sample in samples})
    assert [(s["ticket"], s["sample"]) for s in samples] == [
        (ticket, number) for ticket in range(rows) for number in range(3)
    ]
    assert generated.about["prompts"] == rows > 30
    assert list(shards(tmp_path / "to")) == ["00000.jsonl", "00001.jsonl", "00002.jsonl"]
    for sample in samples:
        assert sample["total"] == sum(sample["rewards"].values())
        assert sample["messages"][-1] == {"role": "user", "content": sample["question"]}
        assert "prompt_token_ids" not in sample
    assert [len(group) for group in generated.groups()] == [3] * rows


def test_a_verifier_of_groups_sees_all_samples_of_a_prompt(
    make_recipe: MakeRecipe, models: Callable[[int], str], tmp_path: Path
) -> None:
    model = {"path": models(0), "init": None}
    recipe = make_recipe("rl", model=model, rewards=[{"type": "tiny_rewards:alone"}])
    generated = generate(recipe, tmp_path / "to", QUIET, Extent(samples=3, rows=12, shard=5))
    scores: list[float] = []
    for group in generated.groups():
        texts = [sample["text"] for sample in group]
        assert [s["rewards"]["alone"] for s in group] == [float(texts.count(t) == 1) for t in texts]
        scores += [sample["rewards"]["alone"] for sample in group]
    assert len(scores) == 36


def test_a_missing_shard_alone_is_generated_again_with_the_same_bytes(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = Extent(samples=2, rows=12, shard=4)
    generate(recipe, tmp_path / "to", QUIET, extent)
    complete_shards = shards(tmp_path / "to")
    (tmp_path / "to" / "shards" / "00001.jsonl").unlink()
    (tmp_path / "to" / "shards" / ".00001.jsonl.77.tmp").write_text("half", "utf-8")
    asked: list[int] = []
    sample_groups = module.sample_groups

    def counted(*args: Any) -> Any:
        asked.append(len(args[2]))
        return sample_groups(*args)

    monkeypatch.setattr(module, "sample_groups", counted)
    generate(recipe, tmp_path / "to", QUIET, extent)
    assert asked == [4]
    assert shards(tmp_path / "to") == complete_shards
    monkeypatch.setattr(module, "build_engine", None)  # nothing is missing: no engine starts
    generate(recipe, tmp_path / "to", QUIET, extent)


def test_a_shard_that_was_damaged_is_named_and_can_be_generated_again(
    recipe: Recipe, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    extent = Extent(samples=2, rows=12, shard=4)
    generate(recipe, to, QUIET, extent)
    complete_shards = shards(to)
    damaged = to / "shards" / "00001.jsonl"
    damaged.write_bytes(complete_shards["00001.jsonl"][:-20])
    with pytest.raises(RunError, match=rf"^{damaged} is damaged: .*; remove it and repeat"):
        list(generate(recipe, to, QUIET, extent).groups())
    damaged.unlink()
    generate(recipe, to, QUIET, extent)
    assert shards(to) == complete_shards


def test_another_cut_into_shards_gives_the_same_samples(recipe: Recipe, tmp_path: Path) -> None:
    for name, shard in (("a", 3), ("b", 12)):
        generate(recipe, tmp_path / name, QUIET, Extent(samples=2, rows=12, shard=shard))
    a, b = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [sample["text"] for sample in a] == [sample["text"] for sample in b]
    assert len({sample["text"] for sample in a}) > 6


@pytest.mark.parametrize(
    ("extent", "changes", "message"),
    [
        (Extent(samples=3, rows=4), {}, "with samples = 2, and now it is 3: choose"),
        (Extent(samples=2, rows=5), {}, "with prompts = 4, and now it is 5"),
        (Extent(samples=2, rows=4), {"seed": 5}, "another recipe"),
    ],
)
def test_another_generation_is_not_mixed_in(
    extent: Extent, changes: dict[str, Any], message: str, recipe: Recipe, tmp_path: Path
) -> None:
    generate(recipe, tmp_path / "to", QUIET, Extent(samples=2, rows=4))
    before = shards(tmp_path / "to")
    with pytest.raises(UsageError) as raised:
        generate(parse_recipe(recipe.dump() | changes), tmp_path / "to", QUIET, extent)
    assert message in str(raised.value)
    assert shards(tmp_path / "to") == before


def test_rows_that_changed_are_told_with_what_generate_can_do(
    make_recipe: MakeRecipe, models: Callable[[int], str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "spell abc", "answer": "cba"}\n', "utf-8")
    recipe = make_recipe("rl", data={"path": str(rows), "max_len": 64}, eval={"sets": []})
    generate(recipe, tmp_path / "to", QUIET, Extent(samples=1), models(0))
    rows.write_text('{"question": "spell abc", "answer": "xyz"}\n', "utf-8")
    why = r"has changed since samples were written to .*/to: .*; restore it, or choose another --to"
    with pytest.raises(UsageError, match=why) as error:
        generate(recipe, tmp_path / "to", QUIET, Extent(samples=1), models(0))
    assert "--allow-change" not in str(error.value)


def test_with_another_model_the_recipes_own_is_not_looked_for(
    make_recipe: MakeRecipe, models: Callable[[int], str], tmp_path: Path
) -> None:
    model_table = {"path": "postgrad-tests/on-no-hub", "init": None}
    recipe = make_recipe("rl", model=model_table)
    generated = generate(recipe, tmp_path / "to", QUIET, Extent(samples=1, rows=2), models(0))
    assert generated.about["model"] == models(0)
    stage = make_recipe("rl", model={"path": "@sft", "init": None})
    generate(stage, tmp_path / "of_stage", QUIET, Extent(samples=1, rows=2), models(0))


def test_a_model_of_a_pipelines_stage_is_asked_for_by_its_key(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    stage = make_recipe("rl", model={"path": "@sft", "init": None})
    with pytest.raises(UsageError, match=r"model\.path = '@sft' is the model of an earlier recipe"):
        generate(stage, tmp_path / "to", QUIET, Extent(samples=1, rows=2))


def test_a_directory_with_something_else_is_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine.txt").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match=r"holds no generate\.json: choose another --to"):
        generate(recipe, tmp_path / "to", QUIET, Extent())
    (tmp_path / "to" / "generate.json").write_text("[1]", "utf-8")
    with pytest.raises(UsageError, match="is not of postgrad generate"):
        generate(recipe, tmp_path / "to", QUIET, Extent())


@pytest.mark.slow
def test_jobs_read_the_selected_rows(
    recipe: Recipe, make_recipe: MakeRecipe, models: Callable[[int], str], tmp_path: Path
) -> None:
    generated = generate(recipe, tmp_path / "to", QUIET, Extent(samples=4, rows=20))
    tokenizer = load_tokenizer(models(0))
    paths = {
        kind: select(
            generated.groups(),
            RowSelection(kind=kind, keep_truncated=True),
            tmp_path / f"{kind}.jsonl",
            generated.name,
        ).path
        for kind in ("best", "pairs", "difficulty")
    }
    data = {"task": {}, "max_len": 64}
    best = {"path": str(paths["best"]), "messages": "messages", **data}
    sft = make_recipe(
        "sft", data=best, eval={"path": "reasoning-gym:spell_backward", "messages": ""}
    )
    assert len(training(sft, tokenizer)) == 20
    pairs = make_recipe("preference").dump()
    pairs["data"] = {"path": str(paths["pairs"]), "max_len": 64}
    rows = paths["pairs"].read_text("utf-8").count("\n")
    assert len(training(parse_recipe(pairs), tokenizer)) == rows > 5
    rl = make_recipe("rl", data={"path": str(paths["difficulty"]), **data})
    assert len(training(rl, tokenizer)) == 20


@pytest.mark.slow
def test_sft_learns_of_episodes_what_the_policy_wrote_in_them(
    make_recipe: MakeRecipe,
    models: Callable[[int], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    rl = make_recipe(
        "rl",
        model={"path": models(0), "init": None},
        environment={"type": "rooms:Rooms", "max_turns": 4},
        data={"max_len": 300},
        rollout={"max_new_tokens": 30, "stop": [*"abcdefghijklmno"]},
    )
    generated = generate(rl, tmp_path / "to", QUIET, Extent(samples=3, rows=8))
    samples = {(s["row"], s["sample"]): s for group in generated.groups() for s in group}
    path = tmp_path / "all.jsonl"
    select(generated.groups(), RowSelection(keep_truncated=True), path, generated.name)
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    learned: dict[Any, list[str]] = {}
    per_row: list[list[str]] = []
    for row in rows:
        answers = [m for m in row["messages"] if m["role"] == "assistant"]
        new = [m["content"] for m in answers if m.get("weight", 1)]
        assert new
        per_row.append(new)
        learned.setdefault((row["row"], row["sample"]), []).extend(new)
    assert len(rows) > len(samples)
    for place, sample in samples.items():
        assert len(learned[place]) == sample["counts"]["turns"]
        assert all(text in sample["text"] for text in learned[place])
    data = {"path": str(path), "messages": "messages", "task": {}, "max_len": 64}
    questions = {"path": "reasoning-gym:spell_backward", "messages": ""}
    sft, tokenizer = make_recipe("sft", data=data, eval=questions), load_tokenizer(models(0))
    kept = training(sft, tokenizer).all()
    assert len(kept) > 3
    texts = [sorted(text.strip() for text in new) for new in per_row]
    for conversation in kept:
        ids = conversation.token_ids[conversation.loss_mask]
        read = tokenizer.decode(ids.tolist()).split(tokenizer.eos_token)
        assert sorted(text.strip() for text in read[:-1]) in texts


def test_answers_without_rewards_are_generated_too(
    make_recipe: MakeRecipe, models: Callable[[int], str], tmp_path: Path
) -> None:
    raw = make_recipe("sft", model={"path": models(0), "init": None}).dump()
    sft = parse_recipe(raw | {"rewards": [], "eval": {}, "rollout": {"max_new_tokens": 6}})
    generated = generate(sft, tmp_path / "to", QUIET, Extent(rows=5))
    samples = lines(tmp_path / "to")
    assert [(s["ticket"], s["total"], s["rewards"]) for s in samples] == [
        (ticket, None, {}) for ticket in range(5)
    ]
    selected = select(generated.groups(), RowSelection(), tmp_path / "all.jsonl", "x")
    assert selected.counts["rows"] == 5


def command(recipe: Recipe, folder: Path, *more: str) -> list[str]:
    """The words that generate EXTENT of a recipe into folder/to."""
    stated = finite(recipe.model_dump(mode="json"))
    (folder / "rl.toml").write_text(tomlkit.dumps(without_none(stated)), "utf-8")
    words = ["generate", str(folder / "rl.toml"), "--to", str(folder / "to")]
    return [*words, "--samples", "2", "--rows", "12", "--shard", "2", *more]


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def test_the_command_says_what_it_selected(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(recipe, tmp_path, "--select", "pairs", "--keep-truncated", "--json")
    assert main(words) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    rows = Path(result["rows"])
    assert rows == tmp_path / "to" / "pairs.jsonl"
    assert result["counts"]["prompts"] == 12
    assert result["counts"]["rows"] == rows.read_text("utf-8").count("\n")


@pytest.mark.slow
def test_a_killed_command_goes_on_and_ends_with_the_same_samples(
    recipe: Recipe, tmp_path: Path
) -> None:
    words = command(recipe, tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "postgrad", *words])
    while not list((tmp_path / "to").glob("shards/*.jsonl")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "to" / "all.jsonl").exists()
    assert main(words) == 0
    uninterrupted = generate(recipe, tmp_path / "whole", QUIET, EXTENT)
    assert shards(tmp_path / "to") == shards(tmp_path / "whole")
    assert len(list(uninterrupted.groups())) == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--samples", "0"], "--samples 0: 1 or more"), (["--select", "bets"], "did you mean best?")],
)
def test_a_wrong_flag_is_one_message(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "recipes/quickstart/rl.toml", "--to", str(tmp_path / "to"), *flags]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_fresh_model_and_pairs_are_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name one with --model"):
        generate(make_recipe("rl"), tmp_path / "to", QUIET, Extent())
    with pytest.raises(UsageError, match='job = "preference" reads pairs'):
        generate(make_recipe("preference"), tmp_path / "to", QUIET, Extent())
    assert not (tmp_path / "to").exists()


def test_a_command_that_was_killed_as_it_began_is_repeated(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "to" / "shards").mkdir(parents=True)
    (tmp_path / "to" / ".generate.json.77.tmp").write_text('{"rec', "utf-8")
    generate(recipe, tmp_path / "to", QUIET, Extent(samples=2, rows=2, shard=2))
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["generate.json", "shards"]

"""`--sweep`: keys and values become runs, each with a whole recipe of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.recipe.load import as_toml, load_recipe
from postgrad.recipe.pipeline import Pipeline
from postgrad.recipe.sweep import (
    MOST_NAME,
    RECIPES,
    SWEEP,
    Sweep,
    is_sweep,
    parse_swept,
    read_sweep,
    sweep_of,
    swept_in_python,
)

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"
Write = Callable[..., Path]


def swept(path: Path, *words: str, flags: tuple[str, ...] = ()) -> Sweep:
    return sweep_of(path, flags, parse_swept(words))


def test_every_combination_is_a_run_with_its_own_directory(write: Write) -> None:
    sweep = swept(write(), "learner.lr=1e-4,3e-4", "algorithm.kl_coef=0.0,0.1,0.2")
    assert [trial.name for trial in sweep.trials] == [
        f"lr={lr},kl_coef={kl}" for lr in ("1e-4", "3e-4") for kl in ("0.0", "0.1", "0.2")
    ]
    assert sweep.path == Path("runs/a")
    for trial in sweep.trials:
        assert trial.path == Path("runs/a") / trial.name
        assert f"{trial.recipes[0].learner.lr:g}" in ("0.0001", "0.0003")
    last = sweep.trials[-1].recipes[0].dump()
    assert (last["learner"]["lr"], last["algorithm"]["kl_coef"]) == (3e-4, 0.2)


def test_flags_are_for_all_runs(write: Write) -> None:
    sweep = swept(write(), "seed=1,2", flags=("--steps", "7", "--run_dir", "runs/b"))
    assert sweep.path == Path("runs/b")
    assert [trial.recipes[0].dump()["steps"] for trial in sweep.trials] == [7, 7]


def test_keys_that_end_alike_are_named_whole(write: Write) -> None:
    sweep = swept(write(), "data.limit=10,20", "eval.limit=5")
    assert sweep.trials[0].name == "data.limit=10,eval.limit=5"


def test_a_comma_in_brackets_or_quotes_is_part_of_a_value() -> None:
    (key,) = parse_swept(["eval.pass_at=[1, 2],[1]"])
    assert key.values == ("[1, 2]", "[1]")
    (key,) = parse_swept(['model.path="a,b",c'])
    assert key.values == ('"a,b"', "c")


@given(st.lists(st.lists(st.integers(), min_size=1), min_size=1))
def test_lists_as_values_are_cut_at_the_right_commas(values: list[list[int]]) -> None:
    (key,) = parse_swept(["key=" + ",".join(map(str, values))])
    assert list(key.values) == [str(value) for value in values]


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        (["learner.lrr=1,2"], (), "--learner.lrr 1: unknown key 'learner.lrr': did you mean"),
        (["learner.lr=1e-4,-1"], (), "--learner.lr -1: learner.lr = -1: input should be greater"),
        (["learner.lr=1e-4,,1"], (), "a key and its values are wanted"),
        (["learner.lr"], (), "a key and its values are wanted"),
        (["=1"], (), "a key and its values are wanted"),
        (["seed=1", "seed=2"], (), "--sweep seed is given twice"),
        (["seed=1,2"], ("--seed", "3"), "--seed 3: --sweep seed gives its values"),
        (["model.path=a,b"], ("--model", "{}"), "--sweep model.path gives its values"),
        (["learner.lr=1e-4,0.0001"], (), "lr=1e-4 and lr=0.0001 are the same run"),
        (["steps=1,2", "epochs=1,2"], (), "state one quantity"),
        (["run_dir=a,b"], (), "the sweep chooses it"),
        (["seed=1,2"], ("--checkpoint.ckpt_path", "x"), "all runs of the sweep would write there"),
        (["seed=1,2"], ("--checkpoint.mirror", "s3://a/b"), "all runs of the sweep would write"),
        ([f"seed={','.join(map(str, range(300)))}"], (), "makes 300 runs, and 256 is the most"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(
    words: list[str], flags: tuple[str, ...], message: str, write: Write
) -> None:
    with pytest.raises(UsageError) as error:
        swept(write(), *words, flags=flags)
    assert message in str(error.value)


def test_an_unknown_key_is_told_once_and_bad_values_each(write: Write) -> None:
    with pytest.raises(UsageError) as error:
        swept(write(), "learner.lrr=1,2,3")
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UsageError) as error:
        swept(write(), "learner.lr=-1,-2,1e-3")
    assert len(str(error.value).splitlines()) == 2


def test_a_sweep_is_read_as_it_was_written(write: Write, tmp_path: Path) -> None:
    flags = ("--run_dir", str(tmp_path / "sweep"))
    sweep = swept(write(), "learner.lr=1e-4,3e-4", "eval.temperature=0.5,1.0", flags=flags)
    sweep.path.mkdir()
    assert not is_sweep(sweep.path)
    sweep.write()
    assert is_sweep(sweep.path)
    assert read_sweep(sweep.path) == sweep
    alone = load_recipe(sweep.path / RECIPES / "lr=1e-4,temperature=0.5.toml")
    assert alone == sweep.trials[0].recipes[0]


def test_overrides_of_a_resume_reach_every_run(write: Write, tmp_path: Path) -> None:
    sweep = swept(write(), "seed=1,2", flags=("--run_dir", str(tmp_path / "sweep")))
    sweep.path.mkdir()
    sweep.write()
    longer = read_sweep(sweep.path, ["--steps", "99", "--eval.limit", "3"])
    for trial in longer.trials:
        data: Any = trial.recipes[0].dump()
        assert (data["steps"], data["eval"]["sets"][0]["limit"]) == (99, 3)


def test_runs_of_an_earlier_command_stay(write: Write, tmp_path: Path) -> None:
    flags = ("--run_dir", str(tmp_path / "sweep"))
    first = swept(write(), "seed=1,2", flags=flags)
    first.path.mkdir()
    first.write()
    more = swept(write(), "seed=2,3", flags=flags).with_earlier()
    assert [trial.name for trial in more.trials] == ["seed=1", "seed=2", "seed=3"]
    with pytest.raises(UsageError, match=r"holds a sweep over seed: choose another --run_dir"):
        swept(write(), "learner.lr=1e-4", flags=flags).with_earlier()


def test_a_pipeline_is_swept_by_the_keys_of_its_stages(tmp_path: Path) -> None:
    flags = ("--run_dir", str(tmp_path / "sweep"))
    sweep = swept(QUICKSTART, "rl.learner.lr=1e-4,1e-3", "seed=1", flags=flags)
    assert [trial.name for trial in sweep.trials] == ["lr=1e-4,seed=1", "lr=1e-3,seed=1"]
    first = sweep.trials[0]
    assert isinstance(first.source, Pipeline)
    sft, rl = first.recipes
    assert (sft.seed, rl.seed, rl.learner.lr) == (1, 1, 1e-4)
    assert sft.learner.lr != 1e-4
    assert first.judged == tmp_path / "sweep" / first.name / "rl"
    sweep.path.mkdir()
    sweep.write()
    again = read_sweep(sweep.path)
    assert [trial.recipes for trial in again.trials] == [trial.recipes for trial in sweep.trials]
    assert again.trials[0].source.ask == first.source.ask  # pyright: ignore
    with pytest.raises(UsageError, match="sweep of a pipeline, which resumes unchanged"):
        read_sweep(sweep.path, ["--rl.steps", "3"])
    with pytest.raises(UsageError, match="rll"):
        swept(QUICKSTART, "rll.learner.lr=1e-4", flags=flags)


def test_a_stage_of_a_swept_pipeline_still_generates(tmp_path: Path) -> None:
    flags = ("--run_dir", str(tmp_path / "sweep"), "--generate.answers.threshold", "1.5")
    sweep = swept(ROOT / "recipes" / "best_of_n", "best_of_n.learner.lr=1e-4,1e-3", flags=flags)
    sweep.path.mkdir()
    sweep.write()
    for trial in read_sweep(sweep.path).trials:
        assert isinstance(trial.source, Pipeline)
        sft, answers, best = trial.source.stages
        assert (sft.generate, best.generate) == (None, None)
        assert answers.generate is not None
        assert (answers.generate.samples, answers.generate.threshold) == (8, 1.5)
        assert answers.rows == trial.path / "answers" / "best.jsonl"
        assert best.recipe.data.path == "@answers"


def test_names_are_folders_of_any_file_system(write: Write) -> None:
    long = "/".join(["x" * 60] * 5)
    sweep = swept(write(), f"model.path=org/one,org one,{long}1,{long}2")
    names = [trial.name for trial in sweep.trials]
    assert names[:2] == ["path=org-one", "path=org-one+2"]
    assert len(set(names)) == 4
    assert all(len(name) <= MOST_NAME and "/" not in name for name in names)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"keys": ["seed"], "runs": []}',
        '{"keys": ["seed"], "runs": [{"name": "../x", "values": {}}]}',
        '{"keys": ["seed"], "runs": [{"name": "..", "values": {}}]}',
        '{"keys": ["seed"], "runs": [{"name": "a", "values": {}}], "more": 1}',
    ],
)
def test_a_forged_sweep_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / SWEEP).write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"sweep\.json is not one that a sweep wrote"):
        read_sweep(tmp_path)


def test_values_of_python_are_those_of_a_recipe(write: Write) -> None:
    swept_keys = swept_in_python(
        {"learner.lr": [1e-5, 0.5], "rollout.stop": [["a"], ["a", "b, c"]], "model.path": ["a b"]}
    )
    sweep = sweep_of(load_recipe(write()), (), swept_keys)
    data: list[Any] = [trial.recipes[0].dump() for trial in sweep.trials]
    assert [entry["learner"]["lr"] for entry in data] == [1e-5, 1e-5, 0.5, 0.5]
    assert [entry["rollout"]["stop"] for entry in data] == [["a"], ["a", "b, c"]] * 2
    assert {entry["model"]["path"] for entry in data} == {"a b"}
    with pytest.raises(UsageError, match="has no values"):
        swept_in_python({"seed": []})
    with pytest.raises(UsageError, match="at least one key"):
        swept_in_python({})
    with pytest.raises(UsageError, match="sweep over seed"):
        swept_in_python({"seed": [object()]})


@pytest.mark.parametrize("name", ["gsm8k_grpo.toml", "7b/ppo_lora.toml", "hh_reward.toml"])
def test_a_shipped_recipe_survives_its_file(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / name)
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(recipe.dump()), "utf-8")
    assert load_recipe(path) == recipe

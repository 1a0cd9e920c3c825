"""Ways to give cards to learner and engines: each is a recipe, and the best is named."""

import json
from pathlib import Path

import pytest

from plan.test_cases import planned, rl
from postgrad.cli.main import main
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.plan import Facts
from postgrad.plan.splits import arrangements, best_split, fitting_splits
from postgrad.recipe.load import parse_recipe, with_overrides
from postgrad.recipe.recipe import Recipe

VLLM = ["--rollout.type", "vllm"]


def splits_of(recipe: Recipe, count: int) -> set[tuple[int, int, bool]]:
    """(ranks, workers, on the same cards) of each arrangement, as the recipe then says it."""
    changed = [with_overrides(recipe, flags) for flags in arrangements(recipe, count, "zero2")]
    return {
        (
            changed_recipe.learner.ranks,
            changed_recipe.cluster.engines(changed_recipe.learner.ranks),
            changed_recipe.cluster.policy.colocate is not None,
        )
        for changed_recipe in changed
    }


def test_cards_move_one_by_one_from_learner_to_engines() -> None:
    recipe = rl("Qwen/Qwen2.5-0.5B", 1024)
    assert splits_of(recipe, 4) == {(4, 4, True), (3, 1, False), (2, 2, False), (1, 3, False)}
    assert splits_of(recipe, 1) == {(1, 0, False)}


def test_an_engine_of_four_cards_takes_them_together() -> None:
    recipe = with_overrides(
        rl("Qwen/Qwen2.5-0.5B", 1024), [*VLLM, "--rollout.vllm.tensor_parallel", "4"]
    )
    apart = {(12, 1, False), (8, 2, False), (4, 3, False)}
    assert splits_of(recipe, 16) == apart | {(16, 4, True)}
    assert splits_of(recipe, 15) == {(11, 1, False), (7, 2, False), (3, 3, False)}


@pytest.mark.parametrize(
    "flags",
    [
        ["--cluster.policy", '{ gpus = 8, machines = 2, colocate = "rollout" }'],
        ["--cluster.rollout", "{ gpus = 1, workers = 1 }"],
    ],
)
def test_a_placement_that_is_stated_is_replaced(flags: list[str]) -> None:
    recipe = with_overrides(rl("Qwen/Qwen2.5-0.5B", 1024, 8, "zero2"), flags)
    assert splits_of(recipe, 2) == {(2, 2, True), (1, 1, False)}


def test_a_job_without_engines_has_one_way() -> None:
    table = {
        "job": "sft",
        "run_dir": "run",
        "steps": 1,
        "model": {"path": "Qwen/Qwen2.5-0.5B"},
        "data": {"path": "rows.jsonl", "max_len": 512},
        "batch": {"train_batch_size": 64},
    }
    recipe = parse_recipe(table)
    assert [with_overrides(recipe, f).learner.ranks for f in arrangements(recipe, 8, "zero1")] == [
        8
    ]


def test_the_best_split_is_the_fastest_that_fits() -> None:
    recipe = with_overrides(rl("Qwen/Qwen2.5-7B", 2048, 7, "zero2"), VLLM)
    facts = Facts(shape_of_model, parse_hardware("8xH100"))
    splits = fitting_splits(recipe, 8, facts)
    seconds = [split.plan.timing.step_seconds for split in splits]
    assert seconds == sorted(seconds)
    assert len(splits) > 3
    assert all(split.plan.fits and split.plan.used_devices == 8 for split in splits)
    for split in splits:
        again = planned(with_overrides(recipe, split.overrides), "8xH100")
        assert again.timing == split.plan.timing
    best = best_split(recipe, 8, facts, ("zero3",))
    assert best is not None
    assert best.plan.recipe.learner.sharding in ("zero3", "none")


def test_a_vllm_on_its_own_card_is_given_most_of_it() -> None:
    recipe = with_overrides(rl("Qwen/Qwen2.5-7B", 2048, 7, "zero2"), VLLM)
    for flags in arrangements(recipe, 8, "zero2"):
        changed = with_overrides(recipe, flags)
        assert changed.rollout_settings is not None
        apart = changed.cluster.policy.colocate is None
        assert changed.rollout_settings.vllm.memory_fraction == (0.9 if apart else 0.5)


def test_a_vllm_beside_a_learner_is_given_half_of_the_card_at_most() -> None:
    recipe = with_overrides(
        rl("Qwen/Qwen2.5-7B", 2048, 7, "zero2"), [*VLLM, "--rollout.vllm.memory_fraction", "0.95"]
    )
    for flags in arrangements(recipe, 8, "zero2"):
        changed = with_overrides(recipe, flags)
        assert changed.rollout_settings is not None
        apart = changed.cluster.policy.colocate is None
        assert changed.rollout_settings.vllm.memory_fraction == (0.95 if apart else 0.5)


@pytest.mark.slow
def test_a_search_moves_cards_and_names_the_best_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "recipe.toml"
    path.write_text(
        'job = "rl"\nrun_dir = "run"\nsteps = 100\n'
        '[model]\npath = "Qwen/Qwen2.5-7B"\ngradient_checkpointing = true\n'
        '[data]\npath = "rows.jsonl"\nmax_len = 2048\n[[rewards]]\ntype = "gsm8k"\n'
        '[algorithm]\ntype = "grpo"\n[rollout]\ntype = "vllm"\nmax_new_tokens = 1024\n'
        "[batch]\nrollout_batch_size = 56\n"
        '[learner]\nranks = 7\nsharding = "zero2"\n'
        '[cluster]\ntype = "ray"\nrollout = { gpus = 1, workers = 1 }\n',
        "utf-8",
    )
    words = ["plan", str(path), "--hardware", "8xH100", "--search"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == 8
    assert [card["cards"] for card in report["cards"]] == ["0-6", "7"]
    splits = report["splits"]
    assert splits[0]["step_seconds"] == min(split["step_seconds"] for split in splits)
    assert {split["learner_devices"] + split["engine_devices"] for split in splits} == {8}
    assert main(words) == 0
    page = capsys.readouterr().out
    assert f"the best split of 8 x H100: {splits[0]['overrides']}" in page
    tables = [line for line in page.splitlines() if line.startswith("  ")]
    assert max(map(len, tables)) <= 80
    cards = page[page.index("cards, GB of 84.9 on each") : page.index("batches")].splitlines()[1:]
    assert [line.split()[0] for line in cards if line[2:3].isalnum()] == [
        "cards",
        "0-6",
        "7",
        "all",
    ]
    assert main([*words[:2], "--hardware", "8xH100", "--json", *splits[0]["flags"]]) == 0
    best = json.loads(capsys.readouterr().out)
    assert best["hours"] == pytest.approx(splits[0]["hours"])

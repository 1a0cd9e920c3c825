"""Sizes that are "auto": the largest that fit, by the planner's own word."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.auto import least_tokens
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, make_plan
from postgrad.recipe.load import parse_recipe

H100 = parse_hardware("H100")
RL: dict[str, Any] = {
    "job": "rl", "run_dir": "run", "steps": 8, "model": {"path": "Qwen/Qwen2.5-1.5B"},
    "data": {"path": "nowhere/rows.jsonl", "max_len": 1024}, "rollout": {"max_new_tokens": 512},
    "algorithm": {"type": "grpo"}, "rewards": [{"type": "gsm8k"}],
}  # fmt: skip


def facts(gigabytes: float) -> Facts:
    device = H100.device.model_copy(update={"memory_bytes": int(gigabytes * 1e9)})
    return Facts(shape_of_model, H100.model_copy(update={"device": device}))


def recipe(tokens: Any = "auto", slots: Any = "auto", **more: Any) -> Any:
    table = {**RL, "batch": {"micro_train_tokens": tokens}}
    table["rollout"] = {**RL["rollout"], "slots": slots, **more}
    return parse_recipe({key: value for key, value in table.items() if value is not None})


@given(st.floats(1.0, 120.0))
def test_what_is_chosen_fits_or_is_the_least_there_is(gigabytes: float) -> None:
    run_plan = make_plan(recipe(), facts(gigabytes))
    tokens, slots = run_plan.auto["batch.micro_train_tokens"], run_plan.auto["rollout.slots"]
    floor = least_tokens(recipe())
    assert floor <= tokens <= 8192
    assert 1 <= slots <= 512
    assert run_plan.memory.fits or (tokens, slots) == (floor, 1)
    assert run_plan.sizes.micro_tokens == tokens
    assert run_plan.sizes.engine is not None
    assert run_plan.sizes.engine.slots == slots


@given(st.floats(20.0, 120.0), st.floats(1.0, 4.0))
def test_more_memory_never_makes_a_size_smaller(gigabytes: float, times: float) -> None:
    less, more = (make_plan(recipe(), facts(room)).auto for room in (gigabytes, gigabytes * times))
    assert all(less[key] <= more[key] for key in less)


def test_with_room_a_gpu_has_what_it_has_without_auto() -> None:
    run_plan = make_plan(recipe(), facts(10_000))
    assert run_plan.auto == {"batch.micro_train_tokens": 8192, "rollout.slots": 512}
    plain = make_plan(recipe(None, None), facts(10_000))
    assert run_plan.sizes.micro_tokens == plain.sizes.micro_tokens
    assert run_plan.memory.peak_bytes == plain.memory.peak_bytes


def test_only_what_is_asked_for_is_chosen() -> None:
    run_plan = make_plan(recipe(slots=8), facts(50))
    assert list(run_plan.auto) == ["batch.micro_train_tokens"]
    assert run_plan.sizes.engine is not None
    assert run_plan.sizes.engine.slots == 8
    assert make_plan(recipe(4096, 8), facts(50)).auto == {}


def test_slots_fill_a_stated_cache_and_no_more() -> None:
    run_plan = make_plan(recipe(cache_tokens=1040 * 5), facts(10_000))
    assert run_plan.auto["rollout.slots"] == 5
    assert run_plan.sizes.engine is not None
    assert run_plan.sizes.engine.cache_tokens == 1040 * 5


def test_the_page_says_which_sizes_would_be_chosen() -> None:
    page = Page(make_plan(recipe(), facts(10_000)), ())
    assert page.to_json()["auto"] == {"batch.micro_train_tokens": 8192, "rollout.slots": 512}
    assert any("batch.micro_train_tokens = 8192" in note for note in page.notes())


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("batch", "micro_train_tokens", "largest"),
        ("rollout", "slots", "all"),
        ("rollout", "slots", 0),
    ],
)
def test_another_word_than_auto_is_refused_by_its_key(section: str, key: str, value: Any) -> None:
    table = {**RL, section: {**RL.get(section, {}), key: value}}
    with pytest.raises(UsageError, match=rf"{section}\.{key}"):
        parse_recipe(table)


def test_auto_and_a_count_of_samples_are_two_ways_to_say_one_thing() -> None:
    with pytest.raises(UsageError, match="in samples and in tokens"):
        parse_recipe({**RL, "batch": {"micro_train_batch_size": 2, "micro_train_tokens": "auto"}})


def test_a_pair_has_room_whole() -> None:
    table = {
        **RL, "job": "reward", "batch": {"micro_train_tokens": "auto"}, "algorithm": None,
        "rollout": None, "rewards": None,
    }  # fmt: skip
    parsed = parse_recipe({key: value for key, value in table.items() if value is not None})
    assert least_tokens(parsed) == 2 * 1024
    tiny = make_plan(parsed, replace(facts(1.0)))
    assert tiny.auto == {"batch.micro_train_tokens": 2048}

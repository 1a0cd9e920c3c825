"""Memory and time of a learner that leaves its cards to an engine while it samples, by hand."""

from typing import Any

import pytest

from plan.test_cases import planned, rl
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.advice import advise
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

WEIGHTS = 7_615_616_512  # of Qwen2.5-7B
SAMPLING = ("--learner.offload", "sampling")
ON_THE_RANKS = ("--cluster.policy.colocate", "rollout")


def lines(run_plan: RunPlan, role: str = "policy") -> dict[str, dict[Any, int]]:
    memory = run_plan.cards[0].memory
    return {line.purpose: dict(line.bytes) for line in memory.lines if line.role == role}


def colocated(*more: str) -> Recipe:
    return with_overrides(rl("Qwen/Qwen2.5-7B", 2048, 8, "zero3"), [*ON_THE_RANKS, *more])


def test_on_ranks_weights_and_moments_leave_before_the_cache_is_there() -> None:
    """Of each of 8: 4 bytes a weight are its shard, 8 are moments."""
    run_plan = planned(colocated(*SAMPLING), "8xH100")
    held = lines(run_plan)
    shard = WEIGHTS * 4 // 8
    assert held["weights"] == {"load": shard, "score": shard, "update": shard}
    assert held["optimizer"] == {"update": 2 * shard}
    cache = lines(run_plan, "engine")["key-value cache"]["save"]
    assert held.get("weights until they are published", {}).get("save", 0) == max(0, shard - cache)


def test_beside_the_built_in_engine_in_one_process_the_weights_that_it_reads_stay() -> None:
    """In bfloat16: 2 bytes a weight stay, 4 are masters, 8 are moments."""
    run_plan = planned(with_overrides(rl("Qwen/Qwen2.5-7B", 2048), SAMPLING), "1xB200")
    held = lines(run_plan)
    assert set(held["weights"].values()) == {2 * WEIGHTS}
    assert len(held["weights"]) == 5
    assert held["master weights"] == {"load": 4 * WEIGHTS, "update": 4 * WEIGHTS}
    assert held["optimizer"] == {"update": 8 * WEIGHTS}
    wide = with_overrides(run_plan.recipe, ["--rollout.dtype", "float32"])  # it borrows the masters
    held = lines(planned(wide, "1xB200"))
    assert set(held["master weights"].values()) == {4 * WEIGHTS}
    assert held["optimizer"] == {"update": 8 * WEIGHTS}


def test_the_copies_of_a_step_go_over_the_link_to_the_host_once_each_way() -> None:
    stays, leaves = (planned(colocated(*more), "8xH100") for more in ((), SAMPLING))
    share = leaves.timing.offload
    assert stays.timing.offload is not None
    assert stays.timing.offload.bytes == 0
    assert share is not None
    assert share.bytes == pytest.approx(WEIGHTS * 12 / 8, rel=1e-6)
    more = {
        phase: seconds - stays.timing.step[phase] for phase, seconds in leaves.timing.step.items()
    }
    assert more["publish"] == pytest.approx(share.seconds / 2)
    assert more["update"] == pytest.approx(share.seconds / 2)
    link = leaves.hardware.device.host_bytes_per_second
    assert share.seconds >= 2 * share.bytes / link
    (note,) = [note for note in Page(leaves, ()).notes() if '"sampling"' in note]
    assert "11.4 GB of each rank are in the host's memory" in note
    assert not [note for note in Page(stays, ()).notes() if '"sampling"' in note]


def test_frozen_weights_under_an_adapter_go_one_way() -> None:
    recipe = with_overrides(
        rl("Qwen/Qwen2.5-7B", 2048, 2, "zero2", lora=True), [*ON_THE_RANKS, *SAMPLING]
    )
    run_plan = planned(recipe, "2xH100")
    share, policy = run_plan.timing.offload, run_plan.roles[0]
    assert share is not None
    adapter = policy.trained * 12 // 2  # float32, and moments
    assert share.bytes == pytest.approx(2 * WEIGHTS + adapter, rel=1e-6)
    both = run_plan.timing.offload.seconds / (2 * WEIGHTS + 2 * adapter)  # type: ignore[union-attr]
    link = run_plan.hardware.device.host_bytes_per_second
    assert both >= 1 / link
    assert both < 2 / link


def test_an_engine_finds_what_the_learner_has_left_when_it_is_built() -> None:
    """Its cache is sized by what is free then."""
    stays, leaves = (planned(colocated(*more), "8xA100-40G") for more in ((), SAMPLING))
    assert stays.sizes.engine is not None
    assert leaves.sizes.engine is not None
    assert leaves.sizes.engine.cache_tokens >= stays.sizes.engine.cache_tokens
    assert leaves.memory.at("rollout") < stays.memory.at("rollout")


def test_on_a_cpu_it_changes_no_plan() -> None:
    recipe = rl("Qwen/Qwen2.5-0.5B", 512)
    stays, leaves = (planned(with_overrides(recipe, more), "cpu") for more in ((), SAMPLING))
    assert stays.memory.to_json() == leaves.memory.to_json()
    assert stays.timing.step == leaves.timing.step


def test_it_is_advised_where_sampling_takes_most_of_the_learners_card() -> None:
    """vLLM's share of 0.6 beside weights and moments: 48 GB and 7B in bfloat16 do not fit 80."""
    recipe = with_overrides(
        rl("Qwen/Qwen2.5-7B", 2048, 4, "zero3"),
        [*ON_THE_RANKS, "--rollout.type", "vllm", "--rollout.vllm.memory_fraction", "0.8"],
    )
    facts = Facts(shape_of_model, parse_hardware("4xH100"))
    start = make_plan(recipe, facts)
    assert not start.fits
    assert start.memory.peak in ("rollout", "save")
    first = advise(start, facts)[0]
    assert first.overrides == SAMPLING
    assert first.after.fits

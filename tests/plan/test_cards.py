"""Memory by card: what each group of cards has, and which of them does not fit."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_cases import planned, rl
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.advice import advise
from postgrad.plan.cards import total_bytes
from postgrad.plan.change import long_as
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.held import PHASES
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan, phase_seconds
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

WEIGHTS_7B = 7_615_616_512  # of Qwen2.5-7B
TOKEN_7B = 28 * 2 * 4 * 128 * 2  # bytes of keys and values: layers, both, heads, width, bfloat16


def apart(recipe: Recipe, workers: int, *more: str) -> Recipe:
    """The recipe with so many rollout workers on cards of their own."""
    return with_overrides(recipe, ["--cluster.rollout", f"{{ workers = {workers} }}", *more])


def lines(plan: RunPlan, group: int) -> dict[tuple[str, str], Any]:
    return {(line.role, line.purpose): line.bytes for line in plan.cards[group].memory.lines}


def test_three_4090s_train_an_adapter_on_two_and_sample_on_the_third() -> None:
    """A learner of 7B beside a copy of it does not fit 24 GB; the engine has a card of its own."""
    recipe = rl("Qwen/Qwen2.5-7B", 2048, 2, "zero2", lora=True)
    beside = with_overrides(recipe, ["--cluster.policy.colocate", "rollout"])
    assert not planned(beside, "2xRTX-4090").fits
    run_plan = planned(apart(recipe, 1, "--cluster.rollout.gpus", "1"), "3xRTX-4090")
    assert run_plan.fits
    learner, engine = run_plan.cards
    assert (learner.numbers, learner.roles) == ("0-1", ("policy",))
    assert (engine.numbers, engine.roles) == ("2", ("built-in engine",))
    assert lines(run_plan, 1)["engine", "weights"] == dict.fromkeys(PHASES, 2 * WEIGHTS_7B)
    assert not [role for role, _ in lines(run_plan, 0) if role == "engine"]
    assert not [role for role, _ in lines(run_plan, 1) if role == "policy"]


def test_a_vllm_engine_fills_its_share_with_weights_a_pass_and_cache() -> None:
    recipe = rl("Qwen/Qwen2.5-7B", 2048, 7, "zero2")
    vllm = ["--rollout.type", "vllm", "--rollout.vllm.memory_fraction", "0.8"]
    batch = ["--batch.rollout_batch_size", "56"]
    run_plan = planned(apart(recipe, 1, *vllm, *batch), "8xH100")
    engine = lines(run_plan, 1)
    share = int(0.8 * 84_943_715_696)
    weights, passing, cache = (
        engine["engine", purpose]["update"]
        for purpose in ("weights", "activations", "key-value cache")
    )
    assert weights == 2 * WEIGHTS_7B
    assert weights + passing + cache == share
    assert 0.5e9 < passing < 3e9  # 8 192 tokens of the widest layer, or 512 rows of logits
    assert run_plan.sizes.engine is not None
    assert run_plan.sizes.engine.cache_tokens == cache // TOKEN_7B
    assert run_plan.cards[1].memory.peak_bytes == share + 1_000_000_000  # and its process


def test_tensor_parallel_cards_divide_an_engine() -> None:
    """Llama 3 70B, eight key heads: each of eight cards has an eighth of weights and cache."""
    recipe = rl("meta-llama/Llama-3.1-70B", 4096, 48, "zero3")
    flags = ["--rollout.type", "vllm", "--rollout.vllm.memory_fraction", "0.9"]
    flags += ["--batch.rollout_batch_size", "96", "--rollout.vllm.tensor_parallel", "8"]
    run_plan = planned(apart(recipe, 2, *flags), "64xH100")
    assert run_plan.fits
    assert [group.numbers for group in run_plan.cards] == ["0-47", "48-63"]
    assert run_plan.cards[1].roles == ("2 vLLM engines of 8 cards",)
    engine = lines(run_plan, 1)
    assert engine["engine", "weights"]["load"] == 70_553_706_496 * 2 // 8
    token = 80 * 2 * 8 * 128 * 2 / 8
    assert run_plan.sizes.engine is not None
    cache = engine["engine", "key-value cache"]["load"]
    assert run_plan.sizes.engine.cache_tokens == int(cache / token)


def test_colocated_cards_have_both_asleep_and_awake() -> None:
    """Asleep, vLLM keeps the memory of its process alone; the learner's state stays."""
    recipe = rl("Qwen/Qwen2.5-7B", 2048, 8, "zero2")
    flags = ["--cluster.policy.colocate", "rollout", "--rollout.type", "vllm"]
    run_plan = planned(with_overrides(recipe, flags), "8xH100")
    (group,) = run_plan.cards
    assert group.roles == ("policy", "8 vLLM engines")
    here = lines(run_plan, 0)
    share = int(0.5 * 84_943_715_696)
    assert here["engine", "share of vLLM"] == {"rollout": share, "save": share}
    assert here["engine", "framework"] == dict.fromkeys(PHASES, 1_000_000_000)
    without = planned(apart(recipe, 1, "--rollout.type", "vllm"), "9xH100").cards[0]
    process = 1_000_000_000
    assert group.memory.at("update") == without.memory.at("update") + process
    assert group.memory.at("rollout") == without.memory.at("rollout") + share + process


def test_engines_on_some_of_the_ranks_are_a_group_of_their_own() -> None:
    recipe = rl("Qwen/Qwen2.5-7B", 2048, 8, "zero2")
    flags = ["--cluster.policy.colocate", "rollout", "--cluster.rollout.workers", "2"]
    run_plan = planned(with_overrides(recipe, flags), "8xH100")
    assert [(group.numbers, group.samples) for group in run_plan.cards] == [
        ("0-1", True),
        ("2-7", False),
    ]


def test_what_does_not_fit_is_named_by_card() -> None:
    recipe = rl("Qwen/Qwen2.5-7B", 2048, 2, "zero2", lora=True)
    small = planned(apart(recipe, 1, "--rollout.type", "vllm"), "3xRTX-4090")
    assert not small.fits
    (problem,) = small.problems
    assert problem.startswith("card 2 (vLLM engine): vLLM's share of 12.7 GB")
    assert "15.2 of weights" in problem
    run_plan = planned(apart(rl("Qwen/Qwen2.5-7B", 2048, 2, "zero2"), 1), "3xRTX-4090")
    (problem,) = run_plan.problems
    assert problem.startswith("cards 0-1 (policy): ")
    assert problem.endswith("of 25.4 each at the peak (update)")
    assert Page(run_plan, ()).to_json()["problems"] == [problem]


def test_engines_and_ranks_that_are_more_than_the_devices_are_counted_together() -> None:
    run_plan = planned(apart(rl("Qwen/Qwen2.5-0.5B", 2048, 8, "zero1"), 2), "8xH100")
    assert not run_plan.fits
    assert run_plan.missing_devices == 2
    assert "8 ranks and 2 for engines are 10 devices" in Page(run_plan, ()).verdict()


def test_engines_over_two_cards_share_those_of_two_ranks() -> None:
    """Each card has half of an engine's weights, within vLLM's share of it."""
    recipe = rl("Qwen/Qwen2.5-7B", 2048, 8, "zero2")
    flags = ["--cluster.policy.colocate", "rollout", "--rollout.type", "vllm"]
    flags += ["--rollout.vllm.tensor_parallel", "2", "--cluster.rollout.workers"]
    some, every = (planned(with_overrides(recipe, [*flags, n]), "8xH100") for n in ("3", "4"))
    assert [(group.numbers, group.roles) for group in some.cards] == [
        ("0-5", ("policy", "3 vLLM engines of 2 cards")),
        ("6-7", ("policy",)),
    ]
    (group,) = every.cards
    assert every.fits
    assert (group.numbers, group.roles) == ("0-7", ("policy", "4 vLLM engines of 2 cards"))
    share = int(0.5 * 84_943_715_696)
    assert lines(every, 0)["engine", "share of vLLM"] == {"rollout": share, "save": share}
    assert every.timing.publish is not None
    assert every.timing.publish.way == "ipc"  # from the rank of each card
    alone = planned(with_overrides(recipe, flags[:4]), "8xH100")
    tokens = [of.sizes.engine.cache_tokens for of in (alone, every) if of.sizes.engine]
    assert tokens[1] > 2 * tokens[0]  # half of the weights leave more than twice the room


def test_weights_that_no_card_holds_are_divided_over_the_cards_of_several_ranks() -> None:
    """141 GB of weights over four cards are 35 GB, under half of 84.9."""
    recipe = rl("meta-llama/Llama-3.1-70B", 2048, 16, "zero3", lora=True)
    flags = ["--cluster.policy.colocate", "rollout", "--rollout.type", "vllm"]
    facts = Facts(shape_of_model, parse_hardware("16xH100"))
    start = make_plan(with_overrides(recipe, flags), facts)
    assert not start.fits
    after = advise(start, facts)[-1].after
    assert after.fits
    assert after.places.each == 4
    assert (after.places.engines, after.places.own_cards) == (4, 0)
    assert after.recipe.cluster.rollout is not None
    assert after.recipe.cluster.rollout.workers == 4


def test_a_placement_that_a_run_refuses_does_not_fit() -> None:
    flags, reason = ["--cluster.rollout", "{ workers = 2, gpus = 2 }"], "on 2 cards each need 4"
    recipe = rl("Qwen/Qwen2.5-0.5B", 2048, 4, "zero1")
    more = ["--rollout.type", "vllm", "--rollout.vllm.tensor_parallel", "2"]
    run_plan = planned(with_overrides(recipe, [*flags, *more]), "8xH100")
    assert not run_plan.fits
    assert reason in run_plan.problems[0]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from(["local", "vllm"]),
    st.booleans(),
)
def test_the_sums_over_all_cards_are_what_each_says(
    ranks: int, workers: int, kind: str, colocated: bool
) -> None:
    place = ["--cluster.rollout", f"{{ workers = {workers} }}"]
    if colocated:
        workers = min(workers, ranks)
        place = ["--cluster.rollout", f"{{ workers = {workers} }}"]
        place += ["--cluster.policy.colocate", "rollout"]
    recipe = rl("Qwen/Qwen2.5-0.5B", 1024, ranks, "zero2")
    flags = [*place, "--cluster.type", "ray", "--rollout.type", kind]
    run_plan = planned(with_overrides(recipe, flags), "16xA100-80G")
    assert run_plan.used_devices == ranks + (0 if colocated else workers)
    numbers = [range(group.first, group.first + group.count) for group in run_plan.cards]
    assert [n for cards in numbers for n in cards] == list(range(run_plan.used_devices))
    page = Page(run_plan, ()).to_json()
    for phase in PHASES:
        cards = [bytes for g in page["cards"] for bytes in [g["phases"][phase]] * g["count"]]
        assert sum(cards) == page["cards_bytes"][phase] == total_bytes(run_plan.cards)[phase]
        for group in run_plan.cards:
            parts = (line.bytes.get(phase, 0) for line in group.memory.lines)
            assert sum(parts) == group.memory.at(phase)


def test_engines_that_join_later_have_the_cards_that_are_there() -> None:
    """The first two take all of a step's prompts, so their slots and cache are sized for that."""
    recipe = rl("Qwen/Qwen2.5-0.5B", 1024, 4, "zero2")
    growing = apart(recipe, 4)
    growing = with_overrides(growing, ["--cluster.rollout", "{ workers = 4, least = 2 }"])
    cards = {count: planned(growing, f"{count}xH100") for count in (5, 6, 7, 8, 12)}
    assert [run_plan.places.own_cards for run_plan in cards.values()] == [2, 2, 3, 4, 4]
    assert [run_plan.places.absent for run_plan in cards.values()] == [2, 2, 1, 0, 0]
    assert [run_plan.fits for run_plan in cards.values()] == [False, True, True, True, True]
    two = planned(apart(recipe, 2), "6xH100")
    assert {run_plan.sizes.engine for run_plan in cards.values()} == {two.sizes.engine}
    seconds = {count: phase_seconds(run_plan)["sample"] for count, run_plan in cards.items()}
    assert seconds[6] == phase_seconds(two)["sample"] > seconds[7] > seconds[8] == seconds[12]
    (note,) = [note for note in Page(cards[7], ()).notes() if "rollout workers" in note]
    assert note == (
        "a step is counted with 3 of 4 rollout workers, as many as have cards here; the run starts "
        "with 2 (cluster.rollout.least), and the others join as there is room"
    )
    assert not [note for note in Page(two, ()).notes() if "rollout workers" in note]


def test_short_runs_are_told_in_minutes_and_seconds() -> None:
    assert [long_as(hours) for hours in (0.01, 0.5, 3.4)] == ["36 s", "30 min", "3.40 h"]


def test_a_plan_says_where_less_stays_free_than_plans_were_off_by() -> None:
    run_plan = planned(rl("Qwen/Qwen2.5-0.5B", 2048, 1, "none"), "1xH100")
    peak = run_plan.memory.peak_bytes
    for capacity, is_tight in ((peak / 0.96, True), (peak / 0.94, False), (peak / 1.01, False)):
        (group,) = run_plan.cards
        memory = replace(group.memory, capacity=int(capacity))
        summary = "\n".join(
            Page(replace(run_plan, cards=(replace(group, memory=memory),)), ()).summary()
        )
        assert ("stay free at the peak; plans were off by up to a twentieth" in summary) == is_tight

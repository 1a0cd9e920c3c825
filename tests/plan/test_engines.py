"""Engines divide sampling: places, waves, seconds by hand, and more of them are never slower."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.test_cases import planned, rl
from postgrad.core.batch import BatchGeometry
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.engines import EnginePlaces, dealt
from postgrad.plan.hardware import Device, Efficiency, Hardware, parse_hardware
from postgrad.plan.lengths import RowLengths
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, make_plan
from postgrad.plan.sampling import SampledShare, reduced_bytes
from postgrad.plan.timing import Timing
from postgrad.recipe.load import parse_recipe, with_overrides
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.local.budget import EngineSizes

IDEAL = Efficiency(
    products=1.0, attention=1.0, between=1.0, decoding=1.0, link=1.0, pair=1.0, host=1.0,
    overhead=0.0,
)  # fmt: skip


def geometry(prompts: int, answers: int) -> BatchGeometry:
    recipe = rl("Qwen/Qwen2.5-0.5B", 2048)
    flags = ["--batch.rollout_batch_size", str(prompts)]
    flags += ["--batch.n_samples_per_prompt", str(answers)]
    return with_overrides(recipe, flags).geometry()


def test_a_last_wave_lasts_as_long_as_its_longest_sample() -> None:
    """112 prompts of 8 over one engine of 512 slots: 896 samples are two waves, of which the first
    lasts the mean of 600 tokens and the last the longest answer of 1 024.
    """
    lengths = RowLengths(prompt=100, answer=600, spread=1.0, source="here")
    sizes, one_engine, four_engines = EngineSizes(512, 10**6), EnginePlaces(1), EnginePlaces(4)
    share = SampledShare.of(geometry(112, 8), lengths, sizes, one_engine, 8, 1024)
    assert (share.sequences, share.together, share.waves) == (896, 512, 2)
    assert share.passes == 600 + 1024
    share = SampledShare.of(geometry(112, 8), lengths, sizes, four_engines, 8, 1024)
    assert (share.sequences, share.waves, share.passes) == (224, 1, 1024)


def test_vllm_decodes_as_many_as_its_cache_has_room_for() -> None:
    """A prompt of 800 tokens is there once for its 8 answers: 100 and 400 tokens of each."""
    lengths = RowLengths(prompt=800, answer=400, spread=1.0, source="here")
    places = EnginePlaces(1, is_vllm=True)
    share = SampledShare.of(geometry(64, 8), lengths, EngineSizes(512, 64_000), places, 8, 400)
    assert (share.together, share.waves) == (128, 4)


def test_prompts_are_dealt_with_all_of_their_answers() -> None:
    assert [dealt(896, 8, engines) for engines in (1, 4, 5, 8)] == [896, 224, 184, 112]


def device(link: float = 1e9) -> Device:
    return Device(
        name="Hand", memory_bytes=80 * 10**9, bandwidth=1e12, bf16_flops=1e15, float32_flops=1e15,
        link="nvlink", link_bytes_per_second=link, host_bytes_per_second=25e9, source="by hand",
    )  # fmt: skip


def sampled(recipe: Recipe, lengths: RowLengths, link: float = 1e9) -> float:
    hardware = Hardware(count=64, device=device(link))
    facts = Facts(shape_of_model, hardware, lengths=lengths, efficiency=IDEAL)
    return make_plan(recipe, facts).timing.step["sample"]


def by_hand(prompts: int, passes: float, each: int = 1) -> float:
    """Seconds of an engine for `prompts` prompts of 100 tokens with 4 answers of 200 by Qwen2.5
    0.5B on a card of 1e15 FLOPs and 1e12 bytes a second, with `each` tensor parallel cards.
    """
    layers, hidden, inner, queries, keys, vocab = 24, 896, 4864, 896, 128, 151_936
    weights, body = 494_032_768, layers * (2 * hidden * (queries + keys) + 3 * hidden * inner)
    answers, prompt, answer = 4, 100, 200
    tokens, sequences = prompts * prompt, prompts * answers
    first = 2 * tokens * body + 2 * prompts * prompt**2 * queries * layers
    first += 2 * prompts * vocab * hidden
    between = 6 * tokens * layers * (5 * hidden + 2 * (queries + keys) + 4 * inner) * 2
    seconds = (first / 1e15 + between / 1e12) / each
    seconds += passes * weights * 2 / 1e12 / each
    seen, token = prompt + answer / 2, layers * 2 * keys * 2
    products = 2 * body + 4 * seen * queries * layers + 2 * vocab * hidden
    each_token = ((prompt + answer / 2) * token / 1e12 + products / 1e15) / each
    return seconds + sequences * answer * each_token


def test_seconds_of_sampling_are_those_by_hand() -> None:
    lengths = RowLengths(prompt=100, answer=200, spread=1.0, source="here")
    flags = ["--rollout.type", "vllm", "--batch.n_samples_per_prompt", "4"]
    flags += ["--rollout.slots", "64", "--rollout.max_new_tokens", "300", "--cluster.type", "ray"]
    recipe = with_overrides(rl("Qwen/Qwen2.5-0.5B", 2048), flags)
    for workers, prompts, passes in ((1, 64, 3 * 200 + 300), (2, 32, 200 + 300), (8, 8, 300)):
        there = with_overrides(recipe, ["--cluster.rollout", f"{{ workers = {workers} }}"])
        assert sampled(there, lengths) == pytest.approx(by_hand(prompts, passes), rel=1e-9)


def test_tensor_parallel_cards_divide_the_work_and_send_their_sums() -> None:
    lengths = RowLengths(prompt=100, answer=200, spread=1.0, source="here")
    flags = ["--rollout.type", "vllm", "--batch.n_samples_per_prompt", "4"]
    flags += ["--rollout.slots", "64", "--rollout.max_new_tokens", "300", "--cluster.type", "ray"]
    flags += ["--cluster.rollout", "{ workers = 8 }", "--rollout.vllm.tensor_parallel", "2"]
    recipe = with_overrides(rl("Qwen/Qwen2.5-0.5B", 2048), flags)
    seconds = sampled(recipe, lengths)
    tokens = 8 * 100 + 8 * 4 * 200  # of an engine's 8 prompts
    sent = tokens * 24 * 2 * 896 * 2 * 2 * 1 / 2 / 1e9  # two sums a layer, a ring of two
    assert reduced_bytes(shape_of_model(recipe.model), 2, 2) * tokens / 1e9 == pytest.approx(sent)
    assert seconds == pytest.approx(by_hand(8, 300, each=2) + sent, rel=1e-9)


@pytest.mark.parametrize("kind", ["vllm", "local"])
@pytest.mark.parametrize("colocated", [True, False])
def test_ten_million_episodes_on_16_h100_take_less_with_more_workers(
    kind: str, colocated: bool
) -> None:
    """They took 11 343 hours with 1, 4 and 8 workers when the plan did not know where they are."""
    table = rl("Qwen/Qwen2.5-7B", 2048, 16 if colocated else 8, "zero2").dump()
    batch = {"rollout_batch_size": 128, "n_samples_per_prompt": 8}
    run = {"steps": None, "total_episodes": 10_000_000, "batch": batch}
    recipe = with_overrides(parse_recipe({**table, **run}), ["--rollout.type", kind])
    hours: list[float] = []
    for workers in (1, 4, 8):
        flags = ["--cluster.rollout", f"{{ workers = {workers} }}"]
        flags += ["--cluster.policy.colocate", "rollout"] if colocated else []
        run_plan = planned(with_overrides(recipe, flags), "16xH100")
        assert run_plan.timing.hours is not None
        hours.append(run_plan.timing.hours)
        assert run_plan.used_devices == (16 if colocated else 8 + workers)
        assert run_plan.timing.devices == 16  # idle ones are paid too
    assert hours[0] > 1.5 * hours[1] > 1.5 * hours[2]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 12),
    prompts=st.integers(1, 300),
    answers=st.sampled_from([2, 4, 8]),
    slots=st.sampled_from([None, 1, 7, 64, 512]),
    kind=st.sampled_from(["local", "vllm"]),
    answer=st.integers(1, 1024),
)
def test_a_worker_more_is_never_slower(
    workers: int, prompts: int, answers: int, slots: int | None, kind: str, answer: int
) -> None:
    flags = ["--cluster.type", "ray", "--rollout.type", kind, "--rollout.max_new_tokens", "1024"]
    flags += ["--batch.rollout_batch_size", str(prompts)]
    flags += ["--batch.n_samples_per_prompt", str(answers)]
    flags += ["--rollout.slots", str(slots)] if slots else []
    recipe = with_overrides(rl("Qwen/Qwen2.5-0.5B", 2048), flags)
    lengths = RowLengths(prompt=300, answer=answer, spread=1.0, source="here")
    facts = Facts(shape_of_model, parse_hardware("16xH100"), lengths=lengths)
    few, many = (
        make_plan(with_overrides(recipe, ["--cluster.rollout", f"{{ workers = {n} }}"]), facts)
        for n in (workers, workers + 1)
    )
    # weights go to one more engine, which may take longer than so few samples save
    before, after = (plan.timing.step_seconds - plan.timing.step["publish"] for plan in (few, many))
    assert after <= before * (1 + 1e-12)


def test_engines_apart_wait_for_learners_unless_both_work_at_once() -> None:
    step = {"sample": 30.0, "score": 4.0, "update": 16.0}
    in_turn = Timing(step, 10, {}, 8)
    at_once = Timing(step, 10, {}, 8, overlaps=True)
    assert (in_turn.step_seconds, at_once.step_seconds) == (50.0, 30.0)
    assert Timing({**step, "sample": 5.0}, 10, {}, 8, overlaps=True).step_seconds == 20.0
    assert in_turn.device_seconds == 400.0
    sent = Timing({**step, "publish": 2.0}, 10, {}, 8, overlaps=True)
    assert sent.step_seconds == 32.0  # both wait for new weights


def test_with_samples_ahead_a_step_lasts_a_share_of_its_longest_answer_at_least() -> None:
    """Sampling takes 3 seconds, learning 6, the longest answer 90: it has S + 1 steps."""
    step = {"sample": 3.0, "update": 6.0}
    ahead = [Timing(step, 1, {}, 8, staleness=s, longest=90.0).step_seconds for s in (1, 5, 11)]
    assert ahead == [48.0, 16.0, 9.0]
    apart = Timing(step, 1, {}, 8, overlaps=True, staleness=31, longest=90.0)
    assert apart.step_seconds == 6.0


def test_engines_that_sample_while_the_learner_works_take_the_longer_of_the_two() -> None:
    recipe = with_overrides(
        rl("Qwen/Qwen2.5-0.5B", 2048, 7, "zero2"),
        ["--cluster.rollout", "{ workers = 1 }", "--batch.rollout_batch_size", "56"],
    )
    assert isinstance(recipe, RLRecipe)
    turns = planned(recipe, "8xH100").timing
    rollout = recipe.rollout.model_copy(update={"max_staleness": 4})
    run_plan = planned(recipe.model_copy(update={"rollout": rollout}), "8xH100")
    ahead = run_plan.timing
    assert ahead.overlaps
    assert not turns.overlaps
    learned = ahead.step["score"] + ahead.step["update"]
    longer = max(ahead.step["sample"], learned) + ahead.step["publish"]
    assert ahead.step_seconds == max(longer, ahead.floor) < turns.step_seconds
    floor = (ahead.longest + learned + ahead.step["publish"]) / 5
    assert ahead.floor == pytest.approx(floor, rel=1e-12)
    # 4 steps of 56 x 8 samples of 1 024 tokens, each with its number and its logprob
    note = next(note for note in Page(run_plan, ()).notes() if note.startswith("samples ahead"))
    assert f"up to {4 * 56 * 8 * 1024 * 8 / 1e6:.3g} MB" in note


@pytest.mark.parametrize(
    ("flags", "count", "expected"),
    [
        ([], 8, (1, 1, 1, 0)),  # built-in, in the learner's process
        (["--rollout.type", "vllm"], 1, (1, 1, 1, 0)),
        (["--rollout.type", "vllm"], 4, (1, 1, 0, 1)),  # on the last card
        (["--rollout.type", "vllm", "--rollout.vllm.engines", "4"], 4, (4, 1, 1, 3)),
        (["--cluster.rollout", "{ workers = 3 }", "--cluster.type", "ray"], 8, (3, 1, 0, 3)),
        (
            ["--cluster.rollout", "{ workers = 2, gpus = 8 }", "--cluster.type", "ray",
             "--rollout.type", "vllm", "--rollout.vllm.tensor_parallel", "4"], 16, (2, 4, 0, 8),
        ),
        (
            ["--cluster.rollout", "{ workers = 2 }", "--cluster.type", "ray",
             "--rollout.type", "vllm", "--rollout.vllm.engines", "2"], 16, (4, 1, 0, 4),
        ),
    ],
)  # fmt: skip
def test_engines_are_where_the_recipe_puts_them(
    flags: list[str], count: int, expected: tuple[int, int, int, int]
) -> None:
    recipe = with_overrides(rl("Qwen/Qwen2.5-0.5B", 2048), flags)
    places = EnginePlaces.of(recipe, parse_hardware(f"{count}xH100"))
    assert (places.engines, places.each, places.shared_cards, places.own_cards) == expected
    assert places.problem is None

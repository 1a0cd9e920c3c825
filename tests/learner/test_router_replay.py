"""Router replay: a policy learns with the experts that were chosen when its samples were drawn."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.model_types import config_of
from helpers.rollouts import Chosen, TwoReplies
from postgrad.algorithms.sft import SFT
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Prompt, Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.layout.layout import lay_out
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update, chosen_experts
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.routers import Routers, chosen_of, replayable
from postgrad.parallel.ranks import ALONE
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.environment import Environments, SamplingSpec
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.sampling import sample_groups
from postgrad.rollout.settings import SamplingSettings

VOCABULARY = 37
TIED = 1e-6  # what tells the first three experts of a router apart


class NoText:
    """A tokenizer of a model that reads numbers."""

    eos_token_id = 36

    def decode(self, ids: Any, **_: Any) -> str:
        return ""

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return ["" for _ in ids]


def undecided(seed: int, dtype: torch.dtype = torch.float32, kind: str = "qwen3_moe") -> Any:
    """The same model for every seed, but for which two of three experts its routers like best."""
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of(kind, VOCABULARY))
    lm.set_attn_implementation(ATTENTION_NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in lm.named_parameters():
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(3, weight.shape[1], generator=generator)
            weight.data[:3] = weight.data[2:3] + TIED * noise
    return lm.to(dtype).eval()


def policy_of(lm: Any, *, replays: bool, micro: MicroBatch | None = None) -> PolicyLearner:
    backbone = Backbone(lm, torch.device("cpu"), micro or MicroBatch())
    backbone.routers = replayable(lm) if replays else Routers(lm)
    backbone.divide(ALONE, "none")
    return PolicyLearner(backbone, LearnerSettings(lr=1e-2), 100)


def engine_of(lm: Any) -> LocalEngine:
    return LocalEngine(lm, NoText(), slots=3, cache_tokens=256, records_experts=True)


def requests(new: int = 9) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 36, 10 + 2 * ticket).astype(np.int32) for ticket in range(2)]
    return [Request(t, (0, 1, 2), p, SamplingSettings(max_new_tokens=new)) for t, p in
            enumerate(prompts)]  # fmt: skip


def sampled(engine: LocalEngine, cut_after: int = 0) -> dict[tuple[int, int], Completion]:
    """cut_after: decode steps after which everything is cut, and goes on; 0: never."""
    done: list[Completion] = []
    for request in requests():
        engine.submit(request)
    if cut_after:
        for _ in range(cut_after):
            done += engine.advance()
        for request in engine.cut():
            engine.submit(request)
    while completions := engine.completed():
        done += completions
    return {(c.ticket, c.sample): c for c in done}


def sequences_of(completions: dict[tuple[int, int], Completion]) -> tuple[Sequences, Ragged]:
    """The samples with their experts, and the sampled logprobs."""
    tokens, masks, groups, logprobs, experts = [], [], [], [], []
    for (ticket, _), completion in sorted(completions.items()):
        prompt = requests()[ticket].token_ids
        tokens.append(np.concatenate([prompt, completion.token_ids]))
        masks.append(np.arange(len(tokens[-1])) >= len(prompt))
        groups.append(ticket)
        logprobs.append(np.concatenate([np.zeros(len(prompt)), completion.logprobs]))
        experts.append(completion.experts)
        assert completion.experts is not None
        assert len(completion.experts) == len(tokens[-1])
    return Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(groups),
        Ragged.of(experts, np.int16),
    ), Ragged.of(logprobs, np.float32)  # fmt: skip


def own_experts(lm: Any, tokens: Any) -> Any:
    """[T, layers, k] that transformers chooses for a sequence alone."""
    out = lm(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True,
             use_cache=False)  # fmt: skip
    return torch.stack([layer.topk(2).indices for layer in out.router_logits], 1).numpy()


@pytest.mark.parametrize("cut_after", [0, 4])
@torch.no_grad()
def test_the_engine_records_the_experts_of_every_token_that_it_computed(cut_after: int) -> None:
    """Of prompts that samples share, of rows that move, and of turns that were cut."""
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of("qwen3_moe", VOCABULARY)).eval()
    plain = copy.deepcopy(lm)
    lm.set_attn_implementation(ATTENTION_NAME)
    completions = sampled(engine_of(lm), cut_after)
    assert len(completions) == 6
    sequences, _ = sequences_of(completions)
    assert sequences.experts is not None
    for tokens, experts in zip(sequences.tokens, sequences.experts, strict=True):
        assert (experts[:-1] == own_experts(plain, tokens)[:-1]).all()
        assert (experts[-1] == -1).all()


@torch.no_grad()
def test_later_turns_record_the_experts_of_what_they_compute_alone() -> None:
    """What the engine keeps between turns has those of the turns before."""
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of("qwen3_moe", VOCABULARY)).eval()
    plain = copy.deepcopy(lm)
    lm.set_attn_implementation(ATTENTION_NAME)
    engine = engine_of(lm)
    prompt = Prompt(0, requests()[0].token_ids, "?", None, "rows", 0)
    sampling = SamplingSettings(max_new_tokens=9)
    spec = SamplingSpec(2, sampling, 0, Environments({None: TwoReplies()}), max_len=100)
    groups = sample_groups(engine, Chosen(lambda t, s: float(s)), [prompt], spec, NoText())
    batch = RolloutBatch.of(groups)
    assert batch.sequences.experts is not None
    for tokens, experts in zip(batch.sequences.tokens, batch.sequences.experts, strict=True):
        assert len(tokens) > 30
        assert (experts[:-1] == own_experts(plain, tokens)[:-1]).all()
        assert (experts[-1] == -1).all()
    of_turns = sum(1 + 3 for r in groups[0].rollouts for turn in r.turns if not turn.logprobs.any())
    assert engine.stats.prompt_tokens == len(prompt.token_ids) + of_turns


def test_replayed_logprobs_are_the_samplers_to_float32_rounding() -> None:
    """The learner's routers like other experts than the engine's, by a millionth."""
    sequences, logprobs = sequences_of(sampled(engine_of(undecided(seed=1))))
    assert sequences.experts is not None
    apart: dict[bool, float] = {}
    for replays in (False, True):
        policy = policy_of(undecided(seed=2), replays=replays)
        replayed = policy.logprobs(sequences).result()
        mask = sequences.loss_mask.values
        apart[replays] = float(np.abs(replayed.values - logprobs.values)[mask].max())
    assert apart[False] > 0.05
    assert apart[True] < 2e-5


def test_updates_use_the_recorded_experts_with_and_without_checkpointing() -> None:
    """The backward pass of checkpointed layers computes them again."""
    sequences, _ = sequences_of(sampled(engine_of(undecided(seed=1))))
    assert sequences.experts is not None
    sft, weights = SFT(), []
    for seed, checkpointing in ((2, False), (2, True), (3, True)):
        lm = undecided(seed)
        if checkpointing:
            lm.train()
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy = policy_of(lm, replays=True, micro=MicroBatch(max_sequences=2))
        update = Update(sft.experience(sequences), np.arange(len(sequences)))
        report = policy.update(update, sft).result().metrics
        weights.append(torch.cat([w.flatten() for w in policy.weights().values()]))
        recorded_experts = sequences.experts.values[(sequences.experts.values >= 0).all((1, 2))]
        loads = np.stack(
            [np.bincount(recorded_experts[:, layer].ravel(), minlength=4) for layer in (0, 1)]
        )
        busiest = (loads * 4 / loads.sum(1, keepdims=True)).max()
        assert report["policy/router_max_load"] == pytest.approx(busiest, rel=0.1)
    torch.testing.assert_close(weights[0], weights[1], rtol=0.0, atol=1e-6)
    # seeds 2 and 3 differ by a millionth in routers alone
    assert (weights[2] - weights[1]).abs().max() < 2.1e-2  # AdamW's first step: lr, either way
    assert (weights[2] - weights[1]).abs().median() < 1e-6


@pytest.mark.parametrize("most", [1, 4])
@torch.no_grad()
def test_chosen_experts_are_those_of_each_sequence_alone(most: int, experience: Experience) -> None:
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of("qwen3_moe", VOCABULARY)).eval()
    plain = copy.deepcopy(lm)
    lm.set_attn_implementation(ATTENTION_NAME)
    policy = policy_of(lm, replays=True, micro=MicroBatch(max_sequences=most))
    chosen = chosen_experts(policy.backbone, experience.sequences)
    assert chosen.values.dtype == np.int16
    for tokens, experts in zip(experience.sequences.tokens, chosen, strict=True):
        assert (experts == own_experts(plain, tokens)).all()


def test_a_prompt_is_shared_where_its_experts_are_the_same_and_rows_have_those_of_their_tokens(
    experience: Experience,
) -> None:
    tokens = experience.sequences.tokens
    experts = np.arange(len(tokens.values) * 2).reshape(-1, 1, 2) % 3
    for row in range(len(tokens)):  # by position: equal in all sequences of a group
        span = slice(tokens.offsets[row], tokens.offsets[row + 1])
        experts[span] = (np.arange(span.stop - span.start) % 5)[:, None, None]
    alike = tokens.like(experts.astype(np.int16))
    rows = np.arange(3)
    sequences = dataclasses.replace(experience.sequences, experts=alike)
    shared = lay_out(sequences, rows)
    assert shared.n_tokens == lay_out(experience.sequences, rows).n_tokens
    assert shared.experts is not None
    assert (shared.experts[:, 0, 0] == shared.positions % 5).all()
    other = alike.values.copy()
    other[: tokens.offsets[1]] = 4  # the first sequence goes its own way from its first token on
    apart = lay_out(dataclasses.replace(sequences, experts=tokens.like(other)), rows)
    prompt = int(np.argmax(experience.sequences.loss_mask.row(0)))
    assert apart.n_tokens == shared.n_tokens + prompt
    assert apart.experts is not None
    assert (apart.experts == 4).all((1, 2)).sum() >= len(tokens.row(0))


def test_what_a_base_under_an_adapter_computes_replays_nothing() -> None:
    sequences, _ = sequences_of(sampled(engine_of(undecided(seed=1))))
    lm = undecided(seed=2)
    without = dataclasses.replace(sequences, experts=None)  # the same layout: the same roundings
    plain = policy_of(copy.deepcopy(lm), replays=False).logprobs(without).result()
    base = policy_of(lm, replays=True).start().logprobs(sequences).result()
    assert (base.values == plain.values).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "jamba"])
def test_routers_of_other_types_choose_what_they_are_told(kind: str) -> None:
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of(kind, VOCABULARY)).eval()
    routers, ids = replayable(lm), torch.arange(1, 13)[None]
    with routers.recording() as recorded:
        first = lm(input_ids=ids, use_cache=False).logits
    chosen = chosen_of(recorded)
    with routers.replaying(chosen):
        again = lm(input_ids=ids, use_cache=False).logits
    assert torch.equal(first, again)
    other = chosen.roll(1, 0)
    other[3] = -1
    with routers.replaying(other), routers.recording() as recorded:
        lm(input_ids=ids, use_cache=False)
    used = chosen_of(recorded)
    assert torch.equal(used[:3], other[:3])
    assert torch.equal(used[4:], other[4:])
    assert (used[3] >= 0).all()


def test_shares_of_replayed_experts_are_the_routers_own_with_their_gradient() -> None:
    """Softmax over four experts, the two that are told, divided by their sum."""
    lm = undecided(seed=1)
    router = lm.model.layers[0].mlp.gate
    routers = replayable(lm)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    recorded_choice = torch.tensor([[3, 0], [3, 1], [2, 3], [0, 1], [3, 2]], dtype=torch.int16)
    with routers.replaying(recorded_choice[:, None].expand(-1, routers.layers, -1)):
        _, shares, chosen = router(x)
    assert torch.equal(chosen, recorded_choice.long())
    weight = router.weight.detach().double().requires_grad_()
    p = (x.double() @ weight.T).softmax(-1).gather(1, recorded_choice.long())
    expected = p / p.sum(-1, keepdim=True) if router.norm_topk_prob else p
    torch.testing.assert_close(shares.double(), expected, rtol=1e-6, atol=1e-7)
    factor = torch.arange(10.0).view(5, 2)
    (shares * factor).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("qwen3", replayable),
        ("dbrx", lambda lm: _forward_of(lm)),
    ],
)
def test_a_model_whose_choices_cannot_be_replayed_is_refused(
    kind: str, make: Callable[[Any], Any]
) -> None:
    lm = AutoModelForCausalLM.from_config(config_of(kind, VOCABULARY)).eval()
    with pytest.raises(UsageError, match=f"router_replay: .*{kind}"):
        make(lm)


def _forward_of(lm: Any) -> None:
    with replayable(lm).recording():
        lm(input_ids=torch.arange(1, 5)[None], use_cache=False)


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 2, 1)])
def test_experts_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    lm = undecided(seed=1)
    routers = replayable(lm)
    ids = torch.arange(1, 5)[None]
    lm.set_attn_implementation("eager")

    def forward() -> None:
        with routers.replaying(torch.zeros(shape, dtype=torch.int16)):
            lm(input_ids=ids, use_cache=False)

    with pytest.raises(RunError, match="they are of another model"):
        forward()

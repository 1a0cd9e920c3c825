"""What filters leave, from the engine to the columns of a learner."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers.rollouts import Chosen, TwoReplies
from postgrad.core.errors import RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import Policy
from postgrad.parallel.ranks import ALONE
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.environment import Environments, SamplingSpec
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.pending import MASK_IDS, MASK_SIZES, to_arrays, to_groups
from postgrad.rollout.records_json import group_from_lines, group_to_json
from postgrad.rollout.sampling import GroupSampler, sample_groups
from postgrad.rollout.settings import SamplingSettings

Model = Callable[..., Any]
FILTERED = SamplingSettings(max_new_tokens=9, temperature=0.8, top_k=12, top_p=0.7, min_p=0.02)


@pytest.fixture
def lm(model: Model) -> Any:
    return model("qwen3")


def engine_of(lm: Any, tokenizer: Any) -> LocalEngine:
    return LocalEngine(lm, tokenizer, slots=3, cache_tokens=512)


def requests(**changes: Any) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 28, 10 + 2 * ticket).astype(np.int32) for ticket in range(2)]
    return [
        Request(ticket, (0, 1, 2), prompt, FILTERED, **{"keeps_mask": True, **changes})
        for ticket, prompt in enumerate(prompts)
    ]


def left_by_hand(logits: Any) -> list[int]:
    """What FILTERED leaves of float64 logits [V]."""
    p = np.exp(logits / 0.8 - np.max(logits / 0.8))
    order = np.argsort(-p, kind="stable")[:12]
    before = np.cumsum(p[order]) - p[order]
    order = order[before < 0.7 * p[order].sum()]
    return sorted(order[p[order] >= 0.02 * p[order[0]]].tolist())


@torch.no_grad()
def test_the_engine_keeps_what_the_filters_left_at_each_token(
    lm: Any, model: Model, tokenizer: Any
) -> None:
    """Of samples that share prompts, and of rows that move when others end."""
    exact = model("qwen3", "eager").double()
    done = generate(engine_of(lm, tokenizer), requests())
    prompts = {request.ticket: request.token_ids for request in requests()}
    assert len(done) == 6
    sizes: set[int] = set()
    for completion in done:
        prompt, mask = prompts[completion.ticket], completion.sampling_mask
        assert mask is not None
        assert len(mask) == len(completion.token_ids)
        read = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))
        logits = exact(input_ids=read[None], use_cache=False).logits[0].numpy()
        for place, ids in enumerate(mask):
            row = logits[len(prompt) + place - 1]
            assert ids.tolist() == left_by_hand(row)
            p = np.exp(row[ids] / 0.8)
            drawn = ids.tolist().index(completion.token_ids[place])
            assert completion.logprobs[place] == pytest.approx(np.log(p[drawn] / p.sum()), abs=1e-4)
            sizes.add(len(ids))
    assert len(sizes) > 2


@pytest.mark.parametrize("steps", [1, 4])
def test_a_turn_that_was_cut_has_the_masks_of_one_that_was_not(
    lm: Any, tokenizer: Any, steps: int
) -> None:
    uninterrupted = generate(engine_of(lm, tokenizer), requests())
    engine, done = engine_of(lm, tokenizer), []
    for request in requests():
        engine.submit(request)
    for _ in range(steps):
        done += engine.advance()
    done += generate(engine, engine.cut())
    done.sort(key=lambda c: (c.ticket, c.sample))
    for completion, other in zip(uninterrupted, done, strict=True):
        assert completion.sampling_mask is not None
        assert other.sampling_mask is not None
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        assert [m.tolist() for m in completion.sampling_mask] == [
            m.tolist() for m in other.sampling_mask
        ]


def test_samples_that_nobody_asks_masks_of_have_none_and_change_no_others(
    lm: Any, tokenizer: Any
) -> None:
    first, second = requests()
    alone = generate(engine_of(lm, tokenizer), [first, second])
    unasked = requests(keeps_mask=False)[1]
    mixed = generate(engine_of(lm, tokenizer), [first, unasked])
    assert [c.sampling_mask is None for c in mixed] == [False] * 3 + [True] * 3
    for completion, other in zip(alone, mixed, strict=True):
        assert completion.token_ids.tobytes() == other.token_ids.tobytes()
        assert completion.logprobs.tobytes() == other.logprobs.tobytes()
        if other.sampling_mask is not None:
            assert completion.sampling_mask is not None
            assert completion.sampling_mask.values.tobytes() == other.sampling_mask.values.tobytes()


def test_greedy_and_unfiltered_tokens_have_empty_masks(lm: Any, tokenizer: Any) -> None:
    for sampling in (SamplingSettings(max_new_tokens=4), FILTERED.model_copy(
        update={"temperature": 0.0})):  # fmt: skip
        request = Request(0, (0,), np.array([3, 4], np.int32), sampling, keeps_mask=True)
        (completion,) = generate(engine_of(lm, tokenizer), [request])
        assert completion.sampling_mask is not None
        assert completion.sampling_mask.lengths.tolist() == [0] * len(completion.token_ids)


def spec_of(**changes: Any) -> SamplingSpec:
    played = Environments({None: TwoReplies()})
    return SamplingSpec(2, FILTERED, 0, played, max_len=100, keeps_mask=True, **changes)


def episodes(lm: Any, tokenizer: Any) -> list[ScoredGroup]:
    prompt = Prompt(0, requests()[0].token_ids, "?", None, "rows", 0)
    engine = engine_of(lm, tokenizer)
    return sample_groups(engine, Chosen(lambda t, s: float(s)), [prompt], spec_of(), tokenizer)


def test_in_episodes_the_policys_tokens_alone_have_masks_and_the_learner_agrees_with_the_engine(
    lm: Any, tokenizer: Any
) -> None:
    batch = RolloutBatch.of(episodes(lm, tokenizer))
    sequences, mask = batch.sequences, batch.sequences.sampling_mask
    assert mask is not None
    assert len(mask) == len(sequences.tokens.values)
    loss = sequences.loss_mask.values
    assert loss.sum() < len(loss) - 12  # a prompt, and two replies in each sample
    assert ((mask.lengths > 0) <= loss).all()
    assert (mask.lengths > 1).sum() > 20
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_sequences=1))
    backbone.divide(ALONE, "none")
    policy = Policy(backbone, 0.8)
    learned = policy.logprobs(sequences).result().values
    np.testing.assert_allclose(learned[loss], batch.sampled_logprobs.values[loss], atol=2e-5)
    turned = sequences.take(np.array([1, 0]))
    again = policy.logprobs(turned).result()
    np.testing.assert_allclose(again.row(1)[-9:], learned[: len(again.row(1))][-9:], atol=2e-5)
    entropies = policy.entropies(sequences).result().values
    assert (entropies[loss] <= np.log(np.maximum(mask.lengths, 1)[loss]) + 1e-5).all()


def test_recorded_samples_have_their_masks_and_other_files_are_refused(
    lm: Any, tokenizer: Any
) -> None:
    (group,) = episodes(lm, tokenizer)
    lines = [json.loads(json.dumps(line)) for line in
             group_to_json(group, step=1, decode=tokenizer.decode)]  # fmt: skip
    back = RolloutBatch.of([group_from_lines(lines)]).sequences.sampling_mask
    mask = RolloutBatch.of([group]).sequences.sampling_mask
    assert mask is not None
    assert back is not None
    assert back.values.tobytes() == mask.values.tobytes()
    assert back.offsets.tobytes() == mask.offsets.tobytes()
    turn = lines[0]["turns"][0]
    turn["token_ids"][0] = 29 if 29 not in group.rollouts[0].turns[0].sampling_mask.row(0) else 28  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ValueError, match="takes away the token that was drawn"):
        group_from_lines(lines)


def under_way(lm: Any, tokenizer: Any) -> GroupSampler:
    """Samples in their second turns."""
    engine = engine_of(lm, tokenizer)
    sampler = GroupSampler(engine, Chosen(lambda t, s: 1.0), spec_of(), tokenizer)
    sampler.start([Prompt(0, requests()[0].token_ids, "?", None, "rows", 0)])
    while engine._rows.count == 0 or not sampler.groups[0].samples[0].completions:  # pyright: ignore[reportPrivateUsage]
        sampler._take(engine.advance())  # pyright: ignore[reportPrivateUsage]
        sampler._observe(list(sampler._steps))  # pyright: ignore[reportPrivateUsage]
    for _ in range(3):
        engine.advance()
    for request in engine.cut():
        sampler.groups[0].samples[request.sample_ids[0]].request = request
    return sampler


def test_samples_under_way_come_back_with_their_masks(lm: Any, tokenizer: Any) -> None:
    sampler = under_way(lm, tokenizer)
    arrays = dict(to_arrays(sampler.groups, {0: 0}))
    assert arrays[MASK_SIZES].shape == arrays["tokens"].shape

    def back(spec: SamplingSpec) -> Any:
        prompt = sampler.groups[0].prompt
        return to_groups(arrays, lambda _: prompt, spec, tokenizer)[0][0]

    for now, then in zip(back(spec_of()).samples, sampler.groups[0].samples, strict=True):
        for completion, other in zip(now.completions, then.completions, strict=True):
            assert completion.sampling_mask.values.tolist() == other.sampling_mask.values.tolist()
            assert completion.sampling_mask.offsets.tolist() == other.sampling_mask.offsets.tolist()
        first_written, other = now.written, then.written
        assert (first_written is None) == (other is None)
        if first_written is not None:
            assert (
                first_written.sampling_mask.values.tolist() == other.sampling_mask.values.tolist()
            )
            part = first_written.first(1).sampling_mask
            assert part.row(0).tolist() == other.sampling_mask.row(0).tolist()
    arrays[MASK_IDS][0] += 100
    with pytest.raises(RunError, match="sampling mask"):
        back(spec_of())
    del arrays[MASK_IDS], arrays[MASK_SIZES]
    with pytest.raises(RunError, match="drawn without rollout"):
        back(spec_of())


def test_rows_are_taken_from_ragged_columns_in_any_order() -> None:
    column = Ragged.of([[1, 2], [], [3], [4, 5, 6]])
    assert [row.tolist() for row in column.take_many(np.array([3, 1, 0, 3]))] == [
        [4, 5, 6], [], [1, 2], [4, 5, 6],
    ]  # fmt: skip
    joined = Ragged.joined([column, Ragged.empty(2, np.int64)], np.int64)
    assert [len(row) for row in joined] == [2, 0, 1, 3, 0, 0]

"""A turn goes on behind the keys and values of the turns before it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from helpers.image_models import IMAGE_MODELS, SIZES, Scene, fresh, placed, placeholders
from helpers.model_types import config_of, steady_norms
from helpers.rollouts import Words
from postgrad.core.records import PlacedImage
from postgrad.models.images import ImageTower
from postgrad.models.states import carry_states
from postgrad.rollout.engine import Completion, Request, WeightHandover
from postgrad.rollout.local.engine import AHEAD, LocalEngine
from postgrad.rollout.local.kept import KeptPrefix
from postgrad.rollout.settings import SamplingSettings
from rollout.conftest import CONFIGS, VOCABULARY, fresh_model, letters_tokenizer, prompt_tokens

# With windows, norms and soft-caps; with latents; with the states of convolutions, of delta rules
# beside attention, and of both in layers that read images.
IMAGES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3_5"]
FAST = ["qwen3", "gemma2", "deepseek_v3", "lfm2", "qwen2_5_vl"]
SLOW = ["qwen2", "gemma3_text", "mamba2", "qwen3_next", "qwen3_vl", "gemma3", "qwen3_5"]
KINDS = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
STATES = ("lfm2", "mamba2", "qwen3_next", "qwen3_5")
Part = tuple[NDArray[np.int32], tuple[PlacedImage, ...]]  # of a sequence: tokens and images


class Text:
    """Letters."""

    def part(self, seed: int, length: int) -> Part:
        return prompt_tokens(seed, length), ()


class Pictured:
    """Tokens with an image among them, of every second seed."""

    def __init__(self, kind: str) -> None:
        self.scene, self._model = Scene(kind), IMAGE_MODELS[kind]

    def part(self, seed: int, length: int) -> Part:
        generator = np.random.default_rng(seed)
        first, last = np.split(generator.integers(3, 80, length).astype(np.int32), [length // 2])
        if seed % 2:
            return np.concatenate([first, last]), ()
        number = seed // 2 % 2
        rows, columns = SIZES[number] if self._model.grid else self._model.size
        tokens = np.concatenate([first, placeholders(rows * columns), last])
        digest = [*self.scene.pixels][number]
        return tokens, placed(tokens, [digest], [(rows, columns)], self._model)


@dataclass(frozen=True)
class Plan:
    """Episodes of several turns, and when their environments answer."""

    tickets: int = 3
    samples: int = 2
    turns: int = 3
    prompt: int = 20  # tokens
    reply: int = 5
    new: int = 6
    delay: Callable[[int, int, int], int] = lambda ticket, sample, turn: 0  # calls of the engine
    between: Callable[[LocalEngine, int], None] = lambda engine, call: None
    may_go_on: bool = True
    same_prompts: bool = False
    text: Text | Pictured = field(default_factory=Text)


@dataclass
class Played:
    """The turns of a plan, by ticket, sample and turn, each behind the tokens of its request."""

    turns: dict[tuple[int, int, int], tuple[NDArray[np.int32], Completion]] = field(
        default_factory=dict
    )
    images: list[tuple[PlacedImage, ...]] = field(default_factory=list)  # of each, none if empty
    computed: int = 0  # tokens of prompts

    @property
    def bits(self) -> dict[tuple[int, int, int], tuple[list[int], bytes]]:
        return {
            key: (done.token_ids.tolist(), done.logprobs.tobytes())
            for key, (_, done) in self.turns.items()
        }

    @property
    def needed(self) -> int:
        """Tokens that nothing has computed: prompts once, then the newest token and the reply."""
        sizes = {}
        for (ticket, sample, turn), (prefix, _) in self.turns.items():
            if not turn:
                sizes[prefix.tobytes()] = len(prefix)
                continue
            before, done = self.turns[ticket, sample, turn - 1]
            sizes[ticket, sample, turn] = len(prefix) - len(before) - len(done.token_ids) + 1
        return sum(sizes.values())


def engine(
    slots: int, kind: str = "qwen3", places: int = 128, every_expert: bool = False, **how: Any
) -> LocalEngine:
    """every_expert: tokens take all experts, so that no rounding decides which."""
    tokenizer, tower = letters_tokenizer(), None
    if kind in IMAGE_MODELS:
        lm, tokenizer = fresh(kind), Words()
        tower = ImageTower(lm, Scene(kind).pixels.__getitem__)
    elif kind in CONFIGS:
        lm = fresh_model(kind)
    else:
        torch.manual_seed(0)
        config = config_of(kind, VOCABULARY)
        if every_expert and hasattr(config, "n_routed_experts"):
            config.num_experts_per_tok = config.n_routed_experts
        lm = AutoModelForCausalLM.from_config(config, attn_implementation="postgrad")
        carry_states(lm)
    steady_norms(lm)
    lm.generation_config.eos_token_id = tokenizer.eos_token_id
    places *= slots
    return LocalEngine(lm, tokenizer, slots=slots, cache_tokens=places, tower=tower, **how)


def play(model: LocalEngine, plan: Plan) -> Played:
    """Plays all episodes of a plan."""
    sampling = SamplingSettings(max_new_tokens=plan.new)
    played, before = Played(), model.stats.prompt_tokens
    prefixes: dict[tuple[int, int], Part] = {}
    waiting: list[tuple[int, Request]] = []  # (the call before which it is submitted, request)
    for ticket in range(plan.tickets):
        prompt, images = plan.text.part(0 if plan.same_prompts else ticket, plan.prompt)
        numbers = tuple(range(plan.samples))
        prefixes |= {(ticket, sample): (prompt, images) for sample in numbers}
        how = {"images": images, "may_go_on": plan.may_go_on}
        model.submit(Request(ticket, numbers, prompt, sampling, **how))
    call = 0
    while len(played.turns) < plan.tickets * plan.samples * plan.turns:
        plan.between(model, call)
        due = [request for at, request in waiting if at <= call]
        waiting = [(at, request) for at, request in waiting if at > call]
        for request in due:
            model.submit(request)
        for done in model.completed():
            place = done.ticket, done.sample
            prefix, images = prefixes[place]
            played.turns[(*place, done.turn)] = prefix, done
            played.images.append(images)
            if done.turn + 1 < plan.turns:
                seed = 100 * done.ticket + 10 * done.sample + done.turn
                reply, more = plan.text.part(1 + seed, plan.reply)
                longer = np.concatenate([prefix, done.token_ids, reply])
                moved = [image.moved(len(longer) - len(reply)) for image in more]
                prefixes[place] = longer, images = longer, (*images, *moved)
                following = Request(done.ticket, (done.sample,), longer, sampling, done.turn + 1)
                at = call + plan.delay(*place, done.turn)
                how = {"images": images, "may_go_on": plan.may_go_on}
                waiting.append((at, replace(following, **how)))
        call += 1
    played.computed = model.stats.prompt_tokens - before
    return played


def require_right(model: LocalEngine, played: Played, rounding: float = 3e-5) -> None:
    """Logprobs of all turns are those of a forward pass over the whole sequence."""
    sequences = [np.concatenate([p, done.token_ids]) for p, done in played.turns.values()]
    for (prefix, done), expected in zip(
        played.turns.values(), model.logprobs(sequences, 1.0, played.images), strict=True
    ):
        np.testing.assert_allclose(done.logprobs, expected[len(prefix) :], atol=rounding)


def rounding_of(kind: str) -> float:
    """States round in other places than whole forward passes do."""
    return 1e-4 if kind in STATES else 3e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_computes_what_is_new_alone_and_samples_as_behind_all_of_its_prefix(kind):
    model, plan = engine(8, kind), Plan(text=Pictured(kind) if kind in IMAGES else Text())
    played = play(model, plan)
    require_right(model, played, rounding_of(kind))
    assert played.computed == played.needed
    again = play(engine(8, kind), replace(plan, may_go_on=False))
    assert again.computed > 2 * played.computed
    for key, (_, done) in again.turns.items():
        before = played.turns[key][1]
        assert done.token_ids.tolist() == before.token_ids.tolist()
        np.testing.assert_allclose(done.logprobs, before.logprobs, atol=rounding_of(kind))


@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_behind_steps_ahead_a_turn_computes_its_reply_alone(kind, monkeypatch):
    """As on a GPU: a row that has ended computes one more token, the newest."""
    monkeypatch.setitem(AHEAD, "cpu", 1)
    model, plan = engine(8, kind), Plan()
    played = play(model, plan)
    require_right(model, played, rounding_of(kind))
    later = plan.tickets * plan.samples * (plan.turns - 1)
    assert played.computed == played.needed - later


@pytest.mark.parametrize("ahead", [0, 1])
def test_where_experts_are_recorded_every_token_but_the_newest_has_some(ahead, monkeypatch):
    monkeypatch.setitem(AHEAD, "cpu", ahead)
    model = engine(8, "qwen3_moe", records_experts=True)
    played = play(model, Plan())
    require_right(model, played)
    assert played.computed == played.needed
    for (_, _, turn), (prefix, done) in played.turns.items():
        assert (done.experts[-1] == -1).all()
        assert (done.experts[:-1] >= 0).all()
        if not turn:
            assert len(done.experts) == len(prefix) + len(done.token_ids)


@pytest.mark.slow
def test_nothing_is_kept_where_layers_do_not_go_on_from_a_state():
    model = engine(8, "jamba")
    played = play(model, Plan())
    require_right(model, played)
    assert played.computed > 2 * played.needed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "lfm2", "qwen3_5"])
@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 2), st.integers(1, 18), st.integers(1, 3), st.integers(1, 9),
    st.integers(1, 5), st.integers(0, 40), st.booleans(), st.integers(0, 2**31), st.booleans(),
)  # fmt: skip
def test_however_turns_come_and_go_samples_are_right(
    kind, slots, tickets, samples, turns, reply, new, longest, same, seed, cuts
):
    """Few slots, prompts that rows share, replies out of order, cuts: each drops some of what is
    kept, and moves the rest.
    """
    draws = np.random.default_rng(seed)
    delays = draws.integers(0, longest + 1, (tickets, samples, turns))
    cut_at = set(draws.integers(0, 60, 2).tolist()) if cuts else set()

    def between(model: LocalEngine, call: int) -> None:
        for request in model.cut() if call in cut_at else ():
            model.submit(request)

    def delay(*place: int) -> int:
        return int(delays[place])

    text = Pictured(kind) if kind in IMAGES else Text()
    plan = Plan(tickets, samples, turns, 17, reply, new, delay, between, True, same, text)
    model = engine(slots, kind, places=192 if kind in IMAGES else 96, every_expert=True)
    played = play(model, plan)
    require_right(model, played, rounding_of(kind))
    assert play(model, plan).bits == played.bits  # its past leaves no trace


def test_a_shared_prompt_is_kept_for_each_of_its_samples():
    model = engine(6)
    played = play(model, Plan(tickets=1, samples=6))
    require_right(model, played)
    assert played.computed == played.needed


def test_samples_with_equal_turns_share_what_is_kept():
    """More of them than read one stretch: one token is the answer, and all draw the same."""
    model = engine(20)
    greedy = SamplingSettings(max_new_tokens=1, temperature=0.0)
    prompt, samples = prompt_tokens(0, 20), tuple(range(20))
    model.submit(Request(0, samples, prompt, greedy, may_go_on=True))
    (token,) = {c.token_ids.tobytes() for c in model.completed()}
    longer = np.concatenate([prompt, np.frombuffer(token, np.int32), prompt_tokens(1, 4)])
    computed = model.stats.prompt_tokens
    more = SamplingSettings(max_new_tokens=7)
    for sample in samples:
        model.submit(Request(0, (sample,), longer, more, 1, may_go_on=True))
    played = Played()
    while done := model.completed():
        played.turns |= {(c.ticket, c.sample, c.turn): (longer, c) for c in done}
    assert len(played.turns) == 20
    require_right(model, played)
    assert model.stats.prompt_tokens - computed == 5


def test_rows_come_first_what_was_kept_longest_is_computed_again():
    """Two slots, and the environment of the first sample answers last."""
    slow = Plan(2, 2, 2, delay=lambda ticket, sample, turn: 30 if ticket == 0 else 0)
    model = engine(2)
    played = play(model, slow)
    require_right(model, played)
    assert played.needed < played.computed


def test_new_weights_drop_what_old_ones_computed():
    model, other = engine(4), fresh_model("qwen3", seed=1)
    prompt, sampling = prompt_tokens(0, 20), SamplingSettings(max_new_tokens=6)
    model.submit(Request(0, (0,), prompt, sampling, may_go_on=True))
    (done,) = model.completed()
    model.load_weights(WeightHandover(list(other.named_parameters())), 1)
    computed = model.stats.prompt_tokens
    longer = np.concatenate([prompt, done.token_ids, prompt_tokens(1, 4)])
    model.submit(Request(0, (0,), longer, sampling, 1, may_go_on=True))
    played = Played({(0, 0, 1): (longer, model.completed()[0])})
    require_right(model, played)
    assert model.stats.prompt_tokens - computed == len(longer)


def test_a_turn_whose_tokens_changed_goes_on_behind_those_that_did_not():
    """As in a chat, whose template leaves thoughts of earlier turns out."""
    model = engine(4)
    prompt, sampling = prompt_tokens(0, 20), SamplingSettings(max_new_tokens=6)
    model.submit(Request(0, (0,), prompt, sampling, may_go_on=True))
    (done,) = model.completed()
    changed = np.concatenate([prompt, done.token_ids])
    changed[18] = 2 + (changed[18] - 1) % (VOCABULARY - 2)
    computed = model.stats.prompt_tokens
    model.submit(Request(0, (0,), changed, sampling, 1))
    played = Played({(0, 0, 1): (changed, model.completed()[0])})
    require_right(model, played)
    assert model.stats.prompt_tokens - computed == len(changed) - 18


def test_another_sample_or_seed_finds_nothing_kept():
    model = engine(4)
    prompt, sampling = prompt_tokens(0, 20), SamplingSettings(max_new_tokens=6)
    for place in ({"sample_ids": (1,)}, {"ticket": 1}, {"seed": 1}, {"turn": 0}):
        first = Request(0, (0,), prompt, sampling, may_go_on=True)
        model.submit(first)
        (done,) = model.completed()
        longer = np.concatenate([prompt, done.token_ids, prompt_tokens(1, 4)])
        computed = model.stats.prompt_tokens
        model.submit(replace(first, **{"token_ids": longer, "turn": 1} | place))
        model.completed()
        assert model.stats.prompt_tokens - computed == len(longer)


def test_a_turn_that_the_cache_is_divided_anew_for_computes_its_prefix_again():
    """Its reply is longer than the places of a row."""
    model = engine(4, places=48)
    prompt, sampling = prompt_tokens(0, 20), SamplingSettings(max_new_tokens=6)
    model.submit(Request(0, (0,), prompt, sampling, may_go_on=True))
    (done,) = model.completed()
    longer = np.concatenate([prompt, done.token_ids, prompt_tokens(1, 60)])
    computed = model.stats.prompt_tokens
    model.submit(Request(0, (0,), longer, sampling, 1))
    played = Played({(0, 0, 1): (longer, model.completed()[0])})
    require_right(model, played)
    assert model.stats.prompt_tokens - computed == len(longer)


def test_what_is_kept_serves_up_to_an_image_that_is_another_one_or_is_cut():
    tokens = np.arange(3, 40).astype(np.int32)
    first, second = (PlacedImage(name, np.arange(at, at + 4)) for name, at in (("a", 5), ("b", 20)))
    kept = KeptPrefix(tokens[:30], 0, (first, second))

    def shared(*images: PlacedImage, ids: NDArray[np.int32] = tokens) -> int:
        sampling = SamplingSettings(max_new_tokens=1)
        return kept.shared_with(Request(0, (0,), ids, sampling, images=images))

    assert shared(first, second) == 30
    assert shared(first, replace(second, digest="c")) == 20
    assert shared(first, second.moved(1)) == 20
    assert shared(first) == shared(first, second, ids=tokens[:23]) == 20
    assert shared(second) == shared() == 5
    assert shared(first, second, replace(first, at=np.arange(32, 36))) == 30
    assert shared(first, second, ids=tokens[:10]) == 9


def test_a_state_serves_no_shorter_beginning_and_no_single_new_token():
    """Of a recurrence nothing is left of what it was before its last token."""
    model = engine(4, "lfm2")
    prompt, sampling = prompt_tokens(0, 20), SamplingSettings(max_new_tokens=6)
    for change in (True, False):
        model.submit(Request(0, (0,), prompt, sampling, may_go_on=True))
        (done,) = model.completed()
        longer = np.concatenate([prompt, done.token_ids])  # the newest token alone is not computed
        if change:
            longer[22] = 2 + (longer[22] - 1) % (VOCABULARY - 2)
            longer = np.concatenate([longer, prompt_tokens(1, 4)])
        computed = model.stats.prompt_tokens
        model.submit(Request(0, (0,), longer, sampling, 1))
        played = Played({(0, 0, 1): (longer, model.completed()[0])})
        require_right(model, played)
        assert model.stats.prompt_tokens - computed == len(longer)

"""Environments that speak before the policy's first turn."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from helpers.chat import chat_tokenizer
from helpers.lives import Chosen, Numbers, Ticking, Words
from postgrad.core.errors import RunError
from postgrad.core.process import done
from postgrad.core.records import EpisodeFailure, Prompt, ScoredGroup
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.environment import Environments, Observation, SamplingSpec, Step
from postgrad.rollout.environments.base import ChatEnvironment, Reply
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.pending import to_arrays, to_groups
from postgrad.rollout.records_json import group_from_lines, group_to_json
from postgrad.rollout.sampling import GroupSampler
from postgrad.rollout.settings import EnvironmentSettings, SamplingSettings

TOKENIZER = chat_tokenizer()
MESSAGES = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Now?"})
PROMPT = Prompt(5, np.array([4], np.int32), "Now?", None, "rows", 0, messages=MESSAGES)
RED = {"role": "user", "content": "red"}
SAMPLING = SamplingSettings(max_new_tokens=9)


class Host(ChatEnvironment):
    """Begins by `kind`, and repeats what it hears."""

    kind: str = "alone"

    def start(self, prompt, sample):
        if self.kind == "no start":
            raise KeyError("size")
        return _Party(self.kind)


class _Party:
    def __init__(self, kind):
        self.kind = kind

    def begin(self):
        if self.kind == "raises":
            raise ConnectionError("no game is free")
        return {
            "prompt": Reply(),
            "behind": Reply((RED,)),
            "alone": Reply((RED,), behind="nothing"),
            "done": Reply(done=True),
            "reward": Reply((RED,), reward=1.0),
            "counts": Reply((RED,), counts={"games": 1.0}),
            "none": None,
            "number": Reply((RED,), behind=0),
            "empty": Reply(behind="nothing"),
            "tools": Reply((RED,), behind="nothing", tools=({"name": "look"},)),
            "no tools": Reply((RED,), behind="nothing", tools="look"),
            "late tools": Reply((RED,), tools=()),
        }[self.kind]

    def step(self, text):
        return Reply(({"role": "user", "content": text},))


class Listens(Host):
    """Hears more than the text of a turn."""

    def start(self, prompt, sample):
        return _Ear(self.kind)


class _Ear:
    def __init__(self, kind):
        self.begin = _Party(kind).begin
        self.heard = []

    def hear(self, turn):
        self.heard.append((turn.text, turn.marked, turn.read, turn.written))
        return Reply((RED,), behind=0 if len(self.heard) == 2 else "newest")


class Slow(Host):
    """The same beside the engine."""

    waits: ClassVar[bool] = True

    def start(self, prompt, sample):
        return _Slow(self.kind)


class _Slow(_Party):
    async def begin(self):
        return super().begin()

    async def step(self, text):
        return super().step(text)


def played(kind, environment="Host", **options):
    settings = {"type": f"{__name__}:{environment}", "kind": kind, **options}
    return dialogue(EnvironmentSettings.model_validate(settings), TOKENIZER, {})


def turn(text, number=0):
    ids = np.array(TOKENIZER(text + TOKENIZER.eos_token)["input_ids"], np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(5, 0, number, ids, logprobs, "stop", ((0, len(ids)),), text)


@pytest.mark.parametrize("environment", ["Host", "Slow"])
@pytest.mark.parametrize(
    ("kind", "messages"), [("prompt", ()), ("behind", (*MESSAGES, RED)), ("alone", (RED,))]
)
def test_the_policy_reads_what_the_environment_begins_with(kind, messages, environment):
    world = played(kind, environment)
    episode = world.reset(PROMPT, 0)
    assert episode.begins
    first = episode.begin().result()
    assert (first.done, first.failure, first.counts) == (False, None, {})
    assert first.behind == ("nothing" if messages else "newest")
    wanted = TOKENIZER.apply_chat_template(
        [*messages], tokenize=False, add_generation_prompt=True
    ) if messages else ""  # fmt: skip
    assert TOKENIZER.decode(first.token_ids) == wanted
    seen = episode.step(turn("a")).result()
    assert TOKENIZER.decode(seen.token_ids) == (
        "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (seen.behind, seen.counts["turns"], seen.counts["conversations"]) == ("newest", 1, 1)
    assert episode.step(turn("b", 1)).result().counts["conversations"] == 0.0
    world.close()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("raises", "ConnectionError: no game is free"),
        ("no start", "KeyError: 'size' (test_beginning.py:"),
        ("done", "the Reply of begin is done, or has a reward or counts"),
        ("reward", "the Reply of begin is done, or has a reward or counts"),
        ("counts", "the Reply of begin is done, or has a reward or counts"),
        ("none", "begin returned a NoneType in place of a Reply"),
        ("number", "the number of one of the policy's 0 turns"),
        ("empty", "a Reply behind nothing has no messages"),
        ("no tools", "the tools of a Reply are 'look', which is no list of schemas"),
        ("late tools", "has tools and does not begin a conversation"),
    ],
)
def test_a_begin_that_is_none_is_a_failure_of_its_sample(kind, why):
    first = played(kind).reset(PROMPT, 0).begin().result()
    assert first.done
    assert first.failure is not None
    assert why in first.failure.message


@pytest.mark.parametrize("kind", ["prompt", "alone"])
def test_a_course_that_hears_knows_how_much_was_read_and_written(kind):
    world = played(kind, "Listens")
    episode = world.reset(PROMPT, 0)
    first = episode.begin().result()
    begin = len(first.token_ids) or len(PROMPT.token_ids)
    marked = f"a{TOKENIZER.eos_token}b"
    ids = np.array(TOKENIZER(marked + TOKENIZER.eos_token)["input_ids"], np.int32)
    second = replace(turn("ab", 1), token_ids=ids)
    seen = [episode.step(each).result() for each in (turn("a"), second, turn("c", 2))]
    behind_first, behind_again = (len(each.token_ids) for each in seen[:2])
    assert [len(TOKENIZER(text + TOKENIZER.eos_token)["input_ids"]) for text in "ac"] == [2, 2]
    assert episode._course.heard == [
        ("a", "a", begin, 2),
        ("ab", marked, begin + 2 + behind_first, 4),
        ("c", "c", begin + 2 + behind_again, 2),  # behind the first turn again
    ]


def test_a_prompt_of_text_alone_has_no_messages_to_stand_behind():
    bare = Prompt(5, np.array([4], np.int32), "Now?", None, "rows", 0)
    first = played("behind").reset(bare, 0).begin().result()
    assert first.failure is not None
    assert 'behind = "nothing" begins anew' in first.failure.message
    assert played("alone").reset(bare, 0).begin().result().failure is None


class Openings:
    """Begins with the prompt, or with tokens of the sample's own, by `late` steps; then ends."""

    concurrent = 2
    turn_tokens = ()
    begins = True

    def __init__(self, late: Any = None, deterministic: bool = True, goes_on: bool = True) -> None:
        self.late, self.deterministic, self.goes_on = late, deterministic, goes_on
        self.begun = 0

    def reset(self, prompt: Prompt, sample: int) -> "_Opening":
        return _Opening(self, sample)

    def resume(
        self, prompt: Prompt, sample: int, opening: Observation | None, recorded: Any
    ) -> "_Opening | None":
        assert opening is not None
        return _Opening(self, sample) if self.goes_on else None


class _Opening:
    begins = True

    def __init__(self, rules: Openings, sample: int) -> None:
        self._rules, self._sample = rules, sample

    def begin(self) -> Step:
        self._rules.begun += 1
        sample = self._sample
        own_observation = Observation(
            np.array([50, 50 + sample], np.int32), False, behind="nothing"
        )
        prompt = Observation(np.zeros(0, np.int32), done=False)
        fault = EpisodeFailure("error", "no game is free")
        broken = Observation(np.zeros(0, np.int32), done=True, failure=fault)
        return self._opening_for((prompt, own_observation, own_observation, broken)[sample % 4])

    def step(self, response: Completion) -> Step:
        return self._opening_for(Observation(np.array([7], np.int32), done=response.turn == 1))

    def close(self) -> None:
        """Keeps nothing."""

    def _opening_for(self, observation: Observation) -> Step:
        late = self._rules.late
        return Step(done(observation) if late is None else late(observation), lambda ended: ended)


class Asked(Ticking):
    """Notes what it is asked for, and when."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: list[tuple[int, tuple[int, ...], int, list[int]]] = []

    def submit(self, request: Request) -> None:
        read = request.token_ids.tolist()
        self.requests.append((self.steps, request.sample_ids, request.turn, read))
        super().submit(request)


def length(ticket: int, sample: int, turn: int) -> int:
    return 1 + (3 * ticket + 2 * sample + turn) % 5


def sampler(engine: Any, environment: Any, **options: Any) -> GroupSampler:
    spec = SamplingSpec(4, SAMPLING, 0, Environments({None: environment}), **options)
    return GroupSampler(engine, Chosen(lambda t, s: 1.0), spec, Words())


def sampled(engine: Any, environment: Any, **options: Any) -> list[ScoredGroup]:
    samples = sampler(engine, environment, **options)
    samples.start([Numbers(100).draw(ticket, 0) for ticket in range(3)])
    return samples.finish(range(3))


def shown(groups: list[ScoredGroup]) -> list[Any]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [(r.token_ids.tolist(), r.logprobs.tolist(), r.failure) for r in rollouts]


def test_each_sample_is_drawn_behind_what_its_environment_began_with():
    engine = Asked(length)
    groups = sampled(engine, Openings())
    prompt = groups[0].prompt.token_ids.tolist()
    first = [request[1:] for request in engine.requests[:3]]
    assert first == [((0,), 0, prompt), ((1,), 0, [50, 51]), ((2,), 0, [50, 52])]
    at_prompt, alone, _, broken = groups[0].rollouts
    assert [turn.author for turn in at_prompt.turns] == ["policy", "environment", "policy"]
    assert [turn.opens for turn in alone.turns] == [True, False, False, False]
    assert at_prompt.read_prompt(groups[0].prompt).tolist() == prompt
    assert alone.read_prompt(groups[0].prompt).tolist() == []
    assert (alone.openings, alone.token_ids[:2].tolist()) == ((), [50, 51])
    assert [r.opening_tokens for r in groups[0].rollouts] == [0, 2, 2, 0]
    assert [tokens.tolist() for _, tokens, _ in alone.conversations(groups[0].prompt)] == [
        alone.token_ids.tolist()
    ]
    assert (broken.turns, broken.text, broken.policy_tokens) == ((), "", 0)
    assert broken.failure == EpisodeFailure("error", "no game is free")


def test_a_batch_has_no_prompt_that_nobody_read():
    groups = sampled(Ticking(length), Openings())
    batch = RolloutBatch.of(groups)
    assert batch.sample.tolist() == [0, 1, 2] * 3  # one of each group has no token to learn from
    rows = list(batch.sequences.tokens)
    assert rows[1][:2].tolist() == [50, 51]
    assert len(rows[1]) == len(groups[0].rollouts[1].token_ids)
    assert not batch.sequences.openings


def test_such_groups_come_back_as_they_were_written():
    group = sampled(Ticking(length), Openings())[0]
    lines = group_to_json(group, step=1, decode=lambda ids: str(ids), columns=[{}] * 4)
    again = group_from_lines(lines)
    assert [r.token_ids.tolist() for r in again.rollouts] == [
        r.token_ids.tolist() for r in group.rollouts
    ]
    assert [r.read_prompt(group.prompt).tolist() for r in again.rollouts[:2]] == [
        group.prompt.token_ids.tolist(), [],
    ]  # fmt: skip


def test_when_a_sample_begins_does_not_depend_on_how_long_its_environment_takes():
    threads = ThreadPoolExecutor(8)
    traces: list[Any] = []
    for seed in (None, 1, 2):
        order = random.Random(seed)

        def late(observation: Observation, order: random.Random = order) -> Any:
            seconds = order.random() * 0.01
            return threads.submit(lambda: pause(seconds, observation))

        engine = Asked(length)
        groups = sampled(engine, Openings(None if seed is None else late))
        traces.append((shown(groups), engine.requests))
    assert traces[0] == traces[1] == traces[2]


def pause(seconds: float, observation: Observation) -> Observation:
    time.sleep(seconds)
    return observation


def test_an_opening_that_no_turn_fits_behind_is_a_failure():
    groups = sampled(Ticking(length), Openings(), max_len=2)
    rollout = groups[0].rollouts[1]
    failure = rollout.failure
    assert failure is not None
    assert rollout.finish_reason == "stop"  # no answer was cut
    assert failure.message == (
        "it begins with 2 tokens, behind which data.max_len = 2 has no room for a turn"
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_checkpoint_goes_on_behind_what_environments_began_with(deterministic):
    engine = Asked(length)
    before = sampler(engine, Openings(deterministic=deterministic))
    before.start([Numbers(100).draw(ticket, 0) for ticket in range(2)])
    before._observe(list(before._steps))
    before._take(engine.completed())
    before.cut()
    arrays = to_arrays(before.groups, {0: 0, 1: 0})
    other = Openings(deterministic=deterministic)
    spec = SamplingSpec(4, SAMPLING, 0, Environments({None: other}))
    again, redrawn = to_groups(arrays, lambda t: Numbers(100).draw(t, 0), spec, Words())
    assert (redrawn, other.begun) == (0, 8 if deterministic else 0)
    for group, then in zip(again, before.groups.values(), strict=True):
        assert (group.left, group.ended) == (then.left, then.ended) == (3, False)
        for sample, was in zip(group.samples, then.samples, strict=True):
            assert (sample.request is None) == (was.request is None)
            if sample.request is not None and was.request is not None:
                assert sample.request.prefix.tolist() == was.request.prefix.tolist()
                assert sample.request.turn == was.request.turn
    ended = {}
    for name, groups in (("killed", again), ("never", list(before.groups.values()))):
        goes_on = sampler(Ticking(length), other)
        goes_on.start_groups(groups)
        ended[name] = shown(goes_on.finish(range(2)))
    assert ended["killed"] == ended["never"]


def test_samples_that_cannot_go_on_begin_again():
    engine = Asked(length)
    before = sampler(engine, Openings(deterministic=False))
    before.start([Numbers(100).draw(0, 0)])
    before.cut()
    other = Openings(deterministic=False, goes_on=False)
    spec = SamplingSpec(4, SAMPLING, 0, Environments({None: other}))
    arrays = to_arrays(before.groups, {0: 0})
    (group,), redrawn = to_groups(arrays, lambda t: Numbers(100).draw(t, 0), spec, Words())
    assert redrawn == 3
    assert [sample.begins for sample in group.samples] == [True, True, True, False]
    assert group.left == 3
    goes_on = sampler(Ticking(length), other)
    goes_on.start_groups([group])
    (scored,) = goes_on.finish([0])
    assert other.begun == 3
    assert [len(rollout.turns) for rollout in scored.rollouts] == [3, 4, 4, 0]


def test_samples_of_a_version_in_which_no_environment_began_are_drawn_from_their_start():
    engine = Asked(length)
    before = sampler(engine, Openings(deterministic=False))
    before.start([Numbers(100).draw(0, 0)])
    before._observe(list(before._steps))
    before._take(engine.completed())
    before.cut()
    arrays = dict(to_arrays(before.groups, {0: 0}))
    stored_replies = json.loads(arrays["replies"].tobytes())
    older = [reply for reply in stored_replies if not reply.get("begins")]
    assert 0 < len(older) < len(stored_replies)
    arrays["replies"] = np.frombuffer(json.dumps(older).encode(), np.uint8)
    other = Openings(deterministic=False)
    spec = SamplingSpec(4, SAMPLING, 0, Environments({None: other}))
    (group,), redrawn = to_groups(arrays, lambda t: Numbers(100).draw(t, 0), spec, Words())
    assert redrawn == len({sample for _, sample, *_ in arrays["turns"].tolist()})
    assert [sample.begins for sample in group.samples] == [True] * 4
    assert group.left == 4
    arrays["replies"] = np.frombuffer(b"[]", np.uint8)
    with pytest.raises(RunError, match="fewer replies"):
        to_groups(arrays, lambda t: Numbers(100).draw(t, 0), spec, Words())

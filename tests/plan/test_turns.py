"""Samples with an environment: several turns, and replies between them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import lines
from postgrad.models.fresh import make_fresh
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.load import load_model
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.lengths import RowLengths, row_lengths
from postgrad.plan.page import Page
from postgrad.plan.pass_time import Samples
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.planner import facts_of
from postgrad.plan.sampling import behind_replies
from postgrad.plan.turns import Turns
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.engine import Request
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings
from postgrad.training.start import train

INIT: dict[str, Any] = {
    **{"type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
    "tokenizer": {"kind": "characters"},
}
CALCULATOR = {"type": "tools", "tools": ["calculator"]}


def with_turns(turns: int, played: dict[str, Any] = CALCULATOR, **more: Any) -> Recipe:
    return parse_recipe(
        {
            "job": "rl",
            "run_dir": "run",
            "steps": 100,
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "data": {"path": "rows.jsonl", "max_len": 2048},
            "environment": {**played, "max_turns": turns},
            "rewards": [{"type": "gsm8k"}],
            "algorithm": {"type": "grpo", "correction": "tis", **more},
            "batch": {"rollout_batch_size": 64, "n_samples_per_prompt": 8},
            "rollout": {"max_new_tokens": 256, "max_staleness": 1},
        }
    )


def planned(recipe: Recipe, lengths: RowLengths | None = None) -> RunPlan:
    return make_plan(recipe, Facts(shape_of_model, parse_hardware("cpu"), lengths=lengths))


def notes(recipe: Recipe, word: str) -> list[str]:
    return [note for note in Page(planned(recipe), ()).notes() if note.startswith(word)]


def test_a_sample_counts_with_all_turns_and_replies_that_fit() -> None:
    turns = Turns((4, 4, 3), reply=10)
    prompts = np.array([20.0, 70, 72, 73, 96, 99, 100])
    written, replies, taken = turns.played(prompts, 100)
    # behind 70 tokens: 4 + 10 + 4 + 10 leave 2 of the last turn; behind 72 the second reply fills
    # the room, behind 73 it has none at all; behind 96 one turn fills it
    assert written.tolist() == [11, 10, 8, 8, 4, 1, 0]
    assert replies.tolist() == [20, 20, 10, 10, 0, 0, 0]
    assert taken.tolist() == [3, 3, 2, 2, 1, 1, 0]


def test_a_reply_of_which_nothing_is_known_counts_as_many_tokens_as_the_prompt() -> None:
    written, replies, taken = Turns((4, 4), reply=None).played(np.array([5.0, 30]), 100)
    assert (written.tolist(), replies.tolist(), taken.tolist()) == ([8, 8], [5, 30], [2, 2])
    # 100 tokens are a prompt of 30, three turns of 3 and two replies of 30, and a token is left
    assert Turns((3, 3, 3), reply=None).prompt(100) == 30
    assert Turns((3, 3, 3), reply=25).prompt(100) == 100 - 9 - 50
    assert Turns((80, 80), reply=None).prompt(100) == 1


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"spell {word}", "answer": word} for word in ("cat", "cow")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def tiny(questions: Path, environment: dict[str, Any], **more: Any) -> RLRecipe:
    recipe = parse_recipe(
        {
            **{"job": "rl", "run_dir": str(questions.parent / "run"), "steps": 2},
            "model": {"init": {**INIT, "initializer_range": 0.3}},
            "data": {"path": str(questions), "max_len": 256},
            "environment": environment,
            "algorithm": {"type": "grpo"},
            "batch": {"rollout_batch_size": 2, "n_samples_per_prompt": 4},
            "rollout": {"max_new_tokens": 12, "stop": [*"abcdefghijklmno"]},  # ends most turns
            "rewards": [{"type": "regex", "pattern": "[a-m]"}],
            "learner": {"threads": 1},
            "sentinels": {"truncation": "off"},
            **more,
        }
    )
    assert isinstance(recipe, RLRecipe)
    return recipe


def test_lengths_of_a_dataset_are_those_of_its_environment(questions: Path) -> None:
    """In characters, with two marks before and behind a role or a text: the prompt
    <user>spell cat</>, <assistant> has 2 + 4 + 9 + 2 + 2 + 9 = 28, and with <user>higher, from 10
    to 99</> in place of it 40.
    """
    game = tiny(questions, {"type": "guess_number", "max_turns": 3, "turn_tokens": [9, 5]})
    lengths = row_lengths(game)
    assert lengths is not None
    assert (lengths.prompt, lengths.turns) == (28, 3)
    assert (lengths.written, lengths.replies) == (9 + 5 + 5, 2 * 40)
    stated = tiny(questions, {"type": "guess_number", "max_turns": 3, "reply_tokens": 7})
    lengths = row_lengths(stated)
    assert lengths is not None
    assert (lengths.written, lengths.replies) == (36, 14)
    # of a step: two prompts of four samples
    assert Samples.of(stated, stated.geometry(), lengths).tokens == 2 * (28 + 4 * 50)
    assert Samples.of(stated, stated.geometry(), lengths).learned == 8 * 36


def test_datasets_have_the_turns_of_their_own_environments(questions: Path) -> None:
    games = {"sets": [{"type": "guess_number", "max_turns": 3, "reply_tokens": 7}]}
    sets = [
        {"path": str(questions), "environment": "guess_number"},
        {"path": str(questions), "environment": "none"},
    ]
    lengths = row_lengths(tiny(questions, games, data={"max_len": 256, "sets": sets}))
    assert lengths is not None
    assert (lengths.turns, lengths.written, lengths.replies) == (2, (36 + 12) / 2, 7)


def test_a_plan_counts_about_as_many_tokens_of_episodes_as_the_run_computes(
    questions: Path,
) -> None:
    """It counts turns of 12 tokens, the run has shorter ones, and replies that are longer than the
    prompt.
    """
    recipe = tiny(questions, {"type": "helpers.rooms:Rooms", "max_turns": 3})
    count = make_plan(*facts_of(recipe, parse_hardware("cpu")))
    train(recipe, Console("quiet"))
    logged = lines(Path(recipe.run_dir) / "metrics.jsonl")
    computed = sum(line["policy/computed_tokens"] for line in logged) / len(logged)
    tokens = Samples.of(recipe, count.geometry, count.lengths).tokens
    assert 0.9 < tokens / computed < 1.5, (tokens, computed)


def test_a_plan_says_what_it_assumes_of_turns_and_replies() -> None:
    assert not notes(with_turns(1), "turns: ")
    (note,) = notes(with_turns(4), "turns: ")
    # a result of a calculator: 2 + 1 + 6 + 2 tokens, and 3 of the opening behind it
    assert (
        "as many as it may have, 4 of together 1024 tokens, and with 42 tokens of replies" in note
    )
    assert "Memory has room for data.max_len = 2048" in note
    assert not notes(with_turns(4), "replies of ")
    rooms = {"type": "helpers.rooms:Rooms"}
    (note,) = notes(with_turns(4, rooms), "replies of helpers.rooms:Rooms: ")
    assert "assumed as long as the prompt; environment.reply_tokens states it" in note
    assert not notes(with_turns(4, {**rooms, "reply_tokens": 90}), "replies of ")


def test_replies_take_time_and_are_learned_only_where_the_loss_has_them() -> None:
    single, short, long = (
        planned(with_turns(turns, {**CALCULATOR, "reply_tokens": reply}), RowLengths(**lengths))
        for turns, reply, lengths in (
            (1, 0, {"prompt": 100, "answer": 256, "spread": 1.0, "source": "here"}),
            (4, 0, {"prompt": 100, "answer": 1024, "spread": 1.0, "source": "here", "turns": 4}),
            (
                4,
                200,
                {
                    **{"prompt": 100, "answer": 1624, "spread": 1.0, "source": "here"},
                    **{"turns": 4, "replies": 600},
                },
            ),
        )
    )
    for phase in ("sample", "update"):
        assert single.timing.step[phase] < short.timing.step[phase] < long.timing.step[phase]
    learned = with_turns(4, observation_coef=0.1)
    samples = Samples.of(learned, long.geometry, long.lengths)
    assert samples.learned == 512 * 1624
    assert samples.written == 512 * 1024
    assert Samples.of(long.recipe, long.geometry, long.lengths).learned == 512 * 1024


def test_memory_has_room_for_rows_of_max_len_whatever_replies_are_counted_with() -> None:
    row = RowLengths(prompt=100, answer=1024, spread=1.0, source="here", turns=4)
    short, long = (
        planned(with_turns(4), replace(row, answer=1024 + replies, replies=replies))
        for replies in (0, 800)
    )
    assert short.memory == long.memory
    full = replace(row, answer=1948, turns=1)  # as one answer would have them
    single = planned(with_turns(1), row), planned(with_turns(1), full)
    for phase in ("rollout", "update"):
        assert all(each.memory.at(phase) <= short.memory.at(phase) for each in single)
    # logits of replies that are learned are among those of a micro-batch
    assert planned(with_turns(4, observation_coef=0.1), row).memory == short.memory


def test_a_plan_has_room_for_all_turns_of_an_environment() -> None:
    """A CPU takes memory for the pages of the cache that are written."""
    single, several = (planned(with_turns(turns)) for turns in (1, 8))
    (alone, together) = (
        next(line.bytes["rollout"] for line in plan.memory.lines if "cache" in line.purpose)
        for plan in (single, several)
    )
    assert together > 1.5 * alone
    (few,), (many,) = (
        [note for note in Page(plan, ()).notes() if "samples ahead take" in note]
        for plan in (single, several)
    )
    tokens = (single.recipe.sampled_tokens, 2047)
    megabytes = [float(note.split("up to ")[1].split()[0]) for note in (few, many)]
    assert megabytes[1] / megabytes[0] == pytest.approx(tokens[1] / tokens[0], rel=0.01)


TURNS, TURN, REPLY, PROMPTS, SAMPLES, PROMPT = 3, 8, 6, 2, 4, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_fresh(ModelInit.model_validate(INIT), [], 0, folder)
    return folder


def read_behind_replies(model: Path, slots: int) -> int:
    """Tokens that the engine computes for the later turns of all samples, which enter together."""
    loaded = load_model(str(model), dtype=torch.float32)
    longest = PROMPT + TURNS * (TURN + REPLY) + 32
    engine = LocalEngine(loaded.lm, loaded.tokenizer, slots=slots, cache_tokens=slots * longest)
    draws = np.random.default_rng(0)
    settings, asked = SamplingSettings(max_new_tokens=TURN), dict[tuple[int, int], Request]()
    ids = draws.integers(10, 60, (PROMPTS, PROMPT)).astype(np.int32)
    for ticket, prompt in enumerate(ids):
        request = Request(ticket, (), prompt, settings, seed=0, may_go_on=True)
        asked |= {(ticket, n): replace(request, sample_ids=(n,)) for n in range(SAMPLES)}
        engine.submit(replace(request, sample_ids=tuple(range(SAMPLES))))
    first, ended = None, []
    while True:
        if completions := engine.completed():
            ended += completions
            continue
        first = engine.stats.prompt_tokens if first is None else first
        for done in ended:
            if done.turn + 1 < TURNS:
                before = asked[done.ticket, done.sample]
                reply = draws.integers(10, 60, REPLY).astype(np.int32)
                longer = np.concatenate([before.token_ids, done.token_ids, reply])
                following = replace(before, token_ids=longer, turn=done.turn + 1)
                asked[done.ticket, done.sample] = following
                engine.submit(following)
        if len(ended) == 0 or ended[0].turn + 1 == TURNS:
            return engine.stats.prompt_tokens - first
        ended = []


def test_later_turns_are_computed_as_the_engine_computes_them(model: Path) -> None:
    """With a slot for each sample the reply and the newest token, else the whole of what is before
    a turn. By hand, of eight samples: 2 * (6 + 1) each; prefixes of 40 + 14 and 40 + 28 each.
    """
    answer = TURNS * TURN + (TURNS - 1) * REPLY
    lengths = RowLengths(PROMPT, answer, 1.0, "", replies=(TURNS - 1) * REPLY, turns=TURNS)
    samples = PROMPTS * SAMPLES
    kept, position = 8 * 14, 40 + 36 / 2
    assert behind_replies(lengths, samples, keeps=True) == (kept, 2 * kept * position)
    assert behind_replies(lengths, samples, keeps=False) == (8 * (54 + 68), 16 * 61**2)
    assert behind_replies(replace(lengths, turns=1.0), samples, keeps=True) == (0, 0)
    assert read_behind_replies(model, slots=samples) == kept
    lost = read_behind_replies(model, slots=samples // 4)
    assert 0.7 * 8 * (54 + 68) < lost <= 8 * (54 + 68)

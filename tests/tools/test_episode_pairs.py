"""Pairs of episodes: what the policy read and wrote on each side, its own turns alone learned, and
the loss on them against plain transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.chat import chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.records import Prompt
from postgrad.data.pairs import load_pairs
from postgrad.data.settings import PairSettings
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.episode_messages import EpisodeRecords
from postgrad.rollout.settings import EnvironmentSettings
from postgrad.tools.selection import RowSelection, Sample, select

ASK = {"role": "user", "content": "2 + 3?"}
PROMPT = Prompt(0, np.array([4], np.int32), "2 + 3?", "5", "sums", 3, messages=(ASK,))


def sample(number: int, total: float | None, *conversations: Any, **more: Any) -> Sample:
    """A line of a shard. conversations: messages, or (messages, tools)."""
    held = [
        dict(
            zip(("messages", "tools"), each if isinstance(each, tuple) else (each, []), strict=True)
        )
        for each in conversations
    ]
    return {
        "ticket": 0, "sample": number, "dataset": "sums", "row": 3, "messages": [ASK],
        "text": "all", "finish_reason": "stop", "total": total, "rewards": {},
        "conversations": held,
    } | more  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def policy(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def selected(
    folder: Path, *group: Sample, **wanted: Any
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows, and what is counted beyond prompts, samples and rows."""
    path = folder / "pairs.jsonl"
    counts = select([group], RowSelection(kind="pairs", **wanted), path, "abc").counts
    more = {
        name: n for name, n in counts.items() if n and name not in ("prompts", "samples", "rows")
    }
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()], more


def call(expression: str) -> str:
    arguments = json.dumps({"expression": expression})
    return f'\n<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


def played(tokenizer: Any, texts: list[str]) -> tuple[list[tuple[list[int], bool]], Any]:
    """An episode with a calculator: its tokens behind the prompt, whether the policy wrote them, in
    turns; and its conversation.
    """
    records = EpisodeRecords()
    settings = EnvironmentSettings.model_validate({"type": "tools", "tools": ["calculator"]})
    episode = dialogue(settings, tokenizer, {}, records=records).reset(PROMPT, 0)
    turns: list[tuple[list[int], bool]] = []
    for number, text in enumerate(texts):
        ids = tokenizer(text + tokenizer.eos_token)["input_ids"]
        logprobs, written = np.zeros(len(ids), np.float32), ((0, len(ids)),)
        fields = np.array(ids, np.int32), logprobs, "stop", written, text
        seen = episode.step(Completion(0, 0, number, *fields)).result()
        turns += [(ids, True), (seen.token_ids.tolist(), False)]
    (held,) = records[0, 0].conversations
    return turns, (held.messages, list(held.tools))


def test_each_side_of_a_pair_is_what_the_policy_read_and_wrote_and_learns_its_turns_alone(
    tmp_path: Path,
) -> None:
    tokenizer = chat_tokenizer(*WITH_TOOLS["qwen"])
    good, better = played(tokenizer, [call("2 + 3"), "It is 5."])
    bad, worse = played(tokenizer, ["Well." + call("2 - 3"), call("2 - "), "It is -1."])
    (row,), _ = selected(tmp_path, sample(0, 0.0, worse), sample(1, 1.0, better))
    assert row["prompt"] == [ASK]
    assert [message["role"] for message in row["chosen"]] == ["assistant", "tool", "assistant"]
    assert (row["tools"], row["samples"], row["margin"]) == (better[1], [1, 0], 1.0)
    (pair,) = load_pairs(PairSettings(path=str(tmp_path / "pairs.jsonl")), tokenizer).all()
    prompt = tokenizer.apply_chat_template(
        [ASK], tools=better[1], tokenize=False, add_generation_prompt=True
    )
    for turns, ids, mask in (
        (good, pair.chosen, pair.chosen_mask),
        (bad, pair.rejected, pair.rejected_mask),
    ):
        pieces = [(tokenizer(prompt)["input_ids"], False), *turns]
        assert ids.tolist() == [token for tokens, _ in pieces for token in tokens]
        assert mask.tolist() == [is_own for tokens, is_own in pieces for _ in tokens]


def test_two_episodes_may_part_where_the_environment_replies(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    first = [ASK, policy("4"), user("lower"), policy("3")]
    second = [ASK, policy("4"), user("higher"), policy("5")]
    selected(tmp_path, sample(0, 1.0, second), sample(1, 0.0, first))
    rows = load_pairs(PairSettings(path=str(tmp_path / "pairs.jsonl")), tokenizer)
    (pair,) = rows.all()
    assert rows.account.notes == ("1 row: pairs of messages that answer 'prompt'",)
    learned = [
        tokenizer.decode(ids[mask].tolist())
        for ids, mask in (
            (pair.chosen, pair.chosen_mask),
            (pair.rejected, pair.rejected_mask),
        )
    ]
    assert learned == ["5<|im_end|>", "3<|im_end|>"]  # both wrote the 4 before


def test_what_a_program_answered_in_the_policys_place_bears_no_loss(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    held = [ASK, policy("a"), user("more"), policy("ours", weight=0), user("and?"), policy("b")]
    selected(tmp_path, sample(0, 1.0, held), sample(1, 0.0, [ASK, policy("c")]))
    (pair,) = load_pairs(PairSettings(path=str(tmp_path / "pairs.jsonl")), tokenizer).all()
    assert tokenizer.decode(pair.chosen[pair.chosen_mask].tolist()) == "a<|im_end|>b<|im_end|>"


def test_what_nobody_answered_is_no_part_of_a_side(tmp_path: Path) -> None:
    cut = [ASK, policy("a"), user("there is no room to answer this")]
    (row,), _ = selected(
        tmp_path, sample(0, 1.0, [ASK, policy("b")]), sample(1, 0.0, cut, finish_reason="length")
    )
    assert row["rejected"] == [policy("a")]


SHOTS = [ASK, policy("an example", weight=0), ASK]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
NO_PAIR = {
    "several conversations": (
        [[[*SHOTS, policy("a")], [ASK, policy("b")]], [[ASK, policy("c")]]],
        "samples with several conversations",
    ),
    "nothing of the policy": (
        [[SHOTS], [[ASK, policy("c")]]],
        "samples with no turn of the policy",
    ),
    "another beginning": (
        [[[ASK, policy("a")]], [[user("room 2"), policy("b")]]],
        "episodes that begin with other messages or tools",
    ),
    "other tools": (
        [[([ASK, policy("a")], TOOLS)], [([ASK, policy("b")], [])]],
        "episodes that begin with other messages or tools",
    ),
    "the same on both sides": (
        [[[ASK, policy("a")]], [[ASK, policy("a")]]],
        "samples with different rewards say the same",
    ),
    "one ends where the other goes on": (
        [[[ASK, policy("a"), user("on"), policy("b")]], [[ASK, policy("a"), user("on")]]],
        "samples with different rewards say the same",
    ),
}


@pytest.mark.parametrize("case", NO_PAIR)
def test_what_is_no_pair_is_told_with_its_reason(case: str, tmp_path: Path) -> None:
    (better, worse), reason = NO_PAIR[case]
    group = [sample(0, 1.0, *better), sample(1, 0.0, *worse)]
    rows, counts = selected(tmp_path, *group)
    assert rows == []
    assert counts[f"prompts without a row: {reason}"] == 1
    none = reason.removeprefix("samples with ")
    assert counts.get(f"samples in no pair: {none}", 0) == (case in list(NO_PAIR)[:2])
    # the others of the prompt are compared all the same
    third = sample(2, -1.0, ([ASK, policy("z")], better[0][1] if case == "other tools" else []))
    rows, counts = selected(tmp_path, *group, third)
    assert len(rows) == 1
    assert not [name for name in counts if name.startswith("prompts")]


def test_a_conversation_that_the_policy_did_not_answer_counts_for_none(tmp_path: Path) -> None:
    opened = [user("a summary that leaves no room")]
    group = sample(0, 0.0, [ASK, policy("a")], opened), sample(1, 1.0, [ASK, policy("b")])
    (row,), _ = selected(tmp_path, *group)
    assert (row["chosen"], row["rejected"]) == ([policy("b")], [policy("a")])

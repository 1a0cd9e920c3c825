"""Episodes in the chat format, as rows of SFT have them."""

import json

import numpy as np
import pytest

from helpers.chat import chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.records import Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.episode_messages import EpisodeMessages, EpisodeRecords
from postgrad.rollout.environments.tool_formats import Call
from postgrad.rollout.settings import EnvironmentSettings

ASK = {"role": "user", "content": "begin"}
PROMPT = Prompt(5, np.array([4], np.int32), "begin", None, "rows", 0, messages=(ASK,))
SUM = 'So.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'


def user(text):
    return {"role": "user", "content": text}


def policy(text, **more):
    return {"role": "assistant", "content": text, **more}


def test_a_conversation_that_goes_on_is_one_row():
    episode = EpisodeMessages([ASK], ())
    episode.write("a", ())
    episode.read([user("on")], "newest", None)
    episode.write("b", ())
    (held,) = episode.conversations
    assert held.messages == [ASK, policy("a"), user("on"), policy("b")]


def test_what_a_conversation_repeats_bears_no_loss_again():
    episode = EpisodeMessages([ASK], ({"name": "look"},))
    episode.write("a", ())
    episode.read([user("left")], "newest", None)
    episode.write("b", ())
    episode.read([user("right")], 0, None)
    episode.write("c", ())
    episode.read([user("short"), policy("of its own")], "nothing", ())
    episode.write("d", ())
    first, second, third = episode.conversations
    assert first.messages == [ASK, policy("a"), user("left"), policy("b")]
    assert second.messages == [ASK, policy("a", weight=0), user("right"), policy("c")]
    assert third.messages == [user("short"), policy("of its own", weight=0), policy("d")]
    assert [held.tools for held in episode.conversations] == [({"name": "look"},)] * 2 + [()]


def test_a_prompt_that_nobody_read_is_no_conversation():
    episode = EpisodeMessages([ASK], ())
    episode.read([user("other")], "nothing", None)
    episode.write("a", ())
    assert [held.messages for held in episode.conversations] == [[user("other"), policy("a")]]


def test_calls_have_the_ids_that_their_results_name():
    episode = EpisodeMessages([ASK], ())
    episode.write("", [Call("look", {"at": 1}), Call("look", {"at": 2})])
    episode.write("", [Call("look", {"at": 3}), Call("look", {}, "abcdefghi")])
    first, second = (message["tool_calls"] for message in episode.conversations[0].messages[1:])
    assert [call["id"] for call in first] == ["call00000", "call00001"]
    assert [call["id"] for call in second] == ["call00002", "abcdefghi"]
    assert first[1]["function"] == {"name": "look", "arguments": {"at": 2}}


def played(**settings):
    """What is recorded of an episode of Qwen's template, and the episode."""
    tokenizer, records = chat_tokenizer(*WITH_TOOLS["qwen"]), EpisodeRecords()
    world = dialogue(EnvironmentSettings.model_validate(settings), tokenizer, {}, records=records)
    return tokenizer, world.reset(PROMPT, 2), records[5, 2]


def turn(tokenizer, text, number=0, finish="stop"):
    end = tokenizer.eos_token if finish == "stop" else ""
    ids = np.array(tokenizer(text + end)["input_ids"], np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(5, 2, number, ids, logprobs, finish, ((0, len(ids)),), text)


def test_an_episode_of_tools_is_written_as_the_policy_read_and_wrote_it():
    tokenizer, episode, record = played(type="tools", tools=["calculator"])
    texts = [SUM, "It is 5."]
    seen = episode.step(turn(tokenizer, SUM)).result()
    assert episode.step(turn(tokenizer, texts[1], 1)).result().done
    (held,) = record.conversations
    assert [message["role"] for message in held.messages] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    call, result = held.messages[1]["tool_calls"][0], held.messages[2]
    assert (held.messages[1]["content"], call["function"]["name"]) == ("So.", "calculator")
    assert (result["content"], result["tool_call_id"]) == ("5", call["id"])
    written = tokenizer.apply_chat_template(
        json.loads(json.dumps(held.messages)), tools=list(held.tools), tokenize=False
    )
    begin = tokenizer.apply_chat_template(
        [ASK], tools=list(held.tools), tokenize=False, add_generation_prompt=True
    )
    end = tokenizer.eos_token
    assert written.rstrip() == (
        f"{begin}{SUM}{end}{tokenizer.decode(seen.token_ids)}{texts[1]}{end}"
    )


@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "calculator"\n</tool_call>', "<tool_call>nothing"]
)
def test_a_turn_with_a_malformed_call_is_text(text):
    tokenizer, episode, record = played(type="tools", tools=["calculator"])
    episode.step(turn(tokenizer, text)).result()
    assert record.conversations[0].messages[1] == policy(text)


def test_a_turn_that_was_cut_is_there_too():
    tokenizer, episode, record = played(type="guess_number")
    episode.step(turn(tokenizer, "4", finish="length")).result()
    assert record.conversations[0].messages == [ASK, policy("4")]

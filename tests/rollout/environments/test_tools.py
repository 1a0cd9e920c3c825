"""Tools: what a call does, and what the model is told of one that is wrong."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from helpers.chat import HERMES, LLAMA, LLAMA_SPECIAL, QWEN_XML, chat_tokenizer
from helpers.tool_templates import WITH_TOOLS
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.models.fresh import TEMPLATE
from postgrad.rollout.environments.base import StepFailed, build
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.tools import load_tool
from postgrad.rollout.settings import EnvironmentSettings

PROMPT = Prompt(0, np.array([4], np.int32), "?", None, "rows", 0)
ALL = ["calculator", "my_environments:shout", "my_environments:pair", "my_environments:fails"]


@pytest.fixture(autouse=True)
def _mine_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def tools(names=ALL, template=HERMES, **options):
    settings = EnvironmentSettings.model_validate({"type": "tools", "tools": names, **options})
    return build(settings).for_template(template)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def say(text, **options):
    """What the tools reply to one turn, and the reply itself."""

    async def replied():
        world = tools(**options)
        async with world.running():
            return await world.start(PROMPT, 0).step(text)

    reply = asyncio.run(replied())
    return [message["content"] for message in reply.messages], reply


def test_a_call_gets_the_tools_result_and_the_episode_goes_on():
    text, reply = say("I compute." + call("calculator", expression="6 * 7"))
    assert text == ["42"]
    assert reply.messages[0]["role"] == "tool"
    assert not reply.done
    assert reply.counts == {"calls": 1.0, "malformed_calls": 0.0}


def test_an_answer_without_a_call_ends_the_episode():
    text, reply = say("It is 42.")
    assert (text, reply.done, reply.counts["calls"]) == ([], True, 0.0)


def test_a_template_of_marked_parameters_is_answered_by_the_types_of_the_tool():
    """As Qwen3-Coder and Qwen 3.5 write calls."""
    values = "<parameter=text>\nab\n</parameter>\n<parameter=times>\n2\n</parameter>"
    turn = f"<tool_call>\n<function=shout>\n{values}\n</function>\n</tool_call>"
    assert say(turn, template=QWEN_XML)[0] == ["ABAB"]
    wrong = turn.replace("\n2\n", "\ntwo\n")
    type_error = "Error: the argument 'times' of shout is of type integer"
    assert say(wrong, template=QWEN_XML)[0] == [type_error]


EXPRESSION = '{"expression": "6 * 7"}'
WRITTEN = {  # a call of the calculator, as each family writes it
    "mistral": f"[TOOL_CALLS]calculator[ARGS]{EXPRESSION}",
    "mistral_list": f'[TOOL_CALLS] [{{"name": "calculator", "arguments": {EXPRESSION}}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n"
    f"```json\n{EXPRESSION}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_plain": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>"
    f"{EXPRESSION}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>"
    + EXPRESSION,
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0"
    f"<|tool_call_argument_begin|>{EXPRESSION}<|tool_call_end|><|tool_calls_section_end|>",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_every_family_calls_a_tool_reads_its_result_and_what_was_wrong(family):
    tokenizer = chat_tokenizer(*WITH_TOOLS[family])
    settings = EnvironmentSettings.model_validate({"type": "tools", "tools": ["calculator"]})
    world = dialogue(settings, tokenizer, {})
    end = "<|call|>" if family == "gpt_oss" else tokenizer.eos_token
    course = world.chat.start(PROMPT, 0)
    seen = []
    for turn in (WRITTEN[family], WRITTEN[family].replace("6 * 7", "6 *").replace("}", "", 1)):
        ids = np.array(tokenizer(turn + end, add_special_tokens=False)["input_ids"], np.int32)
        reply = asyncio.run(course.step(world.template.text(ids)))
        assert reply.counts["calls"] == 1.0
        observed = world.template.after(reply.messages, closed=world.template.closed(ids))
        seen.append((reply.messages[0], tokenizer.decode(observed)))
    (right, text), (wrong, correction) = seen
    assert (right["content"], right["name"]) == ("42", "calculator")
    assert "42" in text
    assert wrong["content"].startswith("Error: ")
    assert "JSON" in correction
    ids = [right["tool_call_id"], wrong["tool_call_id"]]
    assert ids == (
        ["functions.calculator:0"] * 2 if family == "kimi" else ["call00000", "call00001"]
    )


def test_a_course_behind_turns_of_another_process_counts_calls_on():
    world = tools(template=WITH_TOOLS["mistral"][0])
    course = world.resume(PROMPT, 0, [WRITTEN["mistral"] * 2, WRITTEN["mistral"]])
    assert course is not None
    reply = asyncio.run(course.step(WRITTEN["mistral"] * 2))
    ids = [message["tool_call_id"] for message in reply.messages]
    assert ids == ["call00003", "call00004"]


def test_several_calls_are_answered_in_order():
    two = call("shout", text="ab", times=2) + call("pair", flag=True, size=1)
    assert say(two)[0] == ["ABAB", '{"flag": true, "size": 1}']


@pytest.mark.parametrize(
    ("turn", "correction"),
    [
        ("<tool_call>{", "not closed"),
        (call("calc"), "no tool 'calc'; there is: calculator, shout, pair, fails"),
        (call("calculator"), "the argument 'expression' of calculator is missing"),
        (call("calculator", expression="1", base=2), "calculator has no argument 'base'"),
        (call("calculator", expression=1), "'expression' of calculator is of type string"),
        (call("pair", flag=1, size=1.5), "'flag' of pair is of type boolean"),
        (call("pair", flag=True, size=True), "'size' of pair is of type number"),
        (call("shout", text="a", times=1.5), "'times' of shout is of type integer"),
        (call("calculator", expression="1 / 0"), "Fraction(1, 0)"),
        (call("fails", how="value"), "it failed"),
        (call("fails", how="key"), "it failed"),
        (call("fails", how="zero"), "it failed"),
    ],
)
def test_a_call_that_is_wrong_is_told_so_and_counted(turn, correction):
    text, reply = say(turn, malformed_reward=-0.5)
    assert text[0].startswith("Error: ")
    assert correction in text[0]
    assert reply.counts == {"calls": 1.0, "malformed_calls": 1.0}
    assert (reply.done, reply.reward) == (False, -0.5)


def test_what_else_a_tool_raises_is_a_failure_of_its_sample():
    with pytest.raises(StepFailed, match=r"'fails' failed on \{\"how\": \"type\"\}: .*TypeError"):
        say(call("fails", how="type"))


def test_half_a_surrogate_pair_in_a_call_comes_back_as_its_escape():
    text, reply = say(call("shout", text="\ud800a"))
    assert (text, reply.counts["malformed_calls"]) == (["\\ud800A"], 0.0)


def test_a_long_result_is_cut():
    assert say(call("shout", text="a" * 50), longest_result=20)[0] == ["A" * 20]


def test_the_prompt_shows_the_schemas_and_results_come_through_the_templates_tool_role():
    tokenizer = chat_tokenizer(LLAMA, LLAMA_SPECIAL)
    settings = EnvironmentSettings.model_validate({"type": "tools", "tools": ["calculator"]})
    world = dialogue(settings, tokenizer, {})
    assert world.chat.tool_format == "llama"
    schema = world.chat.variables()["tools"][0]["function"]
    assert schema["name"] == "calculator"
    assert schema["parameters"]["required"] == ["expression"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1/8?"}], tools=world.chat.variables()["tools"], tokenize=False
    )
    assert '"name": "calculator"' in prompt
    turn = '{"name": "calculator", "parameters": {"expression": "1/8"}}<|eot_id|>'
    ids = np.array(tokenizer(turn, add_special_tokens=False)["input_ids"], np.int32)
    text = world.template.text(ids)
    assert text == turn.removesuffix("<|eot_id|>")
    reply = asyncio.run(world.chat.start(PROMPT, 0).step(text))
    seen = tokenizer.decode(world.template.after(reply.messages, closed=True))
    assert seen == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"0.125"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_only_a_penalty_makes_an_environment_of_tools_give_rewards():
    assert not tools().gives_rewards
    assert tools(malformed_reward=-0.1).gives_rewards


def test_a_template_without_a_known_format_is_refused_unless_one_is_named():
    with pytest.raises(UsageError, match=r'say tool_format = "qwen_xml", "glm", .* or "kimi"'):
        tools(template=TEMPLATE)
    assert tools(template=TEMPLATE, tool_format="llama").tool_format == "llama"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tools": ["calculater"]}, "no tool is called 'calculater': did you mean 'calculator'"),
        ({"tools": []}, "a function in `tools`, or a server in `mcp`, is wanted"),
        ({"tools": ["calculator", "calculator"]}, "2 tools are called 'calculator'"),
        ({"tools": ["my_environments:Echo"]}, "is no Python function"),
        ({}, "a function in `tools`, or a server in `mcp`, is wanted"),
        ({"tools": ["calculator"], "tool_fromat": "llama"}, "did you mean 'tool_format'"),
        (
            {"tools": ["calculator"], "tool_format": "lama"},
            "tool_format: 'lama' does not fit 'tools': input should be 'auto', 'hermes', 'llama', ",
        ),
        ({"tools": ["calculator"], "malformed_reward": 1.0}, "less than or equal to 0"),
    ],
)
def test_settings_that_are_wrong_are_told_with_their_key(options, why):
    with pytest.raises(UsageError, match=f"environment.*{why}"):
        build(EnvironmentSettings.model_validate({"type": "tools", **options}))


def test_a_function_without_a_description_is_no_tool():
    with pytest.raises(UsageError, match="'my_environments:undescribed' has no schema"):
        load_tool("my_environments:undescribed")

"""Agents with the official packages of OpenAI and Anthropic, which run a tool that adds one."""

import json

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ABOUT = {"name": "next", "description": "The next number."}


def openai_asks(base_url, api_key, model, row):
    """Sends all items of a Responses loop each time."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    items = [{"role": "user", "content": row["question"]}]
    about = {"model": model, "tools": [{"type": "function", **ABOUT, "parameters": SCHEMA}]}
    while True:
        if row["streamed"]:
            with client.responses.stream(input=items, **about) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(input=items, **about)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return float(response.output_text)
        items += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": added(call.arguments),
            }
            for call in calls
        ]


def openai_names_the_previous_response(base_url, api_key, model, row):
    """Sends new items alone."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    about = {"model": model, "tools": [{"type": "function", **ABOUT, "parameters": SCHEMA}]}
    response = client.responses.create(input=row["question"], **about)
    while calls := [item for item in response.output if item.type == "function_call"]:
        items = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": added(call.arguments),
            }
            for call in calls
        ]
        about["previous_response_id"] = response.id
        response = client.responses.create(input=items, **about)
    return float(response.output_text)


async def openai_agents(base_url, api_key, model, row):
    """Has OpenAI's Agents SDK run the loop."""
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
    from openai import AsyncOpenAI

    def following(n: int) -> str:
        return str(n + 1)

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    agent = Agent(
        name="counter",
        instructions="Be brief.",
        model=OpenAIResponsesModel(model, client),
        tools=[function_tool(following, name_override="next")],
    )
    config = RunConfig(tracing_disabled=True)
    if row["streamed"]:
        result = Runner.run_streamed(agent, row["question"], run_config=config)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, row["question"], run_config=config)
    return float(result.final_output)


def anthropic_asks(base_url, api_key, model, row):
    """Sends all messages of a loop each time, after it has counted their tokens."""
    from anthropic import Anthropic

    client = Anthropic(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["question"]}]
    tools = [{**ABOUT, "input_schema": SCHEMA}]
    while True:
        about = {"model": model, "messages": messages, "tools": tools}
        tokens = client.messages.count_tokens(**about).input_tokens
        if row["streamed"]:
            with client.messages.stream(max_tokens=99, **about) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(max_tokens=99, **about)
        assert message.usage.input_tokens == tokens
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert (message.stop_reason == "tool_use") == bool(calls)
        if not calls:
            return float(message.content[-1].text)
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": added(json.dumps(call.input)),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


def anthropic_tool_runner(base_url, api_key, model, row):
    """Has Anthropic's package run the loop, in a thread that the server holds."""
    from anthropic import Anthropic, beta_tool

    @beta_tool(name="next")
    def following(n: int) -> str:
        """The next number."""
        return str(n + 1)

    client = Anthropic(base_url=base_url, auth_token=api_key)
    question = [{"role": "user", "content": row["question"]}]
    about = {"model": model, "max_tokens": 99, "tools": [following]}
    message = client.beta.messages.tool_runner(messages=question, **about).until_done()
    return float(message.content[-1].text)


def added(arguments):
    return str(json.loads(arguments)["n"] + 1)

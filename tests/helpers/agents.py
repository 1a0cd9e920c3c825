"""Agents as a user would write them: they know OpenAI's interface and nothing else."""

import asyncio
import json
import urllib.error
import urllib.request

ENDED: list[str] = []
ELSEWHERE = "https://example.org/cat.png"


def ask(base_url, api_key, messages, **more):
    """The message of a chat completion."""
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]


async def counts(base_url, api_key, model, row):
    """Asks until it hears "stop", and is worth the number of answers."""
    messages = list(row["messages"])
    heard = 0
    try:
        while True:
            message = (await asyncio.to_thread(ask, base_url, api_key, messages))["message"]
            heard += 1
            if message["content"] == "stop":
                return heard
            messages += [message, {"role": "user", "content": f"heard {heard}"}]
    finally:
        ENDED.append(row["question"])


def plain(base_url, api_key, model, row):
    """Asks twice, from a process of its own."""
    messages = list(row["messages"])
    first = ask(base_url, api_key, messages)["message"]
    messages += [first, {"role": "user", "content": [{"type": "text", "text": "and?"}]}]
    return 0.5 if ask(base_url, api_key, messages)["message"]["content"] == "b" else 0.0


def instructs(base_url, api_key, model, row):
    """Has instructions of its own, as most frameworks of agents have."""
    task = {"role": "user", "content": f"Task: {row['question']}"}
    messages = [{"role": "system", "content": "Be brief."}, task]
    messages.append(ask(base_url, api_key, messages)["message"])
    ask(base_url, api_key, [*messages, {"role": "user", "content": "more"}])
    return 1.0


def forgets(base_url, api_key, model, row):
    """Rewrites what the policy has said."""
    messages = list(row["messages"])
    ask(base_url, api_key, messages)
    messages += [{"role": "assistant", "content": "other"}, {"role": "user", "content": "on"}]
    ask(base_url, api_key, messages)


def explores(base_url, api_key, model, row):
    """Goes two ways from the policy's first turn, and comes back to the first way."""
    threads = {"begin": list(row["messages"])}
    threads["begin"].append(ask(base_url, api_key, threads["begin"])["message"])
    for name, way in (("begin", "left"), ("begin", "right"), ("left", "left again")):
        threads[way] = [*threads[name], {"role": "user", "content": way}]
        threads[way].append(ask(base_url, api_key, threads[way])["message"])
    return float(len(threads))


async def delegates(base_url, api_key, model, row):
    """Asks for a plan, and gives its three jobs to the policy at the same time, each alone."""
    await asyncio.to_thread(ask, base_url, api_key, list(row["messages"]))
    jobs = [[{"role": "user", "content": f"job {number}"}] for number in range(3)]
    asked = [asyncio.to_thread(ask, base_url, api_key, messages) for messages in jobs]
    choices = await asyncio.gather(*asked)
    return float(sum(int(choice["message"]["content"]) for choice in choices))


def shortens(base_url, api_key, model, row):
    """Goes on with less than what was said: a call of the policy, and its result."""
    call = ask(base_url, api_key, list(row["messages"]))["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "7"}
    messages = [{"role": "user", "content": "briefly"}, call, result]
    return float(ask(base_url, api_key, messages)["message"]["content"])


def uses_tools_in_two_ways(base_url, api_key, model, row):
    """Has a call in each of two conversations, and answers that of the first one."""
    choices = [list(row["messages"]), [{"role": "user", "content": "other"}]]
    for messages in choices:
        messages.append(ask(base_url, api_key, messages)["message"])
    (call,) = choices[0][-1]["tool_calls"]
    choices[0].append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
    ask(base_url, api_key, choices[0])
    return 1.0


async def hurries(base_url, api_key, model, row):
    """Ends before a request of its own is answered."""
    messages = list(row["messages"])
    await asyncio.to_thread(ask, base_url, api_key, messages)
    other = [{"role": "user", "content": "other"}]
    waiting = asyncio.ensure_future(asyncio.to_thread(ask, base_url, api_key, other))
    waiting.add_done_callback(lambda done: done.exception())
    await asyncio.sleep(0.05)
    return 0.25


async def leaves(base_url, api_key, model, row):
    """Ends by sys.exit, in the loop that it shares with others."""
    raise SystemExit("bye")


def silent(base_url, api_key, model, row):
    """Never asks."""
    return 1.0


def words(base_url, api_key, model, row):
    """Returns no number."""
    ask(base_url, api_key, list(row["messages"]))
    return "good"


def asks_for_several(base_url, api_key, model, row):
    """Wants what there is not."""
    ask(base_url, api_key, list(row["messages"]), n=2)


def demands_a_call(base_url, api_key, model, row):
    """Says that the policy has to call a tool, as frameworks do that read answers from calls."""
    message = ask(base_url, api_key, list(row["messages"]), tool_choice="required")["message"]
    return float(message["content"] == "a")


def forbids_calls(base_url, api_key, model, row):
    """Shows a tool for later, and wants words first."""
    tools = [{"type": "function", "function": {"name": "next", "parameters": {}}}]
    messages = list(row["messages"])
    messages.append(ask(base_url, api_key, messages, tools=tools, tool_choice="none")["message"])
    assert "tool_calls" not in messages[-1]
    messages.append({"role": "user", "content": "now"})
    return float(len(ask(base_url, api_key, messages, tools=tools)["message"]["tool_calls"]))


def brings_tools(base_url, api_key, model, row):
    """Has tools of its own, of which the recipe knows nothing."""
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    try:
        ask(base_url, api_key, list(row["messages"]), tools=tools)
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error


def searches_the_web(base_url, api_key, model, row):
    """Has a tool that OpenAI runs itself."""
    try:
        ask(base_url, api_key, list(row["messages"]), tools=[{"type": "web_search"}])
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error


def begins_an_answer(base_url, api_key, model, row):
    """Wants the policy to go on with words that are put into its mouth."""
    ask(base_url, api_key, [*row["messages"], {"role": "assistant", "content": "Sure: "}])


def uses_tools(base_url, api_key, model, row):
    """Runs one tool for the policy."""
    messages = list(row["messages"])
    choice = ask(base_url, api_key, messages)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert "<" not in (choice["message"]["content"] or "")  # no mark of a call
    number = json.loads(call["function"]["arguments"])["n"] + 1
    messages += [
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": str(number)},
    ]
    return float(ask(base_url, api_key, messages)["message"]["content"])


def brings_a_tool(base_url, api_key, model, row):
    """Says itself which tool there is, runs it, and then asks without tools for a summary."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    function = {"name": "next", "description": "The next number.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    messages = list(row["messages"])
    messages.append(ask(base_url, api_key, messages, tools=tools)["message"])
    (call,) = messages[-1]["tool_calls"]
    number = json.loads(call["function"]["arguments"])["n"] + 1
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(number)})
    messages.append(ask(base_url, api_key, messages, tools=tools)["message"])
    messages.append({"role": "user", "content": "in short?"})
    assert "tool_calls" not in ask(base_url, api_key, messages)["message"]
    return 7.0


def answers_another_call(base_url, api_key, model, row):
    """Names a call that the policy has not made."""
    messages = list(row["messages"])
    messages.append(ask(base_url, api_key, messages)["message"])
    messages.append({"role": "tool", "tool_call_id": "other", "content": "7"})
    ask(base_url, api_key, messages)


def looks(base_url, api_key, model, row):
    """Shows the policy the image of its row again."""
    messages = list(row["messages"])
    image = messages[0]["content"][1]
    answer = ask(base_url, api_key, messages)["message"]
    again = {"role": "user", "content": [{"type": "text", "text": "again "}, image]}
    ask(base_url, api_key, [*messages, answer, again])


def looks_elsewhere(base_url, api_key, model, row):
    """Asks about another image than that of its row."""
    (message,) = row["messages"]
    url = {"url": f"data:image/png;base64,{row['other']}"}
    image = {"type": "image_url", "image_url": url}
    first, _, last = message["content"]
    ask(base_url, api_key, [{**message, "content": [first, image, last]}])


async def sums_up(base_url, api_key, model, row):
    """Wants a last answer where it is ended."""
    messages = list(row["messages"])
    try:
        while True:
            answer = (await asyncio.to_thread(ask, base_url, api_key, messages))["message"]
            messages += [answer, {"role": "user", "content": "on"}]
    finally:
        try:
            await asyncio.to_thread(ask, base_url, api_key, [{"role": "user", "content": "sum up"}])
        except urllib.error.HTTPError as error:
            ENDED.append(error.read().decode())


async def groups(base_url, api_key, model, row):
    """Has parts that work side by side, one of which fails."""
    await asyncio.to_thread(ask, base_url, api_key, list(row["messages"]))

    async def part(number):
        raise KeyError(f"part {number}")

    async with asyncio.TaskGroup() as parts:
        for number in range(2):
            parts.create_task(part(number))


def malformed(base_url, api_key, model, row):
    """Sends calls and tools that are none."""
    ask(base_url, api_key, list(row["messages"]))
    heard = []
    for message, more in (
        ({"role": "assistant", "tool_calls": 5}, {}),
        ({"role": "assistant", "tool_calls": [{"function": "look"}]}, {}),
        ({"role": "user", "content": 5}, {}),
        ({"role": "user", "content": "on"}, {"tools": 5}),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, {}),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": ELSEWHERE}}]}, {}),
    ):
        try:
            ask(base_url, api_key, [message, {"role": "user", "content": "on"}], **more)
        except urllib.error.HTTPError as error:
            heard.append(f"{error.code} {json.load(error)['error']['message']}")
    raise RuntimeError("; ".join(heard))


def misspells(base_url, api_key, model, row):
    """Has a fault of its own, of a kind that tools tell the policy."""
    ask(base_url, api_key, list(row["messages"]))
    return row["anwser"]


def without_thoughts(base_url, api_key, model, row):
    """Knows content and calls alone, as most frameworks, and strips white space."""
    messages, heard = list(row["messages"]), []
    for _ in range(2):
        message = ask(base_url, api_key, messages)["message"]
        heard.append((message.get("reasoning_content"), message["content"]))
        messages.append({"role": "assistant", "content": message["content"].strip()})
        messages.append({"role": "user", "content": json.dumps(heard[-1])})
    ask(base_url, api_key, messages)
    return 1.0


def writes_thoughts(base_url, api_key, model, row):
    """Sends thoughts back, the second time others than it heard."""
    messages = list(row["messages"])
    messages.append(ask(base_url, api_key, messages)["message"])
    messages.append({"role": "user", "content": "on"})
    ask(base_url, api_key, messages)
    messages[-2] = {**messages[-2], "reasoning_content": "no"}
    ask(base_url, api_key, messages)
    return 1.0


def thinks_before_calls(base_url, api_key, model, row):
    """Uses a tool of its own and sends back calls without the thoughts before them."""
    function = {"name": "next", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    messages = list(row["messages"])
    message = ask(base_url, api_key, messages, tools=tools)["message"]
    (call,) = message["tool_calls"]
    call_message = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
    thoughts = message.get("reasoning_content")
    result = {"role": "tool", "tool_call_id": call["id"], "content": f"{thoughts}: 7"}
    ask(base_url, api_key, [*messages, call_message, result], tools=tools)
    return 1.0


async def repeats_requests(base_url, api_key, model, row):
    """Sends what another agent has sent; where that names a reply, it names its own newest one.
    Returns the number of turns, and raises where a count is not what the policy has read.
    """
    replies, counts = [], []
    for path, body in row["requests"]:
        body = json.loads(json.dumps(body))
        if "previous_response_id" in body:
            body["previous_response_id"] = replies[-1]["id"]
        if "previous_message_id" in body.get("thread", {}):
            body["thread"]["previous_message_id"] = replies[-1]["id"]
        reply = await asyncio.to_thread(post, f"{base_url}/{path}", api_key, body)
        (counts if path.endswith("count_tokens") else replies).append(reply)
    if counts:
        read = [reply["usage"]["input_tokens"] for reply in replies]
        assert [count["input_tokens"] for count in counts] == read
    return len(replies)


def post(url, api_key, body):
    """The reply to a request of Anthropic's or OpenAI's; of a stream, the newest that has an id."""
    headers = {"x-api-key": api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        text = reply.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    within = [event.get("response") or event.get("message") for event in events]
    return [each for each in within if each][-1]


async def counts_tokens(base_url, api_key, model, row):
    """Asks how many tokens its messages have, and then for an answer to them, which says the same.
    Returns how often it was refused a count.
    """
    messages, refused = list(row["messages"]), 0
    url = f"{base_url}/messages"
    for _ in range(2):
        body = {"messages": messages, "max_tokens": 5}
        count = await asyncio.to_thread(post, f"{url}/count_tokens", api_key, body)
        reply = await asyncio.to_thread(post, url, api_key, body)
        assert count["input_tokens"] == reply["usage"]["input_tokens"]
        on = {"role": "user", "content": "on"}
        messages += [{"role": "assistant", "content": reply["content"]}, on]
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
    }
    for content in ([image], "\ud800"):
        body = {"messages": [*messages, {"role": "user", "content": content}]}
        try:
            await asyncio.to_thread(post, f"{url}/count_tokens", api_key, body)
        except urllib.error.HTTPError as error:
            refused += json.load(error)["type"] == "error"
    await asyncio.to_thread(post, url, api_key, {"messages": messages, "max_tokens": 5})
    return refused

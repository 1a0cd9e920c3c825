"""A server answers; whatever it does, a question has its answer or the run ends with the cause."""

import base64
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from contracts.conftest import small_tokenizer
from helpers.chat import chat_tokenizer, with_begin
from helpers.chat_server import Answer, chat_server
from helpers.image_directories import picture
from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import MARK, image_store, images_kept_in
from postgrad.core.records import PlacedImage
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.openai.engine import OpenAIEngine
from postgrad.rollout.openai.settings import OpenAISettings
from postgrad.rollout.settings import SamplingSettings

ASKED = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"})


def request(ticket=0, samples=2, turn=0, messages=ASKED, **sampling):
    settings = SamplingSettings(**({"max_new_tokens": 8} | sampling))
    ids = np.array([2, 3, 4], np.int32)
    return Request(ticket, tuple(range(samples)), ids, settings, turn, 5, messages)


def completion(text, ended="stop"):
    """A reply of the older interface."""
    choice = {"index": 0, "text": text, "finish_reason": ended}
    return Answer(raw=json.dumps({"choices": [choice]}).encode())


@pytest.fixture
def make_engine():
    """make_engine(script, **settings): an engine and the server that answers as told."""
    engines = []

    def make(script, **settings):
        context = chat_server(script)
        server = context.__enter__()
        options = {"base_url": server.url, "timeout": 5.0, "backoff": 0.01} | settings
        engine = OpenAIEngine(OpenAISettings.model_validate(options), "m", small_tokenizer())
        engines.append((engine, context))
        return engine, server

    yield make
    for engine, context in engines:
        engine.close()
        context.__exit__(None, None, None)


def test_a_chat_server_is_asked_in_the_rows_messages(make_engine):
    engine, server = make_engine(lambda prompt, times: Answer(prompt[::-1]))
    done = generate(engine, [request(temperature=0.5, top_p=0.9, stop=("x",))])
    assert [(c.ticket, c.sample, c.text) for c in done] == [(0, 0, "cba"), (0, 1, "cba")]
    path, _, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body.pop("seed") != server.requests[1][2]["seed"]
    assert body == {
        "model": "m",
        "messages": list(ASKED),
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "max_tokens": 8,
    }


def test_a_server_of_completions_gets_the_rendered_text(make_engine):
    engine, server = make_engine(lambda *_: completion("ba", "length"), endpoint="completions")
    (sampled,) = generate(engine, [request(samples=1, turn=1, messages=())])
    assert server.requests[0][0] == "/v1/completions"
    assert server.requests[0][2]["prompt"] == "abc"
    assert (sampled.text, sampled.finish_reason, sampled.turn) == ("ba", "length", 1)


@pytest.mark.parametrize("adds", [{}, {"add_special_tokens": True}, {"add_special_tokens": False}])
def test_a_server_whose_tokenizer_begins_every_text_is_sent_no_second_begin(make_engine, adds):
    """vLLM does so unless add_special_tokens says otherwise."""
    script, place = lambda *_: completion("ba"), {"endpoint": "completions"}
    engine, server = make_engine(script, **place, extra_body=adds)
    tokenizer = with_begin(chat_tokenizer("{{ bos_token }}{{ messages[0].content }}"))
    text = tokenizer.apply_chat_template(ASKED[1:], tokenize=False)
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    engine._tokenizer = tokenizer
    list(generate(engine, [replace(request(samples=1, messages=()), token_ids=ids)]))
    sent = server.requests[0][2]["prompt"]
    assert tokenizer(sent, **adds)["input_ids"] == ids.tolist()  # what the server reads


def test_tokens_are_ours_and_logprobs_are_not_known(make_engine):
    engine, _ = make_engine(lambda *_: completion("b"), endpoint="completions")
    (sampled,) = generate(engine, [request(samples=1)])
    assert sampled.token_ids.tolist() == [3]
    assert np.isnan(sampled.logprobs).all()
    assert sampled.versions == ((0, 1),)
    assert (engine.stats.prompt_tokens, engine.stats.response_tokens) == (3, 1)
    assert engine.completed() == []


def test_an_empty_answer_is_an_answer(make_engine):
    engine, _ = make_engine(lambda *_: Answer(""))
    (sampled,) = generate(engine, [request(samples=1)])
    assert sampled.text == ""
    assert len(sampled.token_ids) == 0


def test_the_same_sample_is_asked_for_with_the_same_seed(make_engine):
    engine, server = make_engine(lambda *_: Answer("a"))
    for _ in range(2):
        generate(engine, [request(samples=1)])
    seeds = [body["seed"] for _, _, body in server.requests]
    assert seeds[0] == seeds[1]


def test_extra_body_has_the_last_word(make_engine):
    extra = {"max_completion_tokens": 99, "temperature": 0.1}
    engine, server = make_engine(lambda *_: Answer("a"), extra_body=extra)
    generate(engine, [request(samples=1)])
    body = server.requests[0][2]
    assert body["max_completion_tokens"] == 99
    assert body["temperature"] == 0.1
    assert "max_tokens" not in body


def test_a_busy_server_is_asked_again(make_engine):
    engine, server = make_engine(
        lambda prompt, times: Answer("a") if times == 2 else Answer(status=503, raw=b"busy")
    )
    (sampled,) = generate(engine, [request(samples=1)])
    assert sampled.text == "a"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=503, raw=b"down"), r"HTTP 503 .*down \(3 tries\)"),
        (Answer(status=401, raw=b"who are you"), r"HTTP 401 .*who are you"),
        (Answer(raw=b"<html>"), r"the reply is no completion: '<html>'"),
        (Answer(raw=b'{"choices": []}'), r"the reply is no completion"),
        (Answer(raw=b'{"choices": [{"message": {"content": 7}}]}'), r"the reply has no text: '7'"),
        (Answer("a", delay=2.0), r"timed out"),
    ],
)
def test_a_server_that_fails_ends_the_run_with_its_cause(make_engine, answer, message):
    engine, _ = make_engine(lambda *_: answer, retries=2, timeout=0.3)
    with pytest.raises(RunError, match=rf"gave no answer for ticket 4, sample 0: .*{message}"):
        generate(engine, [request(4, samples=1)])


def test_nobody_at_the_address_is_told(make_engine):
    engine, _ = make_engine(lambda *_: Answer("a"), base_url="http://127.0.0.1:9/v1", retries=0)
    with pytest.raises(RunError, match=r"http://127.0.0.1:9/v1 gave no answer.*refused"):
        generate(engine, [request(samples=1)])


def test_the_key_comes_from_its_variable_and_stands_in_no_message(make_engine, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "s3cret")
    engine, server = make_engine(
        lambda *_: Answer(status=401, raw=b"bad key s3cret"), api_key_env="OUR_KEY"
    )
    with pytest.raises(RunError) as error:
        generate(engine, [request(samples=1)])
    assert server.requests[0][1]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(error.value)
    monkeypatch.delenv("OUR_KEY")
    with pytest.raises(UsageError, match=r"OUR_KEY \(rollout.openai.api_key_env\)"):
        make_engine(lambda *_: Answer("a"), api_key_env="OUR_KEY")


def test_no_more_requests_are_under_way_than_allowed(make_engine):
    most, lock, gate = [0], threading.Lock(), threading.Semaphore(0)

    def script(prompt, times):
        with lock:
            most[0] = max(most[0], server.held)
        gate.release()
        return Answer("a", delay=0.02)

    engine, server = make_engine(script, concurrent=3)
    assert len(generate(engine, [request(ticket) for ticket in range(6)])) == 12
    assert most[0] <= 3


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"min_p": 0.1}, {"regex": "a"}])
def test_filters_that_the_interface_lacks_are_refused(make_engine, sampling):
    engine, _ = make_engine(lambda *_: Answer("a"))
    with pytest.raises(UsageError, match="not part of OpenAI's interface"):
        engine.submit(request(**sampling))


def test_turns_without_messages_are_refused_where_messages_are_asked_for(make_engine):
    engine, _ = make_engine(lambda *_: Answer("a"))
    with pytest.raises(UsageError, match='endpoint = "completions"'):
        engine.submit(request(turn=1, messages=()))


def test_images_are_data_urls_where_the_row_s_message_shows_them(make_engine, tmp_path):
    engine, server = make_engine(lambda *_: Answer("a"))
    with images_kept_in(tmp_path / "images"):
        files = [picture(n, 16, 24) for n in range(2)]
        digests = [image_store().add(file) for file in files]
        asked = {"role": "user", "content": f"{MARK}one{MARK}two", "images": digests}
        shown = tuple(PlacedImage(digest, np.array([n])) for n, digest in enumerate(digests))
        generate(engine, [replace(request(messages=(ASKED[0], asked)), images=shown)])
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    content = [
        {"type": "image_url", "image_url": {"url": urls[0]}},
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": urls[1]}},
        {"type": "text", "text": "two"},
    ]
    messages = [body["messages"] for _, _, body in server.requests]
    assert messages == [[ASKED[0], {"role": "user", "content": content}]] * 2


def test_a_server_of_completions_is_sent_no_image(make_engine):
    engine, _ = make_engine(lambda *_: completion("a"), endpoint="completions")
    shown = (PlacedImage("0" * 64, np.array([0])),)
    with pytest.raises(UsageError, match=r'takes text alone: use .*endpoint = "chat"'):
        engine.submit(replace(request(), images=shown))


def test_its_weights_can_neither_be_sent_nor_asked_for(make_engine):
    engine, _ = make_engine(lambda *_: Answer("a"))
    with pytest.raises(UsageError, match="weights of its own"):
        engine.load_weights([], 1)
    with pytest.raises(UsageError, match="weights of its own"):
        engine.logprobs([], 1.0)
    engine.sleep()

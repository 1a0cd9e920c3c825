"""Images in replies: the template's own tokens, whoever sends them, and what is refused of them."""

import base64
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import agents
from helpers.image_directories import MARKS, bomb, models, picture
from helpers.image_models import IMAGE_MODELS
from postgrad.core.media import MARK, image_store, images_kept_in
from postgrad.core.records import Prompt
from postgrad.data.answer_spans import Rendered
from postgrad.data.images import with_image_texts
from postgrad.data.templates import prompts
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.tokenizer import load_tokenizer
from postgrad.rollout.engine import Completion
from postgrad.rollout.environments import template as templates
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.template import Template
from postgrad.rollout.settings import EnvironmentSettings

__all__ = ["agents", "models"]
PROMPT = Prompt(5, np.array([4], np.int32), "?", None, "rows", 0)
SAYING = {"type": "my_environments:Saying"}
TOOLS = (  # calls as Hermes writes them, results in parts
    '{% if tools %}{{ \'<tool_call>{"name": ..., "arguments": {...}}</tool_call>\' }}{% endif %}'
)
NUMBERED = (
    "{% set seen = namespace(count=0) %}{% for m in messages %}{{ m.role }}:{% if m.content is "
    "string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "{% set seen.count = seen.count + 1 %}{{ 'Picture %d: ' % seen.count }}IMAGE{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(autouse=True)
def _mine_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _kept(tmp_path):
    with images_kept_in(tmp_path / "images"):
        yield


def reads(models, kind="qwen2_5_vl", template=None):
    """(tokenizer, reader) of a tiny model."""
    path = models(kind)
    tokenizer = load_tokenizer(path)
    if template is not None:
        tokenizer.chat_template = template.replace("IMAGE", MARKS[kind][0])
    return tokenizer, ImageReader(path, load_config(path), tokenizer)


def turn(tokenizer, text, number=0):
    ids = tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(
        5, 0, number, np.array(ids, np.int32), logprobs, "stop", ((0, len(ids)),), text
    )


def parts(*contents):
    """A message's content: texts, and files of images."""
    return [
        {"type": "text", "text": content}
        if isinstance(content, str)
        else {"type": "image", "image": content}
        for content in contents
    ]


def replied(monkeypatch, tokenizer, reader, *messages, **options):
    """The observation of replies with `messages`."""
    from my_environments import Saying

    monkeypatch.setattr(Saying, "messages", messages)
    settings = EnvironmentSettings.model_validate({**SAYING, **options})
    return dialogue(settings, tokenizer, {}, reader).reset(PROMPT, 0)


def full_ids(tokenizer, reader, messages):
    """The tokens of a conversation, as rows are read."""
    (text,) = prompts(tokenizer, [messages], variables={}, parts=True)
    (filled,) = with_image_texts([Rendered(text, (), "")], messages, reader)
    return tokenizer(filled.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", [kind for kind in IMAGE_MODELS if kind != "llava_onevision"])
@pytest.mark.parametrize("template", [None, NUMBERED])
def test_tokens_and_images_of_an_episode_are_those_of_the_whole_conversation(
    kind, template, models
):
    if template and kind not in MARKS:
        return
    tokenizer, reader = reads(models, kind, template)
    digests = [image_store().add(picture(n, *size)) for n, size in enumerate([(40, 16), (16, 24)])]
    messages = [{"role": "user", "content": f"{MARK} what?", "images": digests[:1]}]
    (text,) = prompts(tokenizer, [messages], variables={}, parts=True)
    (filled,) = with_image_texts([Rendered(text, (), "")], messages, reader)
    ids = tokenizer(filled.text, add_special_tokens=False)["input_ids"]
    placed = list(reader.placed(np.array(ids), digests))
    renders = Template(tokenizer, {}, reader)
    for before, images in ((1, digests), (3, [])):
        turn_ids = tokenizer("ab" + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        answer = {"role": "user", "content": f"see {MARK * len(images)} now"}
        answer |= {"images": images} if images else {}
        hashable = {**answer, "images": tuple(images)} if images else answer
        tokens, shown = renders.seen([hashable], closed=True, before=before)
        ids += turn_ids
        placed += [image.moved(len(ids)) for image in shown]
        ids += tokens.tolist()
        messages += [{"role": "assistant", "content": "ab"}, answer]
    assert ids == full_ids(tokenizer, reader, messages)
    every = reader.placed(np.array(ids), [digests[0], *digests])
    assert [(i.digest, i.runs, i.grid) for i in placed] == [
        (i.digest, i.runs, i.grid) for i in every
    ]


def test_a_reply_may_have_images_in_several_messages_and_forms(monkeypatch, models, tmp_path):
    tokenizer, reader = reads(models)
    first_image, second_image = picture(1, 16, 16), picture(2, 24, 16)
    url = f"data:image/png;base64,{base64.b64encode(second_image).decode()}"
    episode = replied(
        monkeypatch, tokenizer, reader,
        {"role": "user", "content": parts("see ", first_image, first_image)},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
        {"role": "user", "content": "and?"},
    )  # fmt: skip
    seen = episode.step(turn(tokenizer, "ab")).result()
    digests = [image_store().add(content) for content in (first_image, first_image, second_image)]
    assert [image.digest for image in seen.images] == digests
    assert {file.name for file in (tmp_path / "images").iterdir()} == set(digests)
    assert [len(image.at) for image in seen.images] == [4, 4, 6]
    for image in seen.images:
        assert set(seen.token_ids[image.at]) == {reader.token_id}
    pad = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
    assert f"see {pad}{pad}<|im_end|>" in tokenizer.decode(seen.token_ids)
    assert seen.failure is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (parts(picture(0, 16, 16)[:60]), "its file is broken"),
        (parts(b"no image"), "it is no image in PNG, JPEG"),
        ([{"type": "image", "image": "/etc/hostname"}], "it is a file name"),
        ([{"type": "image", "image": "file:///etc/hostname"}], "it is a file name"),
        ([{"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}], "it is elsewhere"),
        ([{"type": "video", "video": "x"}], "a part of type 'video'"),
        (parts(bomb(5000, 5000)), "5000 x 5000 pixels, and at most 16777216 are read"),
        (parts(picture(0, 1, 300)), "1 x 300 pixels is refused .*absolute aspect ratio"),
        (parts(*[picture(0, 16, 16)] * 3), "more images than environment.max_images"),
        (parts(f"a{MARK}", picture(0, 16, 16)), r"has U\+FFFC in its text"),
        ("an <|image_pad|> of yours", r"has '<\|image_pad\|>', which stands for an image"),
    ],
)
def test_what_cannot_be_shown_is_a_failure_of_its_sample(content, why, monkeypatch, models):
    tokenizer, reader = reads(models)
    message = {"role": "user", "content": content}
    episode = replied(monkeypatch, tokenizer, reader, message, max_images=2)
    seen = episode.step(turn(tokenizer, "ab")).result()
    assert seen.failure is not None
    assert seen.failure.cause == "error"
    assert (seen.done, len(seen.token_ids), seen.images) == (True, 0, ())
    assert re.search(why, seen.failure.message)


def test_a_large_file_is_a_failure_before_it_is_decoded(monkeypatch, models):
    tokenizer, reader = reads(models)
    monkeypatch.setattr(templates, "IMAGE_LIMITS", (100, 100))
    message = {"role": "user", "content": parts(picture(0, 16, 16))}
    seen = replied(monkeypatch, tokenizer, reader, message).step(turn(tokenizer, "a")).result()
    assert "bytes, and at most 100 are read" in seen.failure.message


def test_the_images_of_all_replies_of_an_episode_count(monkeypatch, models):
    tokenizer, reader = reads(models)
    message = {"role": "user", "content": parts(picture(0, 16, 16))}
    episode = replied(monkeypatch, tokenizer, reader, message, max_images=2)
    seen = [episode.step(turn(tokenizer, "a", number)).result() for number in range(3)]
    assert [bool(each.failure) for each in seen] == [False, False, True]


def test_an_episode_that_goes_on_counts_the_images_that_it_has_shown(monkeypatch, models):
    tokenizer, reader = reads(models)
    settings = EnvironmentSettings.model_validate(
        {"type": "helpers.showing:Wandering", "max_images": 2}
    )
    world = dialogue(settings, tokenizer, {}, reader)
    episode, recorded = world.reset(PROMPT, 0), []
    for number in range(2):
        turn_completion = turn(tokenizer, "a", number)
        recorded.append((turn_completion, episode.step(turn_completion).result()))
    goes_on = world.resume(PROMPT, 0, None, recorded)
    assert "max_images" in goes_on.step(turn(tokenizer, "a", 2)).result().failure.message


def test_texts_of_images_are_kept_for_the_newest_alone(monkeypatch, models):
    tokenizer, reader = reads(models)
    monkeypatch.setattr(templates, "KNOWN_IMAGES", 2)
    message = {"role": "user", "content": parts(*(picture(n, 16, 16) for n in range(3)))}
    episode = replied(monkeypatch, tokenizer, reader, message)
    first = episode.step(turn(tokenizer, "a")).result()
    assert list(reader._texts) == [image.digest for image in first.images[1:]]
    again = episode.step(turn(tokenizer, "a", 1)).result()  # one has to be read again
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert len(reader._texts) == 2


def test_a_policy_of_text_alone_is_shown_no_image(monkeypatch, models):
    tokenizer, _ = reads(models)
    message = {"role": "user", "content": parts("see", picture(0, 16, 16))}
    episode = replied(monkeypatch, tokenizer, None, message)
    seen = episode.step(turn(tokenizer, "ab")).result()
    assert "has an image, and the policy reads text alone" in seen.failure.message
    text = {"role": "user", "content": parts("see ", "this")}
    seen = replied(monkeypatch, tokenizer, None, text).step(turn(tokenizer, "ab")).result()
    assert "user\nsee this<|im_end|>" in tokenizer.decode(seen.token_ids)


def test_images_beside_the_content_are_no_reply(monkeypatch, models):
    tokenizer, reader = reads(models)
    message = {"role": "user", "content": MARK, "images": ("../../secret",)}
    seen = replied(monkeypatch, tokenizer, reader, message).step(turn(tokenizer, "ab")).result()
    assert "images beside its content" in seen.failure.message


def test_a_second_image_is_a_failure_for_a_type_that_writes_several_otherwise(monkeypatch, models):
    tokenizer, reader = reads(models, "llava_onevision")
    message = {"role": "user", "content": parts(picture(0, 16, 16))}
    episode = replied(monkeypatch, tokenizer, reader, message)
    assert len(episode.step(turn(tokenizer, "ab")).result().images) == 1
    second = episode.step(turn(tokenizer, "ab", 1)).result()
    assert second.done
    assert "makes other tokens of an image" in second.failure.message


def tools(models, reader=True, **options):
    tokenizer, reads_images = reads(models)
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    settings = EnvironmentSettings.model_validate({"type": "tools", **options})
    return tokenizer, dialogue(settings, tokenizer, {}, reads_images if reader else None)


def called(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_tool_may_return_images(models):
    tokenizer, world = tools(models, tools=["my_environments:draws"], longest_result=8)
    call = called("draws", '{"colour": 5, "times": 2}')
    seen = world.reset(PROMPT, 0).step(turn(tokenizer, call)).result()
    assert seen.failure is None
    assert len(seen.images) == 2
    assert "tool\ncolour 5<|vision_start|><|image_pad|>" in tokenizer.decode(seen.token_ids)
    world.close()


def test_without_eyes_the_parts_of_a_tools_result_are_json(models):
    tokenizer, world = tools(models, False, tools=["my_environments:draws"], longest_result=12)
    seen = world.reset(PROMPT, 0).step(turn(tokenizer, called("draws", '{"colour": 5}'))).result()
    assert '[{"type": "t' in tokenizer.decode(seen.token_ids)
    assert seen.images == ()
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("reader", [True, False])
def test_a_server_of_tools_may_return_images(reader, models):
    pytest.importorskip("mcp")
    command = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]
    tokenizer, world = tools(models, reader, mcp={"numbers": {"command": command}})
    seen = world.reset(PROMPT, 0).step(turn(tokenizer, called("draw", "{}"))).result()
    assert seen.failure is None
    text = tokenizer.decode(seen.token_ids)
    if reader:
        assert "tool\ndrawn\n<|vision_start|><|image_pad|>" in text
        assert "<|vision_end|>the end\n<|im_end|>" in text
    else:
        assert "drawn\n[image]\nthe end" in text
    assert len(seen.images) == reader
    world.close()


@pytest.mark.parametrize("agent", ["looks", "looks_elsewhere"])
def test_an_agent_gets_the_images_of_its_row_and_may_send_others(agent, models):
    pytest.importorskip("uvicorn")
    tokenizer, reader = reads(models)
    digest = image_store().add(picture(3, 16, 16))
    messages = ({"role": "user", "content": f"see {MARK}!", "images": [digest]},)
    images = reader.placed(np.array([reader.token_id] * 4), [digest])
    row = {"other": base64.b64encode(picture(4, 16, 16)).decode()}
    prompt = Prompt(5, np.array([reader.token_id] * 4), "?", None, "rows", 0, row, messages, images)
    settings = {"type": "agent", "agent": f"helpers.agents:{agent}"}
    world = dialogue(EnvironmentSettings.model_validate(settings), tokenizer, {}, reader)
    episode = world.reset(prompt, 0)
    seen = episode.begin().result()
    assert seen.failure is None
    if agent == "looks":
        assert (seen.behind, len(seen.token_ids)) == ("newest", 0)
        seen = episode.step(turn(tokenizer, "ab")).result()
        assert [image.digest for image in seen.images] == [digest]
        assert "user\nagain <|vision_start|>" in tokenizer.decode(seen.token_ids)
    else:
        assert seen.behind == "nothing"
        assert [image.digest for image in seen.images] == [image_store().add(picture(4, 16, 16))]
        assert "user\nsee <|vision_start|>" in tokenizer.decode(seen.token_ids)
    world.close()

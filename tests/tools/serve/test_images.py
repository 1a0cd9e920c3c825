"""A reward model that reads images behind HTTP: scores as transformers gives them, and refusals."""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from helpers.image_directories import bomb, models, picture
from helpers.image_models import IMAGE_MODELS
from helpers.reward_server import reward_server
from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import decoded
from postgrad.models.config import load_config
from postgrad.models.export import export_hf
from postgrad.models.image_reader import ImageReader
from postgrad.models.score import RewardScale, load_score_model
from postgrad.models.tokenizer import load_tokenizer
from postgrad.rewards.remote import Remote
from postgrad.rewards.verifier import PromptView, RolloutView
from postgrad.tools.serve.batcher import ServedModel, load_reward_model
from postgrad.tools.serve.images import RequestImages
from postgrad.tools.serve.wire import Encoder, Input, Refusal, ServerLimits

__all__ = ["models"]

PNG = picture(0, 40, 16)
DIGEST = hashlib.sha256(PNG).hexdigest()


def part(content: bytes) -> dict[str, str]:
    return {"type": "image", "base64": base64.b64encode(content).decode()}


def chat(*parts: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "red"}
    return {"messages": [{"role": "user", "content": [*parts]}, answer]}


TEXT = {"type": "text", "text": " Which?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of a run."""
    folder = tmp_path_factory.mktemp("images")
    (folder / DIGEST).write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def judge(
    models: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """judge("llava"): the directory of a reward model of that type."""

    def written(kind: str) -> Path:
        to = tmp_path_factory.getbasetemp() / f"judge-{kind}"
        if not to.exists():
            lm = load_score_model(models(kind), dtype=torch.float32, images=True).lm
            weights = {name: p.detach() for name, p in lm.named_parameters()}
            scale = RewardScale(0.5, 2.0)
            export_hf(weights, models(kind), to, dtype=torch.float32, scale=scale)
        return to

    return written


@pytest.fixture
def served(judge: Callable[[str], Path], folder: Path) -> ServedModel:
    return load_reward_model(judge("qwen2_5_vl"), "float32", 512, folder=folder)


def expected(judge: Path, ids: Any) -> float:
    """transformers' own score of tokens with the picture."""
    plain: Any = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64)
    tokenizer = load_tokenizer(str(judge))
    reader = ImageReader(str(judge), load_config(str(judge)), tokenizer)
    pixels = reader.inputs(decoded(PNG), "the picture")
    named: dict[str, Any] = {name: torch.as_tensor(array) for name, array in pixels.items()}
    named = {n: t.double() if t.is_floating_point() else t for n, t in named.items()}
    ids = torch.from_numpy(ids).long()[None]
    if (types := IMAGE_MODELS[plain.config.model_type].types) is not None:
        named[types] = (ids == reader.token_id).int()
    return plain.eval()(input_ids=ids, **named).logits.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow),
             pytest.param("mistral3", marks=pytest.mark.slow)],
)  # fmt: skip
def test_scores_are_transformers_however_an_image_is_sent(
    kind: str, judge: Callable[[str], Path], folder: Path
) -> None:
    path = judge(kind)
    model = load_reward_model(path, "float32", 512, folder=folder)
    assert model.images is not None
    encoder = Encoder(model.tokenizer, 512, None, model.images.reader)
    with RequestImages(model.images) as shown:
        asked = Input.model_validate(chat(part(PNG), TEXT))
        (ids,), ((image,),) = encoder.encode([asked], shown)
        assert set(ids[image.at]) == {model.images.reader.token_id}
        assert model.images.nbytes > 0
    assert model.images.nbytes == 0
    wanted = expected(path, ids)
    by_hash = {"type": "image", "sha256": DIGEST}
    with reward_server(model) as server:
        status, reply = server.scores(chat(part(PNG), TEXT), chat(by_hash, TEXT), chat(TEXT))
        assert status == 200
        assert reply["scores"][:2] == pytest.approx([wanted, wanted], rel=1e-4, abs=1e-5)
        assert abs(reply["scores"][2] - wanted) > 1e-4  # the image does matter
        prompt = PromptView(f"<image {DIGEST}> Which?", None, images=[str(folder / DIGEST)])
        for way in ("bytes", "hash"):
            remote = Remote(url=server.url, images=way)
            assert remote.check(prompt) is None
            score = remote.score(prompt, RolloutView("red")).value
            assert score == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert server.ask("/info")[1]["reads_images"] is True
    assert model.images.nbytes == 0
    raw = Remote(url="http://x", text="{response}")
    assert "images" in str(raw.check(prompt))


def test_images_that_cannot_be_read_are_refused_and_nothing_is_held(served: ServedModel) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        (part(bomb(20_000, 5_000)), "unreadable_image", "it has 20000 x 5000 pixels"),
        (part(PNG[:70]), "unreadable_image", "its file is broken"),
        (part(b"<svg/>"), "unreadable_image", "it is no image in PNG"),
        ({"type": "image", "base64": "$"}, "unreadable_image", "its base64 is broken"),
        ({"type": "image", "sha256": "ab" * 32}, "unreadable_image", "no image with this hash"),
        ({"type": "image", "sha256": "../" + DIGEST}, "invalid_request", "sha256"),
        ({"type": "image", "path": "/etc/passwd"}, "invalid_request", "path: Extra inputs"),
        ({"type": "image", "url": "http://a/b.png"}, "invalid_request", "url: Extra inputs"),
        ({"type": "image"}, "invalid_request", "give one of base64 and sha256"),
        ({"type": "text", "text": "\ufffc"}, "cannot_encode", "U+FFFC"),
        ({"type": "text", "text": "<|image_pad|>"}, "cannot_encode", "stands for an image"),
    ]
    with reward_server(served) as server:
        for wrong, code, message in cases:
            status, reply = server.scores(chat(part(PNG), TEXT), chat(wrong))
            assert (status, reply["error"]["code"]) == (422, code), reply
            assert message in reply["error"]["message"]
            assert "messages.0.content" in reply["error"]["message"] or code == "cannot_encode"
            assert served.images is not None
            assert served.images.nbytes == 0
        marked = {"text": "<|image_pad|> red"}
        status, reply = server.scores(marked)
        assert (status, reply["error"]["code"]) == (422, "cannot_encode")


def test_an_image_that_two_threads_read_at_once_is_held_until_both_requests_end(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = served.images
    assert held is not None
    show = held.reader.show

    def as_fast(digest: str, image: Any) -> Any:
        monkeypatch.setattr(held.reader, "show", show)
        held.hold(digest, PNG)  # as another thread does in the meantime
        return show(digest, image)

    monkeypatch.setattr(held.reader, "show", as_fast)
    held.hold(DIGEST, PNG)
    held.release([DIGEST])
    assert held.pixels(DIGEST)
    held.release([DIGEST])
    with pytest.raises(RunError, match="its request has ended"):
        held.pixels(DIGEST)


def test_images_are_bounded_by_number_pixels_and_room(judge: Callable[[str], Path]) -> None:
    for limits, code, message in (
        (ServerLimits(images=1), "too_many_images", "at most 1 images"),
        (ServerLimits(image_pixels=700), "too_many_images", "at most 700 pixels"),
        (ServerLimits(image_bytes=20_000), "busy", "take 20000 bytes already"),
    ):
        model = load_reward_model(judge("qwen2_5_vl"), "float32", 512, limits=limits)
        assert model.images is not None
        encoder = Encoder(model.tokenizer, 512, None, model.images.reader)
        asked = Input.model_validate(chat(part(PNG), part(picture(1, 40, 16)), TEXT))
        with RequestImages(model.images) as shown, pytest.raises(Refusal, match=message) as caught:
            encoder.encode([asked], shown)
        assert caught.value.code == code
        assert model.images.nbytes == 0
        by_hash = Input.model_validate(chat({"type": "image", "sha256": DIGEST}))
        with (
            RequestImages(model.images) as shown,
            pytest.raises(Refusal, match="where the server has"),
        ):
            encoder.encode([by_hash], shown)
    ended = RequestImages(model.images)
    with ended:
        pass
    with pytest.raises(Refusal, match="the request has ended"):
        encoder.encode([Input.model_validate(chat(part(PNG)))], ended)
    assert model.images.nbytes == 0


def test_models_that_read_text_alone_refuse_images(reward_dir: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="reads text alone: leave it out"):
        load_reward_model(reward_dir, "float32", 64, folder=folder)
    with reward_server() as server:
        status, reply = server.scores(chat(part(PNG)))
        assert (status, reply["error"]["code"]) == (422, "no_images")
        status, reply = server.scores(chat({"type": "text", "text": "Which?"}))
        assert status == 200  # parts of text are its text
        assert server.ask("/info")[1]["reads_images"] is False

"""What stands in a text for an image: as transformers' own processors write it, counted by hand."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from helpers.image_directories import models, picture, write_model
from helpers.image_models import KINDS
from postgrad.core.errors import UsageError
from postgrad.core.media import MARK, decoded, image_store, images_kept_in
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.images import with_image_texts
from postgrad.models import image_reader
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader, KeptPixels
from postgrad.models.images import ImageTower
from postgrad.models.load import load_model
from postgrad.models.tokenizer import load_tokenizer

__all__ = ["models"]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[None]:
    with images_kept_in(tmp_path / "images"):
        yield


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path, stored: None) -> ImageReader:
    path = write_model(request.param, tmp_path / request.param)
    return ImageReader(path, load_config(path), load_tokenizer(path))


# transformers' processors, which write the text, and what they know of their models.
CLIPS = {
    "patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
}  # fmt: skip
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llava": (LlavaProcessor, CLIPS),
    "vipllava": (LlavaProcessor, CLIPS),
    "llava_next": (LlavaNextProcessor, CLIPS),
    "llava_onevision": (
        LlavaOnevisionProcessor,
        {
            "num_image_tokens": 4, "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "internvl": (
        InternVLProcessor,
        {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 4},
    ),
    "idefics3": (
        Idefics3Processor,
        {
            "fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>",
            "image_seq_len": 4,
        },
    ),
}  # fmt: skip


def kind(name: str) -> Any:
    return pytest.mark.parametrize("reader", [name], indirect=True)


@kind("qwen2_5_vl")
def test_qwen_has_a_token_for_four_patches(reader: ImageReader) -> None:
    text = reader.text(image_store().add(picture(0, 40, 16)))  # patches of 4 pixels: 10 x 4
    assert (text.text, text.tokens, text.grid) == ("<|image_pad|>" * 10, 10, (2, 5))


@kind("gemma3")
def test_gemma_writes_a_fixed_number_of_tokens_in_lines_of_their_own(reader: ImageReader) -> None:
    begin, each, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    expected = "\n\n" + begin + 4 * each + end + "\n\n"
    text = reader.text(image_store().add(picture(0, 40, 16)))
    assert (text.text, text.tokens, text.grid) == (expected, 4, None)


@kind("mistral3")
def test_mistral_has_a_mark_behind_each_row(reader: ImageReader) -> None:
    text = reader.text(image_store().add(picture(0, 12, 20)))  # 8 pixels are a token
    row = 2 * "[IMG]"
    assert text.text == f"{row}[IMG_BREAK]{row}[IMG_BREAK]{row}[IMG_END]"
    assert (text.tokens, text.grid) == (6, None)
    with pytest.raises(UsageError, match="an image of 8 x 8 pixels or less is one token"):
        reader.text(image_store().add(picture(0, 8, 5)))


@kind("smolvlm")
@pytest.mark.parametrize(
    ("width", "height", "rows", "columns"), [(32, 32, 2, 2), (32, 16, 1, 2), (16, 32, 2, 1)]
)
def test_smolvlm_writes_what_its_processor_writes(
    reader: ImageReader, width: int, height: int, rows: int, columns: int
) -> None:
    processor_text = get_image_prompt_string(
        rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    text = reader.text(image_store().add(picture(0, width, height)))
    assert (text.text, text.tokens) == (processor_text, 4 * (rows * columns + 1))
    digest = image_store().add(picture(0, width, height))
    assert reader.pixels(digest)["pixel_values"].shape == (1, rows * columns + 1, 3, 16, 16)


@pytest.mark.parametrize("family", KINDS)
def test_an_image_has_as_many_tokens_as_its_processor_writes_and_its_tower_gives(
    family: str, models: Callable[[str], str], stored: None
) -> None:
    path = models(family)
    tokenizer, config = load_tokenizer(path), load_config(path)
    reader = ImageReader(path, config, tokenizer)
    tower = ImageTower(load_model(path, dtype=torch.float32, images=True).lm, reader.pixels)
    for number, size in enumerate(((9, 8), (40, 16), (16, 24), (7, 30), (64, 64), (33, 9))):
        digest = image_store().add(picture(number, *size))
        text = reader.text(digest)
        assert text.text.count(reader.token) == text.tokens
        with torch.no_grad():
            assert len(tower.encoded({digest: reader.pixels(digest)})[digest][0]) == text.tokens
        if family in PROCESSORS:
            processor, options = PROCESSORS[family]
            processed = reader._processed(decoded(image_store().read(digest)), digest)
            processor_stub = SimpleNamespace(
                image_token=reader.token,
                image_processor=reader._processor,
                **options,
            )
            for name in ("_get_number_of_features", "_get_unpadded_features"):
                if hasattr(processor, name):
                    setattr(processor_stub, name, partial(getattr(processor, name), processor_stub))
            assert processor.replace_image_token(processor_stub, processed, 0) == text.text


@kind("qwen3_vl")
def test_spans_move_with_the_texts_of_images(reader: ImageReader) -> None:
    digests = [image_store().add(picture(n, 16, 16)) for n in range(2)]  # 2 x 2 tokens each
    question = {"role": "user", "content": f"{MARK}a{MARK}b", "images": digests}
    text = "<|image_pad|>a<|image_pad|>b:yes"
    (filled,) = with_image_texts([Rendered(text, ((29, 32),), text[:29])], [question], reader)
    assert filled.text == "<|image_pad|>" * 4 + "a" + "<|image_pad|>" * 4 + "b:yes"
    assert [filled.text[start:end] for start, end in filled.spans] == ["yes"]
    assert filled.prompt == filled.text[:-3]
    ids = np.array([5, *[reader.token_id] * 4, 6, *[reader.token_id] * 4], np.int32)
    images = reader.placed(ids, digests)
    assert images is not None
    assert [image.at.tolist() for image in images] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert [image.digest for image in reader.placed(ids[:6], digests) or ()] == digests[:1]
    assert reader.placed(ids[:3], digests) is None  # half an image
    assert reader.placed(ids, digests[:1]) is None  # more tokens than images


@kind("qwen3_vl")
@pytest.mark.parametrize(
    ("content", "text", "message"),
    [
        ("<|image_pad|>", "<|image_pad|>a", "message 0 has '<|image_pad|>'"),
        (f"{MARK}a", "a", "writes 0 times"),
        (f"{MARK}a", "<|image_pad|><|image_pad|>a", "writes 2 times"),
    ],
)
def test_placeholders_that_are_not_those_of_the_images_are_refused(
    content: str, text: str, message: str, reader: ImageReader
) -> None:
    digests = [image_store().add(picture(0, 16, 16))] if MARK in content else []
    question = {"role": "user", "content": content, "images": digests}
    with pytest.raises(Unmarkable) as caught:
        with_image_texts([Rendered(text, (), "")], [question], reader)
    assert message in str(caught.value)


@kind("qwen2_5_vl")
def test_an_image_that_the_image_processor_refuses_is_a_matter_of_its_row(
    reader: ImageReader,
) -> None:
    digest = image_store().add(picture(0, 300, 1))
    question = {"role": "user", "content": MARK, "images": [digest]}
    text = Rendered(reader.placeholder, (), "")
    with pytest.raises(Unmarkable, match="300 x 1 pixels is refused by the model's image proc"):
        with_image_texts([text], [question], reader)


@kind("qwen2_5_vl")
def test_an_image_is_processed_once_while_it_is_kept(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [image_store().add(picture(100 + n, 16, 16)) for n in range(3)]
    size = sum(array.nbytes for array in reader.pixels(digests[0]).values())
    kept = KeptPixels(2 * size)
    monkeypatch.setitem(image_reader.KEPT, image_store(), kept)
    processed: list[str] = []
    process = reader._processed

    def counting(shown: Any, name: str) -> Any:
        processed.append(name.removeprefix("image "))
        return process(shown, name)

    monkeypatch.setattr(reader, "_processed", counting)
    first = reader.pixels(digests[0])
    assert reader.pixels(digests[0]) is first
    reader.text(digests[0])
    reader.pixels(digests[1])
    reader.pixels(digests[0])
    reader.pixels(digests[2])  # the second one was not used for the longest time
    assert kept.nbytes == 2 * size
    reader.pixels(digests[0])
    assert processed == digests
    again = reader.pixels(digests[1])
    assert processed == [*digests, digests[1]]
    expected = process(decoded(image_store().read(digests[1])), "again")["pixel_values"]
    np.testing.assert_array_equal(again["pixel_values"], expected)


@kind("gemma3")
def test_crops_are_refused(reader: ImageReader, tmp_path: Path) -> None:
    file = tmp_path / "gemma3" / "preprocessor_config.json"
    file.write_text(file.read_text().replace("{", '{"do_pan_and_scan": true, ', 1))
    path = str(tmp_path / "gemma3")
    with pytest.raises(UsageError, match="do_pan_and_scan"):
        ImageReader(path, load_config(path), load_tokenizer(path))


@kind("llava")
def test_images_of_another_size_than_the_towers_are_refused(
    reader: ImageReader, tmp_path: Path
) -> None:
    file = tmp_path / "llava" / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"height": 8', '"height": 12'))
    path = str(tmp_path / "llava")
    other = ImageReader(path, load_config(path), load_tokenizer(path))
    with pytest.raises(UsageError, match="images of 12 x 8 pixels, and its tower reads 8 x 8"):
        other.text(image_store().add(picture(0, 16, 16)))


def test_a_tower_or_decoder_that_is_not_tried_is_refused_by_name(tmp_path: Path) -> None:
    path = write_model("llava", tmp_path / "llava")
    file = tmp_path / "llava" / "config.json"
    file.write_text(file.read_text().replace('"clip_vision_model"', '"dinov2"'))
    with pytest.raises(UsageError, match="a tower of type dinov2 and a decoder of type llama"):
        load_config(path)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_other_uses_refuse_such_a_model_by_name(name: str, tmp_path: Path) -> None:
    path = write_model(name, tmp_path / name)
    with pytest.raises(UsageError, match=f"is a {name} model, .* it reads images too"):
        load_model(path, dtype=torch.float32)

"""Conversations with models that read images: with pictures, and on text alone."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from helpers.image_directories import models as image_models
from helpers.image_directories import picture, row
from helpers.image_models import KINDS
from helpers.terminal import Terminal
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.core.media import image_store, images_kept_in
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.settings import SamplingSettings
from postgrad.tools.chat.loaded import ChatModel, load
from postgrad.tools.chat.talker import Talker
from postgrad.tools.export import export
from postgrad.training.start import train

__all__ = ["image_models"]
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=6)
FLAGS = ("--max-new-tokens", "4", "--temperature", "0")
ImageModels = Callable[[str], str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The working directory, with two pictures, and a place for what a conversation shows."""
    (tmp_path / "wide.png").write_bytes(picture(1, 40, 16))
    (tmp_path / "my photo.png").write_bytes(picture(2, 16, 24))
    (tmp_path / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    with images_kept_in(tmp_path / "images"):
        yield tmp_path


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path):
    """piped(input, *words): exit code, standard output, standard error."""

    def run(stdin_text: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin_text.encode())))
        code = main(["chat", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def say(talker: Talker, text: str, *files: Path) -> str:
    images = [image_store().add(file.read_bytes()) for file in files]
    return "".join(talker.answer(text, talker.request(text, GREEDY, 0, images), images))


def by_transformers(path: str, prompt: str, files: list[Path]) -> str:
    """The greedy answer of plain transformers to a prompt, an image for each of its marks."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    lm: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
    pixels = processor(images=[Image.open(file) for file in files], return_tensors="pt")
    first, *rest = prompt.split("IMAGE")
    counts = [int(t * h * w) // 4 for t, h, w in pixels["image_grid_thw"]]
    marks = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts]
    text = first + "".join(mark + after for mark, after in zip(marks, rest, strict=True))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    types = (ids == lm.config.image_token_id).int()
    out = lm.generate(
        ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, do_sample=False,
        max_new_tokens=6, **pixels,
    )  # fmt: skip
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_turns_with_images_are_what_plain_transformers_answers(
    image_models: ImageModels, folder: Path
) -> None:
    path = image_models("qwen2_5_vl")
    talker = load(path, None, "float32", 512).talker()
    files = [folder / "wide.png", folder / "my photo.png"]
    first = say(talker, "What?", files[0])
    prompt = "<|im_start|>user\nIMAGEWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert first == by_transformers(path, prompt, files[:1])
    prompt += f"{first}<|im_end|>\n<|im_start|>user\nIMAGEAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert say(talker, "And?", files[1]) == by_transformers(path, prompt, files)
    talker.reset()
    assert say(talker, "What?") != first


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_answers_to_text_and_to_images(
    kind: str, image_models: ImageModels, folder: Path
) -> None:
    loaded = load(image_models(kind), None, "float32", 512)
    talker = loaded.talker()
    say(talker, "hi")
    say(talker, "What?", folder / "wide.png")
    request = talker.request("And?", GREEDY, 0)  # the picture stays in the conversation
    assert loaded.reader is not None
    count = int((request.token_ids == loaded.reader.token_id).sum())
    assert [len(image.at) for image in request.images] == [count]
    assert count == talker.tokens_of(request.images[0].digest) > 0


def test_an_image_goes_with_the_next_message_alone(piped, image_models: ImageModels) -> None:
    path = image_models("qwen2_5_vl")
    stdin_text = "/image wide.png\n/image 'my photo.png'\na\nb\n/image wide.png\n/image\nc\n"
    code, out, error = piped(stdin_text, path, *FLAGS, "--json")
    assert code == 0
    turns = json.loads(out)["turns"]
    assert [turn["images"] for turn in turns] == [["wide.png", "my photo.png"], [], []]
    assert "wide.png" not in error  # answers alone
    plain = json.loads(piped("a\nb\nc\n", path, *FLAGS, "--json")[1])["turns"]
    assert turns[0]["answers"] != plain[0]["answers"]
    reset = json.loads(piped("/image wide.png\n/reset\na\n", path, *FLAGS, "--json")[1])["turns"]
    assert reset == plain[:1]


def test_two_models_see_the_same_image(piped, image_models: ImageModels) -> None:
    two = [image_models(kind) for kind in ("qwen2_5_vl", "gemma3")]
    stdin_text = "/image wide.png\na\n"
    alone = [piped(stdin_text, path, *FLAGS)[1] for path in two]
    _, out, _ = piped(stdin_text, *two, *FLAGS)
    assert out == f"[{two[0]}]\n{alone[0]}[{two[1]}]\n{alone[1]}"


@pytest.mark.parametrize(
    ("stdin_text", "words", "problem"),
    [
        ("/image nothing.png\n", (), "/image nothing.png: there is no file"),
        ("/image notes.txt\n", (), "/image notes.txt: it is no image in PNG, JPEG"),
        ("/image .\n", (), "/image .: there is no file"),
        ("/image https://a.b/c.png\n", (), "download it first, and name the file"),
        ("/image wide.png\n", ("--max-len", "10"), "10 tokens of it, and a conversation has at"),
        ("/image wide.png\nhi\n", ("--max-len", "20"), "those of its images included, the limit"),
        ("/image wide.png\na \ufffc\n", (), "has U+FFFC, which stands for an image here"),
        ("<|image_pad|>\n", (), "has '<|image_pad|>', which stands for an image"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_exit_code_2(
    stdin_text: str, words: tuple[str, ...], problem: str, piped, image_models: ImageModels
) -> None:
    code, _, error = piped(stdin_text, image_models("qwen2_5_vl"), *FLAGS, *words)
    assert code == 2
    assert problem in error
    assert error.count("\n") == 1


def test_a_model_that_reads_text_alone_is_named(
    piped, image_models: ImageModels, models: Callable[[int], str]
) -> None:
    two = image_models("qwen2_5_vl"), models(0)
    code, _, error = piped("/image wide.png\n", *two, *FLAGS)
    assert code == 2
    assert f"/image wide.png: {two[1]}: it reads text alone" in error
    assert piped("hi\n", *two, *FLAGS)[0] == 0


def logprobs(chat_model: ChatModel, file: Path) -> Any:
    """Of the tokens of a text with a picture: two models that agree have the same weights."""
    digest = image_store().add(file.read_bytes())
    request = chat_model.talker().request("What?", GREEDY, 0, [digest])
    return chat_model.engine.logprobs([request.token_ids], 1.0, [request.images])[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"freeze": ["vision"]}, {"lora": {"rank": 2, "alpha": 4}}])
def test_a_checkpoint_of_a_run_answers_as_its_export_does(
    model: dict[str, Any], image_models: ImageModels, folder: Path
) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row(n, 'yes'))}\n" for n in range(4)))
    recipe = parse_recipe({
        "job": "sft", "run_dir": str(folder / "run"), "steps": 2,
        "model": {"path": image_models("qwen3_vl"), "dtype": "float32", **model},
        "data": {"path": str(rows), "max_len": 200}, "batch": {"train_batch_size": 4},
        "learner": {"lr": 1e-2, "threads": 1}, "checkpoint": {"save_steps": 1},
    })  # fmt: skip
    train(recipe, Console())
    exported_logprobs = []
    for step in ("1", "2"):
        exported = export(folder / "run", step, folder / f"model-{step}")
        exported_logprobs.append(
            logprobs(load(str(exported), None, "auto", 200), folder / "wide.png")
        )
        ours = load(recipe.run_dir, step, "auto", 200)
        np.testing.assert_array_equal(logprobs(ours, folder / "wide.png"), exported_logprobs[-1])
    assert not np.array_equal(*exported_logprobs)


@pytest.mark.slow
def test_a_person_is_told_what_becomes_of_an_image(image_models: ImageModels, folder: Path) -> None:
    path = os.path.relpath(image_models("qwen2_5_vl"))
    command = [sys.executable, "-m", "postgrad", "chat", path, *FLAGS]
    with Terminal(command, columns=120) as terminal:
        terminal.wait_for("/help lists commands")
        terminal.type("/image wide.png\n")
        terminal.wait_for("[wide.png: 40 x 16 pixels, 10 tokens, with the next message]")
        terminal.type("/image notes.txt\n")
        terminal.wait_for("no image in")  # and the conversation goes on
        terminal.type("What?\n")
        terminal.wait_for("was cut short")
        terminal.type("/quit\n")


def test_a_message_is_refused_where_the_model_takes_one_image(
    image_models: ImageModels, folder: Path
) -> None:
    talker = load(image_models("llava_onevision"), None, "float32", 512).talker()
    say(talker, "What?", folder / "wide.png")
    with pytest.raises(UsageError, match="it has 2 images, and this type of model"):
        say(talker, "And?", folder / "my photo.png")

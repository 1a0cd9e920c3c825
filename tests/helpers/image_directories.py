"""Directories of tiny models that read images: tokenizer, chat template and image processor too."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from helpers.image_models import IMAGE_MODELS, PINPOINTS
from postgrad.models.fresh import make_fresh
from postgrad.models.save import save_model
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer

QWENS = [kind for kind in IMAGE_MODELS if kind.startswith("qwen")]
MARKS = {  # what the chat template writes for an image, and the token that gets the embeddings
    **dict.fromkeys(QWENS, ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")),
    "gemma3": ("<start_of_image>", "<image_soft_token>"),
    "internvl": ("<IMG_CONTEXT>", "<IMG_CONTEXT>"),
    "mistral3": ("[IMG]", "[IMG]"),
}
IMAGE = ("<image>", "<image>")  # of the others
SPECIAL = [
    "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<start_of_image>",
    "<image_soft_token>", "<end_of_image>", "<image>", "<fake_token_around_image>", "<global-img>",
    "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "<IMG_CONTEXT>", "</img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}, **HALVES,
}  # fmt: skip
CLIP = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8},
    "crop_size": {"height": 8, "width": 8}, **HALVES,
}  # fmt: skip
ANYRES = {"image_grid_pinpoints": PINPOINTS, **HALVES}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": CLIP,
    "vipllava": CLIP,
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 8},
        "crop_size": {"height": 8, "width": 8}, **ANYRES,
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 8, "width": 8}, **ANYRES,
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor", "patch_size": 4,
        "size": {"longest_edge": 32}, **HALVES,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16},
        "max_patches": 4, **HALVES,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16}, "do_image_splitting": True, **HALVES,
    },
    **dict.fromkeys(QWENS, QWEN),
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16},
        **HALVES,
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16}, "do_image_splitting": True, **HALVES,
    },
}  # fmt: skip


def write_model(kind: str, to: Path, change: Callable[[Any], None] = lambda config: None) -> str:
    """Writes a tiny model that reads images; returns its path. change: of its config."""
    # transformers makes every tokenizer of Qwen3.5 one of bytes
    cut = {"kind": "bpe" if kind.startswith("qwen3_5") else "characters"}
    init = {"tokenizer": cut, "hidden_size": 8, "num_hidden_layers": 1}
    make_fresh(ModelInit.model_validate(init), [], 0, to.with_name(f"{to.name}-text"))
    tokenizer = load_tokenizer(str(to.with_name(f"{to.name}-text")))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", MARKS.get(kind, IMAGE)[0])
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    config = IMAGE_MODELS[kind].config()
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    text.eos_token_id = tokenizer.eos_token_id
    config.image_token_id = ids[MARKS.get(kind, IMAGE)[1]]
    if kind.startswith("qwen"):
        config.video_token_id = ids["<|video_pad|>"]
        config.vision_start_token_id = ids["<|vision_start|>"]
        config.vision_end_token_id = ids["<|vision_end|>"]
    if kind == "gemma3":
        config.boi_token_id, config.eoi_token_id = ids["<start_of_image>"], ids["<end_of_image>"]
    change(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_model(lm, tokenizer, to)
    (to / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    return str(to)


def picture(seed: int, width: int, height: int) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of some bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def row(seed: int, answer: str, sizes: tuple[tuple[int, int], ...] = ((16, 16),)) -> dict[str, Any]:
    """A row of SFT with images in parts of the question."""
    parts: list[Any] = []
    for number, size in enumerate(sizes):
        content = base64.b64encode(picture(10 * seed + number, *size)).decode()
        parts += [{"type": "image", "image": f"data:image/png;base64,{content}"}]
        parts += [{"type": "text", "text": f" picture {number}? "}]
    return {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
    }


def vision_pair(seed: int) -> dict[str, Any]:
    """A pair as TRL's vision trainers read it: parts without a source, and a column of images."""
    content = base64.b64encode(picture(seed, *((40, 16), (16, 24))[seed % 2])).decode()
    parts = [{"type": "image"}, {"type": "text", "text": f"Which colour, {seed}?"}]
    return {
        "images": [f"data:image/png;base64,{content}"],
        "prompt": [{"role": "user", "content": parts}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "red"}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "a fish"}]}],
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """models("gemma3"): the path of a tiny model that reads images, written once."""
    folder = tmp_path_factory.mktemp("models")

    def model(kind: str) -> str:
        to = folder / kind
        return str(to) if to.exists() else write_model(kind, to)

    return model

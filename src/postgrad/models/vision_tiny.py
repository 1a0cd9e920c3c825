"""The task and the fresh model of recipes/vision_tiny: how high is the bar in the picture?

    python -m postgrad.models.vision_tiny runs/vision_tiny

writes MODEL (a Qwen2.5-VL of 0.3 million weights), TRAIN and HELD_OUT into a folder that does not
exist yet. The same seed gives the same bytes.
"""

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from postgrad.core.errors import UsageError
from postgrad.core.files import whole_directory
from postgrad.core.media import NEEDED
from postgrad.models.fresh import make_fresh
from postgrad.models.save import save_model
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer

MODEL, TRAIN, HELD_OUT = "model", "train.jsonl", "held_out.jsonl"
SIDE, HIGHEST = 32, 8  # pixels of a picture's side; the heights are 1 to 8, of 4 pixels each
QUESTION = "How high is the bar?"
BEGIN, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def rows(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows with a picture of a bar, of random height, place and colours, and its height."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(NEEDED) from error
    generator = np.random.default_rng(seed)
    for _ in range(size):
        height = int(generator.integers(1, HIGHEST + 1))
        left, width = int(generator.integers(0, 20)), int(generator.integers(4, 12))
        pixels = np.empty((SIDE, SIDE, 3), np.uint8)
        pixels[:] = generator.integers(0, 100, 3)
        pixels[SIDE - height * SIDE // HIGHEST :, left : left + width] = generator.integers(
            156, 256, 3
        )
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [{"type": "image", "image": url}, {"type": "text", "text": QUESTION}]
        yield {
            "messages": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": str(height)},
            ],
            "answer": str(height),
        }


def write_model(to: Path, seed: int) -> None:
    """Writes the fresh model with tokenizer, chat template and image processor."""
    phrases = ["<|im_start|>user", "<|im_start|>assistant", QUESTION]
    init = {"tokenizer": {"kind": "characters", "phrases": phrases}, "num_hidden_layers": 1}
    text = to.with_name(f"{to.name}-tokenizer")
    make_fresh(ModelInit.model_validate(init), [], seed, text)  # for its tokenizer
    tokenizer = load_tokenizer(str(text))
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, IMAGE, END, VIDEO]})
    tokenizer.chat_template = TEMPLATE
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    marks = tokenizer.convert_tokens_to_ids([BEGIN, IMAGE, END, VIDEO])
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 100.0}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "rope_parameters": rope,
            "bos_token_id": None,
            "tie_word_embeddings": True,
            **ends,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PROCESSOR["patch_size"],
            "spatial_merge_size": PROCESSOR["merge_size"],
            "temporal_patch_size": PROCESSOR["temporal_patch_size"],
            "out_hidden_size": 64,
            "window_size": SIDE,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=True,
        **dict(zip(names, marks, strict=True)),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    lm.generation_config = GenerationConfig(**ends)
    save_model(lm, tokenizer, to)
    (to / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), "utf-8")


def write(to: Path, *, train: int = 4000, held_out: int = 200, seed: int = 0) -> None:
    """Writes model and rows. `to` is complete or absent."""
    if to.exists():
        raise UsageError(f"{to} exists already: choose another folder, or remove it")
    with whole_directory(to, replace=False) as folder:
        write_model(folder / MODEL, seed)
        for name, size, number in ((TRAIN, train, 1), (HELD_OUT, held_out, 2)):
            lines = (json.dumps(row) for row in rows(size, 10 * seed + number))
            (folder / name).write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

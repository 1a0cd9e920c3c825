"""The task of recipes/vision_tiny: its pictures show what its answers say."""

import base64
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from postgrad.models.load import load_model
from postgrad.models.save import directory_hash
from postgrad.models.vision_tiny import HELD_OUT, MODEL, TRAIN, rows, write


def test_answers_are_the_heights_of_the_bars() -> None:
    heights: set[int] = set()
    for row in rows(40, 3):
        question, answer = row["messages"]
        url = question["content"][0]["image"]
        picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        pixels = np.asarray(picture)  # the bar is bright in every colour, the ground in none
        lines = pixels.min(axis=2).max(axis=1) > 128
        assert lines.sum() == 4 * int(answer["content"])
        assert lines[-1]  # it stands on the ground
        heights.add(int(answer["content"]))
    assert heights == set(range(1, 9))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, train=3, held_out=2)
    a, b = tmp_path / "a", tmp_path / "b"
    assert directory_hash(a / MODEL) == directory_hash(b / MODEL)
    assert (a / TRAIN).read_bytes() == (b / TRAIN).read_bytes() != (a / HELD_OUT).read_bytes()
    lm = load_model(str(a / MODEL), dtype=torch.float32, images=True).lm
    assert sum(parameter.numel() for parameter in lm.parameters()) < 400_000

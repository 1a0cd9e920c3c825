"""What the headers of safetensors files say of a model's weights, before any weight is read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from postgrad.core.errors import UsageError
from postgrad.core.text import how_many
from postgrad.models.files import CONFIG, require_readable

# Dtypes of plain weights; others belong to quantised models, or to something else.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4}
PER_BYTE = 2  # weights in one byte, at four bits each: no format that is read packs more
SPARE = 2**20  # weights of a score head, which the files may lack
BUFFERS = 2**30  # numbers in buffers, which no file holds: tables of positions, masks


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16"
    file: Path

    @property
    def bytes(self) -> int:
        """Its size on disk; for dtypes of unknown width one byte a number."""
        return torch.Size(self.shape).numel() * BYTES.get(self.dtype, 1)


def read_headers(files: Iterable[Path]) -> dict[str, Header]:
    """The headers of all tensors in `files`, by name. safetensors checks each header against the
    file's size. Raises UsageError for a file that cannot be read, is truncated, or whose header is
    wrong.
    """
    headers: dict[str, Header] = {}
    for file in files:
        require_readable(file)
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    part = opened.get_slice(name)
                    headers[name] = Header(tuple(part.get_shape()), part.get_dtype(), file)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{file} cannot be loaded: {error}; it is cut or damaged: fetch or copy it again"
            ) from error
    return headers


def require_fit(lm: Any, headers: dict[str, Header], path: str) -> None:
    """Raises UsageError where `lm`, a model on the meta device, has far more weights than its files
    hold, or they hold integers in their place. transformers would first take the memory and then
    draw the missing weights at random.
    """
    held = sum(header.bytes for header in headers.values())
    require_room(lm, held, path)
    if getattr(lm.config, "quantization_config", None) is not None:
        return
    for name, _ in lm.named_parameters():
        header = headers.get(name)
        if header is not None and header.dtype not in FLOATS:
            raise UsageError(
                f"{header.file}: {name} is of dtype {header.dtype}, and weights are floating point "
                f"numbers ({', '.join(FLOATS[:4])}): save the model again in one of them"
            )


def require_room(lm: Any, held: int, path: str) -> None:
    """Raises UsageError where `lm`, on the meta device, has more weights than `held` bytes of files
    can hold, or buffers far beyond their size.
    """
    wanted = sum(parameter.numel() for parameter in lm.parameters())
    buffers = sum(buffer.numel() for buffer in lm.buffers())
    if wanted > PER_BYTE * held + SPARE or buffers > max(BUFFERS, PER_BYTE * held):
        too_many = wanted > PER_BYTE * held + SPARE
        size = f"{wanted:,} weights" if too_many else f"{buffers:,} numbers"
        raise UsageError(
            f"{path}/{CONFIG} describes a model of {size}, and its files hold {held:,} bytes: they "
            "are not of one model; take the config.json that belongs to the weights"
        )


def require_whole(
    path: str, *, missing: Sequence[str] = (), mismatched: Sequence[str] = ()
) -> None:
    """Raises UsageError for weights that transformers would draw at random with only a warning."""
    for fault, names in {"missing": missing, "of another shape": mismatched}.items():
        if names:
            raise UsageError(
                f"the model {path} is incomplete: {how_many(len(names), 'weight')} {fault} "
                f"({', '.join(sorted(names)[:3])}); its config.json and its weights have to be of "
                "one model: take both from the same directory or commit"
            )

"""Directories of models that are damaged, or that lie: a good tiny one, changed in one place.

`CORE` has one for each class of mistake, all of which have to be refused. `mutations` makes
hundreds from a seed, of which some are harmless.
"""

import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
VALUES = (-1, 0, 10**9, 10**30, 1.5, "x", "", True, None, [], {}, [-1], float("nan"), float("inf"))
DEEP = "[" * 100_000


class Marker:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def edit(name: str, **keys: Any) -> Change:
    """Sets keys of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps({**content, **keys}), "utf-8")

    return change


def write(name: str, text: str | bytes) -> Change:
    """Replaces a file."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def marked(name: str) -> Change:
    """Saved by an editor that marks UTF-8."""
    return lambda folder: (folder / name).write_bytes(
        b"\xef\xbb\xbf" + (folder / name).read_bytes()
    )


def indexed(shard: str, name: str = "model.norm.weight") -> Change:
    """An index in place of the weights; the file that it names is a pickle where it can be."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        index = {"metadata": {}, "weight_map": {name: shard, "lm_head.weight": shard}}
        (folder / INDEX).write_text(json.dumps(index), "utf-8")
        if shard and not shard.endswith(".safetensors"):
            put = folder / shard
            put.write_bytes(pickle.dumps(Marker(folder / "unpickled")))

    return change


def instead(name: str) -> Change:
    """Another format, and no safetensors."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Marker(folder / "unpickled")))

    return change


def header(alter: Callable[[dict[str, Any]], object]) -> Change:
    """The header of the weights, altered; their bytes stay."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        table = json.loads(content[8 : 8 + size])
        alter(table)
        text = json.dumps(table).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return change


def linked(name: str, to: str) -> Change:
    """A link in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return change


def piped(folder: Path) -> None:
    """Reading it would wait for ever."""
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def adapter_beside(folder: Path) -> None:
    """transformers would load the base that it names."""
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/x"}', "utf-8")


FIRST = "model.norm.weight"
ROPE = {"rope_type": "wrong", "rope_theta": 10_000.0}
HUGE = struct.pack("<Q", 2**62)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 123456\n"
CORE: Mapping[str, tuple[Change, str]] = {
    # what is wrong: (change, what the message says)
    "weights that Git LFS keeps": (write(WEIGHTS, POINTER), "git lfs pull fetches it"),
    "a tokenizer that Git LFS keeps": (write(TOKENIZER, POINTER), "git lfs pull fetches it"),
    "a config with a byte order mark": (marked(CONFIG), "a byte order mark, which transformers"),
    "a width below 1": (edit(CONFIG, hidden_size=-1), "hidden_size is -1"),
    "a width of 10^9": (edit(CONFIG, hidden_size=10**9), "hidden_size is 1000000000"),
    "a width of 10^6": (edit(CONFIG, intermediate_size=10**6), "files hold"),
    "a width that is text": (edit(CONFIG, hidden_size="x"), "hidden_size is 'x'"),
    "no heads": (edit(CONFIG, num_attention_heads=0), "num_attention_heads is 0"),
    "10^4 layers": (
        edit(CONFIG, num_hidden_layers=10_000, layer_types=None), "num_hidden_layers is 10000"
    ),
    "a dtype that is none": (edit(CONFIG, dtype="int7"), "dtype is 'int7'"),
    "an activation that is none": (edit(CONFIG, hidden_act="silo"), "did you mean silu"),
    "a rotation that is none": (edit(CONFIG, rope_parameters=ROPE), "rope_type is 'wrong'"),
    "a rotation that is text": (edit(CONFIG, rope_parameters="yarn"), "it has to be an object"),
    "both directions": (edit(CONFIG, is_causal=False), "is_causal is False"),
    "weights named in the config": (
        edit(CONFIG, transformers_weights="w.bin"), "transformers_weights names another file"
    ),
    "code for an unknown type": (
        edit(CONFIG, model_type="mine", auto_map={"AutoConfig": "mine.C"}),
        "code of its own (auto_map) is never run",
    ),
    "a list for a config": (write(CONFIG, "[]"), "holds a list; it has to hold a JSON object"),
    "a config nested deep": (write(CONFIG, '{"a":' + DEEP), "nested more than 64 deep"),
    "a config cut short": (write(CONFIG, '{"model_type": "qwe'), "cannot be read"),
    "a config that is no text": (write(CONFIG, b"\xff\xfe\x00"), "cannot be read"),
    "a config that is a device": (linked(CONFIG, "/dev/zero"), "not a regular file"),
    "a config that is a pipe": (piped, "not a regular file"),
    "a config linked to nowhere": (linked(CONFIG, "nowhere"), "cannot be read"),
    "an adapter beside a model": (adapter_beside, "is an adapter"),
    "a tokenizer that is a list": (write(TOKENIZER, "[]"), "no tokenizer at"),
    "a tokenizer nested deep": (write(TOKENIZER, DEEP), "no tokenizer at"),
    "a tokenizer config nested deep": (write("tokenizer_config.json", DEEP), "more than 64 deep"),
    "a tokenizer config that is a list": (write("tokenizer_config.json", "[]"), "a JSON object"),
    "an end that is a number": (edit("tokenizer_config.json", eos_token=5), "tokenizer"),
    "a generation config's end": (
        edit("generation_config.json", eos_token_id="x"), "eos_token_id is 'x'"
    ),
    "an index that names a pickle": (indexed("model-1.bin"), "which is a pickle and is not read"),
    "an index that names .pt": (indexed("model-1.pt"), "a pickle"),
    "an index that leaves the folder": (indexed("../w.safetensors"), "outside of this directory"),
    "an index with an absolute path": (indexed("/w.safetensors"), "outside of this directory"),
    "an index of what is not there": (indexed("gone.safetensors"), "gone.safetensors"),
    "an index without a map": (indexed("", ""), "not a file name"),
    "only pytorch_model.bin": (instead("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "only a .pth": (instead("consolidated.00.pth"), "a pickle"),
    "only GGUF": (instead("model.gguf"), "GGUF"),
    "only TensorFlow's": (instead("tf_model.h5"), "TensorFlow"),
    "only Flax's": (instead("flax_model.msgpack"), "Flax"),
    "a header of 2^62 bytes": (write(WEIGHTS, HUGE + b"{}"), "cannot be loaded"),
    "a header with other places": (
        header(lambda t: t[FIRST].update(data_offsets=[0, 2**60])), "cannot be loaded"
    ),
    "a header with another size": (
        header(lambda t: t[FIRST].update(shape=[2**40])), "cannot be loaded"
    ),
    "a header with no such dtype": (
        header(lambda t: t[FIRST].update(dtype="F7")), "cannot be loaded"
    ),
    "weights that are whole numbers": (
        header(lambda t: t[FIRST].update(dtype="I32")), "is of dtype I32"
    ),
    "weights that are empty": (write(WEIGHTS, b""), "cannot be loaded"),
    "weights that are a device": (linked(WEIGHTS, "/dev/zero"), "not a regular file"),
}  # fmt: skip


def mutations(folder: Path, seed: int, count: int) -> Iterator[tuple[str, Change]]:
    """`count` changes of the model in a folder, drawn from a seed."""
    draw = random.Random(seed)
    names = [
        CONFIG, TOKENIZER, "tokenizer_config.json", "generation_config.json", "header", WEIGHTS
    ]  # fmt: skip
    for number in range(count):
        name = names[number % len(names)]
        if name == WEIGHTS:
            content = (folder / WEIGHTS).read_bytes()
            start, new = draw.randrange(len(content)), draw.randbytes(draw.randrange(1, 40))
            cut = draw.choice(
                (content[:start], content[:start] + new + content[start + len(new) :])
            )
            yield f"{number}: bytes {start}", write(WEIGHTS, cut)
        elif name == "header":
            key, value = draw.choice(("shape", "dtype", "data_offsets")), draw.choice(VALUES)
            place = draw.randrange(8)
            yield f"{number}: header {place} {key} {value!r}", header(_at(place, key, value))
        else:
            tree = json.loads((folder / name).read_text("utf-8"))
            where = _change(tree, draw)
            text = json.dumps(tree)
            if draw.random() < 0.1:
                where, text = "cut", text[: draw.randrange(len(text))]
            yield f"{number}: {name} {where}", write(name, text)


def _at(place: int, key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def alter(table: dict[str, Any]) -> None:
        entries = [entry for name, entry in table.items() if name != "__metadata__"]
        entries[place % len(entries)][key] = value

    return alter


def _change(tree: Any, draw: random.Random) -> str:
    """One value somewhere in a JSON tree is another, or gone; says where."""
    place, way = tree, ""
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return f"{way} nothing"
        key = draw.choice(keys[:40])
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            place, way = inner, f"{way}.{key}"
            continue
        value = draw.choice(VALUES)
        if draw.random() < 0.15:
            del place[key]
            return f"{way}.{key} gone"
        place[key] = value
        return f"{way}.{key} = {value!r}"

"""Checks the files of a model's directory before any library reads them.

Weights are read from safetensors only. The library that loads a model reads whatever its index
names, and would unpickle a file called .bin: so the index, its files and every JSON file are
checked first. Free of torch and transformers, so that plans use it too.
"""

import codecs
import re
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.hub import REVISION, at_revision, commit_of, split_revision
from postgrad.core.untrusted import other_content, parse_json, path_problem, read_bytes, reason
from postgrad.models.settings import looks_local

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
# Files of a tokenizer that are parsed here; tokenizer.json may be large, its library parses it.
TOKENIZER_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
# Other files of a vocabulary than tokenizer.json, which it can be made of.
_VOCABULARY = re.compile(r".+\.(model|tiktoken)|vocab\.(json|txt)|tekken\.json")
SUFFIX = ".safetensors"
FORMATS = {
    ".bin": "a pickle",
    ".pt": "a pickle",
    ".pth": "a pickle",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
    ".ckpt": "a pickle",
    ".gguf": "GGUF",
    ".h5": "TensorFlow's",
    ".msgpack": "Flax's",
    ".onnx": "ONNX",
    ".npz": "NumPy's",
}
CONVERT = "convert the model to safetensors (save_pretrained of transformers writes them)"


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UsageError where the file is missing, too large, not a
    regular file or not to be read, and where it holds no JSON object or one nested too deep.
    """
    require_readable(file)
    try:
        content = read_bytes(file)
        if content.startswith(codecs.BOM_UTF8):
            raise ValueError("it begins with a byte order mark, which transformers does not read")
        value = parse_json(content)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}; fix it") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise UsageError(f"{file} holds a {kind}; it has to hold a JSON object")
    return value


def require_readable(file: Path) -> None:
    """Raises UsageError for a dangling link, for a device or a pipe, which might never end, and for
    a file that this user may not read, or the disk does not give: libraries call it damaged.
    """
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}; put the file there") from error
    if not regular:
        raise UsageError(f"{file} is not a regular file: put the file itself there")
    try:
        content = other_content(file)
    except PermissionError as error:
        raise UsageError(
            f"{file} cannot be read: {reason(error)}; give this user the right to read it (chmod)"
        ) from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {reason(error)}; check the disk") from error
    if content:
        raise UsageError(f"{file} cannot be read: {content}")


def is_adapter(path: str | Path) -> bool:
    """True for a directory with a PEFT adapter. Raises UsageError where weights of a whole model
    lie there too, so that it is not clear which of them is meant.
    """
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    for name in (WEIGHTS, INDEX):
        if _is_there(folder / name):
            raise UsageError(
                f"{folder} is an adapter ({ADAPTER_CONFIG}) and a model ({name}), and which is "
                "meant is not clear: move one of them to a directory of its own"
            )
    return True


def adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a directory. Raises UsageError where it cannot be read."""
    try:
        return read_object(folder / ADAPTER_CONFIG)
    except UsageError as error:
        raise UsageError(f"no adapter at {folder}: {error}") from error


def adapter_base(path: str | Path) -> str:
    """The directory or hub id ("org/name@REVISION" too) of the model that an adapter stands on.

    A relative directory is looked for from the current directory, as PEFT does, then from the
    adapter's. Raises UsageError where the config names no base, or a directory without a model.
    """
    folder = Path(path)
    config = adapter_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    wanted = "name the directory or hub id of the model that the adapter was trained on"
    if not isinstance(base, str) or not base or path_problem(base):
        raise UsageError(
            f"{folder}/{ADAPTER_CONFIG} names no base model (base_model_name_or_path): {wanted}"
        )
    if not Path(base).is_dir() and (folder / base).is_dir():
        base = str(folder / base)
    where = f"{folder}/{ADAPTER_CONFIG}: base_model_name_or_path is {base}"
    if Path(base).is_dir() or looks_local(base):
        if (Path(base) / ADAPTER_CONFIG).is_file():
            raise UsageError(
                f"{where}, which is an adapter too: merge that one into its base (postgrad export "
                f"{base} --to MODEL), and name MODEL there"
            )
        if not _is_there(Path(base) / CONFIG):
            raise UsageError(f"{where}, and no model is there (no {CONFIG}): {wanted}")
        return base  # PEFT writes no revision of a directory
    if revision in (None, "main"):
        return base
    if not isinstance(revision, str) or not re.fullmatch(REVISION, revision):
        raise UsageError(
            f"{folder}/{ADAPTER_CONFIG}: revision = {revision!r} is no branch, tag or commit"
        )
    return at_revision(base, revision)


def weights_source(path: str) -> str:
    """Where the config and the weights of `path` lie: `path` itself, or of an adapter its base; a
    base on the hub at the commit that it means now. Raises UsageError where there is no base.
    """
    if not is_adapter(path):
        return path
    base = adapter_base(path)
    if looks_local(base):
        return base
    name, revision = split_revision(base)
    try:
        return at_revision(name, _commit_of_base(name, revision))
    except UsageError as error:
        raise UsageError(
            f"{path}/{ADAPTER_CONFIG}: base_model_name_or_path is {base}, which is no directory "
            f"here, and the hub does not give it: {error}"
        ) from error


@cache
def _commit_of_base(name: str, revision: str | None) -> str:
    """Asked once, so that config, tokenizer and weights of a process are of one commit."""
    return commit_of("model", name, revision)


def require_tokenizer_files(folder: Path) -> None:
    """Raises UsageError where a directory has no vocabulary, of which transformers would make a
    tokenizer of special tokens alone, and where a file of its tokenizer is not a JSON object or not
    a regular file.
    """
    for name in TOKENIZER_FILES:
        if _is_there(folder / name):
            read_object(folder / name)
    if _is_there(folder / "tokenizer.json"):
        require_readable(folder / "tokenizer.json")
    elif not any(map(_VOCABULARY.fullmatch, (file.name for file in _listed(folder)))):
        raise UsageError(
            f"no tokenizer at {folder}: it has no tokenizer.json; copy it there from the model "
            "that this one began as, or name a directory with one"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory has a tokenizer of its own."""
    return _is_there(folder / "tokenizer.json") or _is_there(folder / TOKENIZER_CONFIG)


def has_generation(folder: Path) -> bool:
    """Whether a directory has a generation_config.json. Raises UsageError where the end-of-sequence
    tokens in it are not token ids.
    """
    file = folder / GENERATION
    if not _is_there(file):
        return False
    ends = read_object(file).get("eos_token_id")
    several = ends if isinstance(ends, list) else [0 if ends is None else ends]
    if not all(type(token_id) is int and token_id >= 0 for token_id in several):
        raise UsageError(
            f"{file}: eos_token_id is {ends!r}; it has to be a token id or a list of them"
        )
    return True


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a directory that transformers would read.

    Raises UsageError where there are none, naming a file of weights in another format, and where
    the index names anything but safetensors files beside it.
    """
    if _is_there(folder / WEIGHTS):
        require_readable(folder / WEIGHTS)
        return [folder / WEIGHTS]
    if not _is_there(folder / INDEX):
        raise UsageError(f"{folder} has no {WEIGHTS}{_instead(folder)}")
    files = [folder / name for name in shard_names(folder / INDEX)]
    for file in files:
        require_readable(file)
    return files


def shard_names(index: Path) -> list[str]:
    """The files that an index of weights names, sorted. Raises UsageError where one of them is not
    a safetensors file beside the index: nothing is unpickled or read from elsewhere.
    """
    index_object = read_object(index)
    weights = index_object.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise UsageError(f"{index}: weight_map is not an object of weights and their files; fix it")
    if not isinstance(index_object.get("metadata", {}), dict):
        raise UsageError(
            f"{index}: metadata is {index_object['metadata']!r}; it has to be an object"
        )
    for weight, name in weights.items():
        if not isinstance(name, str) or not name or "\0" in name:
            raise UsageError(f"{index}: {weight} is in {name!r}, which is not a file name")
        path = PurePosixPath(name)
        if path.is_absolute() or "\\" in name or len(path.parts) != 1 or name == "..":
            raise UsageError(
                f"{index}: {weight} is in {name}, outside of this directory: only files beside the "
                "index are read"
            )
        if path.suffix != SUFFIX:
            description = FORMATS.get(path.suffix, "no safetensors file")
            raise UsageError(
                f"{index}: {weight} is in {name}, which is {description} and is not read: {CONVERT}"
            )
    if "metadata" not in index_object:
        raise UsageError(f'{index} has no "metadata" object; write one, it may be empty')
    return sorted(set(weights.values()))


def _instead(folder: Path) -> str:
    foreign = [file.name for file in _listed(folder) if file.suffix in FORMATS]
    if not foreign:
        return f": put the weights there, as {WEIGHTS} or with {INDEX}"
    kind = FORMATS[Path(foreign[0]).suffix]
    return f": {foreign[0]} is {kind} and is not read; {CONVERT}"


def _listed(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error}") from error


def _is_there(file: Path) -> bool:
    """Whether the name exists; also as a dangling link, which is reported when it is read."""
    return file.is_symlink() or file.exists()

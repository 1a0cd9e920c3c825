"""Reads a script, a command line or a config file: its training program, and options by name."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import MOST_DEPTH, decoded, parse_json, read_bytes, reason, shown
from postgrad.translate.shell import UNKNOWN, VISIBLE, arguments, commands

MOST_NODES = 100_000

SCRIPTS = (".sh", ".bash", ".slurm", ".txt", "")
MOST_BYTES = 2**18  # of a script or config
MOST_DIGITS = 40
LARGEST = 2**63
CONFIGS = (".yaml", ".yml", ".json")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NODE_LAUNCHER = "mason.py"  # starts a launcher on each of several nodes

# (word, the word after it or "") -> the program that they name, or None. The second argument is
# None for a program that the user names before a file.
FindProgram = Callable[[str, str | None], str | None]


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; dates are texts. Raises ValueError where it is no YAML, is nested
    too deeply, or has aliases that hold themselves or expand a few lines to gigabytes.
    """
    try:
        node = cast(Any, yaml).compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.Node):
            _size(node, {}, 0)
        return _plain(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    except (ValueError, OverflowError) as error:  # a date or a number that is none
        raise ValueError(f"a value cannot be read: {error}") from error


def _size(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """How many values a node has with its aliases expanded. sizes: by id, of the nodes that were
    counted before; 0 while one is being counted.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    if sizes.get(id(node)) == 0:
        raise ValueError("a name stands for a list or table that holds itself")
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 0
    size = 1 + sum(_size(inner, sizes, depth + 1) for inner in _inner(node))
    if size > MOST_NODES:
        raise ValueError(f"its names stand for more than {MOST_NODES} values")
    sizes[id(node)] = size
    return size


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        pairs = cast(list[tuple[yaml.Node, yaml.Node]], node.value)
        return [node for pair in pairs for node in pair]
    return cast(list[yaml.Node], node.value) if isinstance(node, yaml.SequenceNode) else []


def _plain(value: Any) -> Any:
    """The value with JSON's types alone: sets become lists, dates and bytes texts."""
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return {key: _plain(inner) for key, inner in table.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclass(frozen=True, slots=True)
class SourceCommand:
    """A training command of another system, as a script, a command line or a config states it."""

    program: str  # as its system calls it: "train_sft"; "" where nothing names one
    options: Mapping[str, Any]  # by name, dashes as underscores
    devices: int | None = None  # that train; None where launcher and config do not say
    stage: int | None = None  # the ZeRO stage in which they divide their state
    notes: tuple[str, ...] = ()  # what could not be read, for people


def read(words: Sequence[str], program_of: FindProgram) -> SourceCommand:
    """The training command of FILE_OR_FLAGS: a script, a config, or a command line as it is typed.

    A program before a file, and flags after it, win over the file's. Raises UsageError where
    the file cannot be read or holds no command of the system.
    """
    words = list(words)
    if not words:
        raise UsageError("nothing to translate: give a script, a config, or the flags themselves")
    program = program_of(words[0], None) or ""
    rest = words[1:] if program else words
    if rest and not rest[0].startswith("-") and Path(rest[0]).suffix in (*SCRIPTS, *CONFIGS):
        path = Path(rest[0])
        if path.is_file() or path.suffix:
            return _of_file(path, rest[1:], program, program_of)
    if program:
        return _of_flags(rest, [], program, Path())
    sources = _of_commands([words], program_of, Path())
    return sources[0] if sources else _of_flags(words, [], "", Path())


def _of_file(path: Path, extra: list[str], program: str, program_of: FindProgram) -> SourceCommand:
    text = _text(path)
    if path.suffix in CONFIGS:
        typed = _of_flags(extra, [], program, path.parent)
        return SourceCommand(program, {**_config(path, text), **typed.options}, notes=typed.notes)
    sources = _of_commands(commands(text), program_of, path.parent)
    if not sources:
        raise UsageError(f"{path}: no training command of this system in the script")
    first = sources[0]
    notes = list(first.notes)
    if any(source.options != first.options for source in sources[1:]):
        notes.append(f"the script has {len(sources)} training commands; this is the first")
    options = {**first.options, **_of_flags(extra, [], "", path.parent).options}
    return replace(first, program=program or first.program, options=options, notes=tuple(notes))


def _of_commands(
    lines: list[list[str]], program_of: FindProgram, folder: Path
) -> list[SourceCommand]:
    """The commands in which a word names a program; the words before it are its launcher's."""
    sources: list[SourceCommand] = []
    for words in lines:
        for place, word in enumerate(words):
            after = words[place + 1] if place + 1 < len(words) else ""
            if (program := program_of(word, after)) is not None:
                rest = arguments(words[place + 1 :])
                rest = rest[1:] if rest and program == rest[0] else rest
                sources.append(_of_flags(rest, words[:place], program, folder))
                break
    return sources


def _of_flags(words: list[str], launcher: list[str], program: str, folder: Path) -> SourceCommand:
    notes: list[str] = []
    unknown = [word for word in words if UNKNOWN in word]
    if unknown:
        shown = ", ".join(word.replace(UNKNOWN, "$(...)") for word in unknown)
        notes.append(f"commands within a script are not run; '.' stands for their output: {shown}")
    place = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    configs = [word for word in words[:place] if Path(word).suffix in CONFIGS]
    stated = flags([word.replace(UNKNOWN, ".") for word in words[place:]])
    if isinstance(config := stated.pop("config", None), str):
        configs.append(config)
    for name in configs:
        path = next((file for file in (folder / name, Path(name)) if file.is_file()), None)
        if path is None:
            notes.append(f"{name} is not here, so what it says is missing")
        else:
            options |= _config(path, _text(path))
    count, stage = devices(launcher, stated), zero_stage(launcher, stated)
    return SourceCommand(program, {**options, **stated}, count, stage, tuple(notes))


def flags(words: Sequence[str]) -> dict[str, Any]:
    """Options by name, dashes as underscores. An option has its value, a list where it has several,
    and true where it has none.
    """
    options: dict[str, Any] = {}
    name: str | None = None
    values: list[str] = []

    def close() -> None:
        if name is not None:
            read = [_checked(f"--{name}", plain(value)) for value in values]
            options[name] = True if not read else read[0] if len(read) == 1 else read

    for word in words:
        if word == "--":  # a launcher's own options end
            close()
            name = None
        elif word.startswith("--"):
            close()
            key, equals, value = word[2:].partition("=")
            name, values = key.replace("-", "_"), [value] if equals else []
        elif name is not None:
            values.append(word)
    close()
    return options


def plain(text: str) -> Any:
    """A word as the number or truth value that it is, else as text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "null", "none"):
        return None
    if len(text) <= MOST_DIGITS and _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    if text[:1] in "[{" and text:
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def _checked(name: str, value: Any) -> Any:
    """An option's value. Raises UsageError for a number that no option takes."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict):
            pending += cast(dict[Any, Any], inner).values()
        elif isinstance(inner, list):
            pending += cast(list[Any], inner)
        elif isinstance(inner, int | float) and not abs(inner) < LARGEST:
            raise UsageError(f"{name} = {shown(inner)}: that is no number an option takes")
    return value


def devices(launcher: Sequence[str], options: Mapping[str, Any]) -> int | None:
    """How many processes train, from the flags and configs of accelerate, torchrun or deepspeed;
    None where they do not say. launcher: the words before the program. options: the program's.
    """
    launch = flags(launcher)
    nodes = launch.get("num_nodes", launch.get("num_machines", launch.get("nnodes", 1)))
    if any(PurePosixPath(word).name == _NODE_LAUNCHER for word in launcher):
        gpus = launch.get("gpus")
        if isinstance(gpus, int) and isinstance(nodes, int):
            return gpus * nodes
    if isinstance(launch.get("include"), str) and "exclude" not in launch:
        return _included(launch["include"])
    for name, each in (("num_processes", 1), ("nproc_per_node", nodes), ("num_gpus", nodes)):
        if isinstance(launch.get(name), int) and isinstance(each, int):
            return launch[name] * each
    config = launch.get("config_file", options.get("accelerate_config"))
    if config:
        return _accelerated(str(config))
    programs = {PurePosixPath(word).name for word in launcher}
    on_all_gpus = "deepspeed" in programs and not launch.keys() & {"hostfile", "exclude"}
    if on_all_gpus or "multi_gpu" in launch or launch.get("nproc_per_node") in ("gpu", "auto"):
        count = _visible(launcher)
        return count * nodes if count is not None and isinstance(nodes, int) else None
    return None


def _included(machines: str) -> int | None:
    """GPUs of DeepSpeed's --include: "localhost:0,1", or "worker-0:0,2-4@worker-1:0"; None where a
    machine is named without its GPUs.
    """
    count = 0
    for machine in machines.split("@"):
        slots = [
            re.fullmatch(r"(\d+)(?:-(\d+))?", slot) for slot in machine.partition(":")[2].split(",")
        ]
        for slot in slots:
            if slot is None:
                return None
            count += int(slot[2] or slot[1]) - int(slot[1]) + 1
    return count


def _visible(launcher: Sequence[str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES=0,1 before a command names; the last assignment counts."""
    count: int | None = None
    for word in launcher:
        name, _, value = word.partition("=")
        if name == VISIBLE:
            count = value.count(",") + 1 if re.fullmatch(r"\d+(,\d+)*", value) else None
    return count


def zero_stage(launcher: Sequence[str], options: Mapping[str, Any]) -> int | None:
    """The ZeRO stage of the launcher's or the trainer's config, from its contents or its name; FSDP
    counts as stage 3. None where no config tells.
    """
    launch = flags(launcher)
    configs = (
        launch.get("deepspeed_config_file"), launch.get("config_file"), launch.get("fsdp"),
        options.get("accelerate_config"), options.get("deepspeed"), options.get("fsdp"),
    )  # fmt: skip
    for config in map(str, filter(None, configs)):
        path = Path(config)
        if path.suffix in CONFIGS and path.is_file():
            settings = _config(path, _text(path))
            inner = settings.get("deepspeed_config", settings.get("zero_optimization"))
            table = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
            stage = table.get("zero_stage", table.get("stage"))
            if isinstance(stage, int):
                return stage
        if (match := re.search(r"(?:stage|zero)[_-]?([0-3])", path.stem)) is not None:
            return int(match[1])
        if re.match(r"fsdp|full_shard", path.stem):
            return 3
    return None


def _accelerated(config: str) -> int | None:
    """The number of processes in accelerate's config; for a missing file that TRL ships, by its
    name: they have 8.
    """
    path = Path(config)
    if path.is_file():
        count = _config(path, _text(path)).get("num_processes")
        return count if isinstance(count, int) else None
    shipped = r"(deepspeed_)?zero[123]|fsdp[12]|multi_gpu"
    return 8 if re.fullmatch(shipped, path.stem) else 1 if path.stem == "single_gpu" else None


def _text(path: Path) -> str:
    try:
        return decoded(read_bytes(path, MOST_BYTES, pipes=True))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _config(path: Path, text: str) -> dict[str, Any]:
    """A YAML or JSON file's table; numbers that YAML takes for text (5e-6) are numbers."""
    try:
        parsed = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{path}: a table of settings is wanted, name: value")
    table = cast(dict[Any, Any], parsed)
    options = {
        str(key).replace("-", "_"): plain(value) if isinstance(value, str) else value
        for key, value in table.items()
    }
    return {name: _checked(f"{path}: {name}", value) for name, value in options.items()}

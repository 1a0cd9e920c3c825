"""What a script, a command line or a config file says: a program, and its options by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import decoded, parse_json, read_bytes, reason, shown
from postgrad.recipe.translate.config import parse_yaml
from postgrad.recipe.translate.shell import UNKNOWN, VISIBLE, arguments, commands

SCRIPTS = (".sh", ".bash", ".slurm", ".txt", "")
MOST_BYTES = 2**18  # of a script or config
MOST_DIGITS = 40
LARGEST = 2**63
CONFIGS = (".yaml", ".yml", ".json")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LAUNCHED_BY = "mason.py"  # starts a launcher on each of several nodes

# (word, the word after it, None where it is what the user calls the program) -> program
FindProgram = Callable[[str, str | None], str | None]


@dataclass(frozen=True, slots=True)
class Source:
    """One training command. program: as its system calls it, "" where nothing says so.

    devices: that train, where the launcher or its config says so, and the ZeRO stage in which they
    divide their state. notes: what could not be read.
    """

    program: str
    options: Mapping[str, Any]
    devices: int | None = None
    stage: int | None = None
    notes: tuple[str, ...] = ()


def read(words: Sequence[str], program_of: FindProgram) -> Source:
    """The source that FILE_OR_FLAGS names: a script, a config, or a command line as it is typed.

    A program before a file, and flags after it, add to what the file says. Raises UsageError where
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
    found = _of_commands([words], program_of, Path())
    return found[0] if found else _of_flags(words, [], "", Path())


def _of_file(path: Path, more: list[str], program: str, program_of: FindProgram) -> Source:
    text = _text(path)
    if path.suffix in CONFIGS:
        flags = _of_flags(more, [], program, path.parent)
        return Source(program, {**_config(path, text), **flags.options}, notes=flags.notes)
    found = _of_commands(commands(text), program_of, path.parent)
    if not found:
        raise UsageError(f"{path}: no training command of this system in the script")
    first = found[0]
    notes = list(first.notes)
    if any(one.options != first.options for one in found[1:]):
        notes.append(f"the script has {len(found)} training commands; this is the first")
    options = {**first.options, **_of_flags(more, [], "", path.parent).options}
    return replace(first, program=program or first.program, options=options, notes=tuple(notes))


def _of_commands(found: list[list[str]], program_of: FindProgram, folder: Path) -> list[Source]:
    """The commands in which a word names a program; what stands before it is its launcher's."""
    sources: list[Source] = []
    for words in found:
        for place, word in enumerate(words):
            after = words[place + 1] if place + 1 < len(words) else ""
            if (program := program_of(word, after)) is not None:
                rest = arguments(words[place + 1 :])
                rest = rest[1:] if rest and program == rest[0] else rest
                sources.append(_of_flags(rest, words[:place], program, folder))
                break
    return sources


def _of_flags(words: list[str], launcher: list[str], program: str, folder: Path) -> Source:
    notes: list[str] = []
    unknown = [word for word in words if UNKNOWN in word]
    if unknown:
        shown = ", ".join(word.replace(UNKNOWN, "$(...)") for word in unknown)
        notes.append(f"commands within a script are not run; '.' stands for their output: {shown}")
    place = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    configs = [word for word in words[:place] if Path(word).suffix in CONFIGS]
    given = flags([word.replace(UNKNOWN, ".") for word in words[place:]])
    if isinstance(config := given.pop("config", None), str):
        configs.append(config)
    for name in configs:
        path = next((one for one in (folder / name, Path(name)) if one.is_file()), None)
        if path is None:
            notes.append(f"{name} is not here, so what it says is missing")
        else:
            options |= _config(path, _text(path))
    count, stage = devices(launcher, given), zero_stage(launcher, given)
    return Source(program, {**options, **given}, count, stage, tuple(notes))


def flags(words: Sequence[str]) -> dict[str, Any]:
    """Options by name, dashes as underscores: a value, a list of several, or true for none."""
    found: dict[str, Any] = {}
    name: str | None = None
    values: list[str] = []

    def close() -> None:
        if name is not None:
            read = [_checked(f"--{name}", plain(value)) for value in values]
            found[name] = True if not read else read[0] if len(read) == 1 else read

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
    return found


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
    inside = [value]
    while inside:
        one = inside.pop()
        if isinstance(one, dict):
            inside += cast(dict[Any, Any], one).values()
        elif isinstance(one, list):
            inside += cast(list[Any], one)
        elif isinstance(one, int | float) and not abs(one) < LARGEST:
            raise UsageError(f"{name} = {shown(one)}: that is no number an option takes")
    return value


def devices(launcher: Sequence[str], given: Mapping[str, Any]) -> int | None:
    """Processes that train, as accelerate, torchrun or deepspeed are told; None: not said."""
    said = flags(launcher)
    nodes = said.get("num_nodes", said.get("num_machines", said.get("nnodes", 1)))
    if any(PurePosixPath(word).name == _LAUNCHED_BY for word in launcher):
        gpus = said.get("gpus")
        if isinstance(gpus, int) and isinstance(nodes, int):
            return gpus * nodes
    if isinstance(said.get("include"), str) and "exclude" not in said:
        return _included(said["include"])
    for name, each in (("num_processes", 1), ("nproc_per_node", nodes), ("num_gpus", nodes)):
        if isinstance(said.get(name), int) and isinstance(each, int):
            return said[name] * each
    config = said.get("config_file", given.get("accelerate_config"))
    if config:
        return _accelerated(str(config))
    launched = {PurePosixPath(word).name for word in launcher}
    alone = "deepspeed" in launched and not said.keys() & {"hostfile", "exclude"}
    if alone or "multi_gpu" in said or said.get("nproc_per_node") in ("gpu", "auto"):
        count = _visible(launcher)  # a process for each
        return count * nodes if count is not None and isinstance(nodes, int) else None
    return None


def _included(where: str) -> int | None:
    """GPUs of DeepSpeed's --include: "localhost:0,1", or "worker-0:0,2-4@worker-1:0"; None where a
    machine is named without its GPUs.
    """
    count = 0
    for machine in where.split("@"):
        slots = [
            re.fullmatch(r"(\d+)(?:-(\d+))?", slot) for slot in machine.partition(":")[2].split(",")
        ]
        for slot in slots:
            if slot is None:
                return None
            count += int(slot[2] or slot[1]) - int(slot[1]) + 1
    return count


def _visible(launcher: Sequence[str]) -> int | None:
    """GPUs of CUDA_VISIBLE_DEVICES=0,1 before a command; the last one counts."""
    found: int | None = None
    for word in launcher:
        name, _, value = word.partition("=")
        if name == VISIBLE:
            found = value.count(",") + 1 if re.fullmatch(r"\d+(,\d+)*", value) else None
    return found


def zero_stage(launcher: Sequence[str], given: Mapping[str, Any]) -> int | None:
    """The stage that the configs of launcher and trainer name or say; FSDP is the third."""
    said = flags(launcher)
    named = (
        said.get("deepspeed_config_file"), said.get("config_file"), said.get("fsdp"),
        given.get("accelerate_config"), given.get("deepspeed"), given.get("fsdp"),
    )  # fmt: skip
    for config in map(str, filter(None, named)):
        path = Path(config)
        if path.suffix in CONFIGS and path.is_file():
            known = _config(path, _text(path))
            inner = known.get("deepspeed_config", known.get("zero_optimization"))
            table = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
            found = table.get("zero_stage", table.get("stage"))
            if isinstance(found, int):
                return found
        if (match := re.search(r"(?:stage|zero)[_-]?([0-3])", path.stem)) is not None:
            return int(match[1])
        if re.match(r"fsdp|full_shard", path.stem):
            return 3
    return None


def _accelerated(config: str) -> int | None:
    """Processes of accelerate's config, and of the ones that TRL ships, which say 8."""
    path = Path(config)
    if path.is_file():
        known = _config(path, _text(path))
        count = known.get("num_processes")
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
        found = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: a table of settings is wanted, name: value")
    table = cast(dict[Any, Any], found)
    options = {
        str(key).replace("-", "_"): plain(value) if isinstance(value, str) else value
        for key, value in table.items()
    }
    return {name: _checked(f"{path}: {name}", value) for name, value in options.items()}

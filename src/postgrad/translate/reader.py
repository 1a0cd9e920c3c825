"""Reads a script, a command line or a config file: its training commands, and options by name."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from postgrad.core.errors import UsageError
from postgrad.core.files import is_file
from postgrad.translate.draft import ImageRun, Missing
from postgrad.translate.files import CONFIGS, text_of
from postgrad.translate.launch import launched, slurm_job
from postgrad.translate.nested import overlaid
from postgrad.translate.shell import UNKNOWN, arguments, commands, named

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".txt", "")
PROGRAMS = (".py", ".ipynb")

_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_PRINTERS = ("echo", "printf")  # they show a command and do not run it


class NoTrainer(UsageError):
    """That a Python program calls nothing that trains."""


class Dialect(Protocol):
    """How a system's commands and configs are written."""

    def program_of(self, word: str, after: str | None) -> str | None:
        """The program that a word of a command names, by its short name. after: the word after it,
        "" for none, and None for a program that the user names before a file.
        """
        ...

    def config_of(self, path: Path) -> dict[str, Any]:
        """The options of a config file by name."""
        ...

    def flags_of(self, words: Sequence[str]) -> dict[str, Any]:
        """The options by name that the words after a program state."""
        ...


@dataclass(frozen=True, slots=True)
class SourceCommand:
    """A training command of another system, as a script, a command line or a config states it."""

    program: str  # as its system calls it: "train_sft"; "" where nothing names one
    options: Mapping[str, Any]  # by name, dashes as underscores
    devices: int | None = None  # that train; None where launcher and config do not say
    stage: int | None = None  # the ZeRO stage in which they divide their state
    machines: int | None = None  # over which they are spread; None where that is not said
    notes: tuple[str, ...] = ()  # what could not be read, for people
    beside: tuple["SourceCommand", ...] = ()  # the script's other commands of this system
    images: ImageRun | None = None  # of a run whose rows have some
    folder: Path = Path()  # of the config or script: where files that it names are looked for
    lost: tuple[Missing, ...] = ()  # of a Python program: what no option says
    needless: tuple[Missing, ...] = ()  # the same, of which a recipe needs none


@dataclass(frozen=True, slots=True)
class SourceCommands:
    """What a script, a command line or a config holds."""

    commands: tuple[SourceCommand, ...]  # that train, in order
    others: tuple[str, ...] = ()  # what the other commands are called: "mkdir", "ray start"


# The training calls of a Python program: its file, the options behind it by name, the variables
# before it. None where the options alone say what it does.
ProgramReader = Callable[
    [Path, Mapping[str, Any], Mapping[str, str]], Sequence[SourceCommand] | None
]


def read(
    words: Sequence[str], dialect: Dialect, programs: ProgramReader | None = None
) -> SourceCommands:
    """The training commands of FILE_OR_FLAGS: a script, a config, a Python program, or a command
    line as it is typed.

    A program before a file, and flags after it, win over the file's. Variables before a script
    (NODES=2 run.sh) are set when it begins, as in a shell. programs: reads Python programs, where
    the system's are read. Raises UsageError where the file cannot be read or holds no command of
    the system.
    """
    variables, words = _set_before(list(words))
    if not words:
        raise UsageError("nothing to translate: give a script, a config, or the flags themselves")
    program = dialect.program_of(words[0], None) or ""
    rest = words[1:] if program else words
    if rest and not rest[0].startswith("-") and Path(rest[0]).suffix in (*SCRIPTS, *CONFIGS):
        path = Path(rest[0])
        if is_file(path) or path.suffix:
            return _of_file(path, rest[1:], program, dialect, variables, programs)
    if programs is not None and rest and Path(rest[0]).suffix in PROGRAMS:
        path = Path(rest[0])
        calls: list[SourceCommand] | None = None
        if len(rest) == 1 or is_file(path):
            calls = _of_program(path, rest[1:], [], program, dialect, programs, variables)
        if calls is not None:
            return SourceCommands(tuple(calls))
    if program:
        _refuse_python(rest)
        return SourceCommands((_of_flags(rest, [], program, Path(), dialect),))
    source = _of_commands([words], dialect, Path(), {})
    if not source.commands:
        _refuse_python(words)
    return (
        source if source.commands else SourceCommands((_of_flags(words, [], "", Path(), dialect),))
    )


def _of_program(
    path: Path, words: list[str], launcher: list[str], program: str, dialect: Dialect,
    programs: ProgramReader, job: Mapping[str, str],
) -> list[SourceCommand] | None:  # fmt: skip
    """The training calls of a Python program; None where its flags alone say what it does.
    launcher: the words before it.
    """
    typed = _of_flags(words, launcher, program, path.parent, dialect, job)
    calls = programs(path, typed.options, job)
    if calls is None:
        return None
    return [
        replace(
            call,
            program=program or call.program,
            devices=typed.devices or call.devices,
            stage=call.stage if typed.stage is None else typed.stage,
            machines=typed.machines,
            notes=(*call.notes, *typed.notes),
        )
        for call in calls
    ]


def _launched_program(
    words: list[str], dialect: Dialect, folder: Path, job: Mapping[str, str],
    programs: ProgramReader | None,
) -> list[SourceCommand]:  # fmt: skip
    """The training calls of a Python program that a script starts; [] where it starts none, or one
    that is not here.
    """
    place = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if programs is None or place is None or UNKNOWN in words[place]:
        return []
    name = Path(words[place])
    path = next((file for file in (folder / name, name, folder / name.name) if is_file(file)), None)
    if path is None:
        return []
    rest = arguments(words[place + 1 :])
    try:
        return _of_program(path, rest, words[:place], "", dialect, programs, job) or []
    except NoTrainer:
        return []


def _refuse_python(words: Sequence[str]) -> None:
    """Raises UsageError for a Python program without flags: its settings stand in code, and the
    recipe would have the other system's defaults in their place.
    """
    if len(words) == 1 and words[0].endswith(".py"):
        raise UsageError(
            f"{words[0]}: of Python programs those of TRL alone are read; write the arguments of "
            "its config as flags, --learning_rate 1e-6 for learning_rate=1e-6, and model and "
            "dataset too"
        )


def _set_before(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that stand before a script, and the other words; none before anything else."""
    pairs = list(itertools.takewhile(bool, (_VARIABLE.fullmatch(word) for word in words)))
    rest = words[len(pairs) :]
    suffixes = (*SCRIPTS, *PROGRAMS)
    if not any(Path(word).suffix in suffixes and is_file(Path(word)) for word in rest[:2]):
        return {}, words
    return {pair[1]: pair[2] for pair in pairs if pair is not None}, rest


def _of_file(
    path: Path, extra: list[str], program: str, dialect: Dialect, variables: Mapping[str, str],
    programs: ProgramReader | None,
) -> SourceCommands:  # fmt: skip
    typed = _of_flags(extra, [], program, path.parent, dialect)
    if path.suffix in CONFIGS:
        options = overlaid(dialect.config_of(path), typed.options)
        command = SourceCommand(program, options, notes=typed.notes, folder=path.parent)
        return SourceCommands((command,))
    text = text_of(path)
    job = {**slurm_job(text), **variables}
    lines = commands(text, job, lambda name: _sourced(path.parent, name))
    source = _of_commands(lines, dialect, path.parent, job, programs)
    if not source.commands:
        listed = f" (its commands: {', '.join(source.others)})" if source.others else ""
        raise UsageError(f"{path}: no training command of this system in the script{listed}")
    return replace(
        source,
        commands=tuple(
            replace(
                command,
                program=program or command.program,
                options=overlaid(command.options, typed.options),
            )
            for command in source.commands
        ),
    )


def _sourced(folder: Path, name: str) -> str | None:
    """The text of a shell script beside this one; None for a file that is not here."""
    path = folder / Path(name).name
    return text_of(path) if path.suffix in (".sh", ".bash") and is_file(path) else None


def _counted(names: Sequence[str]) -> list[str]:
    """Each name once, and how often it stands there."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return [name if count == 1 else f"{name} ({count} times)" for name, count in counts.items()]


def _of_commands(
    lines: list[list[str]], dialect: Dialect, folder: Path, job: Mapping[str, str],
    programs: ProgramReader | None = None,
) -> SourceCommands:  # fmt: skip
    """The commands in which a word names a program; the words before it are its launcher's.
    programs: reads other Python programs that they start.
    """
    training: list[SourceCommand] = []
    others: list[list[str]] = []
    for words in lines:
        printed = words[0] in _PRINTERS
        calls = [] if printed else _launched_program(words, dialect, folder, job, programs)
        training += calls
        for place, word in enumerate([] if printed or calls else words):
            after = words[place + 1] if place + 1 < len(words) else ""
            if (program := dialect.program_of(word, after)) is not None:
                rest = arguments(words[place + 1 :])
                rest = rest[1:] if rest and program == rest[0] else rest
                training.append(_of_flags(rest, words[:place], program, folder, dialect, job))
                break
        else:
            others += [] if calls else [words]
    beside = [tuple(other for other in training if other is not command) for command in training]
    return SourceCommands(
        tuple(
            replace(command, beside=rest) for command, rest in zip(training, beside, strict=True)
        ),
        tuple(_counted(named(others))),
    )


def _of_flags(
    words: list[str],
    launcher: list[str],
    program: str,
    folder: Path,
    dialect: Dialect,
    job: Mapping[str, str] | None = None,
) -> SourceCommand:
    notes: list[str] = []
    unknown = [word for word in words if UNKNOWN in word]
    if unknown:
        shown = ", ".join(word.replace(UNKNOWN, "$(...)") for word in unknown)
        notes.append(f"commands within a script are not run; '.' replaces their output: {shown}")
    place = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    place_of_config = folder
    configs = [word for word in words[:place] if Path(word).suffix in CONFIGS and "=" not in word]
    stated = dialect.flags_of([word.replace(UNKNOWN, ".") for word in words])
    if isinstance(config := stated.pop("config", None), str):
        configs.append(config)
    for name in configs:
        path = next((file for file in (folder / name, Path(name)) if is_file(file)), None)
        if path is None:
            notes.append(f"{name} is not here, so what it says is missing")
        else:
            options = overlaid(options, dialect.config_of(path))
            place_of_config = path.parent
    launch = launched(launcher, stated, job)
    if launch.unread:
        notes.append(f"options of the launcher, not in the recipe: {', '.join(launch.unread)}")
    return SourceCommand(
        program,
        overlaid(options, stated),
        launch.devices,
        launch.stage,
        launch.machines,
        tuple(notes),
        folder=place_of_config,
    )

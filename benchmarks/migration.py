"""How many flags of others' launch scripts `postgrad translate` carries over.

    python -m benchmarks.migration openrlhf CHECKOUT
    python -m benchmarks.migration trl CHECKOUT --list lost
    python -m benchmarks.migration trl CHECKOUT --programs

CHECKOUT: a working tree of one of the systems. Its sources are its shell scripts that call it; for
Open-Instruct its train configs too; for TRL, which has no scripts, the commands in docstrings and
in the code of its pages, or with --programs the Python code of its pages that calls a trainer, its
examples and its notebooks; for prime-rl and NeMo RL their configs of `rl` and of GRPO. Each command
of a source is translated, as a user would with --command N. Each flag that a translated command
states counts once, and so does each value of a config and of those that it inherits from:

- carried: the recipe says it;
- not needed: a run is the same without it;
- lost: the translation names it, with the reason;
- unknown: the translation names it as an option that it does not know. The goal is none.

Commands without a recipe are counted by their reason: images (not translated), another job (the
translation says what stands for it here), flags (a program's settings are those), unreadable.
"incomplete" are recipes that do not load before a person adds what the command does not say.
"""

import argparse
import ast
import json
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.core.errors import PostgradError
from postgrad.translate.translate import Translation, sources, translate

KINDS = ("carried", "not needed", "lost", "unknown")
# Why a command has no recipe, or has one that a person has to complete before it loads.
REASONS = ("images", "another job", "flags", "unreadable", "incomplete")
FENCE = re.compile(r"(?ms)^[ >]*```(?:bash|sh|shell|console)?\n(.*?)^[ >]*```")
COMMAND = re.compile(  # with the lines that continue it
    r"(?m)^[ >]*(?:\$ )?((?:\w+=\S* )*(?:python|accelerate|trl|uv|torchrun|srun)\d? "
    r"(?:.*\\+\n)*.*)"
)
PYTHON = re.compile(r"(?ms)^([ >]*)```(?:python|py)\n(.*?)^[ >]*```")
TRAINER = re.compile(r"\w+Trainer\(")
CALLS = {  # what a script of the system says
    "openrlhf": r"openrlhf[./]cli",
    "open-instruct": r"open_instruct[./]\w+",
    "trl": r"\btrl [a-z]|(?:examples|trl)/scripts/\w+",
    "verl": r"verl\.(?:trainer|experimental)\.\w+",
}
CONFIGS = {  # where configs are, and what those of the system's RL say
    "prime-rl": (("configs", "examples"), ".toml", r"(?m)^\[orchestrator"),
    "nemo-rl": (("examples",), ".yaml", r"(?m)^(?:grpo|defaults):"),
}


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """A source of commands: a file, and what has to be said before it."""

    name: str  # within its checkout
    path: Path
    words: tuple[str, ...] = ()  # a config does not say what it trains


@dataclass(slots=True)
class Count:
    """Flags and commands of a system's sources."""

    sources: int = 0
    commands: int = 0  # that have a recipe
    flags: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in KINDS}
    )
    why: dict[str, dict[str, str]] = field(  # by kind, then by name of a flag
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    refused: dict[str, list[str]] = field(default_factory=lambda: {why: [] for why in REASONS})

    def add(self, name: str, translation: Translation) -> None:
        """Counts each flag that the source states."""
        self.commands += 1
        if translation.problem is not None:
            self.refused["incomplete"].append(f"{name}: {translation.problem}")
        draft = translation.draft
        missing = {option.name: option.why for option in draft.missing}
        needless = {option.name: option.why for option in draft.needless}
        for flag in translation.stated:
            kind = "lost" if flag in missing else "not needed" if flag in needless else "carried"
            if missing.get(flag, "").startswith("not an option that this translator knows"):
                kind = "unknown"
            self.flags[kind][flag] += 1
            if kind != "carried":
                self.why[kind][flag] = {**needless, **missing}[flag]

    def refuse(self, name: str, program: str, error: PostgradError) -> None:
        """Counts a command that has no recipe. program: that it runs, "" for a whole script."""
        text = str(error)
        other = bool(program) and text.startswith(f"{program}: ")
        of_images = re.search(r"(needs|reads) images", text)
        reason = "images" if of_images else "another job" if other else "unreadable"
        reason = "flags" if "settings come from the command line" in text else reason
        self.refused[reason].append(f"{name}: {text}")

    def to_json(self) -> dict[str, Any]:
        """The numbers of a row of docs/migration.md."""
        return {
            "sources": self.sources,
            "recipes": self.commands,
            **{reason: len(names) for reason, names in self.refused.items()},
            **{kind: counter.total() for kind, counter in self.flags.items()},
            "distinct flags": len(set().union(*self.flags.values())),
        }


def scripts(system: str, checkout: Path) -> Iterator[LaunchScript]:
    """The launch scripts of a checkout, or its configs."""
    if system in CONFIGS:
        yield from _configs(system, checkout)
        return
    for path in sorted(checkout.rglob("*.sh")):
        if re.search(CALLS[system], path.read_text("utf-8")):
            yield LaunchScript(str(path.relative_to(checkout)), path)
    if system == "open-instruct":
        for path in sorted((checkout / "configs" / "train_configs").rglob("*.yaml")):
            name = str(path.relative_to(checkout))
            yield LaunchScript(name, path, ("dpo" if "dpo" in name else "sft",))
    if system == "trl":
        yield from _snippets(checkout)


def _configs(system: str, checkout: Path) -> Iterator[LaunchScript]:
    """Configs of RL, which others may inherit: NeMo RL's say so only with their parents."""
    folders, suffix, says = CONFIGS[system]
    paths = sorted(path for name in folders for path in (checkout / name).rglob(f"*{suffix}"))
    for path in paths:
        if not re.search(says, path.read_text("utf-8")):
            continue
        (command,) = sources(system, [str(path)]).commands
        if any(name.startswith(("grpo.", "orchestrator")) for name in command.options):
            yield LaunchScript(str(path.relative_to(checkout)), path)


def _snippets(checkout: Path) -> Iterator[LaunchScript]:
    """Commands in docstrings and pages; those of one text are a script."""
    modules = sorted(
        path for name in ("examples", "trl") for path in (checkout / name).rglob("*.py")
    )
    pages = sorted((checkout / "docs").rglob("*.md"))
    texts = [
        (path, ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "") for path in modules
    ]
    texts += [(path, code) for path in pages for code in FENCE.findall(path.read_text("utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        for number, (path, text) in enumerate(texts):
            lines = [line for line in COMMAND.findall(text) if re.search(CALLS["trl"], line)]
            script = Path(folder) / f"{number}.sh"
            script.write_text("\n".join(lines).replace("\\\\\n", "\\\n"), "utf-8")
            if lines:
                yield LaunchScript(f"{path.relative_to(checkout)}", script)


def programs(checkout: Path) -> Iterator[LaunchScript]:
    """Python programs that call a trainer of TRL: code of its pages, examples and notebooks."""
    examples = checkout / "examples"
    for path in sorted([*examples.rglob("*.py"), *examples.rglob("*.ipynb")]):
        if TRAINER.search(path.read_text("utf-8")):
            yield LaunchScript(str(path.relative_to(checkout)), path)
    with tempfile.TemporaryDirectory() as folder:
        for page in sorted((checkout / "docs").rglob("*.md")):
            for number, (_, code) in enumerate(PYTHON.findall(page.read_text("utf-8"))):
                path = Path(folder) / f"{page.stem}-{number}.py"
                path.write_text(textwrap.dedent(code), "utf-8")
                if TRAINER.search(code):
                    yield LaunchScript(f"{page.relative_to(checkout)}, code {number}", path)


def count(system: str, checkout: Path, *, of_programs: bool = False) -> Count:
    """Translates every command of a checkout's scripts, or of its Python programs."""
    total = Count()
    for script in programs(checkout) if of_programs else scripts(system, checkout):
        words = [*script.words, str(script.path)]
        try:
            commands = sources(system, words).commands
        except PostgradError as error:
            if "no training command" not in str(error):
                total.refuse(script.name, "", error)
            continue
        total.sources += 1
        for number, command in enumerate(commands, 1):
            try:
                total.add(script.name, translate(system, words, command=number))
            except PostgradError as error:
                # A config does not say its program: the error does.
                first = str(error).partition(": ")[0]
                program = command.program or (first if first.isidentifier() else "")
                total.refuse(script.name, program, error)
    return total


def main(words: list[str]) -> None:
    """Prints the counts of one checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("system", choices=(*CALLS, *CONFIGS))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--list", choices=(*KINDS, *REASONS), nargs="*", default=[])
    parser.add_argument("--programs", action="store_true", help="TRL's Python programs")
    args = parser.parse_args(words)
    if args.programs and args.system != "trl":
        parser.error("--programs: of TRL alone Python programs are read")
    total = count(args.system, args.checkout, of_programs=args.programs)
    print(json.dumps(total.to_json()))
    for kind in args.list:
        print(f"{kind}:")
        for name, times in total.flags.get(kind, Counter[str]()).most_common():
            print(f"{times:5} {name}: {total.why[kind].get(name, '')}")
        print(*(f"  {text}" for text in total.refused.get(kind, [])), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

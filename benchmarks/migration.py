"""How much of the launch scripts of OpenRLHF, Open-Instruct and TRL `postgrad translate` carries over.

    python -m benchmarks.migration openrlhf CHECKOUT
    python -m benchmarks.migration trl CHECKOUT --lost

CHECKOUT: a working tree of that system. Its launch scripts are its shell scripts; Open-Instruct's
train configs; and for TRL the commands in the docstrings of its examples and in the code of its
pages, because it has no scripts. Every training command of each is translated, as a user would with
--command N. Each flag that a command states counts once:

- carried: the recipe says it;
- not needed: a run is the same without it;
- lost: the translation names it, with the reason;
- unknown: the translation names it as an option that it does not know. The goal is none.

A command is refused where its job is not here, or where it needs images. --lost and --unknown list
the flags, most frequent first; --refused lists the commands with the reason.
"""

import argparse
import ast
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.core.errors import PostgradError
from postgrad.translate.translate import Translation, sources, translate

FENCE = re.compile(r"(?ms)^[ >]*```(?:bash|sh|shell|console)?\n(.*?)^[ >]*```")
DOCSTRING_OF = ("examples", "trl")  # folders of TRL whose modules say how they are started
CONFIG_JOBS = {
    "sft": "sft",
    "dpo": "dpo",
    "finetune": "sft",
}  # of Open-Instruct, by words of a path


@dataclass(slots=True)
class Count:
    """Flags and commands of a system's sources."""

    sources: int = 0
    commands: int = 0
    whole: int = 0  # commands whose recipe loads as it is
    flags: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in KINDS}
    )
    why: dict[str, str] = field(default_factory=dict[str, str])  # of a lost flag
    refused: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def add(self, translation: Translation) -> None:
        """Counts each flag that the source states."""
        self.commands += 1
        self.whole += translation.problem is None
        missing = {option.name: option.why for option in translation.draft.missing}
        needless = {option.name for option in translation.draft.needless}
        for name in translation.stated:
            if "not an option that this translator knows" in missing.get(name, ""):
                kind = "unknown"
            else:
                kind = (
                    "lost" if name in missing else "not needed" if name in needless else "carried"
                )
            self.flags[kind][name] += 1
            self.why |= {name: missing[name]} if name in missing else {}

    def to_json(self) -> dict[str, Any]:
        """The numbers of a row of docs/migration.md."""
        totals = {kind: counter.total() for kind, counter in self.flags.items()}
        return {
            "sources": self.sources,
            "commands": self.commands,
            "whole": self.whole,
            "refused": len(self.refused),
            **totals,
            "distinct": len(set().union(*self.flags.values())),
        }


KINDS = ("carried", "not needed", "lost", "unknown")


def scripts(system: str, checkout: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """(name, file, words before it) of each launch script of a checkout."""
    for path in sorted(checkout.rglob("*.sh")):
        yield str(path.relative_to(checkout)), path, []
    if system == "open-instruct":
        for path in sorted((checkout / "configs" / "train_configs").rglob("*.yaml")):
            words = re.split(r"[/_.]", str(path.relative_to(checkout)))
            job = next(
                (CONFIG_JOBS[word] for word in reversed(words) if word in CONFIG_JOBS), "sft"
            )
            yield str(path.relative_to(checkout)), path, [job]
    if system == "trl":
        yield from _snippets(checkout)


def _snippets(checkout: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Commands in docstrings and pages, each as a script of its own."""
    folder = Path(tempfile.mkdtemp(prefix="snippets-"))
    texts: list[tuple[Path, str]] = []
    for path in sorted(path for name in DOCSTRING_OF for path in (checkout / name).rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        if docstring and re.search(r"(?m)^\s*[\w=,]*\s*(python|accelerate|trl|uv run) ", docstring):
            texts.append((path, re.sub(r"(?m)^\s*```\w*$", "", docstring)))
    for path in sorted((checkout / "docs").rglob("*.md")):
        texts += [(path, block) for block in FENCE.findall(path.read_text("utf-8"))]
    for number, (path, text) in enumerate(texts):
        script = folder / f"{number}.sh"
        script.write_text(re.sub(r"(?m)^[ >]*\$ ", "", text), "utf-8")
        yield f"{path.relative_to(checkout)}", script, []


def count(system: str, checkout: Path) -> Count:
    """Translates every training command of a checkout's scripts."""
    total = Count()
    for name, path, words in scripts(system, checkout):
        try:
            source = sources(system, [*words, str(path)])
        except PostgradError as error:
            if "no training command" not in str(error):
                total.refused.append((name, str(error)))
            continue
        total.sources += 1
        for number in range(1, len(source.commands) + 1):
            try:
                total.add(translate(system, [*words, str(path)], command=number))
            except PostgradError as error:
                total.refused.append((name, str(error)))
    return total


def _listed(total: Count, kind: str) -> Iterator[str]:
    for name, times in total.flags[kind].most_common():
        yield f"{times:5} {name}: {total.why.get(name, '')}"


def main(words: list[str]) -> None:
    """Prints the counts of one checkout."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("system", choices=("openrlhf", "open-instruct", "trl"))
    parser.add_argument("checkout", type=Path)
    for kind in KINDS:
        parser.add_argument(f"--{kind.replace(' ', '-')}", action="store_true")
    parser.add_argument("--refused", action="store_true")
    args = parser.parse_args(words)
    total = count(args.system, args.checkout)
    print(json.dumps(total.to_json()))
    for kind in KINDS:
        if getattr(args, kind.replace(" ", "_")):
            print(f"{kind}:", *_listed(total, kind), sep="\n")
    if args.refused:
        print("refused:", *(f"{name}: {why}" for name, why in total.refused), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The file of what tests on the stub have measured: each entry says when, on which commit and by
which command it was measured.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MEASURED_BY = ("src", "tests", "benchmarks", "recipes")  # folders whose changes change results
OWN = "tests/gpu/stub/results.json"
FOLDER = re.compile(r"(?<!\S)/\S*/(?=[^/\s]+)")  # of a run: it says nothing, and is a machine's


@dataclass(frozen=True)
class Results:
    """What is kept of one version of torch. Without a file, tests measure and keep nothing."""

    file: Path | None
    versions: dict[str, str]  # torch's, and of what works with it
    source: dict[str, str]  # "commit", "date" and "command" of this session

    def keep(self, kind: str, measured: Any, case: str | None = None) -> None:
        """Puts an entry in place of the one of that kind, and of that case where kinds have some.
        The file is written at once: a session that is cut still counts.
        """
        if self.file is None:
            return
        results = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        of_torch = results.setdefault(self.versions["torch"], {})
        of_torch["versions"] = self.versions
        entry = {**self.source, "measured": measured}
        if case is None:
            of_torch[kind] = entry
        else:
            of_torch.setdefault(kind, {})[case] = entry
        ordered = {version: results[version] for version in sorted(results)}
        self.file.write_text(text_of(ordered, 3) + "\n", "utf-8")


def source_of(arguments: Sequence[str]) -> dict[str, str]:
    """Where a session of pytest with these arguments measures: commit, date and command."""
    commit = _git("rev-parse", "--short", "HEAD").strip()
    changed = _git("status", "--porcelain", "--", *MEASURED_BY, f":!{OWN}")
    # By file: which of its tests is said by the entry's name. Folders of a machine say nothing.
    stable_arguments = (argument for argument in arguments if not argument.startswith("--basetemp"))
    files = dict.fromkeys(argument.split("::")[0] for argument in stable_arguments)
    return {
        "commit": f"{commit} and changes" if changed else commit,
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["pytest", *files]),
    }


def text_of(value: Any, depth: int) -> str:
    """JSON with `depth` levels of objects unfolded, and a line for each of what is below them.
    Counts of 0 are left out, and so are folders of a machine.
    """
    if not depth or not isinstance(value, dict):
        return json.dumps(_short(value))
    lines = (f"{json.dumps(name)}: {text_of(each, depth - 1)}" for name, each in value.items())
    body = ",\n".join(lines).replace("\n", "\n ")
    return f"{{\n {body}\n}}"


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return FOLDER.sub("RUNS/", value)
    if not isinstance(value, dict):
        return value
    return {
        name: _short(each)
        for name, each in value.items()
        if each not in (0, {}, []) or each is False
    }


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout

"""`postgrad report`: one HTML file that shows one run, or several side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.files import whole_file
from postgrad.observe.console import Console
from postgrad.observe.report.page import report as pages
from postgrad.observe.report.run import RunReader
from postgrad.observe.report.selection import Cap
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.compare import differences
from postgrad.recipe.load import recipe_from_json

MOST_RUNS = 6  # colours that can be told apart
EVERYTHING = Cap(float("inf"), float("inf"))
REPORT = "report.html"


def report(
    run_dirs: Sequence[Path], to: Path | None, console: Console, cap: Cap | None = None
) -> dict[str, Any]:
    """Writes the HTML page of some runs; returns its path, bytes and number of samples.

    to: the file; None: report.html in the first run's directory. cap: limits the samples on the
    page. Raises UsageError where a directory holds no run, or there are too many.
    """
    require_few(run_dirs)
    readers = [reader(path, number, cap or Cap()) for number, path in enumerate(run_dirs)]
    target = to or run_dirs[0] / REPORT
    if target.is_dir():
        raise UsageError(f"--to {target} is a directory: name a file in it")
    with whole_file(target) as written, written.open("w", encoding="utf-8") as file:
        for part in pages(readers, contents(run_dirs)):
            file.write(part)
    size = target.stat().st_size
    samples = sum(run_reader.samples for run_reader in readers)
    console.note(f"wrote {target}: {size / 2**20:.1f} MiB, {samples} samples; open it in a browser")
    return {"report": str(target), "bytes": size, "samples": samples}


def require_few(run_dirs: Sequence[Path]) -> None:
    """Raises UsageError where there are more runs than a page shows."""
    if len(run_dirs) > MOST_RUNS:
        raise UsageError(f"{len(run_dirs)} runs: a page shows at most {MOST_RUNS} side by side")


def reader(path: Path, number: int, cap: Cap, expected_steps: int = 0) -> RunReader:
    """Reads a run for a page. Raises UsageError where there is none."""
    RunDirectory.open(path)
    return RunReader(path, number, cap, about, expected_steps=expected_steps)


def contents(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """The head data of a page: title, number of runs, and the keys where their recipes differ."""
    recipes = [RunDirectory(path).recipe() for path in run_dirs]
    names = [path.resolve().name for path in run_dirs]
    return {
        "title": " against ".join(names),
        "runs": len(run_dirs),
        "differences": difference_rows(recipes),
    }


def difference_rows(recipes: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """A row [key, value of each run ...] for every recipe key whose values differ."""
    keys = {key: None for other in recipes[1:] for key in differences(recipes[0], other)}
    return [[key, *(value_at(recipe, key) for recipe in recipes)] for key in keys]


def value_at(recipe: Any, key: str) -> Any:
    """The value of a dotted key, None where it is not there."""
    for part in key.split("."):
        recipe = cast(dict[str, Any], recipe).get(part) if isinstance(recipe, dict) else None
    return recipe


def about(recipe: dict[str, Any]) -> dict[str, Any]:
    """The batch numbers of a recipe as rows. Where another version wrote a recipe that this one
    cannot read, no rows and the reason under "batch_problem".
    """
    try:
        return {"batch": [list(row) for row in recipe_from_json(recipe).geometry().rows()]}
    except PostgradError as error:
        return {"batch": [], "batch_problem": f"the recipe is not one of this version: {error}"}

"""The jobs as functions: what `postgrad train`, `train --sweep`, `resume` and `eval` do."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.api.run import Run, RunsOfSweep
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports
from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.recipe.recipe import Recipe


def train(
    recipe: Recipe | str | Path,
    *,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
    quiet: bool = False,
) -> Run:
    """Runs a recipe, or that of a TOML file, to its end; goes on where its run_dir holds this run.

    overwrite: replaces a run that is there. allow_change: keys that may differ from the run that is
    there. quiet: only warnings are printed. Raises UsageError where recipe, data or model is wrong
    or run_dir holds another run, RunError where the run cannot go on.
    """
    resolved = _resolved(recipe)
    with heavy_imports():
        from postgrad.training import start as job

    job.train(resolved, _console(quiet), overwrite=overwrite, allow_change=allow_change)
    return Run(resolved.run_dir)


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    allow_change: Sequence[str] = (),
    quiet: bool = False,
) -> Run:
    """Goes on with a run from its newest checkpoint, to the same bits as if it had never stopped.

    overrides: as on the command line, ["--steps", "200"]. Raises UsageError where there is no run
    or a key changed that may not, RunError where it cannot go on.
    """
    with heavy_imports():
        from postgrad.training import start as job

    job.resume(Path(run_dir), overrides, allow_change, _console(quiet))
    return Run(run_dir)


def sweep(
    recipe: Recipe | str | Path,
    values: Mapping[str, Sequence[Any]],
    *,
    at_once: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> RunsOfSweep:
    """Runs a recipe, or the pipeline in a folder, with every combination of values: {"learner.lr":
    [1e-4, 3e-4]}. Each run is a process of its own in a directory below `run_dir`. Runs that have
    finished are not run again, others go on.

    at_once: runs at the same time; None: as many as cores and memory allow. A run that fails does
    not end the others: see `summary`. Raises UsageError where a key or a value is wrong.
    """
    from postgrad.recipe.sweep import sweep_of, swept_in_python
    from postgrad.tools.sweep.run import Command, show, train_sweep

    source = Path(recipe) if isinstance(recipe, str | Path) else _resolved(recipe)
    console = _console(quiet)
    command = Command(overwrite, (), at_once, None if quiet else sys.stdout)
    result = train_sweep(sweep_of(source, (), swept_in_python(values)), console, command)
    show(result, console)
    return RunsOfSweep(result.sweep.path)


def evaluate(
    recipe: Recipe | str | Path,
    model: str | Path,
    against: str | Path | None = None,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """A model on the evaluation sets of a recipe, and beside it another one; what `postgrad eval
    --json` prints: `accuracy` or, of held-out conversations, `loss`; `rows`, `failed`, `pass@k`,
    `maj@k`, `sets`, ...

    Raises UsageError where the recipe has nothing to evaluate on, or there is no such model.
    """
    resolved = _resolved(recipe)
    with heavy_imports():
        from postgrad.tools import evaluate as job

    other = None if against is None else str(against)
    return job.evaluate(resolved, str(model), _console(quiet), other)


def _resolved(recipe: Any) -> Recipe:
    """A recipe, or that of a file. Raises UsageError for anything else, such as a dict."""
    if isinstance(recipe, str | Path):
        return load_recipe(recipe)
    if not isinstance(recipe, Recipe):
        raise UsageError(
            "a recipe is expected, or the name of its file, and this is a "
            f"{type(recipe).__name__}: SFTRecipe(...), RewardRecipe(...), PreferenceRecipe(...) "
            "and RLRecipe(...) make one"
        )
    return recipe


def _console(quiet: bool) -> Console:
    return Console("quiet" if quiet else "auto")

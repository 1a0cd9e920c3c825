"""Checks of [eval], and of the metric that chooses the best checkpoint. Each yields (place in the
recipe, what is wrong).
"""

from collections.abc import Iterator

from postgrad.data.settings import WHICH_ROWS, RowSettings
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import AnsweringSections, Sections

LOWER_IS_BETTER = ("/loss", "/perplexity")  # ends of the names of such metrics


def evaluation_problems(recipe: Sections) -> Iterator[RecipeProblem]:
    """[eval] without data or beyond the model's positions; a best metric that it does not give."""
    settings = recipe.eval
    yield from _best_metric(recipe)
    if not settings.sets and (settings.every or settings.at_start):
        yield ("eval",), "there is nothing to evaluate on: give path, or [[eval.sets]]"
    init = recipe.model.init if recipe.model.path is None else None
    for number, eval_set in enumerate(settings.sets):
        longest = eval_set.max_len
        if init is not None and recipe.data.max_len < longest > init.max_position_embeddings:
            yield (
                ("eval", "sets", number, "max_len"),
                f"{longest} tokens are more than the model's positions: "
                f"max_position_embeddings = {init.max_position_embeddings}",
            )


def _best_metric(recipe: Sections) -> Iterator[RecipeProblem]:
    """A best metric that no evaluation of the run gives, or that is taken the wrong way round; an
    early stop without one.
    """
    place, times = ("checkpoint", "best_metric"), recipe.eval
    metric, mode = recipe.checkpoint.best_metric, recipe.checkpoint.best_mode
    if metric is None:
        if recipe.checkpoint.early_stop:
            yield (
                ("checkpoint", "early_stop"),
                "needs to know what better is: give checkpoint.best_metric, such as "
                '"eval/accuracy"',
            )
        return
    if not metric.startswith("eval/"):
        yield (
            place,
            f'{metric!r} is no metric of an evaluation: their names begin with "eval/", as '
            '"eval/accuracy" does',
        )
    elif not times.sets:
        yield place, f"{metric!r} needs an evaluation: give [eval] a path"
    elif not (times.every or times.at_start or times.at_end):
        yield place, f"{metric!r} is never measured: give eval.every, or set eval.at_end = true"
    elif (choices := _measured(recipe, metric)) is not None:
        yield (
            place,
            f"{metric!r} is not what this recipe's evaluations measure: {', '.join(choices)}",
        )
    if metric.startswith("eval/") and metric.endswith(LOWER_IS_BETTER) and mode == "max":
        yield (
            ("checkpoint", "best_mode"),
            f'"max" would keep the worst {metric}: lower is better, say best_mode = "min"',
        )


def _measured(recipe: Sections, metric: str) -> list[str] | None:
    """The names of what evaluations measure, where `metric` cannot be among them; None where it is,
    or where rows and environments decide whether it is.
    """
    measured: list[str] = []
    for place, eval_set in enumerate(recipe.eval.sets):
        names = _metric_names(recipe, place)
        if not names:
            return None
        of_answers = list[str]()
        open_ended = ["rows/", *(f"{name}/" for name in names if name != "reward")]
        if isinstance(recipe, AnsweringSections) and recipe.evaluates_answers:
            sampling = recipe.eval.samplings[place]
            at = (1, *sampling.pass_at, *sampling.maj_at)
            of_answers = ["dead_end_fraction", *(f"left_out@{k}" for k in at)]
            open_ended.append("environment/")
        prefix = "eval/" if eval_set.name is None else f"eval/{eval_set.name}/"
        name = metric.removeprefix(prefix) if metric.startswith(prefix) else ""
        if name in (*names, *of_answers) or name.startswith(tuple(open_ended)):
            return None
        measured += [prefix + name for name in names]
    return measured


def _metric_names(recipe: Sections, place: int) -> list[str] | None:
    """What an evaluation measures of set `place` (evaluation/results.py), but for what depends on
    rows; None or nothing where [[rewards]] have an error or are missing, which is told elsewhere.
    """
    if not isinstance(recipe, AnsweringSections):
        if recipe.row_kind == "steps":
            return ["accuracy", "loss", "step_accuracy", "erroneous", "correct", "f1"]
        scores = ("chosen", "rejected", "mean", "std")
        return ["accuracy", "margin", "calibration_error", *(f"reward_{name}" for name in scores)]
    names = list[str]()
    if recipe.reward_components is None:
        return None
    if recipe.evaluates_answers:
        sampling = recipe.eval.samplings[place]
        names += ["accuracy", *(f"pass@{k}" for k in sampling.pass_at if k > 1)]
        names += [f"maj@{k}" for k in sampling.maj_at]
        names += ["greedy_accuracy"] if recipe.eval.greedy else []
        names += ["reward", "response_length", "truncated_fraction"]
        names += [f"reward/{name}" for name in recipe.reward_components]
    return names + (["loss", "perplexity"] if recipe.measures_loss else [])


def evaluation_lengths(recipe: Sections) -> Iterator[RecipeProblem]:
    """Held-out sequences too long for the learner, which computes each of them in one forward."""
    for number, eval_set in enumerate(recipe.eval.sets):
        if eval_set.max_len > recipe.data.max_len:
            yield (
                ("eval", "sets", number, "max_len"),
                f"{eval_set.max_len} tokens are more than data.max_len = {recipe.data.max_len}, "
                "for which the learner is sized: raise that",
            )


def eval_fraction_problems(recipe: Sections) -> Iterator[RecipeProblem]:
    """A part of the training data that no evaluation reads, or that is read otherwise."""
    sources, sets = recipe.data.sources, recipe.eval.sets
    parts = [eval_set.data for eval_set in sets if eval_set.eval_fraction]
    for number, source in enumerate(sources):
        if source.eval_fraction and not any(same_rows(source, part) for part in parts):
            yield (
                (("data", "sets", number) if recipe.data.sets else ("data",)) + ("eval_fraction",),
                "holds out rows to evaluate on, but [eval] names rows of its own: delete path, "
                "split and sets from [eval] to evaluate on the held-out rows, or delete this key",
            )
    for number, eval_set in enumerate(sets):
        if eval_set.eval_fraction and not any(same_rows(eval_set.data, s) for s in sources):
            yield (
                ("eval", "sets", number, "eval_fraction"),
                "is a key of [data]: the part is of the rows that are trained on",
            )


def same_rows(a: RowSettings, b: RowSettings) -> bool:
    """Whether two settings read the same rows and hold out the same part of them."""
    return all(getattr(a, key) == getattr(b, key) for key in (*WHICH_ROWS, "eval_fraction"))

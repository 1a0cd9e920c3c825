"""`postgrad eval`: a model against the evaluation sets of a recipe, or two models side by side; by
sampled answers, by the loss of held-out conversations, or by preferences.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import whole_file
from postgrad.core.hub import split_revision
from postgrad.core.media import IMAGES, images_kept_in
from postgrad.core.progress import reported_to
from postgrad.core.records import Sequences
from postgrad.core.text import how_many
from postgrad.evaluation.answers import Evaluator, check_answers
from postgrad.evaluation.losses import LossEvaluator, with_losses
from postgrad.evaluation.pairs import PairEvaluator
from postgrad.evaluation.results import (
    Comparison,
    Result,
    compare,
)
from postgrad.evaluation.steps import StepEvaluator
from postgrad.evaluation.votes import require_votes
from postgrad.fleet.choices import Choices, choose
from postgrad.fleet.engines import build_engine
from postgrad.fleet.learned import learned_reward, scorer_of
from postgrad.fleet.loading import frozen_policy, frozen_reward_model
from postgrad.learner.score import last_scores, step_scores
from postgrad.models.settings import ModelSettings
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.observe.sinks import fast_json
from postgrad.recipe.load import require_models
from postgrad.recipe.recipe import (
    Answering,
    Comparing,
    PreferenceRecipe,
    Recipe,
    RewardRecipe,
)
from postgrad.rollout.environments.sets import check_rows
from postgrad.tools.eval_results import results_json, show_differing, show_results
from postgrad.tools.export import checkpoint_in, export
from postgrad.training.pairs import implicit_rewards
from postgrad.training.pinned import pin, pin_model
from postgrad.training.rows import image_reader, print_rows


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model to evaluate."""

    name: str  # as a person gave it
    path: str  # of the directory that it is read from, or a hub id


def evaluate(
    recipe: Recipe,
    model: str,
    console: Console,
    against: str | None = None,
    to: Path | None = None,
) -> dict[str, Any]:
    """Evaluates a model; returns and shows its results as JSON values.

    The top level has the first set's results: rows, failed, accuracy with its interval, or loss and
    perplexity of held-out conversations, and for rl jobs pass@k and, where it was asked, maj@k with
    the number of problems that each k leaves out. "sets" has the results of all sets.

    model: a Hugging Face directory, a hub id, a run or one of its checkpoints (`checkpoint_in`).

    against: a second model, evaluated with the same prompts and random numbers. Its results stand
    under "against", the paired differences of each set under "comparison".

    to: gets every answer as a line of eval_samples.jsonl, with "model" in place of its step. Raises
    UsageError where the recipe has no evaluation set, and for `to` where nothing is sampled.
    """
    if not recipe.eval.sets:
        raise UsageError("the recipe has nothing to evaluate on: give [eval] a path")
    recipe, read = pin(_with_all_answers(recipe, to), sections=("reward_model", "eval"))
    with _scratch() as folder:
        models = {
            name: read_from(name, folder / str(number))
            for number, name in enumerate(dict.fromkeys((model, against)))
            if name
        }
        results = {
            name: _results(recipe, Evaluated(name, source), console)
            for name, source in models.items()
        }
    report = {"model": model, **results_json(recipe, results[model])}
    if resolved := [source.to_json() for source in read] + _commits(models):
        report["sources"] = resolved
    if against is None:
        show_results([results[model]], [], console)
        _write_answers(results, to)  # last: a full disk does not take what was measured
        return report
    console.note(f"model    {model}\nagainst  {against}")
    comparisons = _comparisons(results, (model, against), recipe.seed, console)
    _write_answers(results, to)
    return {
        **report,
        "against": {"model": against, **results_json(recipe, results[against])},
        "comparison": [comparison.to_json() for comparison in comparisons],
    }


@contextmanager
def _scratch() -> Generator[Path]:
    """A temporary directory, which the images of rows go to as well."""
    with TemporaryDirectory(prefix="postgrad-") as name, images_kept_in(Path(name) / IMAGES):
        yield Path(name)


def _comparisons(
    results: Mapping[str, list[Result]], names: tuple[str, str], seed: int, console: Console
) -> list[Comparison]:
    """The sets of two models compared, and shown."""
    ours, theirs = (results[name] for name in names)
    comparisons = [compare(*pair, seed) for pair in zip(ours, theirs, strict=True)]
    show_results([ours, theirs], comparisons, console)
    for comparison in comparisons:
        show_differing(comparison, console)
    for name, of_model in results.items():
        _warn_of_ties(name, of_model, console)
    return comparisons


def _warn_of_ties(name: str, results: Sequence[Result], console: Console) -> None:
    """Says of how many pairs a model scores both answers alike: its accuracy there is no opinion.
    All of them are, where the model is the reference that its implicit rewards are told from.
    """
    ties = sum(result.more.get("ties", 0) for result in results)
    if ties:
        rows = sum(result.rows for result in results)
        console.warn(
            f"{name} scores both answers alike in {ties} of {rows} pairs, which count as wrong: "
            "its accuracy, and the difference from it, say nothing about them (a model that is the "
            "reference scores every answer 0); compare two trained models, or read margin"
        )


def _with_all_answers(recipe: Recipe, to: Path | None) -> Recipe:
    """The recipe without thinned samples, where they go to a file. Raises UsageError where `to`
    cannot be written.
    """
    if to is None:
        return recipe
    if not recipe.evaluates_answers:
        raise UsageError(f"--to {to}: this recipe samples no answers: give it [[rewards]]")
    if to.is_dir() or not to.parent.is_dir():
        raise UsageError(f"--to {to}: name a file in a directory that is there")
    everything = recipe.observe.model_copy(update={"eval_samples": "all"})
    return recipe.model_copy(update={"observe": everything})


def _write_answers(results: Mapping[str, Sequence[Result]], to: Path | None) -> None:
    if to is None:
        return
    with whole_file(to) as written, written.open("wb") as file:
        for name, of_model in results.items():
            for line in (line for result in of_model for line in result.samples):
                without_step = {key: value for key, value in line.items() if key != "step"}
                file.write(fast_json({"model": name, **without_step}) + b"\n")


def _commits(models: Mapping[str, str]) -> list[dict[str, Any]]:
    """The commits that hub ids were read at. models: by name, where each is read from."""
    return [
        {"key": "--model", "path": name, "commit": split_revision(source)[1]}
        for name, source in models.items()
        if source != name and split_revision(source)[1]
    ]


def read_from(name: str, folder: Path) -> str:
    """The directory or hub id, at its commit, that model `name` is read from. A run's checkpoint
    is exported to `folder`.
    """
    checkpoint = checkpoint_in(Path(name))
    return pin_model(name) if checkpoint is None else str(export(*checkpoint, folder))


def _results(recipe: Recipe, model: Evaluated, console: Console) -> list[Result]:
    choices = choose(recipe, {}, measure=False)
    choices.apply()
    if not isinstance(recipe, Answering):
        return evaluate_pairs(recipe, model, choices, console)
    answered = _answers(recipe, model, choices, console) if recipe.evaluates_answers else []
    if not recipe.measures_loss:
        return answered
    losses = evaluate_loss(recipe, model, choices, console)
    return with_losses(answered, losses) if answered else losses


def _answers(
    recipe: Answering, model: Evaluated, choices: Choices, console: Console
) -> list[Result]:
    tokenizer = load_tokenizer(model.path)
    learned = learned_reward(recipe, tokenizer)
    with ExitStack() as stack:
        with console.phase(f"load {model.name}") as shown, reported_to(shown.count):
            scorer = stack.enter_context(scorer_of(recipe, tokenizer, learned))
        reader = image_reader(model.path, tokenizer)
        evaluator = Evaluator(recipe, tokenizer, scorer, reader)
        accounts = [prompts.account for _, prompts in evaluator.sets]
        print_rows(console, accounts, f"rows of the evaluation data, read by {model.name}")
        for _, prompts in evaluator.sets:
            check_rows(recipe.environment, prompts)
            check_answers(scorer, prompts.all(), [eval_set.data for eval_set in recipe.eval.sets])
        every = (prompt for _, prompts in evaluator.sets for prompt in prompts.all())
        require_votes(recipe, every, tokenizer)
        if learned is not None:
            judge = recipe.model_tables["reward_model", "model"]
            learned.role = frozen_reward_model(recipe, judge, learned.path, choices)
        engine, _ = build_engine(
            recipe.rollout,
            model.path,
            choices,
            stack,
            sequences=evaluator.sequences,
            max_len=evaluator.max_len,
            eos_token=recipe.model.eos_token,
            router_dtype=recipe.model.router_dtype,
        )
        with console.phase(f"evaluate {model.name}", evaluator.total) as shown:
            return evaluator(engine, shown.advance)


def evaluate_pairs(
    recipe: Comparing, model: Evaluated, choices: Choices, console: Console
) -> list[Result]:
    """Results by set: of a reward model by its scores, of a policy by the implicit rewards of its
    loss.
    """
    if recipe.row_kind == "steps":
        return evaluate_steps(recipe, model, choices, console)
    tokenizer = load_tokenizer(model.path)
    reader = image_reader(model.path, tokenizer)
    evaluator = PairEvaluator(recipe, tokenizer, reader)
    print_rows(console, evaluator.accounts, f"rows of the evaluation data, read by {model.name}")
    with console.phase(f"evaluate {model.name}"):
        if isinstance(recipe, RewardRecipe):
            role = frozen_reward_model(recipe, _unquantized(recipe.model), model.path, choices)
            return evaluator(lambda sequences: last_scores(role, sequences))
        return evaluator(_scores_of_policy(recipe, model.path, choices))


def evaluate_steps(
    recipe: Comparing, model: Evaluated, choices: Choices, console: Console
) -> list[Result]:
    """Results by set, of a process reward model."""
    tokenizer = load_tokenizer(model.path)
    reader = image_reader(model.path, tokenizer)
    evaluator = StepEvaluator(recipe, tokenizer, reader)
    print_rows(console, evaluator.accounts, f"rows of the evaluation data, read by {model.name}")
    with console.phase(f"evaluate {model.name}"):
        role = frozen_reward_model(recipe, _unquantized(recipe.model), model.path, choices)
        return evaluator(lambda sequences: step_scores(role, sequences))


def _unquantized(settings: ModelSettings) -> ModelSettings:
    """Of a model that is evaluated: a run in four bits exports what they read as with its adapter
    merged, and to round that to four bits again would round most of the adapter away.
    """
    return settings.model_copy(update={"quantize": "none"})


def _scores_of_policy(
    recipe: PreferenceRecipe, path: str, choices: Choices
) -> Callable[[Sequences], NDArray[np.float64]]:
    policy = frozen_policy(recipe, _unquantized(recipe.model), path, choices)
    reference = None
    if recipe.algorithm.needs().reference:
        require_models(recipe, ("reference",))
        start = recipe.reference.model.source or recipe.model.source
        if start is None:
            raise UsageError(
                "the recipe's loss needs a reference, and the run's reference was a fresh model: "
                "name it with --reference.model.path RUN_DIR/init"
            )
        reference = frozen_policy(recipe, recipe.reference.model, start, choices)

    def score(sequences: Sequences) -> NDArray[np.float64]:
        logprobs = policy.logprobs(sequences).result()
        ref = None if reference is None else reference.logprobs(sequences).result()
        return implicit_rewards(recipe.algorithm, sequences, logprobs, ref)

    return score


def evaluate_loss(
    recipe: Answering, model: Evaluated, choices: Choices, console: Console
) -> list[Result]:
    """The results of `model` by the loss of held-out conversations."""
    tokenizer = load_tokenizer(model.path)
    reader = image_reader(model.path, tokenizer)
    evaluator = LossEvaluator(recipe, tokenizer, reader)
    print_rows(console, evaluator.accounts, f"held-out conversations, read by {model.name}")
    with console.phase(f"evaluate {model.name}"):
        policy = frozen_policy(recipe, _unquantized(recipe.model), model.path, choices)
        results = evaluator(lambda sequences: policy.logprobs(sequences).result())
    for result in results:
        if result.rows and result.failed == result.rows:
            raise RunError(
                f"{model.name} gives no finite logprobs on any of {how_many(result.rows, 'row')}: "
                "its weights are damaged, or have diverged; evaluate an earlier checkpoint"
            )
    return results

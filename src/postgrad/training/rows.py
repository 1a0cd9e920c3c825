"""The rows of a run: training data by what the job learns from, evaluation sets, and the tables
that account for them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from postgrad.core.records import Prompt
from postgrad.data import account, overlap
from postgrad.data.account import RowAccount
from postgrad.data.conversations import Conversation, load_conversations
from postgrad.data.draws import DrawnSet, Draws
from postgrad.data.mixture import training_prompts, training_rows
from postgrad.data.pairs import (
    Labelled,
    Pair,
    load_labelled,
    load_pairs,
)
from postgrad.data.step_tokens import Stepwise, load_steps
from postgrad.evaluation import answers, losses
from postgrad.evaluation import pairs as pair_sets
from postgrad.evaluation import steps as step_sets
from postgrad.evaluation.answers import (
    Evaluator,
    check_answers,
    unreadable_by,
)
from postgrad.evaluation.keys import keys_of
from postgrad.evaluation.votes import require_votes
from postgrad.fleet.loading import least_shared
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.supported import reads_images
from postgrad.observe.console import Console
from postgrad.recipe.recipe import (
    Answering,
    Comparing,
    Recipe,
    RewardRecipe,
    RLRecipe,
    SFTRecipe,
)
from postgrad.recipe.settings import RowKind
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.curriculum import require_told_apart
from postgrad.rollout.environment import Environments
from postgrad.rollout.environments.chat import NOT_EXACT
from postgrad.rollout.environments.sets import as_played, check_rows, dialogues
from postgrad.training.run import Run


def held_out(recipe: Recipe) -> overlap.HeldOut:
    """The questions of all evaluation sets, or their rows: none of them may be trained on."""
    by_default = "row" if isinstance(recipe, RLRecipe) and recipe.environment else "question"
    by, ngram = recipe.data.held_out or by_default, recipe.data.decontaminate_ngram
    held = overlap.held_out([], ngram, by)
    for place, eval_set in enumerate(recipe.eval.sets):
        with keys_of(recipe.eval, place, recipe.data):
            held |= overlap.held_out([eval_set.data], ngram, by)
    return held


def evaluator(
    run: Run,
    recipe: Answering,
    tokenizer: object,
    scorer: Scorer,
    reader: ImageReader | None = None,
) -> Evaluator:
    """Of a policy that answers; its rows are shown and checked. reader: as of image_reader."""
    of_policy = Evaluator(recipe, tokenizer, scorer, reader, _close_failed(run))
    show_rows(run, [drawn.account for _, drawn in of_policy.sets], "evaluation")
    for _, drawn in of_policy.sets:
        check_rows(recipe.environment, drawn)
        check_answers(scorer, drawn.all(), [eval_set.data for eval_set in recipe.eval.sets])
    every = (prompt for _, drawn in of_policy.sets for prompt in drawn.all())
    require_votes(recipe, every, tokenizer)
    return of_policy


def environments(
    run: Run,
    recipe: Answering,
    tokenizer: object,
    stack: ExitStack,
    reader: ImageReader | None = None,
) -> Environments:
    """What answers the policy's turns, closed with `stack`. reader: as of image_reader."""
    data, warn = recipe.data, _close_failed(run)
    played = dialogues(
        recipe.environment, data, tokenizer, stack, reader, warn, max_len=data.max_len
    )
    if not played.deterministic:
        run.logs.event("not_exact", NOT_EXACT, cause="environment")
        run.console.note(NOT_EXACT)
    return played


def _close_failed(run: Run) -> Callable[[str], None]:
    """Records every episode that could not be closed, and warns of the first."""
    warned = threading.Event()

    def tell(text: str) -> None:
        run.logs.event("environment_close_failed", text)
        if not warned.is_set():
            warned.set()
            run.console.warn(f"{text}; events.jsonl has all such failures")

    return tell


def show_training(run: Run, recipe: Recipe, draws: Draws[Any], reader: ImageReader | None) -> None:
    """The table of the training rows. Warns where no row has an image for a tower that would then
    be changed by weight decay alone. reader: as of image_reader.
    """
    show_rows(run, draws.accounts)
    decay, model = recipe.learner.weight_decay, recipe.model
    learns = model.lora is None and not {"vision", "projector"} <= {*model.freeze}
    replies = isinstance(recipe, Answering) and recipe.environment is not None
    if reader is None or not learns or not decay or replies:
        return
    if not any(_shows_images(entry) for entry in draws.all()):
        problem = (
            "no training row has an image, so what reads images gets no gradient, and "
            f"learner.weight_decay = {decay:g} alone would shrink its weights in every update: "
            'say model.freeze = ["vision", "projector"]'
        )
        run.logs.event("idle_tower", problem)
        run.console.warn(problem)


def _shows_images(entry: Any) -> bool:
    names = ("images", "chosen_images", "rejected_images")
    return any(getattr(entry, name, ()) for name in names)


def show_rows(run: Run, accounts: Sequence[RowAccount], purpose: str = "training") -> None:
    """One table that accounts for every row, and an event for each dataset."""
    title = f"rows of the {purpose} data"
    print_rows(run.console, accounts, title)
    for dataset in accounts:
        run.logs.event("data", title, **dataset.to_json())


def print_rows(console: Console, accounts: Sequence[RowAccount], title: str) -> None:
    """The table, and below it where to look and what else to know."""
    console.table(title, *account.table(accounts))
    for dataset in accounts:
        if remarks := dataset.remarks():
            console.note("\n".join([dataset.name, *remarks]))


def image_reader(path: str, tokenizer: Any) -> ImageReader | None:
    """Reads the images of rows and replies for the model at `path`; None for one that reads text
    alone.
    """
    config = load_config(path)
    return ImageReader(path, config, tokenizer) if reads_images(config) else None


def conversations(
    recipe: SFTRecipe, tokenizer: Any, reader: ImageReader | None = None
) -> Draws[Conversation]:
    """Raises UsageError, as the other functions here do, for rows that cannot be read."""
    data = as_played(recipe.environment, recipe.data)
    return training_rows(
        load_conversations, data, tokenizer, exclude=held_out(recipe), reader=reader
    )


def prompts(
    recipe: RLRecipe,
    tokenizer: Any,
    reader: ImageReader | None = None,
    scorer: Scorer | None = None,
) -> Draws[Prompt]:
    """What the policy answers. scorer: asked where data.on_unreadable is "drop"."""
    draws = training_prompts(
        as_played(recipe.environment, recipe.data),
        tokenizer,
        max_new_tokens=recipe.rollout.max_new_tokens,
        exclude=held_out(recipe),
        reader=reader,
        unreadable=unreadable_by(scorer),
    )
    require_told_apart(recipe.rollout.curriculum, draws.all())
    return draws


def pairs(recipe: Comparing, tokenizer: Any, reader: ImageReader | None = None) -> Draws[Pair]:
    """What a reward model, or a loss on pairs, learns from."""
    shared = partial(least_shared, recipe, recipe.model.source)
    load = partial(load_pairs, scored=recipe.job == "reward", shared=shared)
    return training_rows(load, recipe.data, tokenizer, exclude=held_out(recipe), reader=reader)


def labelled(
    recipe: Comparing, tokenizer: Any, reader: ImageReader | None = None
) -> Draws[Labelled]:
    """What a loss on one answer at a time learns from."""
    return training_rows(
        load_labelled, recipe.data, tokenizer, exclude=held_out(recipe), reader=reader
    )


def steps(recipe: Comparing, tokenizer: Any, reader: ImageReader | None = None) -> Draws[Stepwise]:
    """What a process reward model learns from."""
    return training_rows(
        load_steps, recipe.data, tokenizer, exclude=held_out(recipe), reader=reader
    )


READERS: Mapping[RowKind, Callable[[Any, Any, ImageReader | None], Draws[Any]]] = {
    "conversation": conversations,
    "prompt": prompts,
    "pair": pairs,
    "labelled": labelled,
    "steps": steps,
}


def training(recipe: Recipe, tokenizer: Any, reader: ImageReader | None = None) -> Draws[Any]:
    """What the recipe's job learns from. reader: as of image_reader."""
    return READERS[recipe.row_kind](recipe, tokenizer, reader)


def evaluated(
    recipe: Recipe, place: int, tokenizer: Any, reader: ImageReader | None = None
) -> DrawnSet[Any]:
    """The evaluation set number `place`. reader: as of image_reader."""
    if isinstance(recipe, RewardRecipe) and recipe.row_kind == "steps":
        return step_sets.read_set(recipe, place, tokenizer, reader)
    if not isinstance(recipe, Answering):
        return pair_sets.read_set(recipe, place, tokenizer, reader)
    read_set = answers.read_set if recipe.evaluates_answers else losses.read_set
    return read_set(recipe, place, tokenizer, reader)

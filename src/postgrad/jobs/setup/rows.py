"""The rows that a job reads: what it learns from, and what it is evaluated on."""

from typing import Any

from postgrad.core.records import Prompt
from postgrad.data.conversations import Conversation
from postgrad.data.draws import DrawnSet, Draws
from postgrad.data.mixture import training_conversations, training_prompts
from postgrad.data.pairs import Labelled, Pair, training_labelled, training_pairs
from postgrad.jobs import environments, evaluation, held_out_loss
from postgrad.jobs import pairs as paired
from postgrad.jobs.setup import common
from postgrad.recipe.recipe import Answering, Comparing, Recipe, RLRecipe, SFTRecipe


def conversations(recipe: SFTRecipe, tokenizer: Any) -> Draws[Conversation]:
    """Raises UsageError, as the other functions here do, for rows that cannot be read."""
    data = environments.with_tools(recipe, recipe.data)
    return training_conversations(data, tokenizer, exclude=common.held_out(recipe))


def prompts(recipe: RLRecipe, tokenizer: Any) -> Draws[Prompt]:
    """What the policy answers."""
    return training_prompts(
        environments.with_tools(recipe, recipe.data),
        tokenizer,
        max_new_tokens=recipe.rollout.max_new_tokens,
        exclude=common.held_out(recipe),
    )


def pairs(recipe: Comparing, tokenizer: Any) -> Draws[Pair]:
    """What a reward model, or a loss on pairs, learns from."""
    return training_pairs(recipe.data, tokenizer, exclude=common.held_out(recipe))


def labelled(recipe: Comparing, tokenizer: Any) -> Draws[Labelled]:
    """What a loss on one answer at a time learns from."""
    return training_labelled(recipe.data, tokenizer, exclude=common.held_out(recipe))


def training(recipe: Recipe, tokenizer: Any) -> Draws[Any]:
    """What the recipe's job learns from."""
    if isinstance(recipe, SFTRecipe):
        return conversations(recipe, tokenizer)
    if isinstance(recipe, RLRecipe):
        return prompts(recipe, tokenizer)
    read = pairs if recipe.algorithm.level == "pair" else labelled
    return read(recipe, tokenizer)


def evaluated(recipe: Recipe, place: int, tokenizer: Any) -> DrawnSet[Any]:
    """The evaluation set number `place`."""
    if isinstance(recipe, SFTRecipe) and not recipe.samples_answers:
        return held_out_loss.read_set(recipe, recipe.eval.sets[place], tokenizer)
    if isinstance(recipe, Answering):
        return evaluation.read_set(recipe, recipe.eval.sets[place], tokenizer)
    return paired.read_set(recipe.eval.sets[place], tokenizer)

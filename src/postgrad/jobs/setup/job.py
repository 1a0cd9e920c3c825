"""The job of a run."""

from contextlib import ExitStack

from postgrad.checkpoint.store import Checkpoint
from postgrad.jobs import engines, roles
from postgrad.jobs.loop import Job
from postgrad.jobs.run import Run
from postgrad.jobs.setup import pairs, rl, sft
from postgrad.models.load import load_config
from postgrad.models.supported import experts_of
from postgrad.recipe.recipe import PreferenceRecipe, RewardRecipe, SFTRecipe


def assemble(run: Run, stack: ExitStack, checkpoint: Checkpoint | None) -> tuple[Job, str]:
    """The job of a run, from a checkpoint where there is one, and its base model's path.

    What has to be closed is put on `stack`. Raises UsageError for data, models or rewards that are
    wrong: row, file or key.
    """
    recipe = run.recipe
    engines.require(recipe)
    with run.phase("load"):
        path = roles.base_model(recipe, run.directory.init)
        tell_of_experts(run, path)
        if isinstance(recipe, SFTRecipe):
            return sft.assemble(run, recipe, path, stack, checkpoint), path
        if isinstance(recipe, RewardRecipe):
            return pairs.reward(run, recipe, path, checkpoint), path
        if isinstance(recipe, PreferenceRecipe):
            return pairs.preference(run, recipe, path, checkpoint), path
        return rl.assemble(run, recipe, path, stack, checkpoint), path


def tell_of_experts(run: Run, path: str) -> None:
    """A mixture of experts trains, and nothing keeps its router balanced."""
    config = load_config(path)
    if not (experts := experts_of(config)):
        return
    text = (
        f"{path} is a {config.model_type} model with {experts} experts a layer: it is trained "
        "without an auxiliary loss, so that nothing keeps its router from using few of them, and "
        "without replaying the engine's routing; watch it, keep learner.lr low, or train a dense "
        "model"
    )
    run.logs.event("no_auxiliary_loss", text, experts=experts)
    run.console.warn(text)

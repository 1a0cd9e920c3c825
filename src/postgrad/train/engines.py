"""The rollout engine that a recipe names, in this process or in one of its own."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.fleet import local as roles
from postgrad.fleet.choices import Choices
from postgrad.models.files import is_adapter
from postgrad.models.load import load_tokenizer
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.rollout.engine import Engine
from postgrad.rollout.openai.engine import OpenAIEngine
from postgrad.rollout.vllm import start as vllm
from postgrad.rollout.vllm.process import interpreter
from postgrad.train import memory as auto_sizes
from postgrad.train.run import Run


def require(recipe: Recipe) -> None:
    """Raises UsageError, before anything is loaded, where the recipe's engine cannot start here."""
    if not isinstance(recipe, Answering) or recipe.rollout.type != "vllm":
        return
    _require_whole_model(recipe.model.path)
    if not recipe.cluster.engines(recipe.learner.ranks):  # else they start on other machines
        interpreter(recipe.rollout.vllm.python)


def for_run(
    run: Run, recipe: Answering, path: str, stack: ExitStack, *, sequences: int, max_len: int
) -> Engine:
    """The engine of a run that publishes weights to it, closed with `stack`. Sets the run's
    choices. Raises UsageError for an engine that takes none.
    """
    sizes = {"sequences": sequences, "max_len": max_len}
    if recipe.rollout.type == "local":
        return auto_sizes.engine(run, recipe, path, **sizes)
    if recipe.rollout.type == "openai":
        raise UsageError('rollout.type = "openai" can be evaluated and not trained')
    logs = run.directory.path
    engine, run.choices = _vllm(recipe, path, run.choices, stack, logs, **sizes)
    return engine


def made(
    recipe: Answering,
    path: str,
    choices: Choices,
    stack: ExitStack,
    *,
    sequences: int,
    max_len: int,
    logs: Path | None = None,
) -> tuple[Engine, Choices]:
    """The engine with the weights of `path` (a server has its own), closed with `stack`, and the
    choices with its sizes. sequences: how many are sampled at once; max_len: tokens of the longest.
    logs: see rollout.vllm.start.
    """
    if recipe.rollout.type == "local":
        return roles.engine(recipe, path, choices, sequences=sequences, max_len=max_len)
    sizes = {"sequences": sequences, "max_len": max_len}
    if recipe.rollout.type == "vllm":
        return _vllm(recipe, path, choices, stack, logs, **sizes)
    one = recipe.rollout.openai
    server = OpenAIEngine(one, one.model or split_revision(path)[0], load_tokenizer(path))
    stack.callback(server.close)
    return server, choices


def _vllm(
    recipe: Answering,
    path: str,
    choices: Choices,
    stack: ExitStack,
    logs: Path | None,
    *,
    sequences: int,
    max_len: int,
) -> tuple[Engine, Choices]:
    _require_whole_model(path)
    device = torch.device(choices.device)
    assert choices.rollout_dtype is not None  # of every job that answers
    dtype = compute_dtype(choices.rollout_dtype, device)
    sizes = choices.sizes or vllm.sizes_of(
        path, recipe.rollout, dtype, sequences=sequences, max_len=max_len
    )
    engine = vllm.start(
        path,
        recipe.rollout,
        vllm.read_model(path, dtype, max_len),
        sizes,
        device=device,
        threads=choices.threads,
        logs=logs,
    )
    stack.callback(engine.close)
    return engine, replace(choices, slots=sizes.slots, cache_tokens=sizes.cache_tokens)


def _require_whole_model(path: str | None) -> None:
    """vLLM reads the files of a model by itself, and would begin with the base of an adapter."""
    if path is not None and is_adapter(path):
        raise UsageError(
            f'rollout.type = "vllm" reads whole models, and {path} is an adapter: merge it first '
            f"(postgrad export {path} --to MODEL), and name MODEL"
        )

"""The rollout engine that a recipe names, and its end."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from postgrad.jobs import auto_sizes, roles
from postgrad.jobs.choices import Choices
from postgrad.jobs.run import Run
from postgrad.models.load import load_tokenizer
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.recipe import Answering
from postgrad.rollout.engine import Engine
from postgrad.rollout.openai.engine import OpenAIEngine
from postgrad.rollout.vllm import start as vllm


def for_run(
    run: Run, recipe: Answering, path: str, stack: ExitStack, *, sequences: int, max_len: int
) -> Engine:
    """The engine of a run, closed with `stack`. Sets the run's choices."""
    if recipe.rollout.type == "local":
        return auto_sizes.engine(run, recipe, path, sequences=sequences, max_len=max_len)
    engine, run.choices = started(
        recipe,
        path,
        run.choices,
        stack,
        sequences=sequences,
        max_len=max_len,
        logs=run.directory.path,
    )
    return engine


def for_evaluation(
    recipe: Answering,
    path: str,
    choices: Choices,
    stack: ExitStack,
    *,
    sequences: int,
    max_len: int,
) -> Engine:
    """The engine of `postgrad eval`, with the weights of `path` (a server has its own), closed with
    `stack`.
    """
    if recipe.rollout.type == "openai":
        one = recipe.rollout.openai
        server = OpenAIEngine(one, one.model or path, load_tokenizer(path))
        stack.callback(server.close)
        return server
    engine, _ = started(recipe, path, choices, stack, sequences=sequences, max_len=max_len)
    return engine


def started(
    recipe: Answering,
    path: str,
    choices: Choices,
    stack: ExitStack,
    *,
    sequences: int,
    max_len: int,
    logs: Path | None = None,
) -> tuple[Engine, Choices]:
    """An engine with the weights of `path`, closed with `stack`, and the choices with its sizes.
    logs: the folder for what a process of the engine writes.
    """
    if recipe.rollout.type == "local":
        return roles.engine(recipe, path, choices, sequences=sequences, max_len=max_len)
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

"""Rollout engines: the one that a recipe names, built here or in a worker process of a cluster."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.core.media import IMAGES, images_kept_in
from postgrad.core.records import PlacedImage
from postgrad.fleet.choices import Choices
from postgrad.fleet.receiving import WorkerWeights
from postgrad.models.attention import text_config
from postgrad.models.config import load_config
from postgrad.models.end_tokens import with_ends
from postgrad.models.files import is_adapter
from postgrad.models.four_bits import in_four_bits, twin
from postgrad.models.image_reader import tower_of
from postgrad.models.load import LoadedModel, load_model
from postgrad.models.rope import require_length
from postgrad.models.routers import give_dtype
from postgrad.models.settings import LoraSettings, RouterDtype
from postgrad.models.tokenizer import load_tokenizer
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Completion, Engine, HaltingEngine, Request
from postgrad.rollout.local.budget import EngineSizes, choose_sizes
from postgrad.rollout.local.cache import bytes_per_token
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.prompts import layer_shapes, state_bytes
from postgrad.rollout.openai.engine import OpenAIEngine
from postgrad.rollout.replay import images_of
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.stats import EngineSums
from postgrad.rollout.vllm import start as vllm
from postgrad.rollout.vllm.engine import VLLMEngine
from postgrad.rollout.vllm.process import interpreter

WORKER = "postgrad.fleet.engines:EngineWorker"


def require_startable(recipe: Recipe) -> None:
    """Raises UsageError, before anything is loaded, where the recipe's engine cannot start here."""
    settings = recipe.rollout_settings
    if settings is None or settings.type != "vllm":
        return
    _require_whole_model(recipe.model.path)
    if not recipe.cluster.engines(recipe.learner.ranks):  # else they start on other machines
        interpreter(settings.vllm.python)


def require_images_sampled(recipe: Recipe, path: str) -> None:
    """Raises UsageError, before weights are loaded, where vLLM is to sample a model that reads
    images and cannot. path: of that model.
    """
    settings = recipe.rollout_settings
    if settings is None or settings.type != "vllm":
        return
    vllm.require_images_sampled(load_config(path), path)
    if not recipe.cluster.engines(recipe.learner.ranks):  # else they start on other machines
        interpreter(settings.vllm.python, torchvision=True)


def require_trainable(settings: RolloutSettings) -> None:
    """Raises UsageError for an engine that takes no weights."""
    if settings.type == "openai":
        raise UsageError('rollout.type = "openai" can be evaluated and not trained')


def build_engine(
    settings: RolloutSettings,
    path: str,
    choices: Choices,
    stack: ExitStack,
    *,
    sequences: int,
    max_len: int,
    logs: Path | None = None,
    borrows: bool = False,
    policy: nn.Module | None = None,
    beside_learner: bool = False,
    lora: LoraSettings | None = None,
    eos_token: Sequence[str] = (),
    router_dtype: RouterDtype = "auto",
) -> tuple[Engine, Choices]:
    """The engine with the weights of `path` (a server has its own), closed with `stack`, and the
    choices with its sizes.

    sequences: how many are sampled at once; max_len: tokens of the longest. logs: see
    rollout.vllm.start. borrows: see LocalEngine. policy: the model that is trained, where it is in
    this process: the built-in engine may read its weights, see shares_weights. beside_learner: a
    learner works on this process's first GPU. lora: of the policy's adapter. eos_token: tokens that
    end an answer beside the model's own; a server does not hear of them. router_dtype: of the
    policy; vLLM and servers have their own.
    """
    sizes = {"sequences": sequences, "max_len": max_len}
    if settings.type == "local":
        shared = policy if policy is not None and shares_weights(policy, choices, lora) else None
        return _local(
            settings, path, choices, eos_token, router_dtype,
            **sizes, borrows=borrows, shared=shared,
        )  # fmt: skip
    if settings.type == "vllm":
        adapter = lora if settings.sends_adapter else None
        return _vllm(
            settings, path, choices, stack, logs, adapter, eos_token,
            **sizes, beside_learner=beside_learner,
        )  # fmt: skip
    model = settings.openai.model or split_revision(path)[0]
    server = OpenAIEngine(settings.openai, model, load_tokenizer(path))
    stack.callback(server.close)
    return server, choices


def shares_weights(policy: nn.Module, choices: Choices, lora: LoraSettings | None) -> bool:
    """Whether the built-in engine reads a policy's weights where they are, without a copy: those in
    four bits with their adapter, and on a GPU those of a whole model in the engine's dtype.
    """
    if in_four_bits(policy):
        return True
    trains_itself = lora is None and choices.device == "cuda"
    return trains_itself and choices.rollout_dtype == choices.dtype


def _local(
    settings: RolloutSettings,
    path: str,
    choices: Choices,
    eos_token: Sequence[str],
    router_dtype: RouterDtype,
    *,
    sequences: int,
    max_len: int,
    borrows: bool,
    shared: nn.Module | None,
) -> tuple[LocalEngine, Choices]:
    """The built-in engine, with a copy of the model unless it borrows one, or shares `shared`."""
    device = torch.device(choices.device)
    assert choices.rollout_dtype is not None  # of every job that answers
    if shared is None:
        dtype = compute_dtype(choices.rollout_dtype, device)
        # A weight in a common piece of memory cannot be borrowed; on a CPU there is no need.
        together = device.type != "cpu" and not borrows
        model = load_model(path, dtype=dtype, device=device, together=together, images=True)
    else:
        model = LoadedModel(twin(shared), load_tokenizer(path), shared.config, path)
    lm: Any = model.lm
    if shared is None:
        give_dtype(lm, router_dtype)
    lm.generation_config = with_ends(lm.generation_config, model.tokenizer, eos_token)
    require_length(text_config(lm), max_len, path)
    sizes = choices.sizes or probe_sizes(lm, settings, sequences=sequences, max_len=max_len)
    engine = LocalEngine(
        lm,
        model.tokenizer,
        slots=sizes.slots,
        cache_tokens=sizes.cache_tokens,
        borrows=borrows,
        shares=shared is not None,
        records_experts=settings.router_replay == "sampled",
        tower=tower_of(model),
    )
    return engine, replace(choices, slots=sizes.slots, cache_tokens=sizes.cache_tokens)


def probe_sizes(
    lm: nn.Module, settings: RolloutSettings, *, sequences: int, max_len: int
) -> EngineSizes:
    """choose_sizes for a model and the memory that is free on its device now."""
    parameter = next(lm.parameters())
    device = parameter.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    token_bytes = bytes_per_token(layer_shapes(lm, device), parameter.dtype)
    return choose_sizes(
        settings,
        sequences=sequences,
        max_len=max_len,
        token_bytes=token_bytes,
        free_bytes=free,
        row_bytes=state_bytes(lm, device),
    )


def _vllm(
    settings: RolloutSettings,
    path: str,
    choices: Choices,
    stack: ExitStack,
    logs: Path | None,
    adapter: LoraSettings | None,
    eos_token: Sequence[str],
    *,
    sequences: int,
    max_len: int,
    beside_learner: bool,
) -> tuple[Engine, Choices]:
    _require_whole_model(path)
    device = torch.device(choices.device)
    assert choices.rollout_dtype is not None  # of every job that answers
    dtype = compute_dtype(choices.rollout_dtype, device)
    sizes = choices.sizes or vllm.sizes_of(
        path, settings, dtype, sequences=sequences, max_len=max_len
    )
    engine = vllm.start(
        path,
        settings,
        vllm.read_model(path, dtype, max_len, adapter, eos_token),
        sizes,
        device=device,
        threads=choices.threads,
        logs=logs,
        beside_learner=beside_learner,
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


def image_folders(recipe: Recipe, folder: Path) -> list[str]:
    """Where the processes of a run read images by their hashes: its own, then those of the run that
    it replays. folder: of the run.
    """
    settings = recipe.rollout_settings
    replayed = settings.replay_path if settings is not None else None
    return [str(folder / IMAGES), *([str(images_of(replayed))] if replayed else [])]


class EngineWorker:
    """An engine in a process of a cluster. recipe: as its dump; choices: of the run's start."""

    _engine: Engine
    _stopped: int | None = None  # the pace that was stopped last

    def __init__(self, recipe: Mapping[str, Any], choices: Choices) -> None:
        loaded = recipe_from_json(dict(recipe))
        settings = loaded.rollout_settings
        assert settings is not None  # only jobs that sample have engines
        self._settings = settings
        self._beside_learner = loaded.cluster.policy.colocate is not None
        self._model = loaded.model
        self._device = choices.apply()
        self._opened = ExitStack()  # until the process ends

    def keep_images(self, folders: Sequence[str]) -> None:
        """From now on images are read in `folders`, which all machines see: see image_folders."""
        self._opened.enter_context(images_kept_in(*map(Path, folders)))

    def build(
        self, path: str, choices: Choices, sequences: int, max_len: int, logs: str
    ) -> Choices:
        """build_engine; returns the choices with the engine's sizes. What the engine started ends
        with this process. logs: a folder of this worker's own, where all machines see it.
        """
        self._engine, choices = build_engine(
            self._settings, path, choices, self._opened, sequences=sequences, max_len=max_len,
            logs=Path(logs), beside_learner=self._beside_learner,
            lora=self._model.lora, eos_token=self._model.eos_token,
            router_dtype=self._model.router_dtype,
        )  # fmt: skip
        self._weights = WorkerWeights(self._engine, self._device)
        return choices

    def turn(
        self,
        requests: Sequence[Request],
        dealt: int = 1,
        pace: int | None = None,
        most: int | None = None,
    ) -> tuple[list[Completion], EngineSums]:
        """Takes requests; returns the next completions, and the engine's sums. dealt: to how many
        workers tickets are dealt now. pace: a `stop` of this number ends the turn, as do `most`
        decode steps; then completions may be [].
        """
        if isinstance(self._engine, VLLMEngine):
            self._engine.deal_every(dealt)
        for request in requests:
            self._engine.submit(request)
        if pace is None:
            return self._engine.completed(), self._engine.stats.rows()
        engine, stats = cast(HaltingEngine, self._engine), self._engine.stats
        last = None if most is None else stats.decode_steps + most
        halt = lambda: self._stopped == pace or stats.decode_steps == last  # noqa: E731
        return engine.completed(halt=halt), stats.rows()

    def stop(self, pace: int) -> None:
        """Beside a turn: ends it, and those that begin with the same number."""
        self._stopped = pace
        cast(HaltingEngine, self._engine).notify()

    def repeat(self, turns: Sequence[Sequence[Request]]) -> tuple[list[Completion], EngineSums]:
        """All turns of an engine that was lost; returns what the last one gave, which nobody has
        seen.
        """
        for requests in turns[:-1]:
            self.turn(requests)
        return self.turn(turns[-1])

    def cut(self) -> tuple[list[Request], list[Completion], EngineSums]:
        """Engine.cut; returns also what ended before, and the engine's sums."""
        requests, ended = self._engine.cut(), list[Completion]()
        while completions := self._engine.completed():
            ended += completions
        return requests, ended, self._engine.stats.rows()

    def publish(self, action: str, *arguments: Any) -> Any:
        """A step of a publish from ranks: a method of WorkerWeights."""
        return getattr(self._weights, action)(*arguments)

    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperature: float,
        images: Sequence[tuple[PlacedImage, ...]],
    ) -> list[NDArray[np.float32]]:
        return self._engine.logprobs(sequences, temperature, images)

    def drop(self) -> None:
        """Forgets all requests: nobody waits for their completions any more."""
        self._engine.cut()
        while self._engine.completed():
            pass

    def sleep(self) -> None:
        self._engine.sleep()

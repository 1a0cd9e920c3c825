"""Loads what can be talked to: the directory of a model or of an adapter, a hub id, a run, or one
checkpoint of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.errors import UsageError
from postgrad.data.templates import template_call
from postgrad.fleet.exported import roles_of
from postgrad.models.adapter_files import merged_state
from postgrad.models.end_tokens import with_ends
from postgrad.models.export import frozen_weights
from postgrad.models.files import CONFIG, is_adapter
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import ImageTower
from postgrad.models.load import load_model
from postgrad.models.rope import max_positions
from postgrad.models.routers import give_dtype
from postgrad.models.settings import ModelSettings
from postgrad.models.stored import real
from postgrad.models.supported import reads_images
from postgrad.observe.run_dir import RunDirectory
from postgrad.parallel import device as devices
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.local.budget import places_for
from postgrad.tools.chat.talker import Talker, TalkingEngine
from postgrad.tools.export import checkpoint_in
from postgrad.training.pinned import pin_model
from postgrad.training.saving import store_of


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model that answers, and how it was trained to be spoken to."""

    name: str  # as it was asked for
    about: str  # what it is: "sft run runs/x, step 10, float32"
    engine: TalkingEngine
    tokenizer: Any
    variables: Mapping[str, Any]  # that its chat template is called with
    system: str | None  # system prompt of the training data; None where it has none
    stop: tuple[str, ...]  # texts that end an answer
    reader: ImageReader | None = None  # of a model that reads images

    def talker(self, system: str | None = None) -> Talker:
        """A new conversation with it. system: in place of its own system prompt."""
        return Talker(
            self.engine,
            self.tokenizer,
            variables=self.variables,
            system=self.system if system is None else system,
            stop=self.stop,
            reader=self.reader,
        )


def load(name: str, which: str | None, dtype: str, max_len: int) -> ChatModel:
    """The model of a directory or hub id, an adapter merged into its base, or a checkpoint of a
    run. which: latest, best or a step, of a run. max_len: tokens of the longest conversation.

    Raises UsageError where nothing can be talked to, RunError where a checkpoint is damaged.
    """
    path = Path(name)
    if (checkpoint := checkpoint_in(path)) is not None:
        run_dir, meant = checkpoint
        return _of_run(
            name, run_dir, (which or meant) if run_dir == path else meant, dtype, max_len
        )
    if _is_among_runs(path):
        RunDirectory.open(path)  # which says what could be meant
    if which is not None:
        raise UsageError(f"--checkpoint {which}: {name} is no run, which alone has checkpoints")
    source = pin_model(name)
    engine, tokenizer, reader = _engine(source, dtype, max_len, ModelSettings())
    return ChatModel(name, f"{source}, {engine.dtype}", engine, tokenizer, {}, None, (), reader)


def _is_among_runs(path: Path) -> bool:
    """True of a folder of runs, and of a path in one that does not exist. A single word may be a
    model of the hub.
    """
    folder = path if path.is_dir() else path.parent
    word = not path.is_dir() and folder == Path()
    if word or path.is_file() or (path / CONFIG).exists() or is_adapter(path):
        return False
    return folder.is_dir() and any(map(RunDirectory.holds_runs, folder.iterdir()))


def _of_run(name: str, run_dir: Path, which: str, dtype: str, max_len: int) -> ChatModel:
    directory = RunDirectory.open(run_dir)
    recipe = recipe_from_json(directory.recipe())
    if recipe.trained_role == "reward_model":
        raise UsageError(
            f"{run_dir} trains a reward model, which scores texts and writes none: ask it with "
            "postgrad serve-reward"
        )
    store = store_of(recipe, directory)
    if not store.steps():
        raise UsageError(f"{run_dir} has no checkpoint yet: there is nothing to chat with")
    checkpoint = store.load(which)
    base = recipe.model.source or str(directory.init)
    computed = dtype if dtype != "auto" else _dtype(checkpoint)
    engine, tokenizer, reader = _engine(base, computed, max_len, recipe.model)
    engine.load_weights(_weights(recipe, checkpoint, base).items(), checkpoint.step)
    first, rollout = recipe.data.sources[0], recipe.rollout_settings
    return ChatModel(
        name,
        f"{recipe.job} run {run_dir}, step {checkpoint.step}, {engine.dtype}",
        engine,
        tokenizer,
        template_call(first),
        first.system,
        () if rollout is None else rollout.stop,
        reader,
    )


def _weights(recipe: Recipe, checkpoint: Checkpoint, base: str) -> Mapping[str, Tensor]:
    """The policy's whole weights by hub name, an adapter's merged into its base; frozen parts are
    the base's.
    """
    role = roles_of(recipe, base)["policy"]
    weights = checkpoint.tensors(role.stem)
    stated = checkpoint.state.choices.get("dtype") or "auto"
    dtype = devices.compute_dtype(stated, torch.device("cpu"))
    if role.lora is None:
        frozen = frozen_weights(base, role.freeze, dtype) if role.freeze else {}
        return {name: real(weight) for name, weight in {**frozen, **weights}.items()}
    merged = merged_state(base, weights, role.lora, quantize=role.quantize, dtype=dtype)
    return {name: real(weight) for name, weight in merged.items()}


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype that the run sampled in, or else computed in."""
    choices = checkpoint.state.choices
    return choices.get("rollout_dtype") or choices.get("dtype") or "auto"


def _engine(
    path: str, dtype: str, max_len: int, settings: ModelSettings
) -> tuple[TalkingEngine, Any, ImageReader | None]:
    device = devices.apply(devices.choose(None, False))
    computed = devices.compute_dtype(dtype, device)
    model = load_model(path, dtype=computed, device=device, images=True)
    lm: Any = model.lm
    reader = tower = None
    if reads_images(model.config):
        reader = ImageReader(model.source, model.config, model.tokenizer)
        tower = ImageTower(lm, reader.pixels)
    give_dtype(lm, settings.router_dtype)
    lm.generation_config = with_ends(lm.generation_config, model.tokenizer, settings.eos_token)
    longest = min(max_len, max_positions(model.config) or max_len)
    places = places_for(longest)
    engine = TalkingEngine(lm, model.tokenizer, cache_tokens=places, max_len=longest, tower=tower)
    return engine, model.tokenizer, reader

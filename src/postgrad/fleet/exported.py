"""The roles of a run as files: what a checkpoint's files begin with, and how a role is exported."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.core.errors import UsageError
from postgrad.fleet.choices import Choices
from postgrad.models.adapter_files import merged_state, write_adapter
from postgrad.models.export import export_hf, frozen_weights
from postgrad.models.four_bits import Quantize
from postgrad.models.score import RewardScale, scale_of_state
from postgrad.models.settings import LoraSettings
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.recipe import Recipe, RewardRecipe, RLRecipe


@dataclass(frozen=True, slots=True)
class ExportedRole:
    """A role of a run as it can be exported."""

    stem: str  # its file in a checkpoint: "policy.weights"
    base: str  # path or hub id of the model that it started from
    lora: LoraSettings | None  # of its adapter; None where the file holds all weights
    scores: bool  # it has a score head
    template: str = ""  # the recipe's data.chat_template
    quantize: Quantize = "none"  # of the frozen base under its adapter
    freeze: tuple[str, ...] = ()  # model.freeze: these weights are the base's
    eos_token: tuple[str, ...] = ()  # model.eos_token
    separator: str | None = None  # of steps, if it is a process reward model

    def export(
        self,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any],
        to: Path,
        choices: Choices,
        *,
        overwrite: bool,
        card: str | None = None,
    ) -> None:
        """Writes weights in the run's dtype, with the base model's config and tokenizer and the
        chat template of the training data. Weights are asked for one by one.

        state: of the algorithm; it holds the scale of a reward model's scores. card: the text of
        README.md.
        """
        dtype = compute_dtype(choices.dtype, torch.device("cpu"))
        if self.lora is not None:
            weights = merged_state(
                self.base, weights, self.lora, quantize=self.quantize, dtype=dtype
            )
        elif self.freeze:
            weights = {**frozen_weights(self.base, self.freeze, dtype), **weights}
        scale = None
        if self.scores and self.separator is None:
            trained = self.stem.startswith("reward_model.")
            scale = scale_of_state(state) if trained else RewardScale()
        export_hf(
            weights,
            self.base,
            to,
            dtype=dtype,
            scale=scale,
            separator=self.separator,
            overwrite=overwrite,
            chat_template=self.template,
            eos_token=self.eos_token,
            card=card,
        )

    def export_adapter(
        self, weights: Mapping[str, Tensor], to: Path, choices: Choices, card: str | None = None
    ) -> None:
        """Writes the adapter alone. Raises UsageError where the role has none."""
        if self.lora is None:
            raise UsageError("--adapter: this role was trained without [model.lora]")
        if self.separator is not None:
            raise UsageError(
                "--adapter: PEFT's files do not say that a head judges steps: leave it out, and "
                "the model is written with the adapter merged"
            )
        write_adapter(
            weights, self.lora, self.base, to, quantize=self.quantize,
            dtype=compute_dtype(choices.dtype, torch.device("cpu")),
            chat_template=self.template, eos_token=self.eos_token, card=card,
        )  # fmt: skip


def own_role(recipe: Recipe) -> str:
    """The name of the role that a job trains in the first place: "policy" or "reward"."""
    return "reward" if recipe.trained_role == "reward_model" else "policy"


def role_of(recipe: Recipe, name: str, base: str) -> ExportedRole:
    """The role that `--role name` means: policy, critic, reward, or ema, the moving average of what
    the job trains. base: of the policy. Raises UsageError where the run has none of that name.
    """
    stems = roles_of(recipe, base)
    trained = recipe.trained_role
    named = {own_role(recipe): stems[trained]}
    if recipe.learner.ema_decay:
        named["ema"] = replace(stems[trained], stem=f"{trained}.ema")
    if "critic" in stems:
        named["critic"] = stems["critic"]
    if name not in named:
        raise UsageError(f"role {name!r}: this run has {' and '.join(named)}")
    return named[name]


def roles_of(recipe: Recipe, base: str) -> dict[str, ExportedRole]:
    """The roles in a run's checkpoints, by the stem of their files. base: of the policy."""
    model, template = recipe.model, recipe.data.chat_template

    def of_base(stem: str, *, scores: bool) -> ExportedRole:
        return ExportedRole(
            stem, base, model.lora, scores, template, model.quantize, model.freeze, model.eos_token
        )

    if recipe.trained_role == "reward_model":
        role = of_base("reward_model.weights", scores=True)
        if isinstance(recipe, RewardRecipe) and recipe.row_kind == "steps":
            role = replace(role, separator=recipe.data.separator)
        return {"reward_model": role}
    by_stem = {"policy": of_base("policy.weights", scores=False)}
    if recipe.reference_moves:
        by_stem["reference"] = replace(by_stem["policy"], stem="reference.weights", lora=None)
    if isinstance(recipe, RLRecipe) and recipe.algorithm.needs().critic:
        critic = recipe.critic.model
        start = critic.source or base
        by_stem["critic"] = ExportedRole(
            "critic.weights", start, critic.lora, True, template, critic.quantize, critic.freeze
        )
    return by_stem

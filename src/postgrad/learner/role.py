"""Roles on a backbone: one that scores, and one that also learns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.algorithms.base import Algorithm, LossInputs
from postgrad.core.handles import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout
from postgrad.learner.average import MovingAverage
from postgrad.learner.backbone import Backbone
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.schedule import rate
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update reports. logprobs: float32 over the experience's flat tokens, as the learner
    had them before the step; NaN where nothing was computed.
    """

    metrics: Mapping[str, float]
    logprobs: NDArray[np.float32]


class Role:
    """Scores sequences with a backbone's weights. `temperature` is the sampling temperature, at
    which all logprobs are taken.
    """

    def __init__(self, name: str, backbone: Backbone, temperature: float = 1.0) -> None:
        self.name = name
        self.backbone = backbone
        self.temperature = temperature

    def logprobs(self, sequences: Sequences) -> Handle[Ragged]:
        """The logprob of every loss token, float32; zeros elsewhere."""
        return done(self.backbone.logprobs(sequences, self.temperature))


class Learner(Role):
    """A role with an optimizer. `total_updates` is the horizon of its learning-rate schedule."""

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        settings: LearnerSettings,
        total_updates: int,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(name, backbone, temperature)
        self.settings = settings
        self.total_updates = total_updates
        self.optimizer = MasterOptimizer(backbone.lm, settings)
        self.average = (
            MovingAverage(self.weights(), settings.ema_decay) if settings.ema_decay else None
        )

    def update(self, update: Update, algorithm: Algorithm) -> Handle[UpdateResult]:
        """One optimizer step on `update`: its loss is the sum over micro-batches, each already
        divided by the denominators of the whole update.
        """
        experience = update.experience
        flat = _FlatColumns(update, algorithm, self.backbone.device)
        metrics = {"policy/loss": torch.zeros((), device=self.backbone.device)}
        logprobs = np.full(len(experience.sequences.tokens.values), np.nan, np.float32)
        computed = 0
        for layout in self.backbone.micro_batches(
            experience.sequences,
            update.rows_with_gradient,
            whole_groups=algorithm.level in ("pair", "group"),
        ):
            inputs = self._inputs(layout, flat, algorithm.needs().entropy)
            output = algorithm.policy_loss(inputs)
            output.loss.backward()
            for name, value in {"policy/loss": output.loss.detach(), **output.metrics}.items():
                metrics[name] = metrics[name] + value if name in metrics else value
            logprobs[layout.column] = inputs.logprobs.detach().cpu().numpy()
            computed += layout.n_tokens
        learning_rate = rate(self.settings, self.optimizer.updates, self.total_updates)
        norm = self.optimizer.step(learning_rate)
        if self.average is not None:
            self.average.update(self.weights())
        report = {name: float(value) for name, value in metrics.items()}
        report |= {
            "policy/grad_norm": norm,
            "policy/lr": learning_rate,
            "policy/computed_tokens": computed,
            "policy/skipped_samples": len(update.rows) - len(update.rows_with_gradient),
        }
        return done(UpdateResult(report, logprobs))

    def _inputs(self, layout: Layout, flat: "_FlatColumns", with_entropy: bool) -> LossInputs:
        logprobs, entropy = self.backbone.forward(layout, self.temperature, with_entropy)
        column = torch.from_numpy(layout.column).to(self.backbone.device)
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            columns={name: values.index_select(0, column) for name, values in flat.columns.items()},
            sequence=torch.from_numpy(layout.sequence).to(self.backbone.device),
            n_sequences=layout.n_sequences,
            weight=flat.weight.index_select(0, column),
            token_weight=flat.token_weight.expand(len(column)),
        )

    def weights(self) -> dict[str, Tensor]:
        """The float32 master weights by hub name."""
        return self.optimizer.weights()

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """All state that a checkpoint has to hold, by file stem: "policy.weights"."""
        found: dict[str, Mapping[str, Tensor]] = {
            f"{self.name}.weights": self.weights(),
            f"{self.name}.optimizer": self.optimizer.state(),
        }
        if self.average is not None:
            found[f"{self.name}.ema"] = self.average.weights
        return found

    def state_bytes(self) -> int:
        """What `tensors` will take once there were updates."""
        average = 0 if self.average is None else sum(w.nbytes for w in self.weights().values())
        return self.optimizer.state_bytes() + average

    def load(self, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Go on from a checkpoint. `read` gives the tensors of a file stem; what is missing or of
        another model is a RunError, see MasterOptimizer.load.
        """
        self.optimizer.load(read(f"{self.name}.weights"), read(f"{self.name}.optimizer"))
        if self.average is not None:
            self.average.load(read(f"{self.name}.ema"))


class _FlatColumns:
    """An update's columns and weights on the device, indexed by flat token number."""

    def __init__(self, update: Update, algorithm: Algorithm, device: torch.device) -> None:
        experience = update.experience
        self.columns = {
            name: torch.from_numpy(column.values.astype(np.float32)).to(device)
            for name, column in experience.columns.items()
        }
        weights = algorithm.entry_weights(experience.sequences, update.rows)
        self.weight = torch.from_numpy(weights.values).to(device)
        lengths = experience.sequences.loss_mask.sums()
        # Means over the computed tokens: skipping does not dilute metrics.
        tokens = max(1.0, float(lengths[update.rows_with_gradient].sum()))
        self.token_weight = torch.tensor([1.0 / tokens], dtype=torch.float32, device=device)

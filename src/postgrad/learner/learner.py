"""A role that learns: its updates, their metrics, and the state that a checkpoint holds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.algorithms.base import Algorithm, LossOutput
from postgrad.core.errors import AS_IT_BEGAN, RunError
from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout, ReadPosition
from postgrad.learner.backbone import Backbone, Outputs
from postgrad.learner.loss_scale import LossScale
from postgrad.learner.offload import offload_of
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings, learning_rate
from postgrad.learner.update import FlatColumns, Routing, Update, added, replaying
from postgrad.parallel.sharding import TensorPiece, assembled, whole_tensor

if TYPE_CHECKING:
    from postgrad.models.compiled import LayerSums

AnyAlgorithm = TypeVar("AnyAlgorithm", bound=Algorithm)
SKIPPED = "/skipped_updates"  # the end of a metric's name


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update reports."""

    metrics: Mapping[str, float]  # {"policy/loss": 0.12, "policy/grad_norm": 0.8, ...}
    # [N] over the experience's flat tokens: the logprobs or scores before the step; NaN where none
    # were computed.
    outputs: NDArray[np.float32]

    @property
    def skipped(self) -> bool:
        """Whether no optimizer step was taken: in float16, where the gradient was not finite."""
        return any(value for name, value in self.metrics.items() if name.endswith(SKIPPED))


class MovingAverage:
    """average = decay * average + (1 - decay) * weights, once an update; starts at the weights."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Moves the average towards `weights`, which an update has just changed."""
        for name, average in self.weights.items():
            average.lerp_(weights[name], 1.0 - self.decay)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Takes over the average of a checkpoint. Other names or shapes are a RunError."""
        if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in self.weights.items()}:
            raise RunError(f"the checkpoint's moving average is of another model; {AS_IT_BEGAN}")
        for name, average in self.weights.items():
            average.copy_(saved[name])


def _layer_sums(weights: Mapping[str, nn.Parameter], compiler: str | None) -> "LayerSums | None":
    """What adds up the gradients of compiled layers; None: the optimizer does."""
    if compiler is None:
        return None
    from postgrad.models.compiled import LayerSums  # torch's compiler takes seconds

    return LayerSums(weights, compiler)


class Learner(ABC, Generic[AnyAlgorithm]):
    """A role with an optimizer. `total_updates` is the horizon of its learning-rate schedule.

    name: the first part of its metrics' and files' names: "policy", "critic". reads: the hidden
    state that its loss entries take, see lay_out.
    """

    reads: ReadPosition = "before"

    def __init__(
        self, name: str, backbone: Backbone, settings: LearnerSettings, total_updates: int
    ) -> None:
        self.name = name
        self.backbone = backbone
        self.settings = settings
        self.total_updates = total_updates
        adapter = backbone.adapter
        lm = backbone.lm
        trained = dict(lm.named_parameters()) if adapter is None else adapter.parameters()
        self._sums = _layer_sums(trained, backbone.compiler)  # before the optimizer
        scale = LossScale() if backbone.half else None
        self.optimizer = MasterOptimizer(trained, settings, backbone.ranks, scale)
        weights = self.optimizer.weights()
        self.average = MovingAverage(weights, settings.ema_decay) if settings.ema_decay else None
        averaged = {} if self.average is None else self.average.weights
        self.offload = offload_of(settings, backbone, self.optimizer, averaged)

    @abstractmethod
    def _weights(self, update: Update, algorithm: AnyAlgorithm) -> Ragged:
        """The weight of every token in the update's loss, see Algorithm.entry_weights."""

    def _trained(self, update: Update) -> Sequences:
        """The sequences of an update, with the tokens that the role's loss reads as loss tokens."""
        return update.experience.sequences

    @abstractmethod
    def _loss(
        self, layout: Layout, flat: FlatColumns, algorithm: AnyAlgorithm
    ) -> tuple[LossOutput, Tensor]:
        """The loss of one layout, and the role's outputs [E] at its entries."""

    @abstractmethod
    def _outputs(self, layout: Layout) -> Tensor:
        """The role's outputs [E] at the entries of a layout, without a loss."""

    def update(self, update: Update, algorithm: AnyAlgorithm) -> Handle[UpdateResult]:
        """Takes one optimizer step on `update`. The loss is a sum over micro-batches, each already
        divided by the denominators of the whole update.
        """
        number, noise = self.optimizer.updates, self.backbone.noise
        noising: AbstractContextManager[None] = nullcontext()
        if noise is not None:
            noising = noise.of_update(update.experience.sequences.tokens, number)
        with self.backbone.ranks.doing(f"{self.name} update {number}"), noising:
            if self.offload is not None:
                self.offload.reload_all()
            return done(self._update(update, algorithm))

    def _update(self, update: Update, algorithm: AnyAlgorithm) -> UpdateResult:
        experience = update.experience
        flat = FlatColumns(update, self._weights(update, algorithm), self.backbone.device)
        routing = Routing(self.backbone, update)
        if routing.counts_first:
            self._count_choices(update, algorithm, routing)
        metrics = {f"{self.name}/loss": torch.zeros((), device=self.backbone.device)}
        entry_outputs, computed = Outputs(), 0
        scale = 1.0 if self.optimizer.scale is None else self.optimizer.scale.scale
        for layout in self._layouts(update, algorithm):
            if not layout.n_sequences:  # other ranks still compute: take part in their collectives
                # with dropout as they do: without, compiled layers would gather weights once more
                with self._acting(layout):
                    with routing.watching(layout):
                        unread = self._outputs(layout)
                    (unread * 0.0).sum().backward()
                continue
            with self._acting(layout):
                with routing.watching(layout):  # not backward, which may compute layers again
                    loss_output, of_layout = self._loss(layout, flat, algorithm)
                ((loss_output.loss + routing.loss(layout)) * scale).backward()
            terms = {f"{self.name}/loss": loss_output.loss, **loss_output.metrics}
            metrics |= added(metrics, terms)
            entry_outputs.add(layout, of_layout)
            computed += int(np.count_nonzero(layout.copies))  # without padding for ranks
        lr = learning_rate(self.settings, self.optimizer.updates, self.total_updates)
        if self._sums is not None:
            self._sums.hand_over(self.optimizer.master)
        norm = self.optimizer.step(lr)
        self.backbone.free_gathered()
        if self.average is not None and math.isfinite(norm):
            self.average.update(self.weights())
        ranks = self.backbone.ranks
        sums = ranks.sums(_numbers(metrics))
        outputs = np.full(len(experience.sequences.tokens.values), np.nan, np.float32)
        entry_outputs.write(outputs)
        outputs, _ = ranks.merged(outputs, ~np.isnan(outputs))
        report = algorithm.report(sums)
        report |= {
            **_step_metrics(self.name, norm, None if self.optimizer.scale is None else scale),
            f"{self.name}/lr": lr,
            f"{self.name}/computed_tokens": int(ranks.sum(computed)) // ranks.grid.sharers,
            f"{self.name}/skipped_samples": len(update.rows) - len(update.rows_with_gradient),
        }
        return UpdateResult(report | routing.metrics(self.name), outputs)

    @torch.no_grad()
    def _count_choices(self, update: Update, algorithm: AnyAlgorithm, routing: Routing) -> None:
        """One more forward pass over an update, for the experts that its tokens are sent to."""
        for layout in self._layouts(update, algorithm):
            with self._acting(layout), routing.watching(layout):
                self._outputs(layout)
        routing.have_counted()

    @contextmanager
    def _acting(self, layout: Layout) -> Generator[None]:
        """Inside are the passes of an update over a layout, forward and backward: with dropout, and
        with the experts that came with its sequences.
        """
        dropping = self.backbone.dropping(layout, self.optimizer.updates)
        with dropping, replaying(self.backbone, layout):
            yield

    def _layouts(self, update: Update, algorithm: AnyAlgorithm) -> Iterator[Layout]:
        """The micro-batches of an update."""
        return self.backbone.micro_batches(
            self._trained(update),
            update.rows_with_gradient,
            reads=self.reads,
            whole_groups=algorithm.level in ("pair", "group"),
        )

    @property
    def pieces(self) -> Mapping[str, TensorPiece]:
        """Where this rank's parts of the trained weights, and of state that is not shaped as they
        are, lie in the whole tensors, by name.
        """
        return self.optimizer.pieces | self.optimizer.scale_pieces

    @property
    def updates(self) -> int:
        """Number of optimizer steps so far."""
        return self.optimizer.updates

    @property
    def has_dropout(self) -> bool:
        """True where updates use dropout: their outputs differ from those of the role."""
        adapter = self.backbone.adapter
        return adapter is not None and adapter.settings.dropout > 0

    def weights(self) -> dict[str, Tensor]:
        """This rank's parts of the trained weights, float32, by hub name, or by PEFT's name where
        they are an adapter.
        """
        if self.offload is not None:
            self.offload.reload_weights()
        return self.optimizer.weights()

    def hub_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the model, whole, by hub name, frozen ones too; an adapter is merged one
        matrix at a time. All ranks have to iterate over all of them together.
        """
        if self.offload is not None:
            self.offload.reload_weights()
        adapter, named = self.backbone.adapter, self.backbone.lm.named_parameters()
        if adapter is None:
            yield from self._whole_weights()
            parts = ((name, p.detach()) for name, p in named if not p.requires_grad)
        else:
            parts = adapter.hub_weights()
        for name, tensor in parts:
            yield name, assembled(name, tensor, self.backbone.ranks)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's weights, whole, float32, by PEFT's names. All ranks have to iterate over
        all of them together.
        """
        assert self.backbone.adapter is not None  # of a policy with [model.lora]
        return self._whole_weights()

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, each whole on every rank."""
        pieces = self.optimizer.pieces
        return ((name, whole_tensor(part, pieces[name])) for name, part in self.weights().items())

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """All state that a checkpoint has to hold, by file stem: "policy.weights". What is in
        the host's memory is given from there, until it comes back.
        """
        saved: dict[str, Mapping[str, Tensor]] = {
            f"{self.name}.weights": self.optimizer.weights(),
            f"{self.name}.optimizer": self.optimizer.state(),
        }
        if self.average is not None:
            saved[f"{self.name}.ema"] = self.average.weights
        if self.offload is None:
            return saved
        here = self.offload.copies.here
        return {stem: {n: here(t) for n, t in named.items()} for stem, named in saved.items()}

    def state_bytes(self) -> int:
        """Bytes of `tensors` after the first update; of parts that several ranks hold, only on the
        first of them.
        """
        average = 0
        if self.average is not None:
            weights = self.optimizer.weights().items()
            average = sum(w.nbytes for n, w in weights if self.pieces[n].first)
        return self.optimizer.state_bytes() + average

    def load(self, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Takes over the state of a checkpoint. `read` gives the tensors of a file stem. Missing
        tensors, or those of another model, are a RunError, see MasterOptimizer.load.
        """
        if self.offload is not None:
            self.offload.reload_all()
        self.optimizer.load(read(f"{self.name}.weights"), read(f"{self.name}.optimizer"))
        if self.average is not None:
            saved = read(f"{self.name}.ema")
            self.average.load(self.optimizer.parts_of("moving average", saved))


def _step_metrics(name: str, norm: float, scale: float | None) -> dict[str, float]:
    """Metrics of an optimizer step: its gradient's norm, unless it was skipped, and the loss scale
    that it was computed with, where there is one.
    """
    skipped = not math.isfinite(norm)
    metrics = {} if skipped else {f"{name}/grad_norm": norm}
    if scale is not None:
        metrics |= {f"{name}/loss_scale": scale, f"{name}{SKIPPED}": float(skipped)}
    return metrics


def _numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Tensors of one number, read from their device in one copy."""
    together = torch.stack([value.double().reshape(()) for value in values.values()])
    return dict(zip(values, together.tolist(), strict=True))

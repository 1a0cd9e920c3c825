"""The policy on a backbone: its logprobs and entropies, and what it is as a learner."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from postgrad.algorithms.base import LossInputs, LossOutput, PolicyAlgorithm
from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone
from postgrad.learner.learner import Learner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import FlatColumns, Update, chosen_experts, replaying


class Policy:
    """Computes logprobs with a backbone's weights, at the sampling `temperature`. base: with the
    frozen weights under the backbone's adapter.
    """

    def __init__(self, backbone: Backbone, temperature: float = 1.0, *, base: bool = False) -> None:
        self.backbone = backbone
        self.temperature = temperature
        self._base = base

    def logprobs(self, sequences: Sequences, temperature: float | None = None) -> Handle[Ragged]:
        """The logprob of every loss token, float32; zeros elsewhere. temperature: another than the
        sampling temperature.
        """

        def read(layout: Layout) -> Tensor:
            return self.backbone.logprobs(layout, temperature or self.temperature)[0]

        return self._column(sequences, "logprobs", read)

    def entropies(self, sequences: Sequences) -> Handle[Ragged]:
        """The entropy of the distribution at every loss token, nats, float32; zeros elsewhere."""

        def read(layout: Layout) -> Tensor:
            _, entropy = self.backbone.logprobs(layout, self.temperature, with_entropy=True)
            assert entropy is not None
            return entropy

        return self._column(sequences, "entropies", read)

    def _column(
        self, sequences: Sequences, name: str, read: Callable[[Layout], Tensor]
    ) -> Handle[Ragged]:
        if self._base:  # another policy, which chooses experts itself
            sequences = replace(sequences, experts=None)
        with (
            self.backbone.ranks.doing(name),
            self.backbone.as_base() if self._base else nullcontext(),
        ):
            return done(self.backbone.column(sequences, partial(self._replaying, read)))

    def _replaying(self, read: Callable[[Layout], Tensor], layout: Layout) -> Tensor:
        with replaying(self.backbone, layout):
            return read(layout)


class PolicyLearner(Policy, Learner[PolicyAlgorithm]):
    """The policy with its optimizer."""

    def __init__(
        self,
        backbone: Backbone,
        settings: LearnerSettings,
        total_updates: int,
        temperature: float = 1.0,
    ) -> None:
        Policy.__init__(self, backbone, temperature)
        Learner.__init__(self, "policy", backbone, settings, total_updates)

    def experts(self, sequences: Sequences) -> Handle[Ragged]:
        """int16 [N, layers, k]: the experts that the routers choose now, for every token."""
        with self.backbone.ranks.doing("experts"):
            return done(chosen_experts(self.backbone, sequences))

    def under_adapter(self) -> Policy | None:
        """The frozen weights under its adapter, as a reference; None without an adapter."""
        return None if self.backbone.adapter is None else self.start()

    def start(self) -> Policy:
        """The model as it was before any update. Without an adapter only valid until the first."""
        return Policy(self.backbone, self.temperature, base=True)

    def _trained(self, update: Update) -> Sequences:
        sequences, replies = update.experience.sequences, update.experience.replies
        if replies is None:
            return sequences
        mask = sequences.loss_mask
        return replace(sequences, loss_mask=mask.like(mask.values | (replies.values > 0)))

    def _weights(self, update: Update, algorithm: PolicyAlgorithm) -> Ragged:
        return algorithm.entry_weights(update.experience.sequences, update.rows)

    def _outputs(self, layout: Layout) -> Tensor:
        return self.backbone.logprobs(layout, self.temperature)[0]

    def _loss(
        self, layout: Layout, flat: FlatColumns, algorithm: PolicyAlgorithm
    ) -> tuple[LossOutput, Tensor]:
        with_entropy = algorithm.needs().entropy
        logprobs, entropy = self.backbone.logprobs(layout, self.temperature, with_entropy)
        inputs = LossInputs(logprobs, entropy, **flat.at(layout))
        if (replies := flat.replies(layout)) is None:
            return algorithm.policy_loss(inputs), logprobs
        output = algorithm.policy_loss(inputs.at(replies.written))
        loss, mean = replies.loss(logprobs)
        metrics = {**output.metrics, "policy/observation_loss": mean}
        return LossOutput(output.loss + loss, metrics), logprobs

"""OpenRLHF's adaptive KL coefficient."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_objectives.learning import words_of
from benchmarks.peer_objectives.openrlhf import BASE, OpenRLHF
from benchmarks.peer_objectives.samples import Samples
from benchmarks.peer_objectives.shaping import MEANS, Adapts, alike, near, responses


def cases(checkout: Path) -> Iterator[Adapts]:
    """All that is compared."""
    peer = OpenRLHF(checkout)
    kind: Any = import_module("openrlhf.trainer.ppo_utils.kl_controller").AdaptiveKLController

    def coefficients(estimator: str, steps: Sequence[Samples]) -> Any:
        """A coefficient of 0.05, adapted after each step by the mean that make_experience logs."""
        controller, values = kind(0.05, 0.3, 1000), []
        for batch in steps:
            values.append(controller.value)
            old, ref = batch.padded(batch.old), batch.padded(batch.ref)
            kl = peer.utils.compute_approx_kl(old, ref, estimator).double()
            controller.update(responses(batch, kl), len(batch))
        return np.array(values)

    for estimator in ("k1", "k2"):
        options = BASE | {"algo.advantage.estimator": "reinforce", "algo.kl.init_coef": 0.05,
                          "algo.kl.target": 0.3, "algo.kl.horizon": 1000,
                          "algo.kl.estimator": estimator}  # fmt: skip
        for name, samples in (("", near), (", responses of one length", alike)):
            known_difference = None if estimator == "k1" and name else MEANS
            yield Adapts(f"kl.target, {estimator}{name}", words_of("ppo", options),
                         partial(coefficients, estimator), samples, known_difference)  # fmt: skip

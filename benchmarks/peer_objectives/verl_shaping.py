"""verl's adaptive KL coefficient."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_objectives.samples import Samples
from benchmarks.peer_objectives.shaping import MEANS, Adapts, alike, near, responses
from benchmarks.peer_objectives.verl import BASE, Verl


def cases(checkout: Path) -> Iterator[Adapts]:
    """All that is compared."""
    peer = Verl(checkout)

    def coefficients(kind: str, steps: Sequence[Samples]) -> Any:
        """Those of apply_kl_penalty."""
        controller, values = peer.core.AdaptiveKLController(0.05, 0.3, 1000), []
        for batch in steps:
            values.append(controller.value)
            old, ref = batch.padded(batch.old), batch.padded(batch.ref)
            kl = peer.core.kl_penalty(old, ref, kl_penalty=kind)
            controller.update(responses(batch, kl), len(batch))
        return np.array(values)

    place = "algorithm.kl_ctrl."
    for kind in ("kl", "low_var_kl"):
        words = (*BASE, "algorithm.adv_estimator=reinforce_plus_plus", f"{place}type=adaptive",
                 f"{place}target_kl=0.3", f"{place}horizon=1000", f"{place}kl_coef=0.05",
                 "algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={kind}")  # fmt: skip
        for name, samples in (("", near), (", responses of one length", alike)):
            known_difference = None if kind == "kl" and name else MEANS
            yield Adapts(f"adaptive kl_ctrl, {kind}{name}", words, partial(coefficients, kind),
                         samples, known_difference)  # fmt: skip

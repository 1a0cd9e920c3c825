"""prime-rl's objectives: its advantages and compute_loss."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Known
from benchmarks.peer_objectives.loading import Checkout
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.samples import LONGEST, PROMPT, Samples, drawn

BASE: dict[str, Any] = {
    "model.name": "m", "seq_len": 4 * LONGEST, "orchestrator.batch_size": 20,
    "orchestrator.group_size": 4, "max_steps": 10,
    "orchestrator.train.sampling.max_completion_tokens": LONGEST,
}  # fmt: skip
LOSS = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}


class PrimeRL:
    """A step of the trainer, with prime-rl's own functions."""

    def __init__(self, checkout: Path) -> None:
        files = Checkout(checkout / "src" / "prime_rl", [
            "beartype", "jaxtyping", "verifiers", "prime_rl.configs", "prime_rl.utils",
            "prime_rl.orchestrator.types", "prime_rl.transports",
            "prime_rl.orchestrator.trajectories",
        ])  # fmt: skip
        self.losses: Any = files.module("prime_rl.trainer.rl.loss")
        self.grpo: Any = files.module("prime_rl.orchestrator.algo.grpo")
        self.max_rl: Any = files.module("prime_rl.orchestrator.algo.max_rl")

    def advantages(
        self, kind: str, options: Mapping[str, Any], samples: Samples
    ) -> dict[int, float]:
        """Of each sample, as its trace is told."""
        advantages_by_number: dict[int, float] = {}
        module = getattr(self, kind)
        module.iter_trainable_traces = lambda traces: [(None, trace) for trace in traces]
        module.assign_advantages = lambda trace, value: advantages_by_number.update(
            {trace.number: value}
        )
        stated = {f"num_{name}_weight": options.get(f"{OF_LENGTH}num_{name}_weight", default)
                  for name, default in SHARES.items()}  # fmt: skip
        penalised = any(name.startswith(OF_LENGTH) for name in options)
        algorithm = SimpleNamespace(length_penalty=SimpleNamespace(**stated) if penalised else None)
        name = {"grpo": "GRPOAlgorithm", "max_rl": "MaxRLAlgorithm"}[kind]
        score = getattr(module, name).score_group
        for number in np.unique(samples.group):
            traces = [
                SimpleNamespace(
                    reward=float(samples.rewards[i]), number=int(i),
                    num_output_tokens=int(samples.mask[i].sum()),
                    num_total_tokens=PROMPT + len(samples.mask[i]),
                    num_turns=int((np.diff(samples.mask[i].astype(int), prepend=0) == 1).sum()),
                )
                for i in np.flatnonzero(samples.group == number)
            ]  # fmt: skip
            asyncio.run(score(algorithm, traces))
        return advantages_by_number

    def outcome(self, kind: str, options: Mapping[str, Any], samples: Samples) -> Outcome:
        """Rewards to a loss, on one update of all samples. As prime-rl's train sink does, tokens
        whose advantage is 0 have no weight, and leave the count that divides the loss.
        """
        config = SimpleNamespace(**{name: options.get(f"{OF_LOSS}{name}", default)
                                    for name, default in LOSS.items()})  # fmt: skip
        leaf = samples.padded(samples.logprobs).requires_grad_()
        count = len(samples)
        unit_rows = [torch.ones(len(row), dtype=torch.float64) for row in samples.mask]
        masks = [torch.from_numpy(row) for row in samples.mask]
        advantages = dict.fromkeys(range(count), 0.0)
        rl: list[Any] = [None] * count
        ref_kl: list[Any] = [None] * count
        if kind == "opd":
            rl = [0.0 * unit_row for unit_row in unit_rows]
            ref_kl = [mask.double() for mask in masks]
        else:
            advantages = self.advantages(kind, options, samples)
            if options.get(FILTER, True):
                rl = [(advantages[i] != 0.0) * unit_rows[i] for i in range(count)]
        tokens = sum(int((mask & (True if weight is None else weight != 0)).sum())
                     for mask, weight in zip(masks, rl, strict=True))  # fmt: skip
        loss, _ = self.losses.compute_loss(
            [leaf[i, : len(unit_row)] for i, unit_row in enumerate(unit_rows)],
            [torch.from_numpy(row) for row in samples.sampled],
            [torch.from_numpy(row) for row in samples.ref],
            [advantages[i] * unit_row for i, unit_row in enumerate(unit_rows)],
            masks,
            rl,
            None,
            ref_kl,
            lambda inputs: self.losses.default_loss_fn(inputs, config),
            max(tokens, 1),
            1,
            int(sum(mask.sum() for mask in masks)),
        )
        zeros = torch.zeros_like(leaf)
        return outcome_of(loss, {"logprobs": leaf, "entropy": zeros, "values": zeros}, samples)


def first(seed: int) -> Samples:
    """Samples whose sampler is the policy in the update: every ratio is 1."""
    samples = drawn(seed)
    return replace(samples, sampled=samples.logprobs, old=samples.logprobs)


ZEROS = Known("tokens whose advantage is 0 leave the denominator there, and stay here",
              "advantage is 0, which are left out there")  # fmt: skip
OF_POLICY = Known("an advantage is the teacher's logprob minus the policy's in the update there, "
                  "minus the sampler's here",
                  "there minus that of the policy in the update")  # fmt: skip
OF_LOSS, FILTER = "trainer.loss.", "orchestrator.train.filter_zero_advantages"
ALL = {FILTER: False}
OF_LENGTH = "orchestrator.algo.length_penalty."
SHARES = {"output_tokens": 0.25, "input_tokens": 0.1, "turns": 0.1}  # prime-rl's defaults
PENALTIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("its defaults", {f"{OF_LENGTH}type": "linear"}),
    *((f"{name} alone", {f"{OF_LENGTH}num_{other}_weight": 0.8 * (other == name)
                         for other in SHARES}) for name in SHARES),
)  # fmt: skip
NARROW = {
    f"{OF_LOSS}dppo_mask_low": 0.02,
    f"{OF_LOSS}dppo_mask_high": 0.01,
    f"{OF_LOSS}kl_tau": 0.1,
}
CASES: tuple[tuple[str, dict[str, Any], Any, dict[str, float], Known | None], ...] = (
    ("first update, all tokens", ALL, first, {}, None),
    ("first update", {}, first, {}, ZEROS),
    ("later updates, all tokens", ALL, drawn, {}, None),
    ("later updates, narrow masks", ALL | NARROW, drawn, {}, None),
)


def cases(checkout: Path) -> Iterator[Case]:
    """All that is compared. prime-rl's ratio is to the sampler: it is 1 in a first update."""
    peer = PrimeRL(checkout)
    listed = [(kind, *case) for kind in ("grpo", "max_rl") for case in CASES]
    listed += [("grpo", f"length_penalty, {name}", ALL | options, drawn, {}, None)
               for name, options in PENALTIES]  # fmt: skip
    listed += [("opd", name, {}, draw, {}, known_difference) for name, draw, known_difference in (
        ("first update", first, None), ("later updates", drawn, OF_POLICY))]  # fmt: skip
    for kind, name, options, draw, knobs, known_difference in listed:
        stated = BASE | {"orchestrator.algo.type": kind} | options
        flags = ((f"--{key}", str(value)) for key, value in stated.items())
        words = ["rl", *(word for flag in flags for word in flag)]

        def outcome(
            samples: Samples, kind: str = kind, options: Mapping[str, Any] = options
        ) -> Outcome:
            return peer.outcome(kind, options, samples)

        yield Case(f"{kind}, {name}", words, outcome, draw, known_difference, knobs)

"""TRL's OnlineDPOTrainer, from the rewards of two samples a prompt to the loss."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peer_objectives.comparing import Case, Known, Lost
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.ours import Outcome, outcome_of
from benchmarks.peer_objectives.ours_texts import logits_outcome, preference_outcome
from benchmarks.peer_objectives.samples import Samples, drawn
from benchmarks.peer_objectives.texts import Texts, token_logprobs, written
from benchmarks.peer_objectives.trl import flags

WORDS = ("online_dpo", "--model_name_or_path", "m", "--dataset_name", "d",
         "--reward_model_path", "r", "--per_device_train_batch_size", "10")  # fmt: skip


class OnlineDPO:
    """The part of training_step that follows the rewards."""

    def __init__(self, checkout: Path) -> None:
        path = checkout / "trl" / "experimental" / "online_dpo" / "online_dpo_trainer.py"
        self.run = statements(path, "first_half, second_half = rewards.split", 19)

    def loss(self, options: dict[str, Any], **batch: Any) -> Any:
        """rewards, logprobs, ref_logprobs and completion_mask are of the first samples of all
        prompts, then of the second ones.
        """
        args = SimpleNamespace(loss_type="sigmoid")
        space = {"torch": torch, "F": torch.nn.functional, "device": "cpu",
                 "batch_size": len(batch["rewards"]) // 2,
                 "self": SimpleNamespace(args=args, beta=options.get("beta", 0.1))}  # fmt: skip
        space |= batch
        self.run(space)
        return space["loss"]

    def of_samples(self, options: dict[str, Any], samples: Samples) -> Outcome:
        """Of logprobs as they are."""
        order = np.concatenate([np.arange(0, len(samples), 2), np.arange(1, len(samples), 2)])
        leaf = samples.padded(samples.logprobs).requires_grad_()
        loss = self.loss(
            options, rewards=torch.from_numpy(samples.rewards[order]), logprobs=leaf[order],
            ref_logprobs=samples.padded(samples.ref)[order],
            completion_mask=samples.padded_mask[order],
        )  # fmt: skip
        zeros = torch.zeros_like(leaf)
        return outcome_of(loss, {"logprobs": leaf, "entropy": zeros, "values": zeros}, samples)

    def of_texts(self, options: dict[str, Any], texts: Texts) -> Outcome:
        """Of logits, at temperature 1; the first answer of each pair has the higher reward."""
        order = np.concatenate([np.arange(0, len(texts), 2), np.arange(1, len(texts), 2)])
        leaf = texts.leaf()
        logprobs, ref = (token_logprobs(logits, texts.ids)[order]
                         for logits in (leaf, texts.ref_logits()))  # fmt: skip
        rewards = torch.arange(len(texts), 0, -1.0)
        loss = self.loss(options, rewards=rewards, logprobs=logprobs, ref_logprobs=ref,
                         completion_mask=texts.answers[order])  # fmt: skip
        return logits_outcome(loss, leaf, texts)


def cases(checkout: Path) -> Iterator[Case | Lost]:
    """All that is compared, and what is lost."""
    peer = OnlineDPO(checkout)
    for beta in (0.1, 0.5):
        for name, draw, known_difference in (("", untied, None), (", equal rewards", two, TIED)):

            def sampled(samples: Samples, beta: float = beta) -> Outcome:
                return peer.of_samples({"beta": beta}, samples)

            words = [*WORDS, "--beta", str(beta)]
            yield Case(f"Online DPO, beta {beta}{name}", words, sampled, draw, known_difference)
    for temperature, known_difference in ((1.0, None), (0.9, AT_ONE)):
        yield Case(
            f"Online DPO, temperature {temperature}", [*WORDS, "--temperature", str(temperature)],
            partial(peer.of_texts, {}), written, known_difference,
            ours=partial(preference_outcome, temperature=temperature),
        )  # fmt: skip
    for name, value in (("beta", [0.1, 0.2]), ("loss_type", "ipo")):
        yield Lost(f"Online DPO, {name} {value}", [*WORDS, *flags({name: value})], name)


def two(seed: int) -> Samples:
    """Two samples a prompt, some of equal rewards, without an environment's tokens."""
    return drawn(seed, groups=10, each=2, environment=False)


def untied(seed: int) -> Samples:
    """The same with rewards that differ."""
    samples = two(seed)
    return replace(samples, rewards=np.random.default_rng(seed).permutation(20) / 20)


TIED = Known("pairs of equal rewards are trained on there, the first answer as the better one",
             "of equal rewards there the first answer")  # fmt: skip
AT_ONE = Known("logprobs are at temperature 1 there, and at the sampler's here", "there at 1")

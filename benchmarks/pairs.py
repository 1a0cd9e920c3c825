"""What pairs of answers cost, on real ones: sharing, splits, the score head, LoRA.

    python benchmarks/pairs.py hh-rlhf-harmless.jsonl.gz --to pairs.json

sharing: tokens that a pass over all pairs computes when a pair's common opening is computed once,
against every conversation whole; and CPU seconds of an update of 32 pairs either way. invariance:
the gradient of one update in float32, cut into other micro-batches, without sharing, with its pairs
in another order, against one micro-batch: the largest difference over the largest entry of the same
weight, and the distance over the norm. head: how far a process's peak rises in forward and backward
of 32 pairs with frozen embeddings, by size of the vocabulary. lora: bytes of parameters that policy
and reference hold, each address once.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.core.records import Experience, Sequences
from postgrad.data.mixture import dataset_texts
from postgrad.data.pairs import Pair, load_pairs
from postgrad.data.settings import PairSettings
from postgrad.evaluation.pairs import sequences_of
from postgrad.fleet.choices import choose
from postgrad.fleet.local import LocalFleet
from postgrad.layout.cut import cut
from postgrad.layout.layout import lay_out
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.score import ScoreLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.fresh import make_fresh
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.load import parse_recipe
from postgrad.training.run import Clock

PAIRS = 32
NEVER = 2**31  # tokens that two conversations must have in common to share them
VOCABULARIES = (4096, 151_936)
INIT = ModelInit(
    type="qwen2", hidden_size=128, intermediate_size=384, num_hidden_layers=2,
    max_position_embeddings=1024, tokenizer=TokenizerInit(vocab_size=VOCABULARIES[0]),
)  # fmt: skip
PREFERENCE = {
    "job": "preference", "run_dir": "unused", "steps": 1,
    "data": {"path": "unused"}, "batch": {"train_batch_size": PAIRS},
}  # fmt: skip
LORA = {"lora": {"rank": 16, "alpha": 16}}


def read(path: Path, tokenizer: Any) -> list[Pair]:
    """All pairs of the file."""
    return load_pairs(PairSettings(path=str(path), on_too_long="truncate"), tokenizer).all()


def learner(path: Path, micro: MicroBatch) -> ScoreLearner:
    """A reward model with the same head every time; its steps are not clipped."""
    model = load_score_model(str(path), dtype=torch.float32)
    backbone = Backbone(model.lm, torch.device("cpu"), micro)
    settings = LearnerSettings(lr=1e-6, max_grad_norm=0.0)
    return ScoreLearner("reward_model", backbone, "at", settings, 100)


def experience_of(pairs: list[Pair]) -> Experience:
    """An update on these pairs."""
    return BradleyTerry().experience(sequences_of(pairs), np.zeros(len(pairs)))


def without_sharing(score_learner: ScoreLearner) -> ScoreLearner:
    """The same learner with the same micro-batches, in which every conversation is whole."""
    backbone = score_learner.backbone

    def micro_batches(sequences: Sequences, rows: Any, *, reads: Any, whole_groups: bool) -> Any:
        limits = {"max_tokens": backbone.micro.max_tokens, "whole_groups": whole_groups}
        runs = cut(sequences, rows, max_sequences=backbone.micro.max_sequences, **limits)
        return (lay_out(sequences, run, reads=reads, min_shared=NEVER) for run in runs)

    backbone.micro_batches = micro_batches  # pyright: ignore[reportAttributeAccessIssue]
    return score_learner


def sharing(path: Path, pairs: list[Pair], rounds: int) -> dict[str, Any]:
    """Tokens of a pass over all pairs, and seconds of one update."""
    tokens = {"shared": 0, "whole": 0}
    for pair in pairs:
        both, rows = sequences_of([pair]), np.arange(2)
        tokens["shared"] += lay_out(both, rows, reads="at").n_tokens
        tokens["whole"] += lay_out(both, rows, reads="at", min_shared=NEVER).n_tokens
    update = Update(experience_of(pairs[:PAIRS]), np.arange(2 * PAIRS))
    sides = {
        "shared": learner(path, MicroBatch(max_tokens=2048)),
        "whole": without_sharing(learner(path, MicroBatch(max_tokens=2048))),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):  # the first round warms up
        for name, side in sides.items():
            began = time.process_time()
            side.update(update, BradleyTerry()).result()
            if number:
                seconds[name].append(time.process_time() - began)
    return {
        "pairs": len(pairs),
        "tokens": tokens,
        "saved": 1 - tokens["shared"] / tokens["whole"],
        "update_cpu_seconds": {name: statistics.median(each) for name, each in seconds.items()},
    }


def gradient(score_learner: ScoreLearner, experience: Experience) -> dict[str, Tensor]:
    """Of an update, as the optimizer gets it."""
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        master = score_learner.optimizer.master
        gradients.update({name: weight.grad.clone() for name, weight in master.items()})  # pyright: ignore[reportOptionalMemberAccess]

    hook = register_optimizer_step_pre_hook(keep)
    score_learner.update(Update(experience, np.arange(len(experience))), BradleyTerry()).result()
    hook.remove()
    return gradients


def invariance(path: Path, pairs: list[Pair]) -> dict[str, Any]:
    """How far the gradient moves when the same update is computed another way."""
    pairs = pairs[:PAIRS]
    order = np.random.default_rng(0).permutation(PAIRS)
    uncut, cut = MicroBatch(max_tokens=2**20), MicroBatch(max_sequences=8)
    first = gradient(learner(path, uncut), experience_of(pairs))
    others = {
        "one pair at a time": (learner(path, MicroBatch(max_sequences=2)), pairs),
        "4 096 tokens at a time": (learner(path, MicroBatch(max_tokens=4096)), pairs),
        "pairs in another order": (learner(path, uncut), [pairs[place] for place in order]),
        "another order and split": (learner(path, cut), [pairs[place] for place in order]),
        "without sharing": (without_sharing(learner(path, uncut)), pairs),
    }
    distances: dict[str, Any] = {}
    for name, (other_learner, other_pairs) in others.items():
        other = gradient(other_learner, experience_of(other_pairs))
        off = {key: other[key] - value for key, value in first.items()}
        square = [sum(float(t.double().square().sum()) for t in g.values()) for g in (off, first)]
        distances[name] = {
            "largest": max(float(off[key].abs().max() / first[key].abs().max()) for key in first),
            "distance": (square[0] / square[1]) ** 0.5,
        }
    return distances


def memory(name: str) -> int:
    """Bytes: VmHWM, the most that this process held, or VmRSS, what it holds."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024


def head(path: Path, data: Path, vocabulary: int) -> dict[str, int]:
    """Forward and backward of 32 pairs by a model whose embeddings are frozen."""
    score_learner = learner(path, MicroBatch(max_tokens=2**20))
    lm: Any = score_learner.backbone.lm
    pairs = read(data, load_tokenizer(str(path)))[:PAIRS]
    lm.resize_token_embeddings(vocabulary)
    lm.get_input_embeddings().requires_grad_(False)
    sequences = experience_of(pairs).sequences
    rows = np.arange(len(sequences))
    (layout,) = score_learner.backbone.micro_batches(sequences, rows, reads="at", whole_groups=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
    before = memory("VmRSS")
    score_learner.backbone.scores(layout).sum().backward()
    return {
        "tokens": layout.n_tokens,
        "bytes": memory("VmHWM") - before,
        "whole_logits_bytes": layout.n_tokens * vocabulary * 4,
    }


def lora(folder: Path) -> dict[str, Any]:
    """Parameters that policy and reference hold, with an adapter and without."""
    big = INIT.model_copy(update={"hidden_size": 512, "num_hidden_layers": 8})
    make_fresh(big, ["a few words for a tokenizer"], 0, folder)
    figures: dict[str, Any] = {}
    for name, more in {"full": {}, "lora": LORA}.items():
        recipe: Any = parse_recipe({**PREFERENCE, "model": {"path": str(folder), **more}})
        geometry = SimpleNamespace(total_updates=1, updates_per_step=1)
        run: Any = SimpleNamespace(
            recipe=recipe, choices=choose(recipe, {}), geometry=geometry, clock=Clock()
        )
        fleet = LocalFleet(run)
        policy = fleet.policy(str(folder))
        under = policy.under_adapter()  # the reference, where there is an adapter
        reference = under or fleet.frozen_policy(str(folder))
        models: list[nn.Module] = [policy.backbone.lm, reference.backbone.lm]
        held = {p.data_ptr(): p.nbytes for lm in models for p in lm.parameters()}
        figures[name] = {
            "parameter_bytes": sum(held.values()),
            "trained_bytes": sum(p.nbytes for p in policy.optimizer.master.values()),
            "checkpoint_bytes": policy.state_bytes(),
        }
    return figures


def main() -> None:
    """Measures everything, or the one vocabulary that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="hh-rlhf's pairs, .jsonl or .jsonl.gz")
    parser.add_argument("--vocabulary", type=int, help="internal: one head, of --model")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="timed updates of each side")
    parser.add_argument("--heads", type=int, default=3, help="measurements of each vocabulary")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.vocabulary:
        print(json.dumps(head(options.model, options.data, options.vocabulary)))
        return
    with TemporaryDirectory(prefix="pairs-") as parent:
        path = Path(parent) / "model"
        make_fresh(INIT, dataset_texts(PairSettings(path=str(options.data))), 0, path)
        pairs = read(options.data, load_tokenizer(str(path)))
        report: dict[str, Any] = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "torch": torch.__version__,
            "sharing": sharing(path, pairs, options.rounds),
            "invariance": invariance(path, pairs),
            "head": {},
            "lora": lora(Path(parent) / "big"),
        }
        # an allocator's peak is not the same every time
        for vocabulary in VOCABULARIES * options.heads:
            command = [sys.executable, __file__, str(options.data), "--model", str(path)]
            command += ["--vocabulary", str(vocabulary)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            report["head"].setdefault(vocabulary, []).append(json.loads(done.stdout))
    text = json.dumps(report, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()

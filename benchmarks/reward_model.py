"""A reward model from human comparisons: postgrad's job against TRL's RewardTrainer.

    python benchmarks/reward_model.py hh-rlhf-harmless.jsonl.gz --to reward_model.json

recipes/hh_reward.toml on the file's pairs but the last 300, which are held out; what differs from
the recipe is in `recipe` of the report. For each seed both sides start from one directory (body and
head), read the same token ids in the same order, and take as many AdamW steps with the same rate,
decay, clipping and dtype, each side in a process of its own, in turns. postgrad computes once what
the two conversations of a pair share, with at most micro_train_tokens in a forward; TRL pads the
four conversations of two pairs and accumulates. Accuracies of both come from plain transformers
reading what each side wrote; `own_held_out` is what postgrad's evaluation said.

A step's seconds are those between two optimizer steps, by the clock and of the process (one
thread): where others use the machine the second is the one to compare. TRL: pip install --group
peers.
"""

import argparse
import gzip
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from postgrad.data.mixture import training_rows
from postgrad.data.pairs import Pair, load_pairs
from postgrad.fleet.loading import base_model
from postgrad.models.export import export_hf
from postgrad.models.score import RewardScale, load_score_model
from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.recipe.recipe import RewardRecipe
from postgrad.training.peaks import Resident
from postgrad.training.rows import held_out
from postgrad.training.start import train

RECIPE = Path(__file__).parent.parent / "recipes" / "hh_reward.toml"
SIDES = ("postgrad", "trl")
PADDED = 2  # pairs that TRL pads together: on a CPU more of them take longer
COMPARED = 20  # first steps: later ones drift apart by rounding
Conversations = list[list[int]]  # token ids, chosen and rejected in turns


def recipe_for(options: argparse.Namespace, seed: int, folder: Path) -> RewardRecipe:
    """What both sides do; their start is in folder/start."""
    flags = {
        "data.path": str(options.data.resolve()),
        "data.cache": "false",
        "run_dir": str(folder / "postgrad"),
        "seed": str(seed),
        "steps": str(options.steps),
        "learner.schedule": "constant",  # with warm-up, ends of schedules differ by one step
        "learner.warmup_updates": "0",
        "learner.threads": "1",
        "eval.at_start": "false",
    }
    if (folder / "start").exists():
        flags["model.path"] = str(folder / "start")
    recipe = load_recipe(RECIPE, [f"--{key}={value}" for key, value in flags.items()])
    assert isinstance(recipe, RewardRecipe)
    return recipe


def pairs_of(recipe: RewardRecipe) -> int:
    """Pairs of one update."""
    assert recipe.batch.train_batch_size is not None
    return recipe.batch.train_batch_size


def prepare(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """Writes the start of both sides and the pairs they read; returns where every row went."""
    recipe = recipe_for(options, seed, folder)
    start = base_model(recipe, folder / "body")
    model = load_score_model(start, dtype=torch.float32, seed=seed)
    weights = dict(model.lm.named_parameters())
    export_hf(weights, start, folder / "start", dtype=torch.float32, scale=RewardScale())
    train_set = training_rows(load_pairs, recipe.data, model.tokenizer, exclude=held_out(recipe))
    test_set = load_pairs(recipe.eval.sets[0].data, model.tokenizer)
    drawn = range(options.steps * pairs_of(recipe))
    token_lists = {
        "drawn": tokens_of([train_set.draw(ticket, seed) for ticket in drawn]),
        "train": tokens_of(train_set.all()),
        "held_out": tokens_of(test_set.all()),
        "held_out_rows": [pair.row for pair in test_set.all()],
    }
    (folder / "pairs.json").write_text(json.dumps(token_lists), "utf-8")
    return {
        "training": train_set.accounts[0].to_json(),
        "held_out": test_set.account.to_json(),
        "parameters": sum(weight.numel() for weight in weights.values()),
    }


def tokens_of(pairs: list[Pair]) -> Conversations:
    """Both conversations of every pair."""
    return [ids.tolist() for pair in pairs for ids in (pair.chosen, pair.rejected)]


def by_postgrad(recipe: RewardRecipe, pairs: dict[str, Any]) -> dict[str, Any]:
    """The job itself, from the recipe to the exported model."""
    summary = train(recipe, Console("quiet"))
    metrics = (Path(recipe.run_dir) / "metrics.jsonl").read_text("utf-8").splitlines()
    ending = (Path(recipe.run_dir) / "eval.jsonl").read_text("utf-8").splitlines()[-1]
    return {
        "model": summary["model"],
        "losses": [json.loads(line)["loss"] for line in metrics],
        "own_held_out": json.loads(ending)["accuracy"],
    }


def by_trl(recipe: RewardRecipe, pairs: dict[str, Any]) -> dict[str, Any]:
    """TRL's trainer with the recipe's numbers; it also tokenises the held-out rows its own way."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    learner, start = recipe.learner, str(recipe.model.path)
    to = Path(recipe.run_dir).parent / "trl"
    config = RewardConfig(
        output_dir=str(to), max_steps=recipe.steps or 0, seed=recipe.seed,
        per_device_train_batch_size=PADDED, gradient_accumulation_steps=pairs_of(recipe) // PADDED,
        learning_rate=learner.lr, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=learner.weight_decay, max_grad_norm=learner.max_grad_norm,
        adam_beta1=learner.betas[0], adam_beta2=learner.betas[1], adam_epsilon=learner.eps,
        train_sampling_strategy="sequential", max_length=None, logging_steps=1,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    drawn = {"chosen_ids": pairs["drawn"][0::2], "rejected_ids": pairs["drawn"][1::2]}
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict(drawn),
        eval_dataset=Dataset.from_list(messages(recipe, pairs["held_out_rows"])),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    theirs: Any = trainer.eval_dataset
    tokens = [row[name] for row in theirs for name in ("chosen_ids", "rejected_ids")]
    trainer.train()
    trainer.save_model(str(to / "model"))
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    same = compare_tokens(pairs["held_out"], tokens, recipe.data.max_len)
    return {"model": str(to / "model"), "losses": logged, "tokens": same}


def messages(recipe: RewardRecipe, rows: list[int]) -> list[dict[str, Any]]:
    """Rows of the file as TRL takes them, read without postgrad."""
    path = Path(recipe.data.path)
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]

    def turns(text: str) -> list[dict[str, str]]:
        parts = re.split(r"\n\n(Human|Assistant): ?", text)[1:]
        names = {"Human": "user", "Assistant": "assistant"}
        exchanges = zip(parts[0::2], parts[1::2], strict=True)
        return [{"role": names[who], "content": words} for who, words in exchanges]

    return [{name: turns(lines[row][name]) for name in ("chosen", "rejected")} for row in rows]


def compare_tokens(ours: Conversations, theirs: Conversations, limit: int) -> dict[str, int]:
    """How many conversations have the same ids. The template writes a newline after the last turn,
    which TRL keeps; postgrad ends where a sampled answer ends.
    """
    counts = {"same_but_the_newline_after_the_end": 0, "same_and_cut": 0, "different": 0}
    for our_ids, their_ids in zip(ours, theirs, strict=True):
        cut = len(our_ids) == limit and their_ids[:limit] == our_ids
        lacks_newline = len(their_ids) == len(our_ids) + 1 and their_ids[:-1] == our_ids
        kind = "same_but_the_newline_after_the_end" if lacks_newline else "same_and_cut"
        counts[kind if lacks_newline or cut else "different"] += 1
    return counts


@torch.no_grad()
def accuracy(model: str, sequences: Conversations) -> float:
    """How often plain transformers, with padding, scores the chosen one higher."""
    lm: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    scores = torch.zeros(len(sequences))
    order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]))
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        parts = [torch.tensor(sequences[row]) for row in rows]
        ids = pad_sequence(parts, batch_first=True, padding_value=lm.config.pad_token_id)
        mask = pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
        scores[rows] = lm(ids, attention_mask=mask).logits[:, 0]
    return float((scores[0::2] > scores[1::2]).double().mean())


def peak() -> int:
    """Bytes that this process held at most so far; a parent's do not count, as in getrusage."""
    status = Path("/proc/self/status").read_text("ascii")
    kernel_peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
    return max(kernel_peak, Resident.most)  # a run's phases begin the kernel's peak anew


def measure(options: argparse.Namespace) -> None:
    """Prints the result of one side from one seed as JSON, on the last line."""
    torch.set_num_threads(1)
    recipe = recipe_for(options, options.seed, options.folder)
    pairs = json.loads((options.folder / "pairs.json").read_text("utf-8"))
    marks: list[tuple[float, float, int]] = []
    register_optimizer_step_post_hook(
        lambda *_: marks.append((time.perf_counter(), time.process_time(), peak()))
    )
    trained = (by_postgrad if options.side == "postgrad" else by_trl)(recipe, pairs)
    assert len(marks) == len(trained["losses"]) == recipe.steps
    steps = list(pairwise(marks))
    more = {
        "step_wall_seconds": statistics.median(after[0] - before[0] for before, after in steps),
        "step_cpu_seconds": statistics.median(after[1] - before[1] for before, after in steps),
        "peak_bytes": marks[-1][2],
        "train": accuracy(trained["model"], pairs["train"]),
        "held_out": accuracy(trained.pop("model"), pairs["held_out"]),
    }
    print(json.dumps(trained | more))


def run(options: argparse.Namespace, side: str, seed: int, folder: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    command = [
        sys.executable, __file__, str(options.data), "--steps", str(options.steps),
        "--side", side, "--seed", str(seed), "--folder", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures both sides for every seed, or the one side that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="hh-rlhf's pairs, .jsonl or .jsonl.gz")
    parser.add_argument("--steps", type=int, default=94)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help="internal: one side, in --folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.side:
        measure(options)
        return
    seeds: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="reward-model-") as parent:
        for seed in range(options.seeds):
            folder = Path(parent) / str(seed)
            rows = prepare(options, seed, folder)
            sides = SIDES if seed % 2 == 0 else SIDES[::-1]
            by_side = {side: run(options, side, seed, folder) for side in sides}
            losses = zip(*(by_side[side].pop("losses")[:COMPARED] for side in SIDES), strict=True)
            apart = max(abs(our_loss - their_loss) / their_loss for our_loss, their_loss in losses)
            seeds.append({"seed": seed, "first_losses_apart": apart, **by_side})
            print(json.dumps(seeds[-1]), file=sys.stderr)
    report = summary(options, rows, seeds)
    text = json.dumps(report, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


def summary(
    options: argparse.Namespace, rows: dict[str, Any], seeds: list[dict[str, Any]]
) -> dict[str, Any]:
    """Means over seeds beside each seed's numbers."""
    import trl

    recipe = recipe_for(options, 0, Path("RUN"))
    names = ("train", "held_out", "step_wall_seconds", "step_cpu_seconds", "peak_bytes")
    means = {
        side: {name: statistics.mean(seed_row[side][name] for seed_row in seeds) for name in names}
        for side in SIDES
    }
    for mean in means.values():
        for clock in ("wall", "cpu"):
            mean[f"pairs_per_{clock}_second"] = pairs_of(recipe) / mean[f"step_{clock}_seconds"]
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {
            package.__name__: package.__version__ for package in (torch, transformers, trl)
        },
        "machine": platform.machine(),
        "recipe": {key: recipe.dump()[key] for key in ("steps", "batch", "learner", "algorithm")},
        "rows": rows,
        "seeds": seeds,
        "means": means,
        "held_out_apart": means["postgrad"]["held_out"] - means["trl"]["held_out"],
    }


if __name__ == "__main__":
    main()

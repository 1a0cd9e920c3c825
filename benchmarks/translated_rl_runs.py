"""Translated RL runs: random programs of TRL's GRPOTrainer and RLOOTrainer, and their translations,
train on the same samples. What both trained is compared.

    PYTHONPATH=tests:. python benchmarks/translated_rl_runs.py --count 60 --seed 0

A program has rows of its own, one or two functions of reward, and up to nine options. postgrad
trains its translation first, and samples. Then the program runs with TRL, which gets the recorded
completions in place of its own: what it would sample is all that is replaced, and its prompts have
to be the recorded tokens. Both take rows, and the samples of a step, in their order, for the draws
of the two have nothing in common. The rest is as in translated_runs.py, and so is the measure.

A difference is "told" where the translation names an option without counterpart, or says beside a
setting that it counts another way there (docs/migration.md). Any other, and what only one side
refuses, is printed with its program, which a seed alone decides.
"""

import contextlib
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer, rloo_trainer

from benchmarks.translated_runs import (
    COMMON,
    LIMIT,
    MOST_OPTIONS,
    START,
    WORDS,
    difference,
    our_weights,
    peer_weights,
    refused_by,
    run_programs,
)
from postgrad.core.errors import PostgradError
from postgrad.learner import update

ROWS = 48  # whole generations of all sizes that are drawn
LOOP: dict[str, tuple[Any, ...]] = {  # the sizes of generations and updates
    "num_generations": (2, 4, 8),
    "per_device_train_batch_size": (1, 2, 4, 8),
    "gradient_accumulation_steps": (1, 2, 3, 4),
    "steps_per_generation": (1, 2, 3, 4, 6),
    "num_iterations": (1, 2),
}
SHARED: dict[str, tuple[Any, ...]] = {
    **{
        name: values
        for name, values in COMMON.items()
        if name not in (*LOOP, "max_steps", "max_length", "dataloader_drop_last")
    },
    "num_train_epochs": (1, 0.5),
    "warmup_steps": (1, 0.3),  # a longer one is cut to the run here, which warns
    "max_completion_length": (4, 16),
    "temperature": (0.7, 1.3),
    "top_k": (5,),
    "top_p": (0.9,),
    "epsilon": (0.1, 0.02),
    "epsilon_high": (0.28, 0.05),
    "reward_weights": (0.3,),  # of the last function
    "mask_truncated_completions": (True,),
    "sync_ref_model": (True,),
    "ref_model_mixup_alpha": (0.3, 1.0),
    "ref_model_sync_steps": (1, 2),
    "pad_to_multiple_of": (8,),
}
OF_TRAINER: dict[str, dict[str, tuple[Any, ...]]] = {
    "GRPO": {
        "beta": (0.04, 0.5),
        "use_bias_correction_kl": (True, False),
        "loss_type": (
            "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo",
        ),
        "scale_rewards": ("group", "batch", "none", True, False),
        "importance_sampling_level": ("token", "sequence"),
        "delta": (1.5, 1.1),
        "top_entropy_quantile": (0.2, 0.5),
        "entropy_coef": (0.01,),
        "use_adaptive_entropy": (True,),
        "entropy_target": (3.0,),
        "off_policy_mask_threshold": (0.5, 1e-4),
        "multi_objective_aggregation": ("normalize_then_sum",),
        "sapo_temperature_neg": (2.0,),
        "sapo_temperature_pos": (0.5,),
        "vespo_k_pos": (1.0,),
        "vespo_lambda_pos": (2.0,),
        "vespo_k_neg": (2.0,),
        "vespo_lambda_neg": (3.0,),
    },
    "RLOO": {
        "beta": (0.0, 0.5),
        "normalize_advantages": (True,),
        "reward_clip_range": ((-0.3, 0.3), (0.0, 0.5)),
    },
}  # fmt: skip
# Steps in proportion to gradients: with them a factor on the loss shows, which Adam hides.
IN_PROPORTION = {"adam_epsilon": 1.0, "learning_rate": 0.1, "max_grad_norm": 0.0}
# How a recipe says beside a setting that the source counts another way.
BESIDE = (
    "of all samples here", "masked responses leave the mean",
    "the other responses are spread", "no update of a step without others", "by each token's ratio",
    "a mean over tokens there", "a mean over an update's tokens", "rounded down here",
    "does not divide a step", "is no number of steps", "there of the update before",
    "without vLLM they do not there", "there each with its own mean",
)  # fmt: skip
# Functions of reward in TRL's form, and the same as a recipe takes them.
FUNCTIONS = ("vowels", "shortness")
THEIRS = """\
def texts(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]

def vowels(completions, **_):
    return [sum(map(text.count, "aeiou")) / (1 + len(text)) for text in texts(completions)]

def shortness(completions, **_):
    return [-0.1 * len(text) for text in texts(completions)]

"""
OURS = """\
def vowels(prompt, rollout):
    return sum(map(rollout.text.count, "aeiou")) / (1 + len(rollout.text))

def shortness(prompt, rollout):
    return -0.1 * len(rollout.text)
"""


class Unlike(Exception):
    """TRL asks for other samples than those that were recorded."""


class Recorded:
    """The completions that a run recorded, in the order of its steps; in place of a trainer's
    sampling.
    """

    def __init__(self, run_dir: Path) -> None:
        lines = (run_dir / "samples.jsonl").read_text("utf-8").splitlines()
        samples = [json.loads(line) for line in lines]
        self.left = sorted(samples, key=lambda s: (s["step"], s["ticket"], s["sample"]))

    def take(self, prompts: list[list[int]]) -> list[list[int]]:
        """The next completions. Raises Unlike where they are of other prompts."""
        samples, self.left = self.left[: len(prompts)], self.left[len(prompts) :]
        recorded = [sample["prompt_token_ids"] for sample in samples]
        if recorded != [list(ids) for ids in prompts]:
            raise Unlike(f"{len(prompts)} prompts there, of which {len(recorded)} or others here")
        return [sample["turns"][0]["token_ids"] for sample in samples]


SAMPLING: dict[Any, Any] = {
    kind: kind._generate_single_turn
    for kind in (grpo_trainer.GRPOTrainer, rloo_trainer.RLOOTrainer)
}


def write_rows(chat: bool, rng: random.Random, path: Path) -> None:
    """Writes prompts, as conversations or as texts."""
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            text = "spell " + " and ".join(rng.sample(WORDS, rng.randint(1, 3)))
            prompt: Any = [{"role": "user", "content": text}] if chat else text
            file.write(json.dumps({"prompt": prompt}) + "\n")


def drawn_loop(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Sizes of which a generation holds whole groups, as TRL demands."""
    while True:
        drawn = {name: rng.choice(LOOP[name]) for name in LOOP if rng.random() < 0.4}
        chosen = options | drawn
        accumulation = chosen["gradient_accumulation_steps"]
        steps = chosen.get("steps_per_generation", accumulation)
        if chosen["per_device_train_batch_size"] * steps % chosen["num_generations"] == 0:
            updates = steps * chosen.get("num_iterations", 1) / accumulation
            if updates == int(updates) or updates < 1 or rng.random() < 0.1:
                chosen["max_steps"] = max(1, int(updates)) * rng.randint(2, 3)
                return chosen


def draw(seed: int, models: dict[str, str], folder: Path) -> str:
    """The program of a seed; its rows are written into `folder`."""
    rng = random.Random(seed)
    trainer = "RLOO" if rng.random() < 0.2 else "GRPO"
    write_rows(rng.random() < 0.5, rng, folder / "rows.jsonl")
    functions = FUNCTIONS[: rng.randint(1, 2)]
    options = drawn_loop(rng, START | {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 8, "shuffle_dataset": False, "logging_strategy": "no",
    })  # fmt: skip
    if rng.random() < 0.5:
        options |= IN_PROPORTION
    if trainer == "GRPO" and rng.random() < 0.5:
        options["loss_type"] = "grpo"  # the means of the default are others there
    for _ in range(rng.randint(0, MOST_OPTIONS)):
        values = OF_TRAINER[trainer] if rng.random() < 0.7 else SHARED
        name = rng.choice(tuple(values))
        options[name] = rng.choice(values[name])
        if name == "num_train_epochs":
            options.pop("max_steps", None)
        if name == "sync_ref_model":  # TRL refuses it without a reference
            options.setdefault("beta", 0.04)
        if name == "reward_weights":
            options[name] = [1.0, options[name]][-len(functions) :]
    stated = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return (
        "from datasets import load_dataset\n"
        f"from trl import {trainer}Config, {trainer}Trainer\n"
        f"{THEIRS}"
        f"args = {trainer}Config(output_dir={str(folder / 'peer')!r}, {stated})\n"
        f"rows = load_dataset('json', data_files={str(folder / 'rows.jsonl')!r}, split='train')\n"
        f"trainer = {trainer}Trainer(model={models['base']!r}, args=args, train_dataset=rows, "
        f"reward_funcs=[{', '.join(functions)}])\n"
        "trainer.train()\n"
    )


def replay(recorded: Recorded | None) -> None:
    """Puts recorded completions in place of what TRL's trainers sample; None: they sample."""
    for kind, single_turn in SAMPLING.items():
        kind._generate_single_turn = (
            single_turn
            if recorded is None
            else lambda self, prompt_ids, *_, **__: (
                (recorded.take(prompt_ids), None)
                if isinstance(self, grpo_trainer.GRPOTrainer)
                else recorded.take(prompt_ids)
            )
        )


def differs(translation: Any) -> list[str]:
    """What a translation says of differences: names of options, and comments."""
    lost = {option.name for option in translation.draft.missing} - {"use_cpu"}
    comments = translation.draft.comments.values()
    return [*sorted(lost), *(c for c in comments if any(words in c for words in BESIDE))]


def check(seed: int, models: dict[str, str], folder: Path) -> str:
    """Runs both sides of a seed's program; returns how it ended, in one line."""
    text = draw(seed, models, folder)
    (file := folder / "train.py").write_text(text, "utf-8")
    (folder.parent / "my_rewards.py").write_text(OURS, "utf-8")  # that the translation asks for
    ends: list[str] = []
    ours, translation, recorded, apart = {}, None, None, ""
    try:
        ours, translation = our_weights(file, folder, "GRPO")
        recorded = Recorded(folder / "ours")
    except PostgradError as error:
        ends.append(f"postgrad: {type(error).__name__}: {str(error)[:300]}")
    replay(recorded)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # its last line of metrics
            theirs = peer_weights(text)
    except Unlike as error:
        apart = str(error)
    except Exception as error:  # noqa: BLE001  # whatever TRL refuses a program with
        ends.append(f"TRL: {type(error).__name__}: {str(error)[:200]}")
    if ends:
        return refused_by(seed, ends, text)
    if not apart:
        start = AutoModelForCausalLM.from_pretrained(models["base"], dtype=torch.float32)
        share, moved = difference(ours, theirs, start.state_dict())
        if recorded.left:
            apart = f"{len(recorded.left)} samples more than there"
        elif share > LIMIT:
            apart = f"{share:.2g} of {moved:.2g}"
    if not apart:
        return "same"
    if reasons := differs(translation):
        print(f"# seed {seed}, told: {apart}: {'; '.join(reasons)}", flush=True)
        return "told"
    print(f"# seed {seed}: {apart}\n{text}\n{translation.text}\n", flush=True)
    return "different"


def in_order() -> None:
    """Takes the draws of samples for updates out of both sides."""
    grpo_trainer.shuffle_sequence_dict = rloo_trainer.shuffle_sequence_dict = lambda batch: batch
    update.seeds = SimpleNamespace(permutation=lambda count, *_: np.arange(count))


if __name__ == "__main__":
    in_order()
    run_programs(__doc__, check)

"""Translated runs: random programs train with TRL, and their translations with postgrad. What both
trained is compared.

    PYTHONPATH=tests:. python benchmarks/translated_runs.py --count 60 --seed 0

A program has a trainer (SFT, DPO, KTO, CPO or reward), rows of its own and up to nine options. It
runs in this process with TRL as it stands in the environment; `postgrad translate trl` reads the
same file. So that both train the same, rows come in order, a warm-up begins at 0, as it does there
(docs/migration.md), a head of rewards is in the model's files, and nothing stands behind an
answer's last token. Where the environment has no Triton, torch computes the log-probabilities of
TRL's kernel.

Weights are compared after the last step: the norm of their difference over that of the distance
from the start. A difference is "told" where the translation names an option without counterpart.
Any other, and what only one side refuses, is printed with its program, which a seed alone decides.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets.utils.logging import disable_progress_bar as disable_progress_bars
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer
from transformers.utils import logging as transformers_logging
from trl.trainer import utils as trl_utils

from postgrad.core.errors import PostgradError
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.tools.export import export
from postgrad.training.start import train
from postgrad.translate.translate import translate

LIMIT = 1e-2  # of the difference over the distance moved, both as norms
MOST_OPTIONS = 9
ROWS = 72  # whole batches of all sizes that are drawn
# Nothing stands behind an answer's end, where TRL learns what the template writes.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "cat dog sun pear tree fox owl bee ant elk yak cow rat hen eel".split()  # noqa: SIM905
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.2,
}  # fmt: skip
# Values of options that any trainer has.
COMMON: dict[str, tuple[Any, ...]] = {
    "num_train_epochs": (1, 2, 3, 1.5),
    "max_steps": (1, 3, 7),
    "per_device_train_batch_size": (1, 2, 3, 4),
    "gradient_accumulation_steps": (1, 2, 3),
    "learning_rate": (1e-3, 1e-4),
    "lr_scheduler_type": (
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt",
    ),
    "warmup_steps": (1, 3, 0.3),
    "weight_decay": (0.1, 0.5),
    "adam_beta1": (0.8,),
    "adam_beta2": (0.95,),
    "adam_epsilon": (1e-5,),
    "max_grad_norm": (0.1, 1.0, 0.0),
    "optim": ("adamw_torch", "adamw_torch_fused", "adafactor"),
    "max_length": (16, 24, None),
    "dataloader_drop_last": (True,),
    "gradient_checkpointing": (False,),
    "average_tokens_across_devices": (False,),
}  # fmt: skip
# Values of options of one trainer.
OF_TRAINER: dict[str, dict[str, tuple[Any, ...]]] = {
    "SFT": {
        "completion_only_loss": (True, False),
        "assistant_only_loss": (False,),
        "loss_type": ("nll", "dft"),
        "packing": (False,),
    },
    "DPO": {
        "loss_type": (
            "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
            "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
            ["sigmoid", "sft"], ["sigmoid", "bco_pair", "sft"],
        ),
        "loss_weights": ([0.8, 0.2], [0.8, 0.2, 1.0]),
        "beta": (0.3, 0.05),
        "label_smoothing": (0.1,),
        "ld_alpha": (0.5, 0.0),
        "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "use_weighting": (True,),
        "discopop_tau": (0.1,),
        "precompute_ref_log_probs": (True,),
        "sync_ref_model": (True,),
        "ref_model_mixup_alpha": (0.3,),
        "ref_model_sync_steps": (1, 2),
    },
    "KTO": {
        "loss_type": ("kto", "apo_zero_unpaired"),
        "beta": (0.3,),
        "desirable_weight": (1.5,),
        "undesirable_weight": (0.5, 2.0),
        "precompute_ref_log_probs": (True,),
    },
    "CPO": {
        "loss_type": ("sigmoid", "hinge", "ipo", "simpo", "alphapo"),
        "beta": (0.3,),
        "label_smoothing": (0.1,),
        "simpo_gamma": (0.7,),
    },
    "Reward": {"center_rewards_coefficient": (0.01, 0.5)},
}  # fmt: skip
EXPERIMENTAL = {"CPO": "cpo"}
START: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4,
    "learning_rate": 1e-3, "bf16": False, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


@dataclass
class Program:
    """A program of TRL, the file of its rows, and its model."""

    text: str
    trainer: str


class LogProbabilities:
    """What TRL's Triton kernel returns, computed by torch."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor,
        temperature: float, _chunk: int, softcap: float | None, scale: float, _outputs: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """hidden [n, width], weight [vocabulary, width], labels [n] -> five of [n]."""
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        squares = (2 * logprobs).logsumexp(-1)
        best = logits.argmax(-1) == labels
        return logprobs.gather(1, labels[:, None])[:, 0], entropy, squares, logits.mean(-1), best


def _talk(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def write_rows(trainer: str, form: str, rng: random.Random, path: Path) -> None:
    """Writes rows of a trainer. form: "chat", "plain" or, of SFT, "messages" or "text"."""
    chat = form == "chat"
    with path.open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            word, other = rng.sample(WORDS, 2)
            words = " and ".join([word, *rng.sample(WORDS, rng.randint(0, 3))])
            ask: Any = _talk("user", f"spell {word}?") if chat else f"spell {word}? "
            best: Any = _talk("assistant", words) if chat else words
            worst: Any = _talk("assistant", other) if chat else other
            row = {
                "SFT": {"prompt": ask, "completion": best},
                "KTO": {"prompt": ask, "completion": best, "label": bool(number % 3)},
            }.get(trainer, {"prompt": ask, "chosen": best, "rejected": worst})
            if form == "text":
                row = {"text": f"spell {word}? {words}"}
            elif form == "messages":
                row = {"messages": [*_talk("user", f"say {word}"), *_talk("assistant", words)]}
            file.write(json.dumps(row) + "\n")


def draw(seed: int, models: dict[str, str], folder: Path) -> Program:
    """The program of a seed; its rows are written into `folder`."""
    rng = random.Random(seed)
    trainer = rng.choice(tuple(OF_TRAINER))
    forms = ["chat", "plain"] + (["messages", "text"] if trainer == "SFT" else [])
    write_rows(trainer, rng.choice(forms), rng, folder / "rows.jsonl")
    options = START | ({"cpo_alpha": 0.0} if trainer == "CPO" else {})
    for _ in range(rng.randint(0, MOST_OPTIONS)):
        values = OF_TRAINER[trainer] if rng.random() < 0.5 else COMMON
        name = rng.choice(tuple(values))
        options[name] = rng.choice(values[name])
        if name == "num_train_epochs":
            options.pop("max_steps", None)
    stated = ", ".join(f"{name}={value!r}" for name, value in options.items())
    home = f"trl.experimental.{EXPERIMENTAL[trainer]}" if trainer in EXPERIMENTAL else "trl"
    model = models["head" if trainer == "Reward" else "base"]
    tokens = f", processing_class=AutoTokenizer.from_pretrained({model!r})"
    return Program(
        "from datasets import load_dataset\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"from {home} import {trainer}Config, {trainer}Trainer\n"
        f"args = {trainer}Config(output_dir={str(folder / 'peer')!r}, {stated})\n"
        f"rows = load_dataset('json', data_files={str(folder / 'rows.jsonl')!r}, split='train')\n"
        f"trainer = {trainer}Trainer(model={_model(trainer, model)}, args=args, train_dataset=rows"
        f"{tokens if trainer in EXPERIMENTAL else ''})\n"
        "trainer.train()\n",
        trainer,
    )


def _model(trainer: str, path: str) -> str:
    """The model's expression: the experimental trainers take no name of a local folder."""
    return (
        f"AutoModelForCausalLM.from_pretrained({path!r})"
        if trainer in EXPERIMENTAL
        else f"{path!r}"
    )


def peer_weights(text: str) -> dict[str, torch.Tensor]:
    """Runs a program and returns the weights of its trainer's model."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "train.py", "exec"), names)  # noqa: S102  # drawn above
    return {name: w.detach().float() for name, w in names["trainer"].model.state_dict().items()}


def our_weights(file: Path, folder: Path, trainer: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Translates a program, trains its recipe, and returns the weights and the translation."""
    translation = translate("trl", [str(file)])
    recipe = json.loads(json.dumps(dict(translation.recipe)))
    recipe["run_dir"] = str(folder / "ours")
    recipe["data"]["shuffle"] = False
    recipe.setdefault("learner", {})["threads"] = 1
    if recipe["learner"].keys() & {"warmup_updates", "warmup_ratio"}:
        recipe["learner"].setdefault("warmup_start_ratio", 0.0)
    train(parse_recipe(recipe), Console("quiet"))
    export(folder / "ours", "latest", folder / "hf")
    kind = AutoModelForSequenceClassification if trainer == "Reward" else AutoModelForCausalLM
    model = kind.from_pretrained(folder / "hf", dtype=torch.float32)
    return {name: w.detach() for name, w in model.state_dict().items()}, translation


def difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """(the difference's norm over that of the distance moved, that distance)."""
    names = sorted(ours.keys() & theirs.keys() & start.keys())
    apart = math.hypot(*(float((ours[name] - theirs[name]).norm()) for name in names))
    moved = math.hypot(*(float((theirs[name] - start[name]).norm()) for name in names))
    return (apart / moved if moved else math.inf if apart else 0.0), moved


def make_models(folder: Path) -> dict[str, str]:
    """Two fresh models of the same weights, one of them with a head of rewards."""
    init = ModelInit.model_validate({"type": "qwen3", "tokenizer": {"kind": "characters"}, **SIZES})
    make_fresh(init, WORDS, 0, folder / "base")
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    torch.manual_seed(0)
    head: Any = AutoModelForSequenceClassification.from_pretrained(
        folder / "base", num_labels=1, dtype=torch.float32
    )
    tokenizer = load_tokenizer(str(folder / "base"))
    head.config.pad_token_id = tokenizer.pad_token_id
    head.save_pretrained(folder / "head")
    tokenizer.save_pretrained(folder / "head")
    return {name: str(folder / name) for name in ("base", "head")}


def refused_by(seed: int, ends: list[str], text: str) -> str:
    """Prints with which errors a program ended, and its options; returns who refused it."""
    stated = next(line for line in text.splitlines() if line.startswith("args"))
    print(f"# seed {seed}: {' | '.join(ends)}\n{stated}\n", flush=True)
    return "both refused" if len(ends) == 2 else ends[0].split(":")[0] + " refused"


def check(seed: int, models: dict[str, str], folder: Path) -> str:
    """Runs both sides of a seed's program; returns how it ended, in one line."""
    program = draw(seed, models, folder)
    file = folder / "train.py"
    file.write_text(program.text, "utf-8")
    ends: list[str] = []
    try:
        theirs = peer_weights(program.text)
    except Exception as error:  # noqa: BLE001  # whatever TRL refuses a program with
        ends.append(f"TRL: {type(error).__name__}: {str(error)[:200]}")
    try:
        ours, translation = our_weights(file, folder, program.trainer)
    except PostgradError as error:
        ends.append(f"postgrad: {type(error).__name__}: {str(error)[:300]}")
    if ends:
        return refused_by(seed, ends, program.text)
    reward = program.trainer == "Reward"
    kind = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    model = kind.from_pretrained(models["head" if reward else "base"], dtype=torch.float32)
    apart, moved = difference(ours, theirs, model.state_dict())
    if apart <= LIMIT:
        return "same"
    lost = {option.name for option in translation.draft.missing} - {"use_cpu"}
    if lost:
        return "told"
    print(f"# seed {seed}: {apart:.2g} of {moved:.2g}\n{program.text}\n{translation.text}\n")
    return "different"


def in_order() -> None:
    """Rows come in order in TRL, too."""
    Trainer._get_train_sampler = lambda self, *_, **__: (  # type: ignore[method-assign]
        torch.utils.data.SequentialSampler(self.train_dataset)
    )


def run_programs(
    description: str | None, check: Callable[[int, dict[str, str], Path], str]
) -> None:
    """Runs `check` on the seeds that the command line names, and prints how often programs ended in
    which way. check: of a seed, the models by name, and an empty folder, beside which are modules
    that a recipe may import.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n", 1)[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if trl_utils._ChunkedLogProbFunction is None:
        trl_utils._ChunkedLogProbFunction = LogProbabilities
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        models = make_models(Path(home))
        sys.path.insert(0, home)
        for seed in range(args.seed, args.seed + args.count):
            folder = Path(home, "run")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            counted[check(seed, models, folder)] += 1
    print(dict(counted))


if __name__ == "__main__":
    in_order()
    run_programs(__doc__, check)

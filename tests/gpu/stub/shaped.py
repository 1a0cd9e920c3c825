"""Runs shipped recipes with the shapes of their models: `shaped.py FOLDER NAME ... [--KEY VALUE]`,
of CASES. Prints what each asked of the device, as JSON by name, a line for each as it ends and a
last line of all.

Weights are never read, hashed or written: a model's file is a header and a hole, transformers makes
the model on the device, and no checkpoint is saved (100 GB of zeros). Rows are synthetic and as
long as the recipe allows; a step has fewer of them, and answers are short. The rest is that of the
recipe: layers, vocabulary, micro-batches, optimiser, loss.
"""

import contextlib
import json
import struct
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomlkit
import torch
import transformers
from command import told_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.stub_device import counts
from postgrad.checkpoint.store import CheckpointStore
from postgrad.models import save
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.training.run import Run
from postgrad.training.saving import Saver

ROOT = Path(__file__).parent.parent.parent.parent
SMALL = "Qwen/Qwen3-0.6B"
ROWS = 64
NEW_TOKENS = 16


def _rl(prompts: int, samples: int) -> dict[str, dict[str, Any]]:
    """A step of one update, all of its samples decoded together: how many are best is measured,
    and times mean nothing here.
    """
    return {
        "batch": {"rollout_batch_size": prompts, "train_batch_size": samples},
        "rollout": {"max_new_tokens": NEW_TOKENS, "slots": samples},
    }


EIGHT: dict[str, dict[str, Any]] = {"batch": {"train_batch_size": 8}}
WHOLE: dict[str, dict[str, Any]] = {"model": {"gradient_checkpointing": False}}
# recipe, the model in place of its own, and what changes in its tables
CASES: dict[str, tuple[str, str | None, dict[str, dict[str, Any]]]] = {
    "7b/sft": ("7b/sft", None, EIGHT),
    "7b/dpo": ("7b/dpo", None, EIGHT),
    "7b/dpo_lora": ("7b/dpo_lora", None, EIGHT),
    "7b/reward": ("7b/reward", None, EIGHT),
    "7b/reward_lora": ("7b/reward_lora", None, EIGHT),
    "7b/grpo": ("7b/grpo", None, _rl(16, 128)),
    "7b/grpo_lora": ("7b/grpo_lora", None, _rl(16, 128)),
    "7b/ppo_lora": ("7b/ppo_lora", None, _rl(32, 32)),
    "0.6B sft": ("7b/sft", SMALL, EIGHT | WHOLE),
    "0.6B grpo": ("7b/grpo", SMALL, _rl(32, 256) | WHOLE),
}


def shape(source: str) -> dict[str, Any]:
    """The row of the table of common models."""
    table = (ROOT / "src/postgrad/models/shapes.toml").read_text("utf-8")
    row = tomllib.loads(table)[source.removesuffix("-Base")]
    return {name: value for name, value in row.items() if name != "also"}


def write_model(source: str, to: Path, *, scores: bool) -> None:
    """The directory of a model: a small tokenizer, the config of its shape, a file of weights that
    is a header and a hole.
    """
    tiny = ModelInit(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        tokenizer=TokenizerInit(kind="characters"),
    )
    make_fresh(tiny, ["a"], 0, to)
    row = shape(source)
    ids = json.loads((to / "config.json").read_text("utf-8"))
    special = {name: ids.get(name) for name in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(row.pop("model_type"), **row, **special)
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        config.num_labels, config.reward_mean, config.reward_std = 1, 0.0, 1.0
    with torch.device("meta"):
        lm = kind.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(lm).__name__]
    config.save_pretrained(to)
    header, end = dict[str, Any](), 0
    for name, tensor in lm.state_dict().items():
        if name == "lm_head.weight" and row["tie_word_embeddings"]:
            continue
        start, end = end, end + 2 * tensor.numel()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (to / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _on_device(kind: Any) -> Any:
    """from_pretrained of an Auto class that takes a model's shape and not its weights."""

    def patched_init(path: str, *, config: Any, dtype: torch.dtype, **rest: Any) -> Any:
        with torch.device("cuda"):
            lm = kind.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        missing = []
        if kind is AutoModelForSequenceClassification:
            lm.score.to("cpu")  # may be drawn there
            causal = "CausalLM" in AutoConfig.from_pretrained(path).architectures[0]
            missing = ["score.weight"] if causal else []
        report = {"missing_keys": missing, "mismatched_keys": []}
        return (lm, report) if rest.get("output_loading_info") else lm

    return patched_init


def _hash_without_weights(files_hash: Any) -> Any:
    return lambda files: files_hash([file for file in files if file.suffix != ".safetensors"])


def write_rows(job: str, length: int, to: Path) -> None:
    """Rows of about `length` tokens, each of a character."""

    def text(number: int, part: str, size: int) -> str:
        return (f"{part} {number} " * size)[:size]

    room = length - 128
    with to.open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            question = text(number, "why", room // 4)
            answers = [text(number, part, room - room // 4) for part in ("yes", "no")]
            asked = {"role": "user", "content": question}
            conversations = [
                [asked, {"role": "assistant", "content": answer}] for answer in answers
            ]
            rows = {
                "sft": {"messages": conversations[0]},
                "rl": {
                    "prompt": text(number, "why", 700),
                    "solution": "1",
                    "context_messages": [{"role": "user", "content": text(number, "why", 700)}],
                },
            }
            pair = {"chosen": conversations[0], "rejected": conversations[1]}
            file.write(json.dumps(rows.get(job, pair)) + "\n")


def write_recipe(name: str, folder: Path, models: dict[str, Path]) -> Path:
    """The recipe of a case, with what CASES changes, one step, no evaluation."""
    recipe, source, changes = CASES[name]
    data: Any = tomllib.loads((ROOT / "recipes" / f"{recipe}.toml").read_text("utf-8"))
    rows = folder / f"{name.replace('/', '-')}.jsonl"
    write_rows(data["job"], data["data"]["max_len"], rows)
    for gone in ("eval", "checkpoint", "steps", "epochs", "total_episodes"):
        data.pop(gone, None)
    data["data"] |= {"path": str(rows), "split": "train"}
    data["data"].pop("name", None)
    data["steps"] = 1
    for table, values in changes.items():
        data[table] |= values
    data["model"]["path"] = str(models[source or data["model"]["path"]])
    if "reward_model" in data:
        data["reward_model"]["model"]["path"] = str(models["scores"])
    for owner in (data, data.get("critic", {})):
        owner.get("learner", {}).pop("warmup_updates", None)  # longer than the run
    if data["job"] == "rl":
        data["rewards"].append({"type": "helpers.by_sample:by_sample"})
        data["sentinels"] = {"truncation": "off"}
    data["run_dir"] = str(folder / name.replace("/", "-"))
    to = folder / f"{name.replace('/', '-')}.toml"
    to.write_text(tomlkit.dumps(data), "utf-8")
    return to


PHASES: dict[str, dict[str, int]] = {}
COUNTED = (
    "launches",
    "captured",
    "graph_launches",
    "waits",
    "from_device",
    "to_device",
    "pageable",
)


def _counted(phase: Any) -> Any:
    """Run.phase that also sums what each phase asked of the device."""

    @contextlib.contextmanager
    def counted(run: Run, name: str, *more: Any) -> Iterator[None]:
        before = counts()
        try:
            with phase(run, name, *more):
                yield
        finally:
            after, sums = counts(), PHASES.setdefault(name, dict.fromkeys(COUNTED, 0))
            for count in COUNTED:
                sums[count] += after[count] - before[count]

    return counted


def main(folder: Path, names: list[str], overrides: list[str]) -> dict[str, Any]:
    models = {}
    for source in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", SMALL, "scores"):
        models[source] = folder / source.replace("/", "-")
        of_shape = "Qwen/Qwen3-8B" if source == "scores" else source
        write_model(of_shape, models[source], scores=source == "scores")
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        kind.from_pretrained = _on_device(kind)
    transformers.logging.set_verbosity_error()
    save.files_hash = _hash_without_weights(save.files_hash)
    CheckpointStore.require_space = lambda *arguments: 1 << 60  # type: ignore[method-assign]
    Saver.save = lambda *arguments, **more: None  # type: ignore[method-assign]
    Run.phase = _counted(Run.phase)  # type: ignore[method-assign]
    reports: dict[str, Any] = {}
    for name in names:
        PHASES.clear()
        recipe = write_recipe(name, folder, models)
        reports[name] = told_of(["train", str(recipe), "--debug", *overrides])
        reports[name]["phases"] = {
            phase: {count: number for count, number in sums.items() if number}
            for phase, sums in PHASES.items()
            if any(sums.values())
        }
        print(json.dumps({name: reports[name]}), flush=True)
    return reports


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    names = [word for word in words if word in CASES]
    print(json.dumps(main(Path(folder), names, words[len(names) :])))

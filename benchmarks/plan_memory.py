"""Memory that `postgrad plan` foresees against what runs take, each in a process of its own.

    python benchmarks/plan_memory.py --data DIR --to plan_memory.json

DIR holds gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz. A run has two steps on fresh weights. Measured
is the peak resident size less that of the process before the run, after the same run of a tiny
model has imported everything and read the data, and the model was made.
"""

import argparse
import gc
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

SIZES: dict[str, dict[str, int]] = {
    "6M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6},
    "60M": {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 10},
}
GSM8K = {"prompt": "question", "answer": "answer", "limit": 200}
HH = {"chosen": "chosen", "rejected": "rejected", "limit": 200}
WAYS = ((False, False, 2048), (False, True, 2048), (True, False, 2048), (False, False, 8192))
HEADS = {"6M": (4, 2), "60M": (10, 2)}


def table(
    job: str, size: str, folder: Path, *, lora: bool, checkpointing: bool, tokens: int
) -> Any:
    """The recipe of one configuration."""
    heads, kv_heads = HEADS[size]
    init = {
        "type": "qwen2", **SIZES[size], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tokenizer": {"vocab_size": 4096},
    }  # fmt: skip
    adapter = {"lora": {"rank": 16, "alpha": 16}} if lora else {}
    model = {"init": init, "gradient_checkpointing": checkpointing, "dtype": "float32", **adapter}
    found: dict[str, Any] = {
        "job": job, "steps": 2, "model": model, "learner": {"threads": 1},
        "batch": {"micro_train_tokens": tokens},
    }  # fmt: skip
    if job in ("reward", "preference"):
        pairs = str(folder / "hh-rlhf-harmless.jsonl.gz")
        found["data"] = {"path": pairs, "max_len": 512, "max_lost_fraction": 1.0, **HH}
        found["batch"]["train_batch_size"] = 32
    else:
        found["data"] = {"path": str(folder / "gsm8k.jsonl"), "max_len": 512, **GSM8K}
        found["batch"]["train_batch_size"] = 64
    if job == "rl":
        del found["batch"]["train_batch_size"]
        found["batch"] |= {"rollout_batch_size": 16, "n_samples_per_prompt": 8}
        found |= {"rewards": [{"type": "gsm8k"}], "algorithm": {"type": "grpo", "kl_coef": 0.05}}
        found["rollout"] = {"max_new_tokens": 128}
    return found


def configurations(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and recipe of each."""
    for size in SIZES:
        for job in ("sft", "reward", "rl"):
            for lora, checkpointing, tokens in WAYS:
                words = [job, size, "adapter" * lora, "checkpointing" * checkpointing, str(tokens)]
                recipe = table(
                    job, size, folder, lora=lora, checkpointing=checkpointing, tokens=tokens
                )
                yield " ".join(filter(None, words)), recipe


def run(recipe: Any) -> None:
    """In the child: trains, and prints its peak less what it held before."""
    from postgrad.jobs.roles import base_model
    from postgrad.jobs.train import train
    from postgrad.observe.console import Console
    from postgrad.recipe.load import parse_recipe

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    init = {**recipe["model"]["init"], **small, "num_attention_heads": 2, "num_key_value_heads": 1}
    warm = {**recipe, "model": {**recipe["model"], "init": init}}
    train(parse_recipe({**warm, "run_dir": recipe["run_dir"] + "-warm"}), Console("quiet"))
    model = base_model(parse_recipe(recipe), Path(recipe["run_dir"] + "-model"))
    recipe["model"] = {**recipe["model"], "path": model, "init": None}
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held = psutil.Process().memory_info().rss
    train(parse_recipe(recipe), Console("quiet"))
    status = Path("/proc/self/status").read_text("utf-8")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"held": held, "peak": peak * 1024}))


def measured(recipe: Any) -> int:
    """Bytes of a run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({**recipe, "run_dir": str(Path(folder) / "run")})
        done = subprocess.run(
            [sys.executable, __file__, "--child"], input=text, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
    return found["peak"] - found["held"]


def foreseen(recipe: Any) -> tuple[int, dict[str, int]]:
    """Bytes of the plan's peak, and its lines there."""
    from postgrad.models.known_shapes import shape_of_model
    from postgrad.plan.hardware import parse_hardware
    from postgrad.plan.plan import Facts, outlook
    from postgrad.recipe.load import parse_recipe

    parsed = parse_recipe({**recipe, "run_dir": "run"})
    memory = outlook(parsed, Facts(shape_of_model, parse_hardware("CPU"))).memory
    lines = {f"{line.role} {line.what}": line.bytes.get(memory.peak, 0) for line in memory.lines}
    return memory.peak_bytes, {name: count for name, count in lines.items() if count}


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.child:
        run(json.load(sys.stdin))
        return
    rows: list[dict[str, Any]] = []
    for name, recipe in configurations(options.data):
        if options.only not in name:
            continue
        (planned, lines), real = foreseen(recipe), measured(recipe)
        rows.append({"name": name, "foreseen": planned, "measured": real, "lines": lines})
        print(f"{name:<34} {planned / 1e6:8.0f} {real / 1e6:8.0f} MB {planned / real - 1:+.0%}",
              file=sys.stderr)  # fmt: skip
    text = json.dumps({"command": shlex.join(["python", *sys.argv]), "rows": rows}, indent=1)
    (options.to.write_text(text + "\n", "utf-8") if options.to else print(text))


if __name__ == "__main__":
    main()

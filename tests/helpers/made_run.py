"""A run directory as a run of reinforcement learning leaves it, made without one."""

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from postgrad.observe.sinks import Logs
from postgrad.recipe.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
GROUP = 4


def byte_tokenizer() -> Tokenizer:
    """One token a byte, its id the place of its letter in the byte-level alphabet."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def sample(step: int, ticket: int, number: int, text: str, **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl; the reward is the sample's number over the largest."""
    ids = TOKENIZER.encode(text.encode(errors="replace").decode()).ids
    values = [-0.25] * len(ids)
    reward = number / (GROUP - 1)
    turn = {"author": "policy", "token_ids": ids, "logprobs": values, "text": text}
    return {
        "step": step,
        "ticket": ticket,
        "sample": number,
        "dataset": "questions.jsonl",
        "row": ticket % 10,
        "question": f"What is {ticket % 10} twice?",
        "answer": str(ticket % 10 * 2),
        "metadata": {},
        "prompt_token_ids": TOKENIZER.encode(f"What is {ticket % 10} twice?").ids,
        "turns": [{**turn, "learner_logprobs": [value + 1e-3 for value in values]}],
        "policy_version": [[step - 1, len(ids)]],
        "finish_reason": "length" if number == 0 else "stop",
        "text": text,
        "rewards": {"exact": reward, "format": 1.0},
        "total": reward + 1.0,
        "kept": True,
        "failures": [],
        "details": {"exact": {"answer": text[-3:]}},
        "advantages": [reward - 0.5] * len(ids),
        "mask": [1] * len(ids),
        **more,
    }


def metric(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "update": step,
        "loss": 1.0 / step,
        "reward": 1.0 + step / 100,
        "response_length": 10.0 + step,
        "policy/kl": 0.001 * step,
        "policy/lr": 1e-4,
        "sample_seconds": 2.0,
        "train_seconds": 1.0,
        "sample/decode_seconds": 1.5,
        "peak_memory_bytes": 2**30 + step,
        "train_memory_bytes": 2**28 + step,
        "estimated/sample_seconds": 1.8,
        "estimated/train_memory_bytes": 2**28,
        "estimated/peak_memory_bytes": 2**30 + 2**29,
    }


def evaluation(step: int) -> dict[str, Any]:
    """A line of eval.jsonl."""
    accuracy = 0.5 + step / 100
    ends = {"accuracy_low": accuracy - 0.05, "accuracy_high": accuracy + 0.05}
    return {"step": step, "update": step, "set": None, "rows": 64, "accuracy": accuracy, **ends}


def written(step: int, ticket: int, number: int) -> str:
    """What the policy answers."""
    return f"Twice {ticket % 10} is {ticket % 10 * 2}, says sample {number} of step {step}."


def add_step(
    logs: Logs,
    step: int,
    groups: int,
    text: Callable[[int, int, int], str] = written,
    more: Callable[[int], dict[str, Any]] = lambda step: {},
) -> None:
    """The lines of one step. more: further metrics of a step."""
    logs.metric(metric(step) | more(step))
    tickets = range((step - 1) * groups, step * groups)
    logs.samples(sample(step, t, n, text(step, t, n)) for t in tickets for n in range(GROUP))


def made_run(
    path: Path,
    steps: int = 6,
    groups: int = 2,
    text: Callable[[int, int, int], str] = written,
    overrides: tuple[str, ...] = (),
    more: Callable[[int], dict[str, Any]] = lambda step: {},
) -> Path:
    """Writes a run into `path`: its files, and a tokenizer where a fresh model has it."""
    recipe = load_recipe(RECIPES / "gsm8k_grpo.toml", ["--run_dir", str(path), *overrides])
    (path / "init").mkdir(parents=True)
    TOKENIZER.save(str(path / "init" / "tokenizer.json"))
    recipe_record = {"recipe": recipe.dump(), "versions": {"postgrad": "0", "python": "3"}}
    (path / "recipe.json").write_text(json.dumps(recipe_record), "utf-8")
    plan = {"memory": {"peak_bytes": 2**31, "phases": {"update": 2**31}, "roles": {}}}
    (path / "plan.json").write_text(json.dumps({"plans": [{}, {"after_step": 2, **plan}]}))
    logs = Logs(path)
    logs.event("started", "step 0", step=0, micro_train_tokens=8192)
    logs.evaluation(evaluation(0))
    for step in range(1, steps + 1):
        add_step(logs, step, groups, text, more)
    logs.evaluation(evaluation(steps))
    spoken = {"sentinel": "grad_norm", "action": "warn", "step": steps}
    logs.event("sentinel", "the gradient norm jumped", **spoken)
    logs.close()
    return path


def unpacked(block: str) -> Any:
    """The value of a block that observe/report/page.py packed."""
    return json.loads(gzip.decompress(base64.b64decode(block)))

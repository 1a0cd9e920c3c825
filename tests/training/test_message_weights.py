"""SFT whose messages have weights: whole runs, beside plain transformers and after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from postgrad.data.conversations import load_conversations
from postgrad.data.settings import DataSettings
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

STEPS, BATCH = 3, 8
ROLES = ["user", "assistant"]
Write = Callable[..., dict[str, Any]]


@pytest.fixture
def rows(tmp_path: Path) -> Write:
    """rows("name", weight of a number and a role): the keys of a set of conversations."""

    def write(name: str, weight: Callable[[int, str], Any], **more: Any) -> dict[str, Any]:
        def message(number: int, role: str, content: str) -> dict[str, Any]:
            stated = weight(number, role)
            return {"role": role, "content": content} | ({"weight": stated} if stated != 1 else {})

        chats = [
            [message(n, "user", f"{n} + {n % 7}?"), message(n, "assistant", str(n + n % 7))]
            for n in range(STEPS * BATCH)
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))
        read = {"path": str(path), "messages": "messages", "max_len": 64, "shuffle": False}
        return read | {"loss_turns": ROLES, **more}

    return write


@pytest.fixture
def make(tmp_path: Path, models: Callable[[int], str]) -> Callable[..., Recipe]:
    """make("run", data, **sections)"""

    def sft(run: str, data: dict[str, Any], **changes: Any) -> Recipe:
        common: dict[str, Any] = {
            "job": "sft", "run_dir": str(tmp_path / run), "steps": STEPS,
            "model": {"path": models(1)}, "batch": {},
            "learner": {"lr": 1e-2, "max_grad_norm": 0.0, "threads": 1},
        }  # fmt: skip
        raw = {**common, "data": data, **changes}
        return parse_recipe({**raw, "batch": {"train_batch_size": BATCH, **raw["batch"]}})

    return sft


def odd(number: int, role: str) -> float:
    return (0.5, 1, 3)[number % 3] if role == "assistant" else (0.25, 0)[number % 2]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_killed_and_resumed_run_of_a_mixture_gives_the_same_bits(
    aggregation: str, make: Any, rows: Write, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its sets has no weights."""
    sets = [rows("odd", odd), rows("even", lambda *_: 1, loss_turns="all")]
    changes = {
        "algorithm": {"type": "sft", "aggregation": aggregation},
        "checkpoint": {"save_steps": 1},
    }
    never, killed = (make(run, {"sets": sets}, **changes) for run in ("never", "killed"))
    train(never, console)
    train_until_killed(monkeypatch, SFTJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, STEPS)


@pytest.mark.parametrize("micro", [None, 1])
def test_the_same_weight_on_every_message_changes_no_bit(
    micro: int | None, make: Any, rows: Write, console: Console
) -> None:
    batch = {"micro_train_batch_size": micro}
    of_weight_one, halves, others = (
        make(name, rows(name, weight), batch=batch)
        for name, weight in [("ones", lambda *_: 1), ("halves", lambda *_: 0.5), ("odd", odd)]
    )
    for recipe in (of_weight_one, halves, others):
        train(recipe, console)
    tensors_of_one, half, other = (
        tensors(each.run_dir, STEPS) for each in (of_weight_one, halves, others)
    )
    assert all(torch.equal(tensors_of_one[name], half[name]) for name in tensors_of_one)
    assert not all(torch.equal(tensors_of_one[name], other[name]) for name in tensors_of_one)


@pytest.mark.parametrize("micro", [None, 2])
def test_weighted_losses_are_those_of_plain_transformers(
    micro: int | None, make: Any, rows: Write, console: Console
) -> None:
    """AdamW on sum_t w_t (-log p_t) / sum_t w_t of padded rows, one update at a time."""
    data = rows("odd", odd)
    recipe = make(
        "ours", data, batch={"micro_train_batch_size": micro}
    )  # fmt: skip
    train(recipe, console)
    logged = lines(Path(recipe.run_dir) / "metrics.jsonl")

    path = recipe.model.path
    drawn = load_conversations(DataSettings.model_validate(data), load_tokenizer(path)).all()
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        batch = drawn[step * BATCH : (step + 1) * BATCH]
        length = max(len(row.token_ids) for row in batch)
        ids, weights = torch.zeros(BATCH, length).long(), torch.zeros(BATCH, length)
        for place, row in enumerate(batch):
            assert row.loss_weights is not None
            ids[place, : len(row.token_ids)] = torch.from_numpy(row.token_ids.astype(np.int64))
            weights[place, : len(row.token_ids)] = torch.from_numpy(row.loss_weights.copy())
        logits = lm(ids).logits[:, :-1]  # padding is behind every row: nothing sees it
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        counts = weights[:, 1:].flatten()
        loss = (each * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert logged[step]["policy/loss"] == pytest.approx(loss.item(), abs=1e-5)
        nll = each.detach()[counts > 0].mean().item()
        assert logged[step]["policy/nll"] == pytest.approx(nll, abs=1e-5)
        assert logged[step]["loss_tokens"] == int((counts > 0).sum())
    assert logged[-1]["policy/loss"] != pytest.approx(logged[-1]["policy/nll"], rel=1e-3)


def test_held_out_losses_count_every_token_alike(make: Any, rows: Write, console: Console) -> None:
    def measured(name: str, weight: Callable[[int, str], Any]) -> dict[str, Any]:
        held_out = rows(name, weight)
        trained = rows("trained", lambda n, role: 1)
        recipe = make(
            f"run_{name}", {**trained, "held_out": "none"}, steps=1,
            eval={"path": held_out["path"], "messages": "messages", "at_start": True},
        )  # fmt: skip
        train(recipe, console)
        return lines(Path(recipe.run_dir) / "eval.jsonl")[0]

    plain = measured("plain", lambda n, role: 1)
    halves = measured("halves", lambda n, role: 0.5 if n % 2 else 1)
    answers = measured("answers", lambda n, role: 1 if role == "assistant" else 0)
    assert halves["loss"] == plain["loss"]
    assert halves["loss_tokens"] == plain["loss_tokens"] > answers["loss_tokens"]

"""Whole runs beside TRL's trainers, from the same weights over the same rows: the losses of the
first 20 steps agree.

TRL is installed by `make test-slow` only. Its PRMTrainer was in 1.0 and is not in 1.16: with that
version its case is skipped. Two things of the peers are changed, so that both sides train the same
thing: rows come in order, and the head of PRMTrainer's model is one row for two labels (0 and a
score), whose cross entropy is that of two rows with a difference of that score.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from helpers.packages import TRL
from helpers.runs import lines
from postgrad.data.conversations import load_conversations
from postgrad.data.settings import DataSettings
from postgrad.models.fresh import make_fresh
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.rewards.sums import steps
from postgrad.training.start import train

pytestmark = [pytest.mark.slow, TRL]

STEPS, BATCH, RATE = 20, 4, 3e-3
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
PLAIN = (  # as PRMTrainer joins prompt and steps
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Two fresh models."""
    init = ModelInit.model_validate({"type": "qwen3", "tokenizer": {"kind": "characters"}, **SIZES})
    paths = [tmp_path / name for name in ("student", "teacher")]
    for seed, path in enumerate(paths):
        make_fresh(init, [], seed, path)
    return [str(path) for path in paths]


def our_losses(tmp_path: Path, name: str, model: str, **sections: Any) -> list[float]:
    table = {
        "run_dir": str(tmp_path / "run"),
        "steps": STEPS,
        "model": {"path": model},
        "batch": {"train_batch_size": BATCH},
        "learner": {"lr": RATE, "max_grad_norm": 0.0, "threads": 1},
        **sections,
    }
    train(parse_recipe(table), Console("quiet"))
    return [step[name] for step in lines(tmp_path / "run" / "metrics.jsonl")]


def peer_losses(kind: type[Any], config: type[Any], model: Any, to: Path, **more: Any) -> Any:
    """The losses of a trainer of TRL, unrounded: with AdamW at the same constant rate."""
    losses: list[float] = []

    class InOrder(kind):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **how: Any) -> Any:
            loss = super().compute_loss(*arguments, **how)
            losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
            return loss

    stated = more.pop("settings")
    args = config(
        output_dir=str(to / "peer"), max_steps=STEPS, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1, learning_rate=RATE, max_grad_norm=0.0, report_to="none",
        save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, **stated,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = InOrder(model=model, args=args, optimizers=(optimizer, constant), **more)
    trainer.train()
    return losses


class OneRow(torch.nn.Module):
    """The head [1, hidden] of ours as logits of two labels."""

    def __init__(self, score: torch.nn.Linear) -> None:
        super().__init__()
        self.score = score

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.score(hidden)
        return torch.cat([torch.zeros_like(scores), scores], -1)


def test_a_process_reward_model_has_the_first_losses_of_trl_s_trainer(
    tmp_path: Path, models: list[str]
) -> None:
    prm = pytest.importorskip("trl.experimental.prm", reason="TRL has PRMTrainer up to 1.0")
    from datasets import Dataset

    rows = list(steps(STEPS * BATCH, 3))
    data = {
        "path": "postgrad.rewards.sums:steps", "size": len(rows), "seed": 3, "shuffle": False,
        "chat_template": PLAIN, "separator": "\n", "max_len": 96,
    }  # fmt: skip
    ours = our_losses(
        tmp_path, "reward_model/loss", models[0], job="reward",
        data=data, algorithm={"type": "process_reward"},
    )  # fmt: skip
    model: Any = AutoModelForTokenClassification.from_pretrained(models[0], dtype=torch.float32)
    start: Any = load_score_model(models[0], dtype=torch.float32).lm  # of the recipe's seed, 0
    model.score = OneRow(start.score)
    theirs = peer_losses(
        prm.PRMTrainer, prm.PRMConfig, model, tmp_path,
        settings={"step_separator": "\n", "max_length": None},
        train_dataset=Dataset.from_list(rows), processing_class=load_tokenizer(models[0]),
    )  # fmt: skip
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    assert min(ours) < ours[0] - 0.02  # and they do move


@pytest.mark.parametrize(
    ("beta", "knobs"),
    [
        (0.0, {"divergence": "forward_kl"}),
        (1.0, {"divergence": "reverse_kl"}),
        (0.3, {"divergence": "jsd", "beta": 0.3}),
    ],
)
def test_distillation_has_the_first_losses_of_trl_s_gkd(
    beta: float, knobs: dict[str, Any], tmp_path: Path, models: list[str]
) -> None:
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    data = {
        "path": "postgrad.rewards.sums:examples", "size": STEPS * BATCH, "seed": 3,
        "shuffle": False, "max_len": 96,
    }  # fmt: skip
    ours = our_losses(
        tmp_path, "policy/divergence", models[0], job="sft", data=data,
        teacher={"model": {"path": models[1]}}, algorithm={"type": "distillation", **knobs},
    )  # fmt: skip
    tokenizer = load_tokenizer(models[0])
    rows = load_conversations(DataSettings.model_validate(data), tokenizer).all()

    def collate(entries: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        drawn = [rows[entry["row"]] for entry in entries]
        shape = len(drawn), max(len(row.token_ids) for row in drawn)
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, -100),
        }
        for place, row in enumerate(drawn):
            ids, mask = torch.tensor(row.token_ids).long(), torch.tensor(row.loss_mask)
            batch["input_ids"][place, : len(ids)] = ids
            batch["attention_mask"][place, : len(ids)] = 1
            batch["labels"][place, : len(ids)] = torch.where(mask, ids, -100)
        return {**batch, "prompts": batch["input_ids"][:, :1]}

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models
    )
    theirs = peer_losses(
        GKDTrainer, GKDConfig, student, tmp_path,
        settings={"beta": beta, "lmbda": 0.0, "temperature": 1.0},
        teacher_model=teacher, data_collator=collate, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"row": n} for n in range(len(rows))]),
    )  # fmt: skip
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    assert min(ours) < 0.9 * ours[0]


@pytest.mark.parametrize("asked", [True, False])
def test_sft_on_everything_has_the_first_losses_of_trl_s_trainer_as_it_comes(
    asked: bool, tmp_path: Path, models: list[str]
) -> None:
    """asked: whether the answers follow a system message and a question."""
    import trl
    from datasets import Dataset

    if getattr(trl.trainer.utils, "_ChunkedLogProbFunction", trl) is None:
        pytest.skip(f"SFTTrainer of TRL {trl.__version__} does not run without Triton")
    before = [{"role": "system", "content": "add"}] if asked else []
    rows = [
        {"messages": [
            *before, {"role": "user", "content": f"{n} + {n % 7}?"},
            {"role": "assistant", "content": str(n + n % 7)},
        ]}
        for n in range(STEPS * BATCH)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {
        "path": str(tmp_path / "rows.jsonl"), "messages": "messages", "shuffle": False,
        "loss_turns": "everything", "max_len": 96,
    }  # fmt: skip
    ours = our_losses(tmp_path, "policy/nll", models[0], job="sft", data=data)
    theirs = peer_losses(
        trl.SFTTrainer, trl.SFTConfig,
        AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32), tmp_path,
        settings={"max_length": 96}, train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(models[0]),
    )  # fmt: skip
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    assert min(ours) < ours[0] - 0.5

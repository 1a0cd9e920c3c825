"""Reward models in the loop: a step in float64, the scale of their scores, export and resume."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from helpers.jobs import write_pairs
from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from postgrad.core.errors import UsageError
from postgrad.data.mixture import training_rows
from postgrad.data.overlap import held_out
from postgrad.data.pairs import load_pairs
from postgrad.models.score import RewardScale, load_score_model, scale_of_state
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.export import export
from postgrad.training.pairs import RewardJob
from postgrad.training.start import resume, train

Models = Callable[[int], str]
ROWS = 6


def metrics(recipe: Any) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def scores_of(lm: Any, rows: list[list[int]], pad: int) -> torch.Tensor:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return lm(ids, attention_mask=seen).logits[:, 0]


@pytest.mark.parametrize("micro", [None, 1, 3])
def test_a_step_is_bradley_terry_on_plain_transformers_in_float64(
    micro: int | None, make_recipe: Any, console: Console, models: Models
) -> None:
    batch = {"train_batch_size": ROWS} | ({"micro_train_batch_size": micro} if micro else {})
    recipe = make_recipe(
        "reward",
        model={"path": models(1), "init": None},
        batch=batch,
        steps=1,
        learner={"max_grad_norm": 0.0},
    )
    write_pairs(Path(recipe.data.path), rows=ROWS)
    train(recipe, console)
    tokenizer = load_tokenizer(models(1))
    pairs = training_rows(load_pairs, recipe.data, tokenizer, exclude=held_out([])).all()
    rows = [token_ids.tolist() for pair in pairs for token_ids in (pair.chosen, pair.rejected)]
    start = load_score_model(models(1), dtype=torch.float32, seed=recipe.seed).lm
    lm: Any = AutoModelForSequenceClassification.from_config(start.config).double().eval()
    lm.load_state_dict({name: tensor.double() for name, tensor in start.state_dict().items()})
    lm.set_attn_implementation("eager")
    lm.config.pad_token_id = tokenizer.pad_token_id
    scores = scores_of(lm, rows, tokenizer.pad_token_id)
    loss = -logsigmoid(scores[0::2] - scores[1::2]).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters() if p.grad is not None]).norm()
    (line,) = metrics(recipe)
    assert line["reward_model/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["reward_model/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    right = (scores[0::2] > scores[1::2]).double().mean().item()
    assert line["reward_model/accuracy"] == pytest.approx(right)
    score_values = scores.detach().numpy()
    assert line["reward_model/scale_mean"] == pytest.approx(score_values.mean(), abs=1e-5)
    assert line["reward_model/scale_std"] == pytest.approx(score_values.std(), rel=1e-4)


def test_what_is_exported_scores_the_same_in_plain_transformers(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """The held-out pairs' accuracy and mean reward of the run's own evaluation, from a directory
    that AutoModelForSequenceClassification reads, padded on the right.
    """
    held = str(write_pairs(tmp_path / "eval.jsonl", 40, 8))
    recipe = make_recipe("reward", eval={"path": held}, steps=6)
    train(recipe, console)
    to = export(Path(recipe.run_dir), "latest", tmp_path / "reward")
    tokenizer: Any = AutoTokenizer.from_pretrained(to)
    lm: Any = AutoModelForSequenceClassification.from_pretrained(to, dtype=torch.float32).eval()
    end = tokenizer.eos_token
    rows: list[list[int]] = []
    for row in map(json.loads, Path(held).read_text("utf-8").splitlines()):
        for answer in (row["chosen"], row["rejected"]):
            chat = [{"role": "user", "content": row["prompt"]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(f"{text}{answer}{end}", add_special_tokens=False)["input_ids"]
            rows.append(list(ids))
    with torch.no_grad():
        scores = scores_of(lm, rows, tokenizer.pad_token_id).numpy()
    (line,) = lines(Path(recipe.run_dir) / "eval.jsonl")
    assert line["accuracy"] == pytest.approx((scores[0::2] > scores[1::2]).mean())
    assert line["reward_mean"] == pytest.approx(scores.mean(), abs=1e-4)
    assert line["reward_std"] == pytest.approx(scores.std(), rel=1e-3)
    config = json.loads((to / "config.json").read_text("utf-8"))
    last = metrics(recipe)[-1]
    assert lm.config.num_labels == 1
    assert config["reward_mean"] == pytest.approx(last["reward_model/scale_mean"])
    assert config["reward_std"] == pytest.approx(last["reward_model/scale_std"])


def test_the_scale_is_a_mean_over_the_last_steps() -> None:
    """Steps with means 1 and 3 and mean squares 2 and 10, the first counting 0.9 of the second."""
    state = {"weight": 1.9, "sum": 0.9 * 1 + 3, "squares": 0.9 * 2 + 10}
    mean = 3.9 / 1.9
    scale = scale_of_state(state)
    assert scale.mean == pytest.approx(mean)
    assert scale.std == pytest.approx(np.sqrt(11.8 / 1.9 - mean**2))
    assert scale_of_state({}) == RewardScale(0.0, 1.0)
    equal = scale_of_state({"weight": 1.0, "sum": 2.0, "squares": 4.0})
    assert equal == RewardScale(2.0, 1.0)  # never a division by zero


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"learner": {"ema_decay": 0.9}},
        {"model": {"lora": {"rank": 4, "dropout": 0.3}}},
        {"algorithm": {"type": "bradley_terry", "centre_coef": 0.01}},
    ],
    ids=["ema", "lora", "centred"],
)
def test_a_killed_and_resumed_run_gives_the_same_bits(
    changes: dict[str, Any],
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    held = {"eval": {"path": str(write_pairs(tmp_path / "eval.jsonl", 40, 4)), "every": 1}}
    uninterrupted = make_recipe("reward", "whole", **held, **changes, steps=6)
    killed = make_recipe("reward", "killed", **held, **changes, steps=6)
    train(uninterrupted, console)
    for step in (1, 4):
        train_until_killed(monkeypatch, RewardJob, step, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 6)


def test_the_average_is_exported_as_a_reward_model_of_its_own(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    recipe = make_recipe("reward", learner={"ema_decay": 0.5})
    train(recipe, console)
    to = export(Path(recipe.run_dir), "latest", tmp_path / "ema", "ema")
    lm = load_score_model(str(to), dtype=torch.float32, fresh_head=False).lm
    saved = tensors(recipe.run_dir, 3)
    for name, tensor in lm.named_parameters():
        assert torch.equal(tensor, saved[f"reward_model.ema/{name}"])
    head = saved["reward_model.weights/score.weight"]
    assert not torch.equal(lm.score.weight, head)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match="role 'policy': this run has reward and ema"):
        export(Path(recipe.run_dir), "latest", tmp_path / "policy", "policy")


@pytest.mark.slow
def test_it_learns_what_the_pairs_say(make_recipe: Any, console: Console, tmp_path: Path) -> None:
    held = str(write_pairs(tmp_path / "eval.jsonl", 40, 12))
    recipe = make_recipe("reward", eval={"path": held, "at_start": True}, steps=20)
    train(recipe, console)
    first, last = metrics(recipe)[0], metrics(recipe)[-1]
    assert last["reward_model/accuracy"] == 1.0
    assert last["reward_model/loss"] < 0.2 < first["reward_model/loss"]
    assert lines(Path(recipe.run_dir) / "eval.jsonl")[-1]["accuracy"] == 1.0


def test_a_tokenizer_without_padding_of_its_own_is_refused_before_training(
    make_recipe: Any, console: Console, models: Models, tmp_path: Path
) -> None:
    to = shutil.copytree(models(1), tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(to)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(to)
    recipe = make_recipe("reward", model={"path": str(to), "init": None})
    with pytest.raises(UsageError, match="no padding token of its own"):
        train(recipe, console)
    assert not (Path(recipe.run_dir) / "checkpoints").exists()

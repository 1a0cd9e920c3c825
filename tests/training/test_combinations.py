"""Whole runs of reinforcement learning with everything that carries state from step to step, each
killed once: every two choices that go together meet in a run, and it ends as if nobody killed it.
"""

from pathlib import Path
from typing import Any

import pytest

from helpers.pairwise import pairs_of, pairwise
from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

FACTORS = {
    "algorithm": ("grpo", "rloo", "ppo", "remax", "online_dpo"),
    "reference": ("none", "kl in the loss", "kl in the reward", "moving"),
    "weights": ("all", "muon", "8bit", "adapter", "4bit"),
    "staleness": (0, 2),
    "sampling": ("all", "dynamic", "curriculum"),
    "updates": (1, 2),
    "played": (False, True),
    "masked": (False, True),
}
STEPS = 3
ROWS = "postgrad.rollout.environments.guess_number:rows"
TASK = {"lowest": 1, "highest": 9, "least": 4, "most": 6}
INIT = {**MODEL["init"], "num_hidden_layers": 1, "max_position_embeddings": 160}
ADAPTER = {"rank": 2, "alpha": 4, "dropout": 0.2}
STOP = ["1", "2", "3", "a", "e", "i"]  # some samples of a fresh model end by themselves
WEIGHTS: dict[str, dict[str, Any]] = {
    "all": {"learner": {"ema_decay": 0.5}},
    "muon": {"learner": {"optimizer": "muon"}},
    "8bit": {"learner": {"optimizer_state": "8bit"}},
    "adapter": {"model": {"lora": ADAPTER, "gradient_checkpointing": True}},
    "4bit": {"model": {"lora": {**ADAPTER, "dora": True}, "quantize": "4bit"}},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "all": {},
    "dynamic": {"dynamic_sampling": True, "max_rounds": 2},
    "curriculum": {"curriculum": {"retire_at": 0.4, "revisit_epochs": 1}},
}


def allowed(row: dict[str, Any]) -> bool:
    if row["algorithm"] == "online_dpo" and (row["masked"] or "kl" in row["reference"]):
        return False
    return row["reference"] != "moving" or row["weights"] not in ("adapter", "4bit")


def algorithm_of(row: dict[str, Any]) -> dict[str, Any]:
    if row["algorithm"] == "online_dpo":
        return {"type": "online_dpo"}
    knobs: dict[str, Any] = {"type": row["algorithm"]}
    if row["reference"] != "none":
        in_reward = row["reference"] == "kl in the reward"
        knobs |= {"kl_coef": 0.1, "kl_in": "reward" if in_reward else "loss"}
        knobs |= {"kl_target": 0.01, "kl_horizon": 16} if in_reward else {}
    corrected = {"correction": "tis", "rejection": {"token": [0.5, 2.0], "mean_k3": 0.05}}
    knobs |= corrected if row["staleness"] else {"reward_scaling": "running"}
    knobs |= {"critic_warmup_steps": 1} if row["algorithm"] == "ppo" else {}
    knobs |= {"observation_coef": 0.1} if row["played"] else {}
    return {**knobs, "mask_truncated_completions": row["masked"]}


def sections(row: dict[str, Any]) -> dict[str, Any]:
    """What the recipe of a row has of its own."""
    more = WEIGHTS[row["weights"]]
    ahead = {"max_staleness": row["staleness"], "slots": 5} if row["staleness"] else {}
    return {
        "algorithm": algorithm_of(row),
        "model": {"init": INIT, "dtype": "float32", **more.get("model", {})},
        "learner": more.get("learner", {}),
        "reference": {"ema_decay": 0.5} if row["reference"] == "moving" else {},
        "batch": {"num_mini_batches": row["updates"]},
        "data": {"path": ROWS, "task": TASK, "max_len": 120},
        "eval": {"path": ROWS, "task": TASK, "size": 2, "every": 2, "at_start": False},
        "rollout": {"max_new_tokens": 4, "stop": STOP, **ahead, **SAMPLING[row["sampling"]]},
        "sentinels": {"truncation": "off"},
        "checkpoint": {"save_steps": 1, "max_ckpt_num": 1, "best_metric": "eval/reward"},
    } | ({"environment": {"type": "guess_number", "max_turns": 2}} if row["played"] else {})


TABLE, WANTED = pairwise(FACTORS, allowed)


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "_") for value in row.values())


def test_every_two_choices_that_go_together_meet_in_the_table() -> None:
    assert set().union(*(pairs_of(row) for row in TABLE)) == WANTED
    assert ("weights", "4bit", "staleness", 2) in WANTED
    assert ("reference", "moving", "weights", "adapter") not in WANTED
    assert len(TABLE) < 33


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    row: dict[str, Any],
    make_recipe: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uninterrupted, killed = (
        make_recipe("rl", name, **sections(row)) for name in ("whole", "killed")
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 1 + TABLE.index(row) % (STEPS - 1), killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, STEPS)
    assert (
        sum(step["updates/made"] for step in lines(Path(uninterrupted.run_dir) / "metrics.jsonl"))
        > 0
    )

"""Schedules, optimizers, filters and controllers of benchmarks/peer_objectives, with peers that are
written here.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peer_objectives.__main__ import version_of
from benchmarks.peer_objectives.comparing import Known, compared
from benchmarks.peer_objectives.filters import Filters, Group, condition
from benchmarks.peer_objectives.learning import (
    STEPS,
    Optimizes,
    Rates,
    argument_defaults,
    class_defaults,
    words_of,
)
from benchmarks.peer_objectives.ours_texts import distilled_outcome, steps_outcome
from benchmarks.peer_objectives.shaping import Adapts, alike, responses
from benchmarks.peer_objectives.texts import written

TRL = ("sft", "--model_name_or_path", "m", "--dataset_name", "d")
WARM = (*TRL, "--warmup_steps", "10")  # then linear to 0
OPENRLHF = ("ppo", "--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "./rewards.py",
            "--advantage_estimator", "reinforce", "--init_kl_coef", "0.05",
            "--actor_num_gpus_per_node", "1")  # fmt: skip


def falling(count: int, first: int = 0) -> list[float]:
    """Linear from 1 to 0 behind ten updates that rise from 0, or from 1/10."""
    return [(u + first) / 10 if u < 10 else 1 - (u - 10) / (count - 10) for u in range(count)]


def test_a_warm_up_that_begins_one_update_earlier_is_known_and_no_other_is() -> None:
    assert compared("trl", Rates("same", WARM, lambda n: falling(n, 1)), 1).verdict == "equal"
    assert compared("trl", Rates("late", WARM, falling), 1).verdict == "known"
    moved = compared("trl", Rates("moved", WARM, lambda n: [0.9 * x for x in falling(n)]), 1)
    assert moved.verdict == "differs"
    row = compared("trl", Rates("late", WARM, falling), 1)
    assert row.loss == pytest.approx(0.1)
    assert row.theirs == pytest.approx(np.mean(falling(STEPS)))


def test_ticks_of_steps_are_repeated_for_each_update() -> None:
    words = (*OPENRLHF, "--lr_scheduler", "constant", "--rollout_batch_size", "8",
             "--train_batch_size", "2")  # fmt: skip
    flat = Rates("four updates a step", words, lambda n: [1.0] * n, in_steps=True)
    assert compared("openrlhf", flat, 1).verdict == "equal"


def adamw(decays: bool, **knobs: Any) -> Optimizes:
    """A peer whose norms and biases decay, or none of its weights."""

    def build_adamw(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, float]:
        decay = 0.1 if decays else 0.0
        return torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=decay, **knobs), 1.0

    words = (*TRL, "--weight_decay", "0.1") if decays else TRL
    return Optimizes("adamw", words, build_adamw, Known("all decay") if decays else None)


def test_decay_and_moments_are_compared() -> None:
    assert compared("trl", adamw(decays=False), 1).verdict == "equal"
    row = compared("trl", adamw(decays=True), 1)
    assert (row.verdict, row.theirs) == ("known", 1.0)
    assert 0 < (row.ours or 0) < 1
    row = compared("trl", adamw(decays=False, eps=1e-6), 1)
    assert (row.verdict, "eps" in row.why) == ("differs", True)


def test_a_filter_of_samples_is_compared_with_the_recipe_s_of_groups() -> None:
    words = (*OPENRLHF, "--dynamic_filtering", "--dynamic_filtering_reward_range", "0", "1")
    groups = [Group("mixed", np.array([1.0, 0.0]), np.array([1.0, 0.0])),
              Group("right", np.array([1.0, 1.0]), np.array([1.0, 0.5]))]  # fmt: skip
    same = Filters("mixed groups", words, lambda sample_group: sample_group.name == "mixed", groups)
    assert compared("openrlhf", same, 1).verdict == "equal"
    single = Filters("one sample", words, lambda sample_group: sample_group.first > 0.5, groups)
    row = compared("openrlhf", single, 1)
    assert (row.verdict, row.loss) == ("differs", 0.75)


def test_a_condition_of_a_file_is_read_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("def f(x):\n    if x > 2:\n        return None\n", "utf-8")
    test = condition(path, "if x > 2")
    assert (test({"x": 3}), test({"x": 1})) == (True, False)
    with pytest.raises(LookupError, match="no condition"):
        condition(path, "if y")


def test_a_coefficient_that_adapts_is_compared_step_by_step() -> None:
    words = (*OPENRLHF, "--kl_target", "0.3", "--kl_horizon", "1000")

    def controlled(steps: object, by: float = 1.0) -> np.ndarray:
        value, values = 0.05, []
        for batch in steps:  # pyright: ignore[reportGeneralTypeIssues]
            values.append(value)
            kl = responses(batch, batch.padded(batch.old) - batch.padded(batch.ref))
            value *= 1 + by * np.clip(kl / 0.3 - 1, -0.2, 0.2) * len(batch) / 1000
        return np.array(values)

    assert compared("openrlhf", Adapts("same", words, controlled, alike), 1).verdict == "equal"
    twice = Adapts("twice", words, lambda steps: controlled(steps, 2.0), alike)
    assert compared("openrlhf", twice, 1).verdict == "differs"


def test_defaults_are_read_without_running_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text(
        "class A:\n    x: int = 3\n    y: int = field(default=4)\n    z: int = Field(5, ge=1)\n"
        "p.add_argument('--lr', default=1e-5)\np.add_argument(f'--{prefix}.b', default=[1, 2])\n",
        "utf-8",
    )
    assert class_defaults(path, "A") == {"x": 3, "y": 4, "z": 5}
    assert argument_defaults(path) == {"lr": 1e-5, "actor.b": [1, 2]}
    assert words_of("sft", {"a": True, "b": [1, 2], "c": {"d": 0.5}}) == [
        "sft", "--a", "--b", "1", "2", "--c", '{"d": 0.5}']  # fmt: skip


def test_a_checkout_of_openrlhf_before_0_11_has_cases_of_its_own(tmp_path: Path) -> None:
    assert version_of("openrlhf", tmp_path) == ""
    for version, chosen in (("0.8.4", "_0_8"), ("0.10.0", "_0_8"), ("0.11.0", "")):
        (tmp_path / "version.txt").write_text(f"{version}\n", "utf-8")
        assert version_of("openrlhf", tmp_path) == chosen
    (tmp_path / "version.txt").write_text("0.8.4", "utf-8")
    assert version_of("trl", tmp_path) == ""


def test_a_teacher_s_cross_entropy_is_a_mean_over_tokens_of_answers() -> None:
    texts = written(3)
    table = {"type": "distillation", "teacher_coef": 0.5, "nll_coef": 0.25}
    terms: list[float] = []
    for tokens, mask, logits, teacher in zip(
        texts.tokens, texts.mask, texts.logits, texts.ref, strict=True
    ):
        log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
        for at in np.flatnonzero(mask):
            crossed = -(p[at - 1] * log_q[at - 1]).sum()
            terms.append(0.5 * crossed - 0.25 * log_q[at - 1, tokens[at]])
    assert distilled_outcome(table, texts).loss == pytest.approx(np.mean(terms), rel=1e-6)


def test_steps_are_judged_by_the_difference_of_two_logits() -> None:
    texts = written(4)
    tokens = [np.where(np.arange(len(row)) == len(row) - 1, 6, row % 6) for row in texts.tokens]
    texts = replace(texts, tokens=tokens)
    steps = (texts.ids == 6) & (texts.attention > 0)
    labels = np.full(texts.ids.shape, 0.25, np.float32)
    scores = np.array([row[-1, 2] - row[-1, 4] for row in texts.logits])
    loss = steps_outcome({"type": "process_reward"}, texts, steps, labels, (2, 4)).loss
    assert loss == pytest.approx(np.mean(np.log1p(np.exp(scores)) - 0.25 * scores), rel=1e-6)

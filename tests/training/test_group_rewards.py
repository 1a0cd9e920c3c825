"""Runs whose rewards compare the samples of a prompt, or read their special tokens."""

import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run, tensors, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

FILE = '''
def rare(prompt, rollouts, worth=1.0):
    """The more of the other samples say something else, the better."""
    texts = [rollout.text for rollout in rollouts]
    return [worth * (1 - texts.count(text) / len(texts)) for text in texts]


def ends(prompt, rollout):
    return rollout.text.endswith("<|im_end|>")
'''


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own functions, on the path of their run."""
    (tmp_path / "own_rewards.py").write_text(FILE, "utf-8")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )


def samples(run: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_learns_from_a_function_of_the_users_that_compares_samples(
    make_recipe: MakeRecipe, console: Console, own_file: None
) -> None:
    rewards = [
        {"type": "own_rewards:rare", "worth": 2.0},
        {"type": "relative_length", "weight": 0.5},
        {"type": "own_rewards:ends", "special_tokens": True, "weight": 0.0},
    ]
    runs: list[list[dict[str, Any]]] = []
    for workers in (1, 3):
        recipe = make_recipe(
            "rl", f"run{workers}", rewards=rewards, scoring={"workers": workers}, steps=2
        )
        train(recipe, console)
        runs.append(samples(Path(recipe.run_dir)))
    assert runs[0] == runs[1]
    ended = set[bool]()
    for _, group in groupby(runs[0], key=lambda sample_line: sample_line["ticket"]):
        drawn = list(group)
        texts = [line["text"] for line in drawn]
        tokens = [sum(len(turn["token_ids"]) for turn in line["turns"]) for line in drawn]
        assert len(drawn) == 4
        for line, text, count in zip(drawn, texts, tokens, strict=True):
            assert line["rewards"]["rare"] == 2 * (1 - texts.count(text) / 4)
            spread = max(tokens) - min(tokens)
            relative = 0.5 - (count - min(tokens)) / spread if spread else 0.0
            assert line["rewards"]["relative_length"] == relative
            assert line["rewards"]["ends"] == float(line["finish_reason"] == "stop")
            assert line["total"] == line["rewards"]["rare"] + 0.5 * relative
            ended.add(line["finish_reason"] == "stop")
    assert ended == {True, False}
    evaluated = samples(Path(recipe.run_dir), "eval_samples.jsonl")
    greedy = [line for line in evaluated if line.get("greedy")]
    assert greedy
    assert all(line["rewards"]["relative_length"] == 0.0 for line in greedy)  # a group of one


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [{}, {"max_staleness": 2, "slots": 5}], ids=["in step", "ahead"])
def test_a_killed_and_resumed_run_compares_the_same_samples(
    ahead: dict[str, int],
    make_recipe: MakeRecipe,
    console: Console,
    own_file: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples ahead are in the checkpoint, some groups with a part of their samples."""
    changes: dict[str, Any] = {
        "rewards": [{"type": "own_rewards:rare"}, {"type": "relative_length", "weight": 0.5}],
        "rollout": {"max_new_tokens": 6, **ahead},
        "algorithm": {"correction": "tis", "length_penalty": {"output_tokens": 0.25}},
        "scoring": {"workers": 2},
        "eval": {"every": 1},
        "steps": 4,
    }
    never, killed = (make_recipe("rl", name, **changes) for name in ("never", "killed"))
    train(never, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    pending = [name for name in tensors(killed.run_dir, 2) if name.startswith("pending/")]
    assert bool(pending) == bool(ahead)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 4)
    assert_penalties_are_of_the_group(Path(killed.run_dir), 0.25)


def assert_penalties_are_of_the_group(run: Path, share: float) -> None:
    """Each line's penalty, from the totals and tokens of its group in samples.jsonl."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in samples(run):
        groups.setdefault(line["ticket"], []).append(line)
    some = 0.0
    for lines in groups.values():
        tokens = [sum(len(turn["token_ids"]) for turn in line["turns"]) for line in lines]
        mean = max(0.0, sum(line["total"] for line in lines) / len(lines))
        for line, count in zip(lines, tokens, strict=True):
            assert line["length_penalty"] == pytest.approx(share * mean * count / max(tokens))
            some += line["length_penalty"]
    means = [line["length_penalty/mean"] for line in samples(run, "metrics.jsonl")]
    count = sum(map(len, groups.values()))
    assert some > 0
    assert sum(means) / len(means) == pytest.approx(some / count)

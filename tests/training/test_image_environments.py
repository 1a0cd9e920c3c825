"""Episodes of models that read images: whole runs of tiny models, with images in prompts and in the
environment's replies.
"""

import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import torch

from helpers.image_directories import models, row
from helpers.runs import lines, tensors
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.tools.dry_run.dry_run import dry_run
from postgrad.tools.evaluate import evaluate
from postgrad.tools.generate import Extent, generate
from postgrad.training.start import resume, train

__all__ = ["models"]

Make = Callable[..., Recipe]


@pytest.fixture
def make(tmp_path: Path, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """A recipe of two steps, in which every turn ends with its first letter."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    rows = [{**row(n, "yes", ((40, 16), (16, 24))[: 1 + n % 2]), "answer": "yes"} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    held_out = {**row(50, "no"), "answer": "no"}
    (tmp_path / "held_out.jsonl").write_text(f"{json.dumps(held_out)}\n")

    def recipe(kind: str, name: str = "run", **changes: Any) -> Recipe:
        rollout = {"max_new_tokens": 30, "stop": [*ascii_letters], **changes.pop("rollout", {})}
        return parse_recipe(
            {
                "job": "rl",
                "run_dir": str(tmp_path / name),
                "steps": 2,
                "model": {"path": models(kind), "dtype": "float32"},
                "data": {
                    "path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 600,
                },
                "eval": {"path": str(tmp_path / "held_out.jsonl"), "at_start": True},
                "environment": {"type": "showing:Showing", "max_turns": 3},
                "algorithm": {"type": "grpo", "correction": "tis"},
                "batch": {"rollout_batch_size": 3, "n_samples_per_prompt": 3},
                "rollout": rollout,
                "learner": {"lr": 1e-2, "threads": 1},
                "checkpoint": {"save_steps": 1},
                **changes,
            }
        )  # fmt: skip

    return recipe


def shown_in(sample: dict[str, Any]) -> tuple[set[str], set[int]]:
    """The hashes of the images of prompt and turns, and the tokens at which they stand."""
    prompt = {"token_ids": sample["prompt_token_ids"], "images": sample["images"]}
    placed = [(p, image) for p in (prompt, *sample["turns"]) for image in p.get("images", ())]
    tokens = {
        part["token_ids"][start + offset]
        for part, image in placed
        for start, length in image["runs"]
        for offset in range(length)
    }
    return {image["sha256"] for _, image in placed}, tokens


# Images of prompts alone (0), and of the first or every reply.
CASES = [("qwen2_5_vl", 0), ("qwen2_5_vl", 9), ("qwen3_vl", 1), ("llava", 9), ("qwen3_5", 9)]
LONG = [("llava", 0), ("gemma3", 9), ("smolvlm", 9), ("qwen3_vl", 9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pictures"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_engine_and_learner_agree_on_turns_behind_images(
    kind: str, pictures: int, make: Make, tmp_path: Path
) -> None:
    shows = {"type": "showing:Showing", "max_turns": 3, "pictures": pictures}
    train(make(kind, environment=shows), Console())
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    for line in metrics:
        assert line["sentinel/publish_difference"] < 1e-5
        assert line["sentinel/prob_difference"] < 1e-5
        assert line["environment/turns"] > 2
    assert metrics[-1]["policy/grad_norm"] > 0
    kept, compared = {file.name for file in (run / "images").iterdir()}, 0
    for sample in lines(run / "samples.jsonl"):
        shown = [len(turn.get("images", ())) for turn in sample["turns"]]
        assert shown == [0, min(pictures, 1), 0, int(pictures > 1), 0][: len(shown)]
        digests, tokens = shown_in(sample)
        assert digests <= kept
        assert len(tokens) == 1  # placeholders, all of them
        for turn in sample["turns"]:
            if "learner_logprobs" in turn:  # of a group that has something to learn from
                compared += 1
                np.testing.assert_allclose(turn["logprobs"], turn["learner_logprobs"], atol=2e-5)
    assert compared
    assert lines(run / "eval.jsonl")[0]["environment/turns"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def test_engine_and_learner_agree_on_conversations_with_images_of_their_own(
    kind: str, make: Make, tmp_path: Path
) -> None:
    shows = {"type": "showing:Jumping", "max_turns": 5}
    train(make(kind, environment=shows, data={
        "path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 2000,
    }), Console())  # fmt: skip
    run, shown = tmp_path / "run", set()
    for line in lines(run / "metrics.jsonl"):
        assert line["sentinel/publish_difference"] < 1e-5
        assert line["sentinel/prob_difference"] < 1e-5
        assert line["environment/conversations"] > 2
    for sample in lines(run / "samples.jsonl"):
        for turn in sample["turns"]:
            shown.add((turn.get("opens", False), len(turn.get("images", ()))))
            if "learner_logprobs" in turn:
                np.testing.assert_allclose(turn["logprobs"], turn["learner_logprobs"], atol=2e-5)
    assert {(True, 1), (True, 2), (False, 1)} <= shown  # alone, behind the prompt's, and more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("qwen2_5_vl", "Showing"),  # is stepped again
        ("qwen2_5_vl", "Wandering"),  # its replies are recorded
        pytest.param("llava", "Wandering", marks=pytest.mark.long),
    ],
)
def test_a_run_that_resumes_in_the_middle_of_episodes_has_the_same_bits(
    kind: str, world: str, make: Make, tmp_path: Path
) -> None:
    shows = {"type": f"showing:{world}", "max_turns": 4}
    ahead = {"max_staleness": 1, "slots": 2}
    train(make(kind, "whole", rollout=dict(ahead), environment=shows, steps=3), Console())
    train(make(kind, "parted", rollout=dict(ahead), environment=shows, steps=1), Console())
    turns = tensors(str(tmp_path / "parted"), 1)["pending/turns"][:, :2].tolist()
    assert any(turns.count(place) > 1 for place in turns)  # in the middle of an episode
    resume(tmp_path / "parted", ["--steps", "3"], (), Console())
    uninterrupted, parted = (tensors(str(tmp_path / name), 3) for name in ("whole", "parted"))
    assert uninterrupted.keys() == parted.keys()
    assert all(torch.equal(uninterrupted[name], parted[name]) for name in uninterrupted)


@pytest.mark.slow
def test_a_replay_reads_the_images_of_turns_by_their_hashes(make: Make, tmp_path: Path) -> None:
    train(make("qwen3_vl"), Console())
    again = make(
        "qwen3_vl",
        "again",
        rollout={"source": "replay", "replay_path": str(tmp_path / "run")},
        eval={},
    )
    train(again, Console())
    first, second = (tensors(str(tmp_path / name), 2) for name in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_dry_run_plays_episodes_with_images(make: Make, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 500}
    report = dry_run(make("qwen2_5_vl", data=data), Console())
    assert report.problems == []
    assert {"sample", "train", "evaluate", "export"} <= {check.name for check in report.checks}


@pytest.mark.slow
def test_a_game_is_played_behind_the_picture_of_its_row(make: Make, tmp_path: Path) -> None:
    game = {"low": 10, "high": 40, "secret": 17}
    shown = [{**row(n, "17"), "answer": "17", **game} for n in range(3)]
    (tmp_path / "games.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in shown))
    data = {"path": str(tmp_path / "games.jsonl"), "messages": "messages", "max_len": 500}
    plays = {"type": "guess_number", "max_turns": 3, "miss_reward": -0.1}
    changed: dict[str, Any] = {"data": data, "environment": plays, "eval": {}, "steps": 1}
    scores = {"rewards": [{"type": "tiny_rewards:looks"}], "scoring": {"workers": 1}}
    train(make("qwen2_5_vl", **changed, **scores), Console())
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics["environment/turns"] > 2
    assert metrics["sentinel/prob_difference"] < 1e-5
    replies = [turn for s in lines(tmp_path / "run" / "samples.jsonl") for turn in s["turns"][1::2]]
    assert replies
    assert all("invalid, from 10 to 40" in turn["text"] for turn in replies)


@pytest.mark.slow
def test_eval_and_generate_play_episodes_with_images(
    make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    recipe = make("qwen2_5_vl")
    report = evaluate(recipe, models("qwen2_5_vl"), Console())
    assert (report["rows"], report["failed"]) == (1, 0)
    generated = generate(recipe, tmp_path / "to", Console(), Extent(samples=2))
    samples = [sample for group in generated.groups(tmp_path / "all.jsonl") for sample in group]
    played = [each["messages"] for sample in samples for each in sample["conversations"]]
    assert len(played) == len(samples) == 10
    replies = [message for messages in played for message in messages[2::2]]
    assert replies
    for reply in replies:
        (image,) = [part["image"] for part in reply["content"] if part["type"] == "image"]
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")

"""Process reward models on images: trained on labelled steps, asked by RL, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from helpers.image_directories import models, row, vision_pair
from helpers.image_models import IMAGE_MODELS
from helpers.runs import lines
from postgrad.core.errors import UsageError
from postgrad.core.media import images_kept_in
from postgrad.data.settings import PairSettings
from postgrad.data.step_tokens import load_steps
from postgrad.evaluation.steps import sequences_of
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import image_part
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.tools.evaluate import evaluate
from postgrad.training.start import train

__all__ = ["models"]


def stepwise(seed: int) -> dict[str, Any]:
    """A row as TRL's stepwise ones, with an image in a column."""
    pair = vision_pair(seed)
    return {
        "images": pair["images"],
        "prompt": pair["prompt"],
        "completions": ["It is red", "or blue" if seed % 2 else "or not"],
        "labels": [True, bool(seed % 2)],
    }


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(stepwise(seed))}\n" for seed in range(4)))
    return path


def test_steps_are_read_with_their_images(
    rows: Path, models: Callable[[str], str], tmp_path: Path
) -> None:
    path = models("qwen2_5_vl")
    tokenizer = load_tokenizer(path)
    with images_kept_in(tmp_path / "images"):
        reader = ImageReader(path, load_config(path), tokenizer)
        settings = PairSettings(path=str(rows), max_len=200)
        answers = load_steps(settings, tokenizer, reader=reader).all()
        assert [len(answer.images) for answer in answers] == [1, 1, 1, 1]
        for answer in answers:
            (image,) = answer.images
            assert set(answer.token_ids[image.at]) == {reader.token_id}
            assert answer.loss_mask.sum() == 2  # behind the tokens of the image
            assert np.flatnonzero(answer.loss_mask)[0] > image.at[-1]
            assert "images" not in answer.metadata
        assert len(sequences_of(answers).images) == 4
        begins = int(answers[0].images[0].at[0])
        cut = PairSettings(path=str(rows), max_len=begins + 2, on_too_long="truncate")
        with pytest.raises(UsageError, match="4  dropped: over the limit"):
            load_steps(cut, tokenizer, reader=reader)  # half an image is never shown
        with pytest.raises(UsageError, match="has an image"):
            load_steps(settings, tokenizer)


def test_rows_that_are_all_held_out_are_one_message(
    rows: Path, models: Callable[[str], str]
) -> None:
    """They made a bare ValueError once."""
    data = {"path": str(rows), "max_len": 200}
    recipe = parse_recipe({
        "job": "reward", "run_dir": str(rows.parent / "run"), "model": {"path": models("gemma3")},
        "data": data, "eval": {"path": str(rows)}, "algorithm": {"type": "process_reward"},
        "steps": 1,
    })  # fmt: skip
    with pytest.raises(UsageError, match="4  left out: held out"):
        train(recipe, Console("quiet"))


def expected_probabilities(judge: str, run: Path, sample: dict[str, Any]) -> Any:
    """What transformers' own class says of a sample's tokens and pixels, at its steps' ends."""
    plain: Any = AutoModelForTokenClassification.from_pretrained(judge, dtype=torch.float64)
    reader = ImageReader(judge, load_config(judge), load_tokenizer(judge))
    prompt = sample["prompt_token_ids"]
    ids = torch.tensor([prompt + sample["turns"][0]["token_ids"]])
    with images_kept_in(run / "images"):
        pixels = reader.pixels(sample["images"][0]["sha256"])
    named: dict[str, Any] = {name: torch.from_numpy(array) for name, array in pixels.items()}
    if (types := IMAGE_MODELS[plain.config.model_type].types) is not None:
        named[types] = (ids == reader.token_id).int()
    named = {n: t.double() if t.is_floating_point() else t for n, t in named.items()}
    right = plain.eval()(input_ids=ids, **named).logits[0].softmax(-1)[:, 1]
    ends = [len(prompt) + end for end in sample["details"]["process_reward"]["ends"]]
    return right[ends].detach().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_a_process_reward_model_learns_and_scores_samples_with_images(
    kind: str, rows: Path, models: Callable[[str], str], tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f"{json.dumps(stepwise(seed))}\n" for seed in (8, 9)))
    common = {"learner": {"lr": 1e-2, "threads": 1}, "steps": 2}
    model = {"path": models(kind), "dtype": "float32"}
    judge = parse_recipe({
        "job": "reward", "run_dir": str(tmp_path / "judge"), "model": model,
        "data": {"path": str(rows), "max_len": 200}, "eval": {"path": str(held_out)},
        "algorithm": {"type": "process_reward"}, "batch": {"train_batch_size": 4},
        "checkpoint": {"save_steps": 1, "save_hf": True}, **common,
    })  # fmt: skip
    train(judge, Console("quiet"))
    judged = tmp_path / "judge" / "model"
    start, end = (load_file(f / "model.safetensors") for f in (Path(models(kind)), judged))
    moved = {name for name in end if name in start and not torch.equal(end[name], start[name])}
    assert any(image_part(f".{name}") == "vision" for name in moved)
    report = evaluate(judge, str(judged), Console("quiet"))
    (evaluated,) = lines(tmp_path / "judge" / "eval.jsonl")
    assert report["sets"][0]["loss"] == pytest.approx(evaluated["loss"], rel=1e-4)
    prompts = tmp_path / "prompts.jsonl"
    asked = [{**row(n, "yes"), "answer": "yes"} for n in range(3)]
    prompts.write_text("".join(f"{json.dumps(each)}\n" for each in asked))
    policy = parse_recipe({
        "job": "rl", "run_dir": str(tmp_path / "run"), "model": model,
        "data": {"path": str(prompts), "messages": "messages", "max_len": 200},
        "rewards": [
            {"type": "process_reward", "aggregate": "mean", "credit": "step", "separator": "a"}
        ],
        "reward_model": {"model": {"path": str(judged)}},
        "algorithm": {"type": "reinforce_pp"}, "rollout": {"max_new_tokens": 8},
        "batch": {"rollout_batch_size": 3, "n_samples_per_prompt": 2, "train_batch_size": 6},
        "scoring": {"workers": 1}, "sentinels": {"truncation": "off"}, **common,
    })  # fmt: skip
    train(policy, Console("quiet"))
    sample = lines(tmp_path / "run" / "samples.jsonl")[0]
    expected = expected_probabilities(str(judged), tmp_path / "run", sample)
    np.testing.assert_allclose(
        sample["details"]["process_reward"]["steps"], expected, rtol=1e-4, atol=1e-5
    )

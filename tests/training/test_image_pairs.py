"""Preferences and reward models on rows with images: whole runs of tiny models of every family."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from helpers.image_directories import models, picture, row, vision_pair
from helpers.image_models import IMAGE_MODELS, RUNS
from helpers.runs import lines, tensors
from postgrad.core.errors import UsageError
from postgrad.core.media import images_kept_in
from postgrad.data.conversations import load_conversations
from postgrad.data.pairs import load_pairs
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.models.config import load_config
from postgrad.models.fresh import make_fresh
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import image_part
from postgrad.models.score import scale_of
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.tools.evaluate import evaluate
from postgrad.training.start import resume, train

__all__ = ["models"]

Make = Callable[..., Recipe]


def plain_row(seed: int) -> dict[str, Any]:
    """A row of texts with a column of images, which stand before the question."""
    data = [base64.b64encode(picture(90 + seed + n, 16, 16)).decode() for n in range(2)]
    return {"images": data, "prompt": f"Same, {seed}?", "chosen": "yes", "rejected": "no"}


TEXT = {"prompt": "Ready?", "chosen": "yes", "rejected": "no"}
ROWS = [vision_pair(1), vision_pair(2), plain_row(3), {**row(4, "no")}, TEXT]
ROWS[3] = {"chosen": ROWS[3]["messages"], "rejected": row(4, "yes, it is")["messages"]}


@pytest.fixture
def make(tmp_path: Path, models: Callable[[str], str]) -> Make:
    """A recipe of two steps on every row, evaluated on a row of its own."""
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in ROWS))
    held_out.write_text(f"{json.dumps(vision_pair(50))}\n")

    def recipe(kind: str, name: str = "run", **changes: Any) -> Recipe:
        model = {"path": models(kind), "dtype": "float32", **changes.pop("model", {})}
        return parse_recipe(
            {
                "job": "preference",
                "run_dir": str(tmp_path / name),
                "steps": 2,
                "model": model,
                "data": {"path": str(rows), "max_len": 200},
                "eval": {"path": str(held_out)},
                "batch": {"train_batch_size": len(ROWS)},
                "learner": {"lr": 1e-2, "threads": 1},
                "checkpoint": {"save_steps": 1, "save_hf": True},
                **changes,
            }
        )

    return recipe


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_whole_model_learned(before: Path, after: Path) -> None:
    old, new = weights(before), weights(after)
    moved = {name for name in old if name in new and not torch.equal(old[name], new[name])}
    assert any(image_part(f".{name}") == "vision" for name in moved)
    assert any(image_part(f".{name}") == "projector" for name in moved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_dpo_learns_exports_and_evaluates(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    recipe = make(kind)
    train(recipe, Console())
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert first["policy/loss"] == pytest.approx(np.log(2), abs=1e-6)  # policy and reference agree
    assert second["policy/loss"] < first["policy/loss"]
    assert_whole_model_learned(Path(models(kind)), tmp_path / "run" / "model")
    report = evaluate(recipe, str(tmp_path / "run"), Console())
    (evaluated,) = lines(tmp_path / "run" / "eval.jsonl")
    assert report["sets"][0]["margin"] == pytest.approx(evaluated["margin"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen3_vl_moe", "qwen3_5"])
def test_a_reward_model_learns_exports_and_evaluates(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    recipe = make(kind, job="reward")
    train(recipe, Console())
    assert_whole_model_learned(Path(models(kind)), tmp_path / "run" / "model")
    report = evaluate(recipe, str(tmp_path / "run" / "model"), Console())
    (evaluated,) = lines(tmp_path / "run" / "eval.jsonl")
    assert report["sets"][0]["margin"] == pytest.approx(evaluated["margin"], rel=1e-4)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    train(
        make(kind, "again", job="reward", steps=1, model={"path": str(tmp_path / "run" / "model")}),
        Console(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("job", ["preference", "reward"])
def test_a_run_that_resumes_has_the_same_bits(job: str, make: Make, tmp_path: Path) -> None:
    train(make("qwen2_5_vl", "whole", job=job), Console())
    train(make("qwen2_5_vl", "parted", job=job, steps=1), Console())
    resume(tmp_path / "parted", ["--steps", "2"], (), Console())
    uninterrupted, parted = (tensors(str(tmp_path / name), 2) for name in ("whole", "parted"))
    assert uninterrupted.keys() == parted.keys()
    assert all(torch.equal(uninterrupted[name], parted[name]) for name in uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "reference"),
    [
        ({"type": "kto"}, {}),
        ({"type": "orpo"}, {}),
        ({"type": "dpo"}, {"model": {"path": "other"}}),
        ({"type": "dpo"}, {"refresh_steps": 1}),
    ],
    ids=str,
)
def test_other_losses_and_references_read_images(
    algorithm: dict[str, Any],
    reference: dict[str, Any],
    make: Make,
    models: Callable[[str], str],
    tmp_path: Path,
) -> None:
    """The reference of its own is the model of an earlier run."""
    if "model" in reference:
        train(make("smolvlm", "other", steps=1), Console())
        reference = {"model": {"path": str(tmp_path / "other" / "model")}}
    lora = {"lora": {"rank": 2, "alpha": 2}} if algorithm["type"] == "kto" else {}
    train(make("smolvlm", algorithm=algorithm, reference=reference, model=lora), Console())
    first, *_ = lines(tmp_path / "run" / "metrics.jsonl")
    assert np.isfinite(first["policy/loss"])


@pytest.mark.slow
def test_logprobs_of_a_reference_are_those_of_its_images(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another image of the same size gives the same tokens, and takes nothing from the cache."""
    row, other = vision_pair(1), vision_pair(3)["images"]
    counts: list[tuple[str, str]] = []
    for number, images in enumerate((row["images"], row["images"], other)):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "images": images}))
        changes: Any = {"batch": {"train_batch_size": 1}, "eval": {}, "steps": 1}
        train(make("smolvlm", str(number), **changes), Console())
        counts += re.findall(
            r"(\d) sequences computed with .*?, (\d) from", capsys.readouterr().out
        )
    assert counts == [("2", "0"), ("0", "2"), ("2", "0")]


def test_every_text_of_a_side_shows_the_images_that_it_has(
    models: Callable[[str], str], tmp_path: Path
) -> None:
    """As those of SFT, which has a training row for each text."""
    path = models("qwen2_5_vl")
    tokenizer: Any = load_tokenizer(path)
    reader = ImageReader(path, load_config(path), tokenizer)
    text_part = "{{ part['text'] }}"  # the template drops an earlier answer's first letter
    cut = "{{ part['text'] if message == messages[-1] else part['text'][1:] }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(text_part, cut)
    shown = [
        {"role": "user", "content": [{"type": "image", "base64": data}]}
        for data in (base64.b64encode(picture(n, 16, 16)).decode() for n in range(2))
    ]
    first, second = ({"role": "assistant", "content": f"-{letter}"} for letter in "ab")
    row = {"prompt": shown[:1], "chosen": [first, shown[1], second], "rejected": [second]}
    pairs, chats = tmp_path / "pairs.jsonl", tmp_path / "chats.jsonl"
    pairs.write_text(json.dumps(row))
    chats.write_text(json.dumps({"messages": [*row["prompt"], *row["chosen"]]}))
    with images_kept_in(tmp_path / "images"):
        (pair,) = load_pairs(PairSettings(path=str(pairs)), tokenizer, reader=reader).all()
        settings = DataSettings(path=str(chats), messages="messages")
        texts = load_conversations(settings, tokenizer, reader=reader).all()
    begins = [0, *pair.chosen_openings]
    assert len(texts) == len(begins) == 2
    expected = [
        image.moved(begin)
        for text, begin in zip(texts, begins, strict=True)
        for image in text.images
    ]
    assert [image.digest for image in expected] == [
        pair.rejected_images[0].digest, *(image.digest for image in texts[1].images)
    ]  # fmt: skip
    for image, other in zip(pair.chosen_images, expected, strict=True):
        assert (image.digest, image.at.tolist()) == (other.digest, other.at.tolist())


def test_a_reference_that_reads_text_alone_is_refused(make: Make, tmp_path: Path) -> None:
    make_fresh(
        ModelInit.model_validate({"tokenizer": {"kind": "characters"}, "num_hidden_layers": 1}),
        [], 0, tmp_path / "text",
    )  # fmt: skip
    recipe = make("smolvlm", reference={"model": {"path": str(tmp_path / "text")}})
    with pytest.raises(UsageError, match=r"\[reference.model\] .*text reads text alone"):
        train(recipe, Console())


def test_half_an_image_is_never_shown(make: Make, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "max_len": 30, "on_too_long": "truncate"}
    with pytest.raises(UsageError, match="3  dropped: over the limit"):
        train(make("smolvlm", data=data), Console())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_ppo_learns_from_a_reward_model_on_images(
    kind: str, make: Make, models: Callable[[str], str], tmp_path: Path
) -> None:
    """Critic and reward model read the images of prompts; both learn or score with them."""
    train(make(kind, "judge", job="reward", steps=1), Console())
    prompts = tmp_path / "prompts.jsonl"
    asked = [{**row(n, "yes"), "answer": "yes"} for n in range(3)]
    prompts.write_text("".join(f"{json.dumps(each)}\n" for each in asked))
    rl: dict[str, Any] = {
        "job": "rl",
        "data": {"path": str(prompts), "messages": "messages", "max_len": 200},
        "eval": {},
        "rewards": [{"type": "reward_model", "normalise": True}],
        "reward_model": {"model": {"path": str(tmp_path / "judge" / "model")}},
        "algorithm": {"type": "ppo", "kl_coef": 0.1},
        "critic": {"learner": {"lr": 1e-2}},
        "batch": {"rollout_batch_size": 3, "n_samples_per_prompt": 2, "train_batch_size": 6},
        "rollout": {"max_new_tokens": 4},
        "scoring": {"workers": 1},
    }
    train(make(kind, **rl), Console())
    run = tmp_path / "run"
    first, second = lines(run / "metrics.jsonl")
    assert np.isfinite([first["critic/loss"], second["critic/loss"]]).all()
    assert second["sentinel/publish_difference"] < 1e-5
    samples = lines(run / "samples.jsonl")
    assert all(np.isfinite(sample["rewards"]["reward_model"]) for sample in samples)
    saved, start = tensors(str(run), 2), weights(Path(models(kind)))
    names = {n for n in saved if n.startswith("critic") and image_part(n) == "vision"}
    assert names
    assert_scored_with_images(samples, str(tmp_path / "judge" / "model"), run)
    assert any(not torch.equal(saved[n], start[k]) for n in names for k in start if n.endswith(k))


def assert_scored_with_images(samples: list[dict[str, Any]], judge: str, run: Path) -> None:
    """What transformers' own class says of the tokens and pixels of a sample, scaled."""
    plain: Any = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64)
    reader = ImageReader(judge, load_config(judge), load_tokenizer(judge))
    sample = samples[0]
    ids = torch.tensor([sample["prompt_token_ids"] + sample["turns"][0]["token_ids"]])
    with images_kept_in(run / "images"):
        pixels = reader.pixels(sample["images"][0]["sha256"])
    named: dict[str, Any] = {name: torch.from_numpy(array) for name, array in pixels.items()}
    if (types := IMAGE_MODELS[plain.config.model_type].types) is not None:
        named[types] = (ids == reader.token_id).int()
    named = {n: t.double() if t.is_floating_point() else t for n, t in named.items()}
    score = plain.eval()(input_ids=ids, **named).logits.item()
    scale = scale_of(plain.config)
    assert scale is not None
    expected = (score - scale.mean) / scale.std
    assert sample["rewards"]["reward_model"] == pytest.approx(expected, rel=1e-3, abs=1e-4)

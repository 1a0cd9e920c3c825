"""The classic pipeline in small, as it ships: SFT, a reward model from comparisons, PPO."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from postgrad.observe.console import Console
from postgrad.recipe.pipeline import load_pipeline
from postgrad.rewards.courtesy import questions, worth_of
from postgrad.tools.pipeline import train_pipeline

ROOT = Path(__file__).parent.parent.parent
ON_ONE_THREAD = [
    "--learner.threads",
    "1",
    "--sft.scoring.workers",
    "1",
    "--ppo.scoring.workers",
    "1",
]
BOUND = 1.2  # times the target: from there on the coefficient rises as fast as it can


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rlhf") / "run"


@pytest.fixture(scope="module")
def summary(run_dir: Path) -> dict[str, Any]:
    pipeline = load_pipeline(
        ROOT / "recipes" / "rlhf_tiny", [*ON_ONE_THREAD, "--run_dir", str(run_dir)]
    )
    return train_pipeline(pipeline, Console("quiet"))


@pytest.mark.slow
def test_the_reward_of_held_out_requests_rises_and_kl_stays_in_its_bound(
    summary: dict[str, Any],
) -> None:
    ppo = summary["stages"]["ppo"]
    assert ppo["reward_after"] > ppo["reward_before"] + 0.5
    gold = ppo["rewards"]["gold"]
    assert gold["after"] > gold["before"] + 0.1  # what people want, not only what the model says
    kl = ppo["kl"]
    assert kl["target"] is not None
    assert 0.0 < kl["token"] <= BOUND * kl["target"]
    assert kl["sequence"] > kl["token"]


@pytest.mark.slow
def test_the_reward_model_orders_held_out_pairs(summary: dict[str, Any]) -> None:
    reward = summary["stages"]["reward"]
    assert reward["accuracy_after"] > 0.8
    assert reward["evaluations"]["eval/gold/accuracy"] > 0.85


@pytest.mark.slow
def test_the_summary_on_disk_has_what_the_table_shows(
    summary: dict[str, Any], run_dir: Path
) -> None:
    assert json.loads((run_dir / "summary.json").read_text("utf-8")) == summary
    assert list(summary["stages"]) == ["sft", "reward", "ppo"]
    lines = [json.loads(x) for x in (run_dir / "ppo" / "metrics.jsonl").open(encoding="utf-8")]
    kl = [line["kl/token_mean"] for line in lines]
    ppo = summary["stages"]["ppo"]
    assert ppo["kl"]["token"] == pytest.approx(np.mean(kl[-10:]))
    assert ppo["kl"]["token_most"] == max(kl)
    evaluations = [json.loads(x) for x in (run_dir / "ppo" / "eval.jsonl").open(encoding="utf-8")]
    assert evaluations[0]["step"] == 0
    assert ppo["rewards"] == {
        name: {
            "before": evaluations[0][f"reward/{name}"],
            "after": evaluations[-1][f"reward/{name}"],
        }
        for name in ("reward_model", "gold")
    }
    for stage in summary["stages"].values():
        assert stage["seconds"] > 0
        assert stage["peak_memory_bytes"] > 10**8


@pytest.mark.slow
def test_plain_transformers_answers_with_the_policy(summary: dict[str, Any]) -> None:
    """Greedy answers to held-out requests, by a loop of its own."""
    path = summary["stages"]["ppo"]["model"]
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(path)
    lm = cast(Any, AutoModelForCausalLM).from_pretrained(path)
    worth: list[float] = []
    for row in questions(32, 9, held_out=True):
        messages = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        written = lm.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=28
        )
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        worth.append(worth_of(row["person"], row["thing"], text))
    assert np.mean(worth) > 0.85
    assert len(summary["answers"]) == 3


@pytest.mark.slow
def test_plain_transformers_gives_the_scores_that_the_run_recorded(
    summary: dict[str, Any], run_dir: Path
) -> None:
    """The first sampled notes: prompt and tokens as in samples.jsonl, padded to one length."""
    path = summary["stages"]["reward"]["model"]
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(path)
    model = cast(Any, AutoModelForSequenceClassification).from_pretrained(path)
    mean, std = model.config.reward_mean, model.config.reward_std
    with (run_dir / "ppo" / "samples.jsonl").open(encoding="utf-8") as lines:
        samples = [json.loads(line) for line, _ in zip(lines, range(12), strict=False)]
    sequences = [sample["prompt_token_ids"] + sample["turns"][0]["token_ids"] for sample in samples]
    recorded = [sample["rewards"]["reward_model"] for sample in samples]
    batch = tokenizer.pad({"input_ids": sequences}, return_tensors="pt")
    assert not batch["attention_mask"].all()  # some are padded
    with torch.inference_mode():
        scores = model(**batch).logits[:, 0].double().numpy()
    np.testing.assert_allclose((scores - mean) / std, recorded, rtol=0, atol=1e-4)

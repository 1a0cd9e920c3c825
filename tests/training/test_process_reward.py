"""A process reward model from the recipe to its uses: trained, exported, read by transformers,
served, and asked by an RL job.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from helpers.jobs import write_recipe
from helpers.runs import lines
from postgrad.core.errors import UsageError
from postgrad.data.settings import PairSettings
from postgrad.data.step_tokens import load_steps
from postgrad.evaluation.steps import sequences_of
from postgrad.fleet.choices import Choices
from postgrad.fleet.exported import ExportedRole
from postgrad.learner.score import probabilities, step_scores
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings
from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.tools.serve.batcher import ServedModel, load_reward_model
from postgrad.tools.serve.images import RequestImages
from postgrad.tools.serve.wire import Encoder, Input, Refusal
from postgrad.training.start import train

MESSAGES = [
    {"role": "user", "content": "from 1?"},
    {"role": "assistant", "content": "2\n\n3\n\n4"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run; do not change it."""
    to = tmp_path_factory.mktemp("steps")
    more = ["--run_dir", str(to / "run"), "--checkpoint.save_hf", "true"]
    train(load_recipe(write_recipe("process reward model", to), more), Console("quiet"))
    return to / "run"


@pytest.fixture(scope="module")
def served(run: Path) -> ServedModel:
    return load_reward_model(run / "model", "float32", 256)


def test_plain_transformers_give_the_same_probabilities_of_steps(
    run: Path, served: ServedModel
) -> None:
    """Softmax over the two labels of a token is the logistic function of our score."""
    plain: Any = AutoModelForTokenClassification.from_pretrained(run / "model")
    plain.eval()
    assert plain.config.id2label == {0: "wrong", 1: "right"}
    assert plain.config.step_separator == "\n\n"
    rows = load_steps(PairSettings(path=str(run.parent / "step_rows.jsonl")), served.tokenizer)
    for answer in rows.all()[:4]:
        with torch.no_grad():
            logits = plain(torch.tensor(answer.token_ids[None].astype(np.int64))).logits[0]
        wanted = logits.softmax(-1)[torch.tensor(answer.loss_mask), 1].numpy()
        (scores,) = step_scores(served.role, sequences_of([answer]))
        np.testing.assert_allclose(probabilities(scores), wanted, rtol=1e-5)
        assert len(wanted) == 3


def test_a_run_logs_what_it_learned_and_evaluated(run: Path) -> None:
    metrics = lines(run / "metrics.jsonl")[-1]
    assert metrics["loss"] == metrics["reward_model/loss"]
    assert metrics["loss_tokens"] == 18  # three steps of six answers
    result = lines(run / "eval.jsonl")[-1]
    assert {"f1", "f1_low", "erroneous", "correct", "step_accuracy", "accuracy"} <= result.keys()


def test_an_exported_model_is_evaluated_as_in_its_run(run: Path) -> None:
    recipe = load_recipe(run.parent / "recipe.toml", ["--run_dir", str(run)])
    report = evaluate(recipe, str(run / "model"), Console("quiet"))
    result = lines(run / "eval.jsonl")[-1]
    (of_set,) = report["sets"]
    for name in ("loss", "step_accuracy", "accuracy"):
        assert of_set[name] == pytest.approx(result[name], rel=1e-5)


def test_a_server_gives_a_probability_for_each_step(served: ServedModel) -> None:
    encoder = Encoder(served.tokenizer, 256, served.separator)
    (marked,), _ = encoder.encode(
        [Input.model_validate({"messages": MESSAGES})], RequestImages(None)
    )
    (scores,) = served.score([marked])
    assert scores.shape == (3,)
    assert ((scores > 0) & (scores < 1)).all()
    ends = np.flatnonzero(marked[:, 1])
    assert ends[-1] == len(marked) - 1
    assert served.tokenizer.decode(marked[: ends[0] + 1, 0]).endswith("2\n\n")


def test_a_server_of_steps_takes_messages_alone(served: ServedModel) -> None:
    encoder = Encoder(served.tokenizer, 256, served.separator)
    with pytest.raises(Refusal, match=r"inputs\.0: .* send messages"):
        encoder.encode([Input.model_validate({"text": "a"})], RequestImages(None))


def test_a_trained_head_goes_on_as_one_row(run: Path) -> None:
    lm = load_score_model(str(run / "model"), dtype=torch.float32).lm
    assert lm.score.weight.shape[0] == 1
    assert lm.score.bias is None


def test_a_head_with_a_bias_is_used_and_not_trained(run: Path, tmp_path: Path) -> None:
    plain: Any = AutoModelForTokenClassification.from_pretrained(run / "model")
    with torch.no_grad():
        plain.score.weight.normal_()
        plain.score.bias.copy_(torch.tensor([0.25, 1.0]))
    plain.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (run / "model" / file).exists():
            (tmp_path / file).write_bytes((run / "model" / file).read_bytes())
    lm = load_score_model(str(tmp_path), dtype=torch.float32, fresh_head=False).lm
    difference = plain.score.weight[1] - plain.score.weight[0]
    torch.testing.assert_close(lm.score.weight[0], difference)
    assert lm.score.bias.tolist() == [0.75]
    with pytest.raises(UsageError, match="has a bias"):
        load_score_model(str(tmp_path), dtype=torch.float32)


RL = """
job = "rl"
run_dir = "{run}/rl"
steps = 2
[model]
path = "{run}/init"
[reward_model.model]
path = "{run}/model"
[data]
path = "{rows}"
prompt = "prompt"
answer = ""
max_len = 64
[[rewards]]
type = "process_reward"
aggregate = "mean"
credit = "step"
separator = "a"
[scoring]
workers = 1
[algorithm]
type = "reinforce_pp"
[rollout]
max_new_tokens = 16
[batch]
rollout_batch_size = 2
n_samples_per_prompt = 4
[sentinels]
truncation = "off"
[learner]
threads = 1
"""


def test_an_rl_job_credits_steps(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(RL.format(run=run, rows=run.parent / "step_rows.jsonl"), "utf-8")
    train(load_recipe(path, ["--run_dir", str(tmp_path / "rl")]), Console("quiet"))
    samples = lines(tmp_path / "rl" / "samples.jsonl")
    assert len(samples) == 16
    for sample in samples:
        steps = sample["details"]["process_reward"]
        assert sample["total"] == pytest.approx(float(np.mean(steps["steps"])))
        parts = np.array(sample["columns"]["step_rewards"])
        assert parts.sum() == pytest.approx(sample["total"], abs=1e-6)
        assert set(np.flatnonzero(parts).tolist()) <= set(steps["ends"])
    assert any(len(sample["details"]["process_reward"]["ends"]) > 1 for sample in samples)


def test_gates_beside_credit_by_step_are_refused(run: Path, tmp_path: Path) -> None:
    gate = '[[rewards]]\ntype = "regex"\npattern = "a"\ngate = true\n'
    path = tmp_path / "rl.toml"
    text = RL.format(run=run, rows=run.parent / "step_rows.jsonl")
    path.write_text(text.replace("[scoring]", f"{gate}[scoring]"), "utf-8")
    with pytest.raises(UsageError, match="the reward is no sum"):
        load_recipe(path)


def test_an_adapter_of_steps_is_not_written_alone(tmp_path: Path) -> None:
    lora = LoraSettings(rank=2, alpha=2)
    role = ExportedRole("reward_model.weights", "base", lora, True, separator="\n\n")
    with pytest.raises(UsageError, match="a head judges steps"):
        role.export_adapter(
            {}, tmp_path / "adapter", Choices("cpu", 1, True, "float32", None, None)
        )


@pytest.mark.slow
def test_an_adapter_of_steps_is_written_merged(tmp_path: Path) -> None:
    lora = ["--model.lora.rank", "2", "--model.lora.alpha", "2", "--steps", "1"]
    more = ["--run_dir", str(tmp_path / "run"), "--eval.every", "0", *lora]
    recipe = write_recipe("process reward model", tmp_path)
    recipe.write_text(recipe.read_text().replace('best_metric = "eval/accuracy"', ""), "utf-8")
    train(load_recipe(recipe, more), Console("quiet"))
    export(tmp_path / "run", "latest", tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]

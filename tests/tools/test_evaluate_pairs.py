"""`postgrad eval` of recipes on preferences: reward models and policies."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.jobs import write_pairs
from helpers.runs import lines
from postgrad.core.errors import UsageError
from postgrad.data.pairs import load_pairs
from postgrad.evaluation.pairs import sequences_of
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.training.start import train


@pytest.fixture
def held(tmp_path: Path) -> str:
    return str(write_pairs(tmp_path / "eval.jsonl", 40, 8))


NUMBERS = ("accuracy", "margin", "reward_mean", "reward_std", "calibration_error")


FOUR_BITS = {"quantize": "4bit", "lora": {"rank": 4, "alpha": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["reward", "preference"])
@pytest.mark.parametrize("more", [{}, FOUR_BITS], ids=["whole", "four bits"])
def test_an_exported_model_gets_the_numbers_of_its_runs_last_evaluation(
    job: str,
    more: dict[str, Any],
    make_recipe: Any,
    console: Console,
    models: Any,
    held: str,
    tmp_path: Path,
) -> None:
    model = {"path": models(0), "init": None, **more}
    recipe = make_recipe(job, model=model, eval={"path": held}, steps=4)
    train(recipe, console)
    to = str(export(Path(recipe.run_dir), "latest", tmp_path / "exported"))
    (line,) = lines(Path(recipe.run_dir) / "eval.jsonl")
    (eval_result,) = evaluate(recipe, to, console)["sets"]
    assert eval_result["rows"] == line["rows"] == 8
    for name in NUMBERS:
        assert eval_result[name] == pytest.approx(line[name], abs=1e-5)
    assert abs(line["margin"]) > 1e-3
    run = Path(recipe.run_dir)
    for checkpoint in (run, run / "checkpoints" / "step-000004"):
        report = evaluate(recipe, str(checkpoint), console)
        assert report["model"] == str(checkpoint)
        assert [report["sets"][0][name] for name in NUMBERS] == [
            eval_result[name] for name in NUMBERS
        ]
        assert "sources" not in report
    other = run / "checkpoints" / "newest"
    other.mkdir()
    with pytest.raises(UsageError, match="newest is no checkpoint: name RUN_DIR/checkpoints/step"):
        evaluate(recipe, str(other), console)


def by_plain_transformers(path: str, recipe: Any) -> tuple[list[float], list[int]]:
    """Sums of the answers' logprobs in float64, and their tokens."""
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    data = recipe.eval.sets[0].data
    sequences = sequences_of(load_pairs(data, load_tokenizer(path)).all())
    sums: list[float] = []
    for tokens, mask in zip(sequences.tokens, sequences.loss_mask, strict=True):
        ids = torch.tensor(tokens.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(lm(ids[None]).logits[0], -1)
        each = logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
        sums.append(float(each[mask[1:]].sum()))
    return sums, sequences.loss_mask.sums().tolist()


def test_a_policy_scores_beta_times_what_it_moved_from_the_reference(
    make_recipe: Any, console: Console, models: Any, held: str
) -> None:
    recipe = make_recipe("preference", model={"path": models(1), "init": None}, eval={"path": held})
    (eval_result,) = evaluate(recipe, models(2), console)["sets"]
    policy_sums, _ = by_plain_transformers(models(2), recipe)
    reference_sums, _ = by_plain_transformers(models(1), recipe)
    scores = recipe.algorithm.beta * (np.array(policy_sums) - np.array(reference_sums))
    assert eval_result["reward_mean"] == pytest.approx(scores.mean(), abs=1e-4)
    assert eval_result["margin"] == pytest.approx((scores[0::2] - scores[1::2]).mean(), abs=1e-4)
    assert eval_result["accuracy"] == pytest.approx((scores[0::2] > scores[1::2]).mean())


def test_without_a_reference_simpo_scores_beta_times_the_mean_logprob_of_an_answer(
    make_recipe: Any, console: Console, models: Any, held: str
) -> None:
    sections = {"model": {"path": models(1), "init": None}, "algorithm": {"type": "simpo"}}
    recipe = make_recipe("preference", **sections, eval={"path": held})
    (eval_result,) = evaluate(recipe, models(2), console)["sets"]
    sums, counts = by_plain_transformers(models(2), recipe)
    scores = recipe.algorithm.beta * np.array(sums) / np.array(counts)
    assert eval_result["reward_mean"] == pytest.approx(scores.mean(), abs=1e-5)
    assert eval_result["margin"] == pytest.approx((scores[0::2] - scores[1::2]).mean(), abs=1e-5)


def test_two_models_are_compared_on_the_same_pairs(
    make_recipe: Any, console: Console, models: Any, held: str
) -> None:
    recipe = make_recipe("preference", model={"path": models(1), "init": None}, eval={"path": held})
    report = evaluate(recipe, models(2), console, against=models(0))
    assert report["against"]["model"] == models(0)
    assert report["rows"] == report["against"]["rows"] == 8
    assert len(report["comparison"]) == 1
    assert report["sets"][0]["ties"] == 0


def test_a_comparison_with_the_reference_warns_that_all_of_its_pairs_are_ties(
    make_recipe: Any, models: Any, held: str
) -> None:
    recipe = make_recipe("preference", model={"path": models(1), "init": None}, eval={"path": held})
    output = io.StringIO()
    report = evaluate(recipe, models(2), Console("plain", output), against=models(1))
    reference = report["against"]["sets"][0]
    assert (reference["ties"], reference["accuracy"]) == (8, 0.0)
    warning = f"warning: {models(1)} scores both answers alike in 8 of 8 pairs"
    assert warning in " ".join(output.getvalue().split())
    assert f"{models(2)} scores both" not in output.getvalue()


def test_a_policy_is_not_evaluated_as_a_reward_model(
    make_recipe: Any, console: Console, models: Any, held: str
) -> None:
    recipe = make_recipe("reward", eval={"path": held})
    with pytest.raises(UsageError, match="it is no reward model"):
        evaluate(recipe, models(1), console)


def test_a_recipe_without_an_evaluation_set_says_so(
    make_recipe: Any, console: Console, models: Any
) -> None:
    with pytest.raises(UsageError, match=r"give \[eval\] a path"):
        evaluate(make_recipe("reward"), models(1), console)


def test_a_policy_is_not_measured_from_a_reference_that_nobody_names(
    make_recipe: Any, console: Console, models: Any, held: str
) -> None:
    recipe = make_recipe("preference", eval={"path": held})
    with pytest.raises(UsageError, match=r"--reference.model.path"):
        evaluate(recipe, models(1), console)


def test_a_reference_of_a_pipelines_stage_is_asked_for_by_its_key(
    make_recipe: Any, console: Console, models: Any, held: str
) -> None:
    model = {"path": "@sft", "init": None}
    recipe = make_recipe("preference", model=model, eval={"path": held})
    with pytest.raises(UsageError, match=r"@sft' .* or give --reference\.model\.path DIR"):
        evaluate(recipe, models(1), console)

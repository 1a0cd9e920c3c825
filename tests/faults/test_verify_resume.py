"""`postgrad verify-resume`: a real process, killed with all it started, ends with the same bits."""

from pathlib import Path

import pytest

from helpers.jobs import write_recipe
from postgrad.observe.console import Console
from postgrad.tools.verify_resume import verify_resume


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "grpo with kl and ema", "grpo of stale samples"])
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(job: str, tmp_path: Path) -> None:
    recipe = write_recipe(job, tmp_path)
    report = verify_resume(recipe, ["--steps", "8"], 5, Console("quiet"), seed=len(job))
    assert report["kills"] >= 1
    assert {"policy.weights.safetensors", "policy.optimizer.safetensors"} <= set(report["same"])
    assert {"state.json", "metrics.jsonl", "eval.jsonl"} <= set(report["same"])
    assert ("policy.ema.safetensors" in report["same"]) == ("ema" in job)

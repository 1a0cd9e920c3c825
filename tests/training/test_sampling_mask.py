"""Whole runs that sample with filters and learn over what these left."""

from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

NUCLEUS = {"top_p": 0.8}
# Ratios to the sampler itself: of the first step they are 1, if both mean one distribution.
TO_SAMPLER = {"type": "grpo", "correction": "metrics", "kl_coef": 0.01}


def steps_of(recipe: Any) -> list[dict[str, float]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


@pytest.mark.slow
def test_with_the_mask_importance_ratios_of_the_first_step_are_one_and_without_it_they_are_not(
    make_recipe: MakeRecipe, console: Console
) -> None:
    changes = {"algorithm": TO_SAMPLER, "steps": 1}
    kept = make_recipe("rl", "kept", rollout={**NUCLEUS, "keep_sampling_mask": True}, **changes)
    biased = make_recipe("rl", "biased", rollout=NUCLEUS, **changes)
    for recipe in (kept, biased):
        train(recipe, console)
    (first,), (other,) = steps_of(kept), steps_of(biased)
    assert first["correction/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["correction/kl"] < 1e-10
    assert first["sentinel/ratio_excess"] == pytest.approx(1.0, abs=1e-5)
    # what top_p leaves has 0.8 of the probability and a little more
    assert 0.79 < other["correction/ratio"] < 0.9
    assert "sentinel/ratio_excess" not in other  # of another distribution
    assert first["sampling/masked_fraction"] == 1.0
    assert first["sampling/mask_size"] > 10  # an untrained model
    assert first["policy/grad_norm"] != other["policy/grad_norm"]
    assert first["sampled_entropy"] == pytest.approx(-first["policy/logprob"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "learning",
    [
        {"algorithm": {"type": "grpo", "correction": "tis", "kl_coef": 0.01}},
        # the ratio to the sampler itself, in two updates
        {
            "algorithm": {"type": "grpo", "old_logprobs": "sampled", "entropy_coef": 0.01},
            "batch": {"train_batch_size": 8},
            "model": {"lora": {"rank": 2}},
        },
    ],
)
def test_a_run_that_was_killed_with_samples_under_way_goes_on_to_the_same_bits(
    make_recipe: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    learning: dict[str, Any],
) -> None:
    rollout = {**NUCLEUS, "top_k": 9, "min_p": 0.01, "keep_sampling_mask": True}
    changes = {"rollout": {**rollout, "max_staleness": 1, "slots": 5}, **learning}
    never = make_recipe("rl", "never", **changes)
    killed = make_recipe("rl", "killed", **changes)
    train(never, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)
    assert all(step["sampling/mask_size"] <= 9 for step in steps_of(killed))


@pytest.mark.slow
def test_a_replay_learns_what_the_recorded_run_learned_and_needs_its_masks(
    make_recipe: MakeRecipe, console: Console
) -> None:
    kept = {**NUCLEUS, "keep_sampling_mask": True}
    recorded = make_recipe("rl", "recorded", rollout=kept, steps=2)
    train(recorded, console)
    source = {"source": "replay", "replay_path": recorded.run_dir}
    replay = make_recipe("rl", "replay", rollout={**kept, **source}, steps=2)
    train(replay, console)
    for recorded_step, replayed_step in zip(steps_of(recorded), steps_of(replay), strict=True):
        assert recorded_step["policy/logprob"] == replayed_step["policy/logprob"]
        assert recorded_step["policy/grad_norm"] == replayed_step["policy/grad_norm"]
    without = make_recipe("rl", "without", rollout=NUCLEUS, steps=1)
    train(without, console)
    source = {"source": "replay", "replay_path": without.run_dir}
    with pytest.raises(RunError, match="samples came without their masks"):
        train(make_recipe("rl", "lacks", rollout={**kept, **source}, steps=1), console)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("ray_cluster")
def test_masks_reach_the_ranks_of_the_policy_and_not_of_the_critic(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks behind Ray learn what one process learns from the same samples."""
    pytest.importorskip("ray")
    from postgrad.cluster.workers import RankGroup

    sent: set[tuple[str, str, bool]] = set()
    call = RankGroup.call

    def watched(group: RankGroup, method: str, *arguments: Any) -> Any:
        if method == "do" and arguments[1] in ("logprobs", "scores", "update"):
            role, asked, read = arguments[:3]
            sequences = read.experience.sequences if asked == "update" else read
            sent.add((role, asked, sequences.sampling_mask is not None))
        return call(group, method, *arguments)

    monkeypatch.setattr(RankGroup, "call", watched)
    kept = {**NUCLEUS, "keep_sampling_mask": True}
    same: dict[str, Any] = {
        "algorithm": {"type": "ppo", "kl_coef": 0.05},
        "critic": {"learner": {"eps": 1e-6}},
        "batch": {"train_batch_size": 8},
        "steps": 2,
    }
    learner: dict[str, Any] = {"eps": 1e-6}  # moments of nothing but rounding decide no step
    several = make_recipe(
        "rl", "several", rollout=kept, learner={**learner, "ranks": 2, "sharding": "zero2"},
        cluster={"type": "ray", "start_seconds": 600.0}, **same,
    )  # fmt: skip
    train(several, console)
    assert sent == {
        ("policy", "logprobs", True), ("policy", "update", True), ("reference", "logprobs", True),
        ("critic", "scores", False), ("critic", "update", False),
        ("policy", "logprobs", False),  # of the probe that checks what was published
    }  # fmt: skip
    assert ("critic", "update", False) in sent
    replay = {**kept, "source": "replay", "replay_path": several.run_dir}
    alone = make_recipe("rl", "alone", rollout=replay, learner=learner, **same)
    train(alone, console)
    for here, there in zip(steps_of(alone), steps_of(several), strict=True):
        for name in ("policy/logprob", "policy/grad_norm", "critic/loss", "correction/ratio"):
            if name in here:
                assert there[name] == pytest.approx(here[name], rel=1e-4), name

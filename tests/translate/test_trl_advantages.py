"""What TRL's GRPOTrainer and RLOOTrainer do with options, as whole runs of both showed it
(benchmarks/translated_rl_runs.py).
"""

import json
from pathlib import Path

import pytest

from postgrad.translate.translate import Translation, translate

FLAGS = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "accuracy_reward"]
# Completions of a step 48, of an update 8, of a forward pass 4, and two passes: 12 updates.
SEVERAL = (
    "--per_device_train_batch_size",
    "4",
    "--gradient_accumulation_steps",
    "2",
    "--steps_per_generation",
    "12",
    "--num_generations",
    "4",
    "--num_iterations",
    "2",
)
PARTS = (*SEVERAL[:4], "--num_generations", "4")  # an update a step, of two forward passes


def of(*flags: str, program: str = "grpo") -> Translation:
    translation = translate("trl", [program, *FLAGS, *flags])
    assert translation.problem is None
    return translation


def settings(*flags: str) -> dict[str, object]:
    return dict(of(*flags).recipe["algorithm"])


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


def comment(translation: Translation, key: str) -> str:
    return translation.draft.comments.get(("algorithm", key), "")


def test_settings_of_losses_that_are_not_the_run_s_are_not_needed() -> None:
    """A recipe with them would be refused: TRL does not read them."""
    others = ("--sapo_temperature_pos", "0.5", "--vespo_lambda_neg", "3", "--delta", "4")
    assert settings("--loss_type", "dapo", *others[:4]) == settings("--loss_type", "dapo")
    cispo = ("--loss_type", "cispo", "--epsilon_high", "5")
    assert settings(*cispo, *others) == settings(*cispo)
    assert {option.name for option in of(*cispo, *others).draft.needless} >= {
        "sapo_temperature_pos", "vespo_lambda_neg", "delta",
    }  # fmt: skip
    assert settings("--loss_type", "sapo", *others)["gate_positive"] == 0.5
    assert settings("--loss_type", "vespo", *others)["rate_negative"] == 3.0
    assert settings("--loss_type", "grpo", *others)["dual_clip"] == 4.0


@pytest.mark.parametrize(
    ("loss", "kind", "is_lost"),
    [("dapo", "gspo", False), ("vespo", "vespo", False), ("sapo", "sapo", True),
     ("cispo", "cispo", True)],
)  # fmt: skip
def test_a_ratio_of_responses_is_gspo_s_or_lost(loss: str, kind: str, is_lost: bool) -> None:
    """VESPO's is that of a response whatever is stated; CISPO and SAPO have a token's."""
    flags = ("--loss_type", loss, "--epsilon_high", "2")
    translation = of(*flags, "--importance_sampling_level", "sequence")
    assert translation.recipe["algorithm"]["type"] == kind
    assert ("importance_sampling_level" in missing(translation)) is is_lost


def test_a_bound_of_every_ratio_below_the_clip_takes_its_place() -> None:
    """Of good answers the lower of the two counts, of bad ones the higher: a ratio r of a bad
    answer has -min(min(r, delta) A, clip(r) A) there, which is |A| max(min(r, delta), clip(r)).
    """
    below = settings("--epsilon", "0.2", "--epsilon_high", "0.28", "--delta", "1.1")
    assert (below["clip_low"], below["clip_high"], below["dual_clip"]) == (0.2, 0.1, 1.28)
    above = settings("--epsilon", "0.2", "--delta", "1.5")
    assert (above["clip_high"], above["dual_clip"]) == (0.2, 1.5)
    assert "delta" in missing(of("--delta", "0.9"))


def test_rewards_that_are_normalised_apart_are_so_with_every_scale() -> None:
    """normalize_then_sum does not read scale_rewards."""
    apart = ("--multi_objective_aggregation", "normalize_then_sum")
    for scale in ("group", "batch", "none"):
        assert settings(*apart, "--scale_rewards", scale) == settings(*apart)
    assert settings(*apart)["type"] == "gdpo"


def test_an_entropy_s_target_is_one_where_it_is_on() -> None:
    numbers = ("--entropy_target", "0.4", "--entropy_coef_delta", "0.01")
    assert settings(*numbers) == settings()
    assert "entropy_target" not in missing(of(*numbers))
    on = of("--use_adaptive_entropy", "true", *numbers)
    algorithm = on.recipe["algorithm"]
    assert algorithm["entropy_target"] == 0.4
    assert (algorithm["entropy_coef_step"], algorithm["entropy_coef_max"]) == (0.01, 1.0)
    assert "there of the update before" in comment(on, "entropy_target")
    least = of("--use_adaptive_entropy", "true", "--entropy_coef_min", "0.1")
    assert missing(least) == {"entropy_coef_min"}


@pytest.mark.parametrize(("every", "alpha", "steps", "is_inexact"), [
    ("24", "0.6", 2, False), ("12", "0.6", 1, False), ("6", "0.6", 1, True),
    ("6", "1.0", 1, False), ("30", "0.6", 2, True), ("30", "1.0", 2, True),
])  # fmt: skip
def test_a_reference_that_follows_counts_steps_of_several_updates(
    every: str, alpha: str, steps: int, is_inexact: bool
) -> None:
    """There it counts updates. Of several copies within a step the last one is what is read."""
    flags = ("--sync_ref_model", "true", "--ref_model_sync_steps", every, "--beta", "0.1")
    translation = of(*SEVERAL, *flags, "--ref_model_mixup_alpha", alpha)
    assert translation.recipe["reference"]["refresh_steps"] == steps
    text = translation.draft.comments["reference", "refresh_steps"]
    assert ("is no number of steps" in text) is is_inexact
    alone = of(*PARTS, *flags)
    assert alone.recipe["reference"]["refresh_steps"] == int(every)
    assert ("reference", "refresh_steps") not in alone.draft.comments


def test_means_of_tokens_that_are_others_there_are_told() -> None:
    """dapo, cispo and vespo divide each update by the tokens of a generation, shared evenly; bnpo
    each micro-batch by its own.
    """
    for loss in ("dapo", "cispo", "vespo"):
        flags = ("--loss_type", loss, "--epsilon_high", "2")
        assert "an average update's" in comment(of(*SEVERAL, *flags), "type")
        assert "an average update's" not in comment(of(*PARTS, *flags), "type")
    assert "each micro-batch's" in comment(of(*PARTS, "--loss_type", "bnpo"), "type")
    assert "micro-batch" not in comment(of("--loss_type", "bnpo"), "type")
    bonus = ("--entropy_coef", "0.01")
    assert "each micro-batch's" in comment(of(*PARTS, *bonus), "entropy_coef")
    assert comment(of(*bonus), "entropy_coef") == ""


def test_where_masked_responses_leave_is_told() -> None:
    key, mask = "mask_truncated_completions", ("--mask_truncated_completions", "true")
    assert "spread evenly" in comment(of(*SEVERAL, *mask), key)
    assert "no update" in comment(of(*PARTS, *mask), key)
    assert "leave the mean" in comment(of(*mask, program="rloo"), key)


def test_a_ratio_of_rloo_is_the_responses_where_it_is_not_1() -> None:
    assert of(*SEVERAL, program="rloo").recipe["algorithm"]["by_response"] is True
    assert "by_response" not in of(*PARTS, program="rloo").recipe["algorithm"]


def test_generations_between_which_nothing_is_learnt_are_one_step() -> None:
    """Four micro-batches of an update: a generation each, and with two iterations two, twice."""
    flags = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4",
             "--num_generations", "4", "--steps_per_generation", "1")  # fmt: skip
    for iterations, prompts in (("1", 4), ("2", 2), ("4", 1)):
        translation = of(*flags, "--num_iterations", iterations)
        batch = translation.recipe["batch"]
        assert (batch["rollout_batch_size"], batch["epochs_per_rollout"]) == (prompts, 1)
        assert batch["train_batch_size"] == 4 * prompts
        text = translation.draft.comments["batch", "rollout_batch_size"]
        assert "there each with its own mean over tokens" in text
    batch = of(*flags, "--num_iterations", "3").recipe["batch"]  # no whole number of generations
    assert (batch["rollout_batch_size"], batch["epochs_per_rollout"]) == (1, 3)


def test_an_off_policy_mask_reads_logprobs_under_filters() -> None:
    mask = ("--off_policy_mask_threshold", "0.5")
    translation = of(*mask, "--top_k", "5")
    assert translation.recipe["algorithm"]["correction_with_filters"] is True
    assert "without vLLM they do not there" in comment(translation, "correction_with_filters")
    assert "correction_with_filters" not in settings(*mask)


def test_rows_without_a_solution_have_no_answer(tmp_path: Path) -> None:
    """Prompts alone are enough for functions of one's own."""
    for columns, answer in (({}, ""), ({"solution": "1"}, "solution")):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"prompt": "q", **columns}) + "\n", "utf-8")
        flags = ["--model_name_or_path", "m", "--dataset_name", str(file)]
        recipe = translate("trl", ["grpo", *flags, "--reward_funcs", "my.score"]).recipe
        assert recipe["data"]["answer"] == answer

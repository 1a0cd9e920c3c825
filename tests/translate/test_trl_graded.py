"""Trainers of TRL that grade tokens, and younger relatives of GRPO and of reward models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.chat import chat_tokenizer
from postgrad.core.errors import UsageError
from postgrad.data.settings import PairSettings
from postgrad.data.step_tokens import load_steps
from postgrad.translate.translate import Translation, translate

REWARD = ("--reward_funcs", "accuracy_reward")


def of(program: str, *flags: str) -> Translation:
    """The translation of a run, whose recipe has to be whole."""
    words = [program, "--model_name_or_path", "m", "--dataset_name", "d", *flags]
    translation = translate("trl", words)
    assert translation.problem is None
    return translation


def why(translation: Translation, name: str) -> str:
    """What is said of a lost option; "" where it is not lost."""
    return next((option.why for option in translation.draft.missing if option.name == name), "")


def comment(translation: Translation, *place: str) -> str:
    return translation.draft.comments.get(place, "")


def test_the_text_of_steps_is_that_of_their_trainer(tmp_path: Path) -> None:
    """A begin of text, the prompt, and each step with the separator, whose last token is judged."""
    recipe = of("prm", "--step_separator", "; \n").recipe
    assert recipe["algorithm"] == {"type": "process_reward"}
    assert (recipe["learner"]["lr"], recipe["data"]["on_too_long"]) == (1e-5, "truncate")
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "1 + 1?", "completions": ["add", "so 3"], "labels": [True, False]}
    rows.write_text(json.dumps(row), "utf-8")
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    settings = PairSettings.model_validate({**recipe["data"], "path": str(rows)})
    (steps,) = load_steps(settings, tokenizer).all()
    text = "<s>1 + 1?add; \nso 3; \n"
    assert steps.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = [len("1 + 1?add; \n"), len("1 + 1?add; \nso 3; \n")]  # <s> is one token
    np.testing.assert_array_equal(np.flatnonzero(steps.loss_mask), ends)
    np.testing.assert_array_equal(steps.labels[ends], [1.0, 0.0])


def test_steps_that_are_not_learned_there_are_told() -> None:
    translation = of("prm", "--train_on_last_step_only", "--max_completion_length", "100")
    assert "every step" in why(translation, "train_on_last_step_only")
    assert "together" in why(translation, "max_completion_length")
    assert "two rows" in comment(translation, "algorithm", "type")
    assert translation.recipe["data"]["max_len"] == 1024


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ((), (0.4, 0.4)),
        (("--epsilon", "0.3"), (0.3, 0.3)),
        (("--epsilon", "1.5", "--epsilon_high", "0.5"), (1.5, 0.5)),
    ],
)
def test_bounds_of_gmpo_are_of_a_ratio_s_logarithm(
    flags: tuple[str, ...], bounds: tuple[float, float]
) -> None:
    algorithm = of("gmpo", *REWARD, *flags).recipe["algorithm"]
    assert (algorithm["type"], algorithm["std_eps"]) == ("gmpo", 1e-4)
    assert (algorithm["clip_low"], algorithm["clip_high"]) == bounds


def test_what_the_loss_of_gmpo_does_not_read_is_not_in_its_recipe() -> None:
    translation = of("gmpo", *REWARD, "--loss_type", "cispo", "--beta", "0.04", "--delta", "2",
                     "--use_bias_correction_kl", "true", "--use_vllm", "true")  # fmt: skip
    algorithm = translation.recipe["algorithm"]
    assert algorithm.keys() == {"type", "kl_coef", "clip_low", "clip_high", "std_eps"}
    assert translation.draft.missing == []
    both = of("gmpo", *REWARD, "--multi_objective_aggregation", "normalize_then_sum")
    assert "not gmpo" in why(both, "multi_objective_aggregation")


def test_samples_ahead_of_async_grpo_have_their_bound_and_its_ratio() -> None:
    translation = of("async_grpo", *REWARD, "--per_device_train_batch_size", "16",
                     "--gradient_accumulation_steps", "2", "--weight_sync_steps", "3",
                     "--max_inflight_tasks", "64")  # fmt: skip
    recipe = translation.recipe
    assert (recipe["rollout"]["max_staleness"], recipe["rollout"]["slots"]) == (4, 64)
    assert recipe["rollout"]["max_new_tokens"] == 2048
    assert (recipe["cluster"]["rollout"]["workers"], recipe["rollout"]["type"]) == (1, "vllm")
    algorithm = recipe["algorithm"]
    assert (algorithm["old_logprobs"], algorithm["aggregation"]) == ("sampled", "token")
    assert "correction" not in algorithm
    assert recipe["batch"]["rollout_batch_size"] == 4  # 16 * 2 completions, 8 a prompt
    assert recipe["learner"]["schedule"] == "constant"
    assert "as many as fit into the server's" in comment(translation, "batch", "rollout_batch_size")
    assert "(n) there" in comment(translation, "algorithm", "std_eps")
    assert "every step" in why(translation, "weight_sync_steps")


def test_a_budget_of_tokens_is_a_micro_batch_s() -> None:
    batch = of("async_grpo", *REWARD, "--token_budget", "9000").recipe["batch"]
    assert batch["micro_train_tokens"] == 9000
    assert "micro_train_batch_size" not in batch
    counted = of("async_grpo", *REWARD, "--token_budget", "-1")  # a fixed number of completions
    assert counted.recipe["batch"]["micro_train_batch_size"] == 8
    assert "as many as fit" not in comment(counted, "batch", "rollout_batch_size")


@pytest.mark.parametrize(
    ("flags", "coefficient", "is_lost"),
    [
        ((), 2.0, True),
        (("--single_step_decomposition", "false"), None, False),
        (("--rkl_advantage", "false"), None, True),
    ],
)
def test_both_terms_of_minillm_are_grades_of_sampled_tokens(
    flags: tuple[str, ...], coefficient: float | None, is_lost: bool
) -> None:
    translation = of("minillm", "--teacher_model_name_or_path", "t", *flags)
    algorithm = translation.recipe["algorithm"]
    assert algorithm["type"] == "on_policy_distillation"
    assert algorithm.get("teacher_coef") == coefficient
    assert ("whole distributions" in why(translation, "single_step_decomposition")) == is_lost
    assert (algorithm["aggregation"], algorithm.get("reward_coef")) == ("token", None)
    assert translation.recipe["teacher"]["model"]["path"] == "t"


def test_what_minillm_adds_to_grades_is_kept_or_told() -> None:
    flags = ("--teacher_model_name_or_path", "t")
    rewarded = of("minillm", *flags, *REWARD, "--loss_type", "dr_grpo", "--scale_rewards", "none")
    algorithm = rewarded.recipe["algorithm"]
    assert (algorithm["reward_coef"], algorithm["std_norm"]) == (1.0, False)
    assert algorithm["aggregation"] == "constant"
    later = of("minillm", *flags, "--gamma", "0.9", "--kd_temperature", "2", "--loss_type", "sapo")
    for name in ("gamma", "kd_temperature", "loss_type"):
        assert why(later, name)
    with pytest.raises(UsageError, match="MiniLLM is GRPO"):
        of("minillm", *flags, "--rkl_advantage", "false", "--single_step_decomposition", "false")


@pytest.mark.parametrize(
    ("kind", "graded_by", "reference"),
    [
        ("live", "policy", None),
        ("base", "reference", None),
        ("ema", "reference", {"ema_decay": 0.95}),
    ],
)
def test_who_grades_is_the_policy_its_start_or_its_average(
    kind: str, graded_by: str, reference: dict[str, float] | None
) -> None:
    for program in ("sdft", "sdpo"):
        recipe = of(program, "--teacher_model_kind", kind).recipe
        assert recipe["algorithm"]["graded_by"] == graded_by
        assert recipe.get("reference") == reference
        assert recipe["algorithm"]["aggregation"] == "sequence"


def test_an_average_of_the_policy_moves_as_often_as_there() -> None:
    rate = ("--teacher_model_kind", "ema", "--teacher_update_rate", "0.25")
    every = of("sdft", *rate, "--teacher_sync_steps", "6", "--num_iterations", "2")
    assert every.recipe["reference"] == {"ema_decay": 0.75, "refresh_steps": 3}
    assert "updates, 2 a step" in comment(every, "reference", "refresh_steps")
    copied = of("sdft", "--teacher_model_kind", "ema", "--teacher_update_rate", "1")
    assert copied.recipe["reference"] == {"refresh_steps": 1}
    adapted = of("sdft", *rate, "--use_peft")
    assert "no average" in why(adapted, "teacher_model_kind")
    assert "reference" not in adapted.recipe


def test_a_hint_is_what_stands_behind_the_prompt() -> None:
    translation = of("sdft")
    data = translation.recipe["data"]
    assert (data["hint"], data["max_len"]) == ("{privileged_context}", 512 + 256)
    assert "Jensen-Shannon divergence (distillation_alpha 0.5) over the 100" in why(
        translation, "distillation_mode"
    )
    renamed = of("sdft", "--teacher_prompt_template", "Hint.\n{prompt}\n{privileged_context}",
             "--privileged_context_column", "solution")  # fmt: skip
    assert renamed.recipe["data"]["hint"] == "{solution}"
    assert "stands behind" in why(renamed, "teacher_prompt_template")
    assert "without one" in comment(renamed, "data", "hint")
    sampled = of("sdft", "--distillation_mode", "sampled_token", "--distillation_alpha", "1",
                 "--generate_from_teacher", "true", "--num_loss_tokens_to_skip", "3")  # fmt: skip
    lost = {option.name for option in sampled.draft.missing}
    assert lost == {"generate_from_teacher", "num_loss_tokens_to_skip"}


def test_right_answers_of_a_group_are_the_hint_of_sdpo() -> None:
    translation = of("sdpo", *REWARD, "--success_reward_threshold", "0.5")
    data, algorithm = translation.recipe["data"], translation.recipe["algorithm"]
    assert data["hint"] == (
        "Correct solution:\n\n{group.answer}\n\n\n\nCorrectly solve the original question.\n"
    )
    assert data["max_len"] == 512 + 256 + 64 + 256
    assert (algorithm["correct_at"], algorithm.get("reward_coef")) == (0.5, None)
    assert translation.draft.missing == []
    feedback = of("sdpo", *REWARD, "--include_environment_feedback", "--use_successful_as_teacher",
              "false", "--feedback_column", "feedback")  # fmt: skip
    assert "{feedback}" in feedback.recipe["data"]["hint"]
    assert "{group.answer}" not in feedback.recipe["data"]["hint"]
    both = of("sdpo", *REWARD, "--include_environment_feedback", "--dont_reprompt_on_self_success",
              "false")  # fmt: skip
    assert "shown alone" in why(both, "include_environment_feedback")
    assert "its own answer" in why(both, "dont_reprompt_on_self_success")


def test_rewards_of_sdpo_have_what_grades_leave() -> None:
    translation = of("sdpo", *REWARD, "--distillation_weight", "0.75", "--num_iterations", "2",
                     "--mask_truncated_completions")  # fmt: skip
    algorithm = translation.recipe["algorithm"]
    assert (algorithm["teacher_coef"], algorithm["reward_coef"]) == (0.75, 0.25)
    assert (algorithm["std_eps"], algorithm["clip_high"]) == (1e-4, 0.2)
    assert "loss_type dapo" in comment(translation, "algorithm", "aggregation")
    assert "PPO's clip" in why(translation, "distillation_is_clip")
    assert "count in it there" in comment(translation, "algorithm", "mask_truncated_completions")
    with pytest.raises(UsageError, match="SDPO is GRPO then"):
        of("sdpo", *REWARD, "--distillation_weight", "0")


def test_a_program_of_minillm_names_both_models(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "args = MiniLLMConfig('out', rkl_advantage=True, single_step_decomposition=False)\n"
        "MiniLLMTrainer('m', 't', f, args, train_dataset=load_dataset('d'))\n", "utf-8",
    )  # fmt: skip
    recipe: dict[str, Any] = translate("trl", [str(path)]).recipe
    assert (recipe["model"]["path"], recipe["teacher"]["model"]["path"]) == ("m", "t")
    assert recipe["run_dir"] == "out"

"""Rewards of translated recipes: what they score otherwise than their source is told."""

import pytest

from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score
from postgrad.translate.translate import Translation, translate


def verl(*words: str) -> Translation:
    return translate("verl", ["ppo", "actor_rollout_ref.model.path=m",
                              "actor_rollout_ref.rollout.n=4", *words])  # fmt: skip


def comment_of(translation: Translation, number: int = 0) -> str:
    return translation.draft.comments.get(("rewards", number, "type"), "")


def score(translation: Translation, text: str, answer: str) -> float:
    """What the first reward gives, times its weight."""
    reward = RewardSettings(**translation.recipe["rewards"][0])
    value = build(reward).score(PromptView("?", answer), RolloutView(text))
    return reward.weight * (value.value if isinstance(value, Score) else value)


@pytest.mark.parametrize("file", ["math/train.parquet", "geo3k/train.parquet"])
def test_of_math_and_geo3k_a_sample_without_a_box_is_wrong(file: str) -> None:
    translation = verl(f"data.train_files={file}")
    right = translation.recipe["rewards"][0].get("weight", 1.0)
    assert score(translation, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}") == right
    assert score(translation, r"It is $\frac{1}{2}$.", r"\frac{1}{2}") == 0.0


def test_right_and_wrong_are_as_far_apart_as_in_dapo() -> None:
    translation = verl("data.train_files=dapo-math-17k.parquet")
    assert score(translation, "Answer: 5", "5") - score(translation, "Answer: 6", "5") == 1.0 - (
        -1.0
    )
    assert "there 1 or -1" in comment_of(translation)


@pytest.mark.parametrize(("longest", "grows"), [(90, True), (100, False)])
def test_a_penalty_that_grows_beyond_its_limit_there_is_told(longest: int, grows: bool) -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg."
    translation = verl("data.train_files=gsm8k.parquet", "data.max_response_length=100",
                       f"{buffer}enable=True", f"{buffer}len=20",
                       f"reward.reward_kwargs.max_resp_len={longest}")  # fmt: skip
    assert ("there it grows on" in comment_of(translation, 1)) is grows


def test_formulas_that_are_no_latex_are_told_of_trl() -> None:
    words = ["grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs"]
    translation = translate("trl", [*words, "accuracy_reward", "think_format_reward"])
    assert "LaTeX alone counts there" in comment_of(translation)
    assert comment_of(translation, 1) == "think_format_reward"

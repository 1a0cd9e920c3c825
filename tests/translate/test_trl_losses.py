"""TRL's losses beside RL: what their trainers read, and what a recipe has instead."""

from typing import Any

import pytest

from postgrad.translate.translate import Translation, translate


def of(program: str, *flags: str) -> Translation:
    """The translation of a run, whose recipe has to be whole."""
    translation = translate(
        "trl", [program, "--model_name_or_path", "m", "--dataset_name", "d", *flags]
    )
    assert translation.problem is None
    return translation


def why(translation: Translation, name: str) -> str:
    """What is said of a lost option; "" where it is not lost."""
    return next((option.why for option in translation.draft.missing if option.name == name), "")


def comment(translation: Translation, key: str) -> str:
    return translation.draft.comments.get(("algorithm", key), "")


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--f_divergence_type", "alpha_divergence"],
         {"divergence": "alpha", "divergence_alpha": 0.5}),  # the coefficient's default
        (["--f_divergence_type", "alpha_divergence", "--f_alpha_divergence_coef", "0.3"],
         {"divergence": "alpha", "divergence_alpha": 0.7}),
        (["--f_divergence_type", "alpha_divergence", "--f_alpha_divergence_coef", "0"],
         {"divergence": "forward_kl"}),
        (["--f_divergence_type", "alpha_divergence", "--f_alpha_divergence_coef", "1"], {}),
        (["--f_alpha_divergence_coef", "0.3"], {}),
        (["--f_divergence_type", "js_divergence", "--loss_type", "apo_zero"],
         {"loss": "apo_zero"}),
        (["--discopop_tau", "0.2"], {}),
        (["--discopop_tau", "0.2", "--loss_type", "discopop"],
         {"loss": "discopop", "discopop_tau": 0.2}),
    ],
)  # fmt: skip
def test_an_option_that_a_loss_does_not_read_is_not_in_its_recipe(
    flags: list[str], settings: dict[str, Any]
) -> None:
    translation = of("dpo", *flags)
    assert translation.recipe["algorithm"] == {"type": "dpo", **settings}
    assert translation.draft.missing == []


@pytest.mark.parametrize("program", ["sft", "distillation", "gkd", "dpo"])
def test_noise_on_embeddings_is_carried_in_sft_and_lost_elsewhere(program: str) -> None:
    taught = TAUGHT if program in ("distillation", "gkd") else []
    translation = of(program, *taught, "--neftune_noise_alpha", "5")
    if program == "dpo":
        assert "in SFT alone" in why(translation, "neftune_noise_alpha")
        assert "neftune_noise_alpha" not in translation.recipe["algorithm"]
    else:
        assert translation.recipe["algorithm"]["neftune_noise_alpha"] == 5.0
        assert "each conversation's length" in comment(translation, "neftune_noise_alpha")
        assert why(translation, "neftune_noise_alpha") == ""


@pytest.mark.parametrize("loss", ["nca_pair", "bco_pair", "sppo_hard", "ipo", "apo_down"])
def test_a_divergence_beside_a_loss_that_has_none_here_is_lost(loss: str) -> None:
    translation = of("dpo", "--f_divergence_type", "js_divergence", "--loss_type", loss)
    assert f"{loss} has reverse_kl here" in why(translation, "f_divergence_type")
    assert "divergence" not in translation.recipe["algorithm"]


def test_weights_of_pairs_are_no_setting_of_ipo() -> None:
    translation = of("dpo", "--use_weighting", "true", "--loss_type", "ipo")
    assert translation.recipe["algorithm"] == {"type": "ipo"}
    assert "ipo is none" in why(translation, "use_weighting")
    assert "there without a bound" in comment(of("dpo", "--use_weighting", "true"), "type")


def test_the_weight_of_ipo_is_lost_and_its_nll_keeps_its_share() -> None:
    translation = of("dpo", "--loss_type", "ipo", "sft", "--loss_weights", "0.5", "0.25")
    assert translation.recipe["algorithm"] == {"type": "ipo", "nll_coef": 0.5}
    assert "weight 1 here" in why(translation, "loss_weights")


def test_sorted_pairs_can_have_an_nll() -> None:
    translation = of("dpo", "--loss_type", "aot_unpaired", "sft")
    assert translation.recipe["algorithm"] == {"type": "aot", "paired": False, "nll_coef": 1.0}
    assert "there those of a micro-batch" in comment(translation, "type")


def test_sft_alone_is_no_preference() -> None:
    assert 'job = "sft"' in why(of("dpo", "--loss_type", "sft"), "loss_type")


def test_smoothing_beside_sigmoid_is_told() -> None:
    both = of("dpo", "--loss_type", "sigmoid", "robust", "--label_smoothing", "0.1")
    assert "sigmoid reads it here too" in comment(both, "label_smoothing")
    alone = of("dpo", "--loss_type", "robust", "--label_smoothing", "0.1")
    assert comment(alone, "label_smoothing") == ""


def test_simpo_and_alphapo_of_cpo_are_one_algorithm() -> None:
    smoothed = ("--loss_type", "simpo", "--label_smoothing", "0.1", "--cpo_alpha", "0")
    assert of("cpo", *smoothed).recipe["algorithm"] == {
        "type": "simpo", "beta": 0.1, "gamma": 0.5, "label_smoothing": 0.1, "nll_coef": 0.0,
    }  # fmt: skip
    translation = of("cpo", "--loss_type", "alphapo", "--alpha", "0.2")
    assert translation.recipe["algorithm"]["nll_coef"] == 0.0
    assert "AlphaPO" in why(translation, "alpha")
    assert why(of("cpo", "--loss_type", "alphapo"), "alpha") == ""  # 0: rewards are logprobs


def test_what_is_a_mean_over_something_else_there_is_told() -> None:
    assert "over all chosen tokens" in comment(of("cpo"), "nll_coef")
    assert "over prompts too" in comment(of("orpo"), "nll_coef")
    assert "there over a micro-batch" in comment(of("kto"), "type")
    assert comment(of("kto", "--loss_type", "apo_zero_unpaired"), "type") == ""


def test_an_option_of_another_trainer_is_lost_and_in_no_recipe() -> None:
    translation = of("kto", "--label_smoothing", "0.1", "--use_weighting", "true")
    assert translation.recipe["algorithm"] == {"type": "kto"}
    assert {option.name for option in translation.draft.missing} == {
        "label_smoothing",
        "use_weighting",
    }


TAUGHT = ("--teacher_model_name_or_path", "t")


@pytest.mark.parametrize(
    ("beta", "divergence"),
    [("0", {"divergence": "forward_kl"}), ("1.0", {"divergence": "reverse_kl"}),
     ("0.3", {"divergence": "jsd", "beta": 0.3})],
)  # fmt: skip
@pytest.mark.parametrize("program", ["distillation", "gkd"])
def test_beta_of_distillation_names_its_divergence(
    program: str, beta: str, divergence: dict[str, Any]
) -> None:
    algorithm = of(program, *TAUGHT, "--beta", beta).recipe["algorithm"]
    assert {key: algorithm.get(key) for key in ("divergence", "beta")} == {
        "beta": None
    } | divergence


def test_a_student_of_distillation_answers_every_row_itself_at_the_losses_temperature() -> None:
    translation = of(
        "distillation",
        *TAUGHT,
        "--temperature",
        "0.8",
        "--max_completion_length",
        "300",
        "--teacher_model_revision",
        "v2",
        "--use_vllm",
        "true",
    )
    recipe = translation.recipe
    assert recipe["job"] == "sft"
    assert recipe["algorithm"] == {"type": "distillation", "divergence": "reverse_kl",
                                   "temperature": 0.8, "on_policy": 1.0}  # fmt: skip
    assert recipe["teacher"]["model"] == {"path": "t", "revision": "v2"}
    assert recipe["rollout"] == {"type": "vllm", "temperature": 0.8, "max_new_tokens": 300,
                                 "vllm": {"memory_fraction": 0.3}}  # fmt: skip
    assert recipe["learner"]["lr"] == 1e-6
    assert not translation.draft.missing


def test_a_student_of_gkd_answers_some_rows_and_its_loss_is_at_temperature_1() -> None:
    translation = of("gkd", *TAUGHT)
    assert translation.recipe["algorithm"] == {
        "type": "distillation",
        "divergence": "jsd",
        "beta": 0.5,
        "on_policy": 0.5,
    }
    assert translation.recipe["rollout"] == {"max_new_tokens": 128, "temperature": 0.9}
    alone = of("gkd", *TAUGHT, "--lmbda", "0", "--seq_kd", "true")
    assert "rollout" not in alone.recipe
    assert why(alone, "seq_kd").startswith("the teacher writes no rows")
    with pytest.raises(AssertionError):  # no teacher, no recipe
        of("gkd")


def test_a_pair_of_a_reward_model_with_a_longer_answer_is_dropped_as_there() -> None:
    data = of("reward").recipe["data"]
    assert (data["max_len"], data.get("on_too_long")) == (1024, None)
    assert of("dpo").recipe["data"]["on_too_long"] == "truncate"

"""OpenRLHF's options whose meaning depends on their sign, their range, or the estimator."""

from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.length import StopProperly
from postgrad.rewards.mixing import total
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView
from postgrad.translate.translate import Translation, translate

PPO = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--data.input_key", "q",
       "--reward.remote_url", "r.py"]  # fmt: skip


def of(*flags: str) -> Translation:
    return translate("openrlhf", ["ppo", *PPO, *flags])


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


def earned(rewards: list[dict[str, Any]], task: float, finish_reason: str) -> float:
    """What a sample earns by the translated rewards, the first of which gave `task`."""
    stop = {key: value for key, value in rewards[1].items() if key in ("penalty", "stopped")}
    view = RolloutView("", finish_reason, 5)
    shaped = StopProperly(**stop).score(PromptView("?", None), view).value
    return total([RewardSettings(**reward) for reward in rewards], [task, shaped])


@pytest.mark.parametrize(
    ("coefficient", "task", "cut"),
    [("-0.5", -1.0, -0.5), ("-0.5", 1.0, -0.5), ("0.5", -1.0, -0.5), ("0.5", 1.0, 0.5),
     ("0.0", 1.0, 0.0), ("1.0", -1.0, -1.0)],
)  # fmt: skip
def test_a_penalty_below_zero_replaces_the_reward_of_what_was_cut_off_and_others_scale_it(
    coefficient: str, task: float, cut: float
) -> None:
    translation = of("--reward.stop_properly_penalty_coef", coefficient)
    assert translation.problem is None
    rewards = translation.recipe["rewards"]
    assert earned(rewards, task, "length") == cut
    assert earned(rewards, task, "stop") == task


def test_a_clip_range_keeps_both_of_its_bounds() -> None:
    for bounds, wanted in ((["-1", "5"], [-1.0, 5.0]), (["-3", "3"], 3.0)):
        for estimator in ("gae", "reinforce", "rloo"):
            translation = of(
                "--reward.clip_range",
                *bounds,
                "--algo.advantage.estimator",
                estimator,
                "--rollout.n_samples_per_prompt",
                "2",
            )
            assert translation.problem is None
            assert translation.recipe["algorithm"]["reward_clip"] == wanted
    unsaid = of("--algo.advantage.estimator", "rloo", "--rollout.n_samples_per_prompt", "2")
    assert "reward_clip" not in unsaid.recipe["algorithm"]


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline"])
def test_no_std_norm_is_std_norm_false(estimator: str) -> None:
    flags = ["--algo.advantage.estimator", estimator, "--rollout.n_samples_per_prompt", "4"]
    translation = of(*flags, "--algo.advantage.no_std_norm")
    assert translation.problem is None
    assert translation.recipe["algorithm"]["std_norm"] is False
    assert "std_norm" not in of(*flags).recipe["algorithm"]


def test_estimators_that_do_not_ask_no_std_norm_are_left_as_they_are() -> None:
    flags = ["--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4"]
    translation = of(*flags, "--algo.advantage.no_std_norm")
    assert "std_norm" not in translation.recipe["algorithm"]
    assert missing(translation) == set()


def test_the_critic_has_a_schedule_of_its_own() -> None:
    assert of().recipe["critic"]["learner"] == {"lr": 9e-6}
    translation = of("--critic.lr_scheduler", "constant", "--critic.lr_warmup_ratio", "0.0",
                     "--critic.max_norm", "0.5")  # fmt: skip
    assert translation.problem is None
    assert translation.recipe["critic"]["learner"] == {
        "lr": 9e-6, "schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": 0.5,
    }  # fmt: skip
    assert translation.recipe["learner"]["warmup_ratio"] == 0.03


def test_what_is_said_of_the_actor_alone_is_not_taken_over_by_the_critic() -> None:
    translation = of("--actor.lr_scheduler", "linear", "--actor.lr_warmup_ratio", "0.1")
    assert translation.problem is None
    assert (
        translation.recipe["learner"]["schedule"],
        translation.recipe["learner"]["warmup_ratio"],
    ) == (
        "linear",
        0.1,
    )
    critic = translation.recipe["critic"]["learner"]
    assert critic == {"lr": 9e-6, "schedule": "cosine", "min_lr_ratio": 0.1, "warmup_ratio": 0.03}
    both = of("--lr_warmup_ratio", "0.1")  # before 0.11 one option was both roles'
    assert both.recipe["critic"]["learner"] == {"lr": 9e-6}


def test_a_critic_s_options_need_no_saying_where_there_is_none() -> None:
    translation = of("--algo.advantage.estimator", "rloo", "--rollout.n_samples_per_prompt", "4",
                     "--critic.lr_warmup_ratio", "0.1")  # fmt: skip
    assert translation.problem is None
    assert missing(translation) == set()
    assert "critic" not in translation.recipe


def test_what_an_estimator_does_not_do_here_is_said() -> None:
    several = ["--rollout.n_samples_per_prompt", "4"]
    discounted = of("--algo.advantage.estimator", "reinforce", "--algo.advantage.gamma", "0.9")
    assert missing(discounted) == {"algo.advantage.gamma"}
    frozen = of("--algo.advantage.estimator", "rloo", *several, "--actor.freezing_steps", "5")
    assert missing(frozen) == {"actor.freezing_steps"}
    sequence = of("--algo.advantage.estimator", "rloo", *several,
                  "--actor.policy_loss_type", "gspo")  # fmt: skip
    assert missing(sequence) == {"algo.advantage.estimator"}
    assert of("--actor.freezing_steps", "-1").problem is None


def test_bounds_that_are_no_pair_are_named() -> None:
    with pytest.raises(
        UsageError, match=r"reward\.clip_range: two numbers are expected, the lower"
    ):
        of("--reward.clip_range", "5")
    with pytest.raises(UsageError, match="dynamic_filtering_range: two numbers"):
        of("--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "1", "0")


def test_one_threshold_of_a_correction_is_its_upper_bound() -> None:
    tis = of("--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "3")
    assert tis.recipe["algorithm"]["correction_high"] == 3.0
    assert missing(tis) == set()
    two = of("--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "0.5", "3")
    assert two.recipe["algorithm"]["correction_high"] == 3.0
    assert two.recipe["algorithm"]["correction_low"] == 0.5
    assert missing(two) == set()
    assert "correction_low" not in tis.recipe["algorithm"]


def test_a_kl_coefficient_below_zero_is_none() -> None:
    translation = of("--algo.kl.init_coef", "-1")
    assert translation.problem is None
    assert translation.recipe["algorithm"]["kl_coef"] == 0.0


def test_an_overlong_factor_is_above_zero_or_said_to_be_none() -> None:
    flags = ["--reward.overlong_buffer_len", "100", "--reward.overlong_penalty_factor"]
    assert of(*flags, "2.0").recipe["rewards"][1]["factor"] == 2.0
    assert len(of(*flags, "0.0").recipe["rewards"]) == 1
    assert missing(of(*flags, "-1.0")) == {"reward.overlong_penalty_factor"}


def test_notes_on_muon_and_mixtures_of_experts_say_what_is_here() -> None:
    translation = of(
        "--actor.optim",
        "muon",
        "--actor.muon.lr",
        "0.02",
        "--actor.muon.momentum",
        "0.9",
        "--actor.aux_loss_coef",
        "0.01",
    )
    assert translation.problem is None
    why = {option.name: option.why for option in translation.draft.missing}
    assert "learner.muon_lr is Muon's rate" in why["muon.lr"]
    assert translation.recipe["model"]["router_aux_loss_coef"] == 0.01
    assert translation.recipe["learner"]["muon_momentum"] == 0.9


def test_asynchronous_training_is_samples_ahead_with_a_correction() -> None:
    on = ["--train.async_enable", "--train.async_queue_size", "2"]
    translation = of(*on)
    assert translation.problem is None
    assert translation.recipe["rollout"]["max_staleness"] == 2
    assert translation.recipe["rollout"]["in_flight_updates"] is False
    assert translation.recipe["algorithm"]["old_logprobs"] == "sampled"
    partial = of(*on, "--train.partial_rollout_enable")
    assert "in_flight_updates" not in partial.recipe["rollout"]
    assert not missing(partial) & {"train.partial_rollout_enable", "train.async_queue_size"}
    corrected = of(*on, "--algo.advantage.is_correction_enable")
    assert corrected.recipe["algorithm"]["correction"] == "tis"
    assert "old_logprobs" not in corrected.recipe["algorithm"]
    filtered = of(*on, "--rollout.top_p", "0.9")
    assert filtered.problem is None
    assert filtered.recipe["rollout"]["top_p"] == 0.9
    assert filtered.recipe["algorithm"]["correction"] == "tis"
    assert of("--train.async_enable").recipe["rollout"]["max_staleness"] == 1


def test_a_queue_of_a_synchronous_run_is_none() -> None:
    translation = of("--train.async_queue_size", "4", "--train.partial_rollout_enable")
    assert "max_staleness" not in translation.recipe["rollout"]
    assert "train.partial_rollout_enable" in missing(translation)
    assert "train.async_queue_size" not in missing(translation)


def test_a_ratio_of_gspo_is_to_the_sampler_where_it_is_corrected() -> None:
    gspo = ["--algo.advantage.estimator", "group_norm", "--actor.policy_loss_type", "gspo"]
    algorithm = of(*gspo, "--algo.advantage.is_correction_enable").recipe["algorithm"]
    assert algorithm["old_logprobs"] == "sampled"
    assert "correction" not in algorithm
    assert "old_logprobs" not in of(*gspo).recipe["algorithm"]


def test_a_billionth_is_added_to_deviations_of_group_norm() -> None:
    of_group = of("--algo.advantage.estimator", "group_norm").recipe["algorithm"]
    assert of_group["std_eps"] == 1e-9
    assert "std_eps" not in of("--algo.advantage.estimator", "rloo").recipe["algorithm"]


def test_evaluations_have_their_own_temperature_and_the_filters_of_training() -> None:
    translation = of(
        "--eval.dataset", "e.jsonl", "--rollout.top_p", "0.9", "--rollout.temperature", "0.8"
    )
    assert (translation.recipe["eval"]["temperature"], translation.recipe["eval"]["top_p"]) == (
        0.6,
        0.9,
    )


def test_ipo_sums_log_ratios_and_reads_no_smoothing() -> None:
    words = ["dpo", "--model.model_name_or_path", "m", "--data.dataset", "d", "--model.ipo_enable"]
    translation = translate("openrlhf", [*words, "--model.label_smoothing", "0.1"])
    assert translation.problem is None
    assert translation.recipe["algorithm"] == {"type": "ipo", "length_normalised": False}
    assert "model.label_smoothing" in {option.name for option in translation.draft.needless}


def test_logexp_reads_no_margin() -> None:
    words = ["rm", "--model.model_name_or_path", "m", "--data.dataset", "d"]
    translation = translate("openrlhf", [*words, "--model.loss_type", "logexp",
                                         "--model.margin_loss_enable"])  # fmt: skip
    assert translation.problem is None
    assert translation.recipe["algorithm"] == {"type": "bradley_terry", "loss": "log_exp"}


@pytest.mark.parametrize(
    ("program", "tokens"),
    [("dpo", 4096), ("rm", 4096), ("kto", 4096), ("prm", 2048), ("sft", 2048)],
)
def test_a_token_budget_holds_both_answers_of_a_pair(program: str, tokens: int) -> None:
    words = [program, "--model.model_name_or_path", "m", "--data.dataset", "d"]
    words += ["--data.placeholder_token", "ки", "--data.reward_tokens", "+", "-"]
    translation = translate(
        "openrlhf",
        [
            *words,
            "--data.max_len",
            "2048",
            "--train.dynamic_batch_enable",
            "--train.max_tokens_per_gpu",
            "1500",
        ],
    )
    assert translation.problem is None
    assert translation.recipe["batch"]["micro_train_tokens"] == tokens


@pytest.mark.parametrize(
    ("program", "expected_note"),
    [("sft", "before it over each micro-batch's"), ("kd", "there over each micro-batch's"),
     ("prm", "there over each micro-batch's"), ("kto", "there over a micro-batch"), ("dpo", "")],
)  # fmt: skip
def test_means_of_a_micro_batch_there_are_told(program: str, expected_note: str) -> None:
    words = [program, "--model.model_name_or_path", "m", "--data.dataset", "d"]
    comment = translate("openrlhf", words).draft.comments.get(("algorithm", "type"), "")
    assert expected_note in comment
    assert bool(comment) is bool(expected_note)


def test_pretraining_is_plain_text_without_a_template() -> None:
    words = ["--model.model_name_or_path", "m", "--data.dataset", "d", "--data.input_key", "body"]
    translation = translate("openrlhf", ["sft", *words, "--model.pretrain_mode_enable"])
    assert translation.problem is None
    assert translation.recipe["data"]["text"] == "body"
    assert translation.recipe["data"].keys().isdisjoint({"prompt", "answer", "chat_template"})
    assert "model.pretrain_mode_enable" not in missing(translation)

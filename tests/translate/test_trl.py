"""TRL's options whose meaning depends on their sign, their range, or the loss."""

from typing import Any, cast

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import parse_recipe
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score
from postgrad.translate.tables.trl import FUNCTIONS
from postgrad.translate.translate import Translation, translate

GRPO = ["grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs",
        "accuracy_reward"]  # fmt: skip


def of(*flags: str) -> Translation:
    translation = translate("trl", [*GRPO, *flags])
    assert translation.problem is None
    return translation


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


def test_scale_rewards_none_is_no_division_by_the_deviation_whatever_the_loss() -> None:
    for scale in ("none", "false"):
        sequence = of("--scale_rewards", scale, "--importance_sampling_level", "sequence")
        assert sequence.recipe["algorithm"]["type"] == "gspo"
        assert sequence.recipe["algorithm"]["std_norm"] is False
        weights = of("--scale_rewards", scale, "--loss_type", "cispo", "--epsilon_high", "5.0")
        assert weights.recipe["algorithm"]["std_norm"] is False
        assert of("--scale_rewards", scale).recipe["algorithm"]["type"] == "dr_grpo"
    assert "std_norm" not in of("--scale_rewards", "group").recipe["algorithm"]
    of_step = of("--scale_rewards", "batch")
    assert (of_step.recipe["algorithm"]["std_norm"], missing(of_step)) == ("batch", set())


def test_cispo_bounds_the_ratio_at_one_more_than_clip_high() -> None:
    algorithm = of("--loss_type", "cispo", "--epsilon_high", "5.0").recipe["algorithm"]
    assert algorithm["clip_high"] == 4.0
    assert "clip_low" not in algorithm
    assert missing(of("--loss_type", "cispo")) == {"epsilon_high"}  # 0.2 there, by default


def test_a_clip_range_of_rloo_bounds_rewards() -> None:
    flags = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs",
             "accuracy_reward", "--reward_clip_range", "-2", "1"]  # fmt: skip
    translation = translate("trl", ["rloo", *flags])
    assert translation.problem is None
    assert translation.recipe["algorithm"]["reward_clip"] == [-2.0, 1.0]


def test_thoughts_do_not_count_where_they_do_not_there() -> None:
    flags = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs",
             "accuracy_reward", "reasoning_accuracy_reward"]  # fmt: skip
    translation = translate("trl", ["grpo", *flags])
    assert translation.problem is None
    of_answer, behind = translation.recipe["rewards"]
    assert (of_answer["type"], of_answer.get("after")) == ("math", None)
    assert (behind["type"], behind["after"]) == ("math", "</think>")


def test_think_format_reward_wants_one_beginning_of_thoughts_as_there() -> None:
    """The function of TRL 1.16 gives 0, 0, 1, 1, 0."""
    kind, settings, _ = FUNCTIONS["think_format_reward"]
    verifier = build(RewardSettings.model_validate({"type": kind, **settings}))
    texts = ["<think>a<think>b</think>c", "<think>a</think><think>b</think>", "<think>a</think>c",
             "<think>\n</think>\nc</think>\n", "c<think>a</think>"]  # fmt: skip
    scores = [verifier.score(PromptView("q", None), RolloutView(text)) for text in texts]
    assert [cast(Score, score).value for score in scores] == [0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_missing_end_costs_what_ppo_says() -> None:
    flags = ["--sft_model_path", "m", "--dataset_name", "d", "--reward_model_path", "r",
             "--missing_eos_penalty", "1.5", "--whiten_rewards"]  # fmt: skip
    translation = translate("trl", ["ppo", *flags])
    assert translation.problem is None
    assert translation.recipe["rewards"] == [
        {"type": "reward_model"}, {"type": "stop_properly", "penalty": -1.5},
    ]  # fmt: skip
    assert translation.recipe["algorithm"]["whiten_rewards"] is True
    both = translate("trl", ["ppo", *flags, "--model_name_or_path", "base"])
    assert both.recipe["model"]["path"] == "m"  # the policy starts from sft_model_path


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--warmup_ratio", "0.1"], {"warmup_ratio": 0.1}),
        (["--warmup_steps", "0.1"], {"warmup_ratio": 0.1}),
        (["--warmup_steps", "10"], {"warmup_updates": 10}),
        (["--warmup_ratio", "0.1", "--warmup_steps", "10"], {"warmup_updates": 10}),
    ],
)
def test_warm_up_below_one_is_a_share(flags: list[str], wanted: dict[str, float]) -> None:
    learner = of(*flags).recipe["learner"]
    assert {key: setting for key, setting in learner.items() if "warmup" in key} == wanted


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("adamw_torch", None),
        ("paged_adamw_32bit", None),
        ("adamw_bnb_8bit", "8bit"),
        ("paged_adamw_8bit", "8bit"),
    ],
)
def test_adamw_in_eight_bits_has_its_key(name: str, state: str | None) -> None:
    translation = of("--optim", name)
    assert translation.problem is None
    assert translation.recipe["learner"].get("optimizer_state") == state
    assert translation.recipe["learner"].get("optimizer", "adamw") == "adamw"


def test_another_optimizer_is_missing() -> None:
    translation = of("--optim", "adafactor")
    assert "optimizer_state" not in translation.recipe["learner"]
    assert "adafactor" in translation.text


def test_a_least_rate_is_a_share_of_the_rate() -> None:
    translation = of("--learning_rate", "1e-5", "--lr_scheduler_type", "cosine_with_min_lr",
                     "--lr_scheduler_kwargs", '{"min_lr": 1e-6}')  # fmt: skip
    assert translation.recipe["learner"]["min_lr_ratio"] == pytest.approx(0.1)


def test_steps_below_one_are_a_share_of_the_run() -> None:
    translation = of("--save_steps", "0.1", "--eval_strategy", "steps", "--eval_steps", "0.25")
    assert missing(translation) == {"save_steps", "eval_steps"}
    assert "save_steps" not in translation.recipe["checkpoint"]


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_without_a_limit_of_checkpoints_all_are_kept(limit: str) -> None:
    translation = of("--save_total_limit", limit, "--save_steps", "50")
    assert missing(translation) == set()
    assert (
        translation.recipe["checkpoint"]["keep_steps"]
        == translation.recipe["checkpoint"]["save_steps"]
    )
    epochs = of("--save_total_limit", limit, "--save_strategy", "epoch")
    assert missing(epochs) == {"save_total_limit"}
    assert of("--save_total_limit", "2").recipe["checkpoint"]["max_ckpt_num"] == 2


def test_a_checkpoint_after_each_epoch_has_its_key() -> None:
    translation = of("--save_strategy", "epoch")
    assert translation.recipe["checkpoint"]["save_epochs"] == 1
    assert missing(translation) == set()


def test_what_is_faster_or_smaller_there_is_lost_or_has_its_key() -> None:
    translation = of(
        "--torch_compile",
        "--use_liger_kernel",
        "--dtype",
        "bfloat16",
        "--tf32",
        "True",
        "--activation_offloading",
        "--router_aux_loss_coef",
        "0.001",
    )
    assert translation.recipe["model"]["compile"] is True
    assert translation.recipe["model"]["router_aux_loss_coef"] == 0.001
    assert translation.recipe["model"]["gradient_checkpointing"] == "offload"
    assert missing(translation) == {"use_liger_kernel", "dtype", "tf32"}
    assert missing(of("--dtype", "float32")) == set()


def test_a_text_field_is_the_column_of_plain_text() -> None:
    flags = ["sft", "--model_name_or_path", "m", "--dataset_name", "d"]
    translation = translate("trl", [*flags, "--dataset_text_field", "body"])
    assert translation.problem is None
    assert translation.recipe["data"]["text"] == "body"
    unstated = translate("trl", flags).recipe["data"]
    assert not {"text", "messages", "prompt"} & unstated.keys()


def test_the_length_of_rows_has_two_names() -> None:
    flags = ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--max_seq_length", "99"]
    assert translate("trl", flags).recipe["data"]["max_len"] == 99
    both = translate("trl", [*flags, "--max_length", "77"])
    assert both.recipe["data"]["max_len"] == 77
    assert missing(both) == set()


def algorithm_of(program: str, *flags: str) -> dict[str, Any]:
    """[algorithm] of the recipe, which has to be whole."""
    translation = translate(
        "trl", [program, "--model_name_or_path", "m", "--dataset_name", "d", *flags]
    )
    assert translation.problem is None
    assert missing(translation) == set()
    return translation.recipe["algorithm"]


def test_dpo_s_losses_are_named_or_weighted() -> None:
    assert algorithm_of("dpo", "--loss_type", "apo_down") == {"type": "dpo", "loss": "apo_down"}
    mixed = algorithm_of(
        "dpo", "--loss_type", "sigmoid", "bco_pair", "sft", "--loss_weights", "0.8", "0.2", "1.0"
    )
    assert mixed["loss"] == {"sigmoid": 0.8, "bco": 0.2}
    assert mixed["nll_coef"] == 1.0
    assert algorithm_of("dpo", "--loss_type", "sigmoid_norm")["length_normalised"] is True
    assert algorithm_of("dpo", "--loss_type", "ipo")["type"] == "ipo"
    smooth = algorithm_of("dpo", "--loss_type", "robust", "--label_smoothing", "0.1")
    assert (smooth["loss"], smooth["label_smoothing"]) == ("robust", 0.1)


def test_a_divergence_has_the_alpha_of_its_paper() -> None:
    divergence_flags = (
        "--f_divergence_type",
        "alpha_divergence",
        "--f_alpha_divergence_coef",
        "0.75",
    )
    algorithm = algorithm_of("dpo", *divergence_flags)
    assert (algorithm["divergence"], algorithm["divergence_alpha"]) == ("alpha", 0.25)
    assert "divergence" not in algorithm_of("dpo", "--f_divergence_type", "reverse_kl")


def test_losses_of_other_trainers_are_settings_and_types() -> None:
    assert algorithm_of("kto", "--loss_type", "apo_zero_unpaired")["loss"] == "apo_zero"
    assert algorithm_of("sft", "--loss_type", "dft")["loss"] == "dft"
    assert algorithm_of("cpo", "--cpo_alpha", "0.5") == {
        "type": "cpo", "beta": 0.1, "nll_coef": 0.5
    }  # fmt: skip
    simpo = algorithm_of("cpo", "--loss_type", "simpo", "--simpo_gamma", "0.7")
    assert (simpo["type"], simpo["gamma"], simpo["nll_coef"]) == ("simpo", 0.7, 1.0)


def test_losses_without_a_clip_take_their_own_settings() -> None:
    sapo = of("--loss_type", "sapo", "--sapo_temperature_neg", "1.2").recipe["algorithm"]
    assert sapo == {"type": "sapo", "gate_negative": 1.2, "kl_coef": 0.0, "std_eps": 1e-4}
    vespo = of("--loss_type", "vespo", "--vespo_k_pos", "1.5").recipe["algorithm"]
    assert (vespo["type"], vespo["shape_positive"]) == ("vespo", 1.5)
    luspo = of("--loss_type", "luspo", "--importance_sampling_level", "sequence")
    assert luspo.recipe["algorithm"]["type"] == "gspo"
    assert luspo.recipe["algorithm"]["aggregation"] == "constant"
    assert luspo.recipe["algorithm"]["constant_length"] == 1


def test_what_is_added_to_a_deviation_is_ten_thousandth_as_there() -> None:
    for more in ([], ["--loss_type", "cispo", "--epsilon_high", "2"],
                 ["--importance_sampling_level", "sequence"]):  # fmt: skip
        assert of(*more).recipe["algorithm"]["std_eps"] == 1e-4
        assert "std_eps" not in of(*more, "--scale_rewards", "none").recipe["algorithm"]


def test_the_logprobs_of_an_answer_of_rloo_are_summed() -> None:
    flags = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "f.g"]
    algorithm = translate("trl", ["rloo", *flags]).recipe["algorithm"]
    assert algorithm["constant_length"] == 1  # else each would be divided by max_completion_length


def test_the_weights_of_vllm_are_in_the_ratio_of_vespo() -> None:
    algorithm = of("--loss_type", "vespo", "--use_vllm", "true").recipe["algorithm"]
    assert algorithm["old_logprobs"] == "sampled"
    assert "correction" not in algorithm
    assert "old_logprobs" not in of("--loss_type", "vespo").recipe["algorithm"]


@pytest.mark.parametrize(("loss", "is_noted"), [("grpo", True), ("dapo", False), ("vespo", False)])
def test_means_that_differ_from_the_loss_s_are_told(loss: str, is_noted: bool) -> None:
    """An entropy is averaged over tokens there, and masked responses stay in a mean over them."""
    flags = ("--entropy_coef", "0.01", "--mask_truncated_completions", "true")
    translation = of("--loss_type", loss, *flags)
    assert translation.recipe["algorithm"]["entropy_coef"] == 0.01
    comments = translation.draft.comments
    assert (("algorithm", "entropy_coef") in comments) is is_noted
    masked = comments["algorithm", "mask_truncated_completions"]
    assert (masked == "masked responses leave the mean here, and count in it there") is is_noted
    assert (masked == "no update of a step without others; there one without a gradient") is (
        not is_noted
    )


def test_label_smoothing_is_of_the_losses_that_read_it() -> None:
    smooth = ["--label_smoothing", "0.1"]
    sigmoid = translate("trl", ["dpo", "--model_name_or_path", "m", "--dataset_name", "d", *smooth])
    assert "label_smoothing" not in sigmoid.recipe["algorithm"]
    assert "label_smoothing" in missing(sigmoid)
    assert algorithm_of("dpo", "--loss_type", "aot", *smooth)["label_smoothing"] == 0.1
    assert algorithm_of("cpo", *smooth)["label_smoothing"] == 0.1


def test_masks_and_the_corrected_kl_are_settings_of_every_algorithm() -> None:
    flags = ("--top_entropy_quantile", "0.2", "--off_policy_mask_threshold", "0.5")
    translation = of(*flags, "--beta", "0.1")
    algorithm = translation.recipe["algorithm"]
    assert algorithm["top_entropy_fraction"] == 0.2
    assert algorithm["off_policy_threshold"] == 0.5
    assert algorithm["kl_corrected"] is True
    assert "TRL's default" in translation.draft.comments["algorithm", "kl_corrected"]
    off = of("--beta", "0.1", "--use_bias_correction_kl", "false")
    assert "kl_corrected" not in off.recipe["algorithm"]
    without = of("--use_bias_correction_kl", "true")  # and no KL
    assert "kl_corrected" not in without.recipe["algorithm"]
    assert not missing(without)


def test_layers_are_computed_again_by_either_name_and_as_the_arguments_say() -> None:
    key = "gradient_checkpointing"
    assert of("--activation_checkpointing", "false").recipe["model"][key] is False
    newer = of("--gradient_checkpointing", "true", "--activation_checkpointing", "false")
    assert newer.recipe["model"][key] is False  # the newer name counts, as there
    offloaded = of("--activation_checkpointing_kwargs", '{"offload": true}')
    assert offloaded.recipe["model"][key] == "offload"
    some = of("--activation_checkpointing_kwargs", '{"every_n_layers": 2}')
    assert missing(some) == {"activation_checkpointing_kwargs"}
    assert not missing(of("--gradient_checkpointing_kwargs", '{"use_reentrant": false}'))


def test_a_sampler_in_order_does_not_shuffle() -> None:
    assert of("--train_sampling_strategy", "sequential").recipe["data"]["shuffle"] is False
    assert "shuffle" not in of("--train_sampling_strategy", "group_by_length").recipe["data"]


def test_samples_of_held_out_prompts_need_an_evaluation() -> None:
    flags = ("--num_generations_eval", "2")
    evaluated = of(*flags, "--eval_strategy", "steps", "--eval_steps", "10")
    assert evaluated.recipe["eval"]["n_samples"] == 2
    assert "eval" not in of(*flags).recipe


def test_online_dpo_counts_prompts_and_samples_two_of_each() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--beta", "0.2"]
    batch = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    rest = ["--reward_model_path", "rm", "--missing_eos_penalty", "1.0"]
    recipe = translate("trl", ["examples/scripts/dpo_online.py", *words, *batch, *rest]).recipe
    assert recipe["algorithm"] == {"type": "online_dpo", "beta": 0.2}
    assert recipe["batch"] == {
        "rollout_batch_size": 8, "n_samples_per_prompt": 2, "micro_train_batch_size": 8
    }  # fmt: skip
    assert [reward["type"] for reward in recipe["rewards"]] == ["reward_model", "stop_properly"]
    assert recipe["reward_model"]["model"]["path"] == "rm"
    assert recipe["rollout"] == {"max_new_tokens": 64, "temperature": 0.9}


def test_the_end_of_a_turn_is_a_policy_s_and_not_a_reward_model_s() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--eos_token", "<|im_end|>"]
    translation = translate("trl", ["sft", *words])
    assert translation.problem is None
    assert translation.recipe["model"]["eos_token"] == "<|im_end|>"
    assert parse_recipe(dict(translation.recipe)).model.eos_token == ("<|im_end|>",)
    judge = translate("trl", ["reward", *words])
    assert "eos_token" not in judge.recipe["model"]
    assert "eos_token" in missing(judge)


def test_rewards_that_are_normalised_before_they_are_added_are_gdpo() -> None:
    algorithm = of("--multi_objective_aggregation", "normalize_then_sum").recipe["algorithm"]
    assert algorithm["type"] == "gdpo"
    other = of("--multi_objective_aggregation", "normalize_then_sum", "--loss_type", "sapo")
    assert "multi_objective_aggregation" in str(other.draft.missing)


def test_sorted_and_weighted_pairs_and_a_reference_that_follows() -> None:
    assert algorithm_of("dpo", "--loss_type", "aot_unpaired") == {"type": "aot", "paired": False}
    assert algorithm_of("dpo", "--use_weighting", "true")["type"] == "wpo"
    flags = ["--sync_ref_model", "true", "--ref_model_sync_steps", "64"]
    recipe = translate("trl", ["dpo", "--model_name_or_path", "m", *flags]).recipe
    assert recipe["reference"] == {"refresh_steps": 64, "ema_decay": 0.4}


def test_modules_that_train_whole_beside_an_adapter_have_their_key() -> None:
    flags = ("--lora_modules_to_save", "embed_tokens", "lm_head")
    lora = of("--use_peft", *flags).recipe["model"]["lora"]
    assert lora["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert "lora" not in of(*flags).recipe["model"]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [((), "bfloat16"), (("--fp16",), "float16"), (("--bf16", "false"), "float32")],
)
def test_float16_has_its_key(flags: tuple[str, ...], dtype: str) -> None:
    assert of(*flags).recipe["model"]["dtype"] == dtype


@pytest.mark.parametrize("name", ["vllm_structured_outputs_regex", "vllm_guided_decoding_regex"])
def test_a_regex_for_vllm_is_the_rollouts(name: str) -> None:
    flags = [f"--{name}", r"\d{1,3}", "--vllm_importance_sampling_mode", "token_mask"]
    translation = of("--use_vllm", "true", *flags)
    assert translation.recipe["rollout"]["regex"] == r"\d{1,3}"
    assert translation.recipe["algorithm"]["correction"] == "icepop"
    assert (
        translation.recipe["algorithm"]["correction_with_filters"] is True
    )  # its ratio is the same
    assert missing(of(*flags)) >= {name}  # without vLLM it does nothing there


def test_a_bound_of_the_prompt_alone_is_missing_where_answers_are_given() -> None:
    translation = translate("trl", ["dpo", "--model_name_or_path", "m", "--dataset_name", "d",
                                    "--max_prompt_length", "128"])  # fmt: skip
    (lost,) = (option for option in translation.draft.missing if option.name == "max_prompt_length")
    assert lost.why == "data.max_len bounds prompt and answer together"


def test_tokens_and_rows_that_a_loss_reads_only_there_are_told() -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d"]
    place = ("algorithm", "type")
    assert "there all tokens" in translate("trl", ["sft", *words]).draft.comments[place]
    alike = translate("trl", ["sft", *words, "--assistant_only_loss", "true"])
    assert place not in alike.draft.comments
    all_tokens = translate("trl", ["sft", *words, "--completion_only_loss", "false"])
    assert place not in all_tokens.draft.comments
    assert (all_tokens.recipe["data"]["loss_turns"], missing(all_tokens)) == ("everything", set())
    assert "column margin" in translate("trl", ["reward", *words]).draft.comments[place]


def test_online_dpo_tells_its_temperature_and_its_ties() -> None:
    words = ["online_dpo", "--model_name_or_path", "m", "--dataset_name", "d"]
    comments = translate("trl", words).draft.comments  # its temperature is 0.9
    assert comments["rollout", "temperature"] == "of the policy's logprobs too; there at 1"
    assert "pairs of equal rewards have no gradient" in comments["algorithm", "type"]
    even = translate("trl", [*words, "--temperature", "1"]).draft.comments
    assert ("rollout", "temperature") not in even


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("gold", "teacher.align"),
        ("ssd", "write a pipeline: a recipe that samples"),
        ("a2po", "estimates the value of a prompt"),
        ("grpo_with_replay_buffer", "rollout.dynamic_sampling samples other prompts"),
    ],
)
def test_a_trainer_without_a_recipe_says_what_to_write(program: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        translate("trl", [program, "--model_name_or_path", "m"])

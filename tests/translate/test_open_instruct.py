"""Open-Instruct's options whose meaning depends on their sign, their range, or the loss."""

from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from postgrad.models.named_templates import template_text
from postgrad.rollout.environments.guess_number import rows
from postgrad.translate.translate import Translation, translate

GRPO = ["grpo", "--model_name_or_path", "m", "--dataset_mixer_list", "org/math", "1.0"]


def of(*flags: str) -> Translation:
    translation = translate("open-instruct", [*GRPO, *flags])
    assert translation.problem is None
    return translation


def test_a_non_stop_penalty_replaces_the_reward() -> None:
    gate = {"type": "stop_properly", "gate": True, "gate_at": 0.0}
    rewards = of("--non_stop_penalty", "--non_stop_penalty_value", "-2.0").recipe["rewards"]
    assert rewards[-1] == {**gate, "gate_value": -2.0}
    assert of("--non_stop_penalty", "True").recipe["rewards"][-1] == {**gate, "gate_value": 0.0}
    off = of("--non_stop_penalty", "False", "--non_stop_penalty_value", "-2.0")
    assert [reward["type"] for reward in off.recipe["rewards"]] == ["math"]


def test_centred_advantages_are_not_divided_whatever_the_loss() -> None:
    cispo = of("--loss_fn", "cispo", "--clip_lower", "0.2", "--clip_higher", "0.3")
    assert cispo.recipe["algorithm"]["std_norm"] is False
    assert cispo.recipe["algorithm"]["clip_high"] == 0.3
    assert "clip_low" not in cispo.recipe["algorithm"]
    standard = of("--loss_fn", "cispo", "--advantage_normalization_type", "standard")
    assert "std_norm" not in standard.recipe["algorithm"]


def test_a_cap_of_importance_weights_is_tis_and_0_is_none() -> None:
    cap = "--truncated_importance_sampling_ratio_cap"
    algorithm = of(cap, "3.0").recipe["algorithm"]
    assert (algorithm["correction"], algorithm["correction_high"]) == ("tis", 3.0)
    assert "correction" not in of(cap, "0.0").recipe["algorithm"]


def test_bounds_of_a_ratio_that_are_0_are_none() -> None:
    algorithm = of("--rho_mask_upper_bound", "1.5").recipe["algorithm"]
    assert (algorithm["correction"], algorithm["correction_high"]) == ("tis", 2.0)  # clamped beside
    assert algorithm["rejection"] == {"token": [0.0, 1.5]}
    translation = of("--rho_mask_lower_bound", "0.5")
    least, most = translation.recipe["algorithm"]["rejection"]["token"]
    assert least == 0.5
    assert most > 1e8
    assert "rho_clamp_upper_bound" not in {option.name for option in translation.draft.missing}
    algorithm = of("--use_rho_correction", "true", "--rho_clamp_upper_bound", "0").recipe[
        "algorithm"
    ]
    assert algorithm["correction"] == "tis"
    assert algorithm["correction_high"] > 1e8
    translation = of("--rho_clamp_lower_bound", "0.5", "--rho_clamp_upper_bound", "3")
    assert translation.recipe["algorithm"]["correction_low"] == 0.5


def test_the_third_estimator_is_k1_times_the_ratio() -> None:
    algorithm = of("--kl_estimator", "3", "--beta", "0.1").recipe["algorithm"]
    assert (algorithm["kl_estimator"], algorithm["kl_corrected"]) == ("k1", True)


def test_a_final_rate_belongs_to_linear_schedules() -> None:
    linear = of("--final_lr_ratio", "0.1", "--lr_scheduler_type", "linear", "--warmup_ratio", "0.1")
    assert linear.recipe["learner"]["min_lr_ratio"] == 0.1
    assert linear.recipe["learner"]["warmup_ratio"] == 0.1
    cosine = of("--final_lr_ratio", "0.1", "--lr_scheduler_type", "cosine")
    assert "min_lr_ratio" not in cosine.recipe["learner"]


def test_all_checkpoints_are_kept_where_steps_save_them() -> None:
    sft = ["sft", "--model_name_or_path", "m", "--dataset_mixer_list", "org/math", "1.0"]
    by_steps = [*sft, "--keep_last_n_checkpoints", "-1", "--checkpointing_steps", "500"]
    saves = translate("open-instruct", by_steps).recipe["checkpoint"]
    assert (saves["save_steps"], saves["keep_steps"]) == (500, 500)
    by_epochs = [*by_steps[:-1], "epoch"]
    translation = translate("open-instruct", by_epochs)
    assert [option.name for option in translation.draft.missing] == ["keep_last_n_checkpoints"]


def test_checkpoints_after_each_epoch_are_here_too() -> None:
    sft = ["sft", "--model_name_or_path", "m", "--dataset_mixer_list", "org/math", "1.0"]
    by_epoch = translate("open-instruct", [*sft, "--checkpointing_steps", "epoch"])
    assert by_epoch.problem is None
    assert by_epoch.recipe["checkpoint"] == {"save_epochs": 1, "save_hf": True}
    by_steps = translate("open-instruct", [*sft, "--checkpointing_steps", "500"])
    assert by_steps.recipe["checkpoint"] == {"save_steps": 500, "save_hf": True}


def test_state_and_model_are_saved_together_here() -> None:
    translation = of("--save_freq", "100", "--checkpoint_state_freq", "50")
    assert translation.recipe["checkpoint"]["save_steps"] == 50
    assert [option.name for option in translation.draft.missing] == ["save_freq"]
    assert of("--save_freq", "100").recipe["checkpoint"]["save_steps"] == 100
    same = of("--save_freq", "50", "--checkpoint_state_freq", "50")
    assert same.draft.missing == []


def test_guessing_a_number_is_the_environment_of_that_name() -> None:
    translation = translate("open-instruct", [
        "grpo", "--model_name_or_path", "m", "--dataset_mixer_list", "org/rlenv-guess-number",
        "1.0", "--total_episodes", "64", "--num_unique_prompts_rollout", "4",
        "--num_samples_per_prompt_rollout", "2", "--max_steps", "7", "--single_gpu_mode",
        "--tool_parser_type", "vllm_hermes", "--max_prompt_token_length", "100",
        "--response_length", "28",
    ])  # fmt: skip
    assert translation.problem is None
    assert translation.recipe["environment"] == {"type": "guess_number", "max_turns": 7}
    task = translation.recipe["data"].pop("task")
    assert translation.recipe["data"] == {
        "path": "postgrad.rollout.environments.guess_number:rows", "prompt": "question",
        "answer": "answer", "size": 32, "max_len": 128,
    }  # fmt: skip
    games = list(rows(5, 0, **task))
    assert {(game["low"], game["high"]) for game in games} == {(1, 100)}
    assert "rewards" not in translation.recipe
    assert translation.draft.missing == []


def test_a_tokenizer_of_another_place_is_lost() -> None:
    assert of("--tokenizer_name", "m").draft.missing == []
    translation = of("--tokenizer_name", "other", "--tokenizer_revision", "v2")
    assert [option.name for option in translation.draft.missing] == [
        "tokenizer_name",
        "tokenizer_revision",
    ]
    same = of("--model_revision", "v2", "--tokenizer_revision", "v2")
    assert same.draft.missing == []


@pytest.mark.parametrize(
    ("model", "bos", "begin"),
    [("meta-llama/x", "<s>", "<s>"), ("meta-llama/x", None, ""), ("allenai/OLMo-2", None, "</s>")],
)
def test_a_named_template_begins_with_the_first_token_where_it_is_added(
    model: str, bos: str | None, begin: str
) -> None:
    """OLMo's tokenizers begin texts with the token that ends them."""
    flags = ("--add_bos", "--chat_template_name", "tulu", "--model_name_or_path", model)
    result = of(*flags)
    assert "add_bos" not in {option.name for option in result.draft.missing}
    texts = list[str]()
    stated = template_text(result.recipe["data"]["chat_template"])
    for template in (stated, template_text("tulu")):
        compiled = ImmutableSandboxedEnvironment().from_string(template)
        special = {"eos_token": "</s>"} | ({} if bos is None else {"bos_token": bos})
        messages = [{"role": "user", "content": "hi"}]
        texts.append(compiled.render(messages=messages, add_generation_prompt=True, **special))
    assert texts[0] == begin + texts[1]
    assert texts[1].startswith("<|user|>\nhi")


def test_a_name_that_is_no_template_there_is_the_tokenizer_s_own_template() -> None:
    result = of("--chat_template_name", "olmo123")
    assert "chat_template" not in result.recipe["data"]
    assert "chat_template_name" in {option.name for option in result.draft.needless}
    result = of("--chat_template_name", "olmo_old")
    assert "chat_template_name" in {option.name for option in result.draft.missing}
    assert of("--chat_template_name", "olmo").recipe["data"]["chat_template"] == "olmo"


def test_a_first_token_stands_before_the_tokenizer_s_own_template() -> None:
    result = of("--add_bos")
    included = '{% include "tokenizer" %}'
    assert result.recipe["data"]["chat_template"] == f"{{{{ bos_token }}}}{included}"
    assert result.draft.missing == []
    olmo = of("--add_bos", "--model_name_or_path", "allenai/OLMo-2-1124-7B-SFT")
    assert olmo.recipe["data"]["chat_template"] == f"{{{{ bos_token or eos_token }}}}{included}"
    assert "chat_template" not in of("--add_bos", "false").recipe["data"]
    file = of("--add_bos", "--chat_template_name", "own.jinja")
    assert [option.name for option in file.draft.missing] == ["add_bos"]


def test_eight_bit_moments_and_compiled_layers_have_their_keys() -> None:
    sft = ["sft", "--model_name_or_path", "m", "--dataset_mixer_list", "org/math", "1.0"]
    translation = translate(
        "open-instruct", [*sft, "--use_8bit_optimizer", "--compile_model", "true"]
    )
    assert translation.problem is None
    assert translation.recipe["learner"]["optimizer_state"] == "8bit"
    assert translation.recipe["model"]["compile"] is True
    assert translation.draft.missing == []


def test_what_changes_speed_or_memory_is_never_among_what_is_not_needed() -> None:
    flags = {
        "--use_liger_kernel": "True", "--attn_implementation": "flash_attention_2",
        "--zero_hpz_partition_size": "8", "--activation_memory_budget": "0.5",
        "--apply_evolving_rubric_reward": "True",
    }  # fmt: skip
    translation = of(*(word for pair in flags.items() for word in pair))
    lost = {option.name: option.why for option in translation.draft.missing}
    assert set(lost) == {name.removeprefix("--") for name in flags}
    assert all(len(why) > 20 for why in lost.values())
    assert of("--zero_hpz_partition_size", "1").draft.missing == []  # one part is none


def test_steps_that_samples_are_ahead_are_the_bound_on_their_age() -> None:
    translation = of("--async_steps", "4", "--inflight_updates", "True")
    assert translation.recipe["rollout"]["max_staleness"] == 4
    assert "in_flight_updates" not in translation.recipe["rollout"]
    assert translation.recipe["algorithm"]["correction"] == "tis"
    still = of(
        "--async_steps",
        "1",
        "--inflight_updates",
        "False",
        "--truncated_importance_sampling_ratio_cap",
        "0.0",
    )
    assert still.recipe["rollout"]["in_flight_updates"] is False
    assert still.recipe["algorithm"]["old_logprobs"] == "sampled"
    unsaid = of()
    assert unsaid.recipe["rollout"]["max_staleness"] == 8  # its default, with updates in flight
    assert "in_flight_updates" not in unsaid.recipe["rollout"]
    synchronous = of("--async_steps", "0", "--inflight_updates", "False")
    assert "max_staleness" not in synchronous.recipe["rollout"]
    assert "in_flight_updates" not in synchronous.recipe["rollout"]
    assert not {missing.name for missing in translation.draft.missing} & {"async_steps"}


def test_a_number_of_evaluations_counts_where_steps_between_them_are_not_stated() -> None:
    """768 000 episodes of 48 * 16 are 1000 steps: 20 evaluations are 50 steps apart."""
    words = ["grpo_fast.py", "--model_name_or_path", "m", "--total_episodes", "768000"]
    words += ["--num_unique_prompts_rollout", "48", "--num_samples_per_prompt_rollout", "16"]
    words += ["--dataset_mixer_list", "d/gsm8k", "1.0", "--response_length", "64"]
    words += ["--dataset_mixer_eval_list", "e/gsm8k", "16", "--num_evals", "20"]
    words += ["--max_prompt_token_length", "64", "--apply_verifiable_reward", "true"]
    recipe = translate("open-instruct", words).recipe
    assert recipe["eval"]["every"] == 50
    recipe = translate("open-instruct", [*words, "--local_eval_every", "7"]).recipe
    assert recipe["eval"]["every"] == 7


def test_tags_of_an_answer_gate_the_reward_or_are_added_to_it() -> None:
    tags = {"type": "regex", "pattern": r"</think>\s*<answer>.*?</answer>", "dot_all": True}
    stated = ("--apply_r1_style_format_reward", "true")
    assert of(*stated).recipe["rewards"][1:] == [{**tags, "gate": True, "weight": 0.0}]
    added = of(*stated, "--additive_format_reward", "true", "--r1_style_format_reward", "2.0")
    assert added.recipe["rewards"][1:] == [{**tags, "weight": 2.0}]
    scaled = of(*stated, "--r1_style_format_reward", "2.0")  # no score there is ever 1
    assert [option.name for option in scaled.draft.missing] == ["apply_r1_style_format_reward"]
    off = of("--apply_r1_style_format_reward", "false", "--additive_format_reward", "true")
    assert [reward["type"] for reward in off.recipe["rewards"]] == ["math"]


def test_an_answer_that_was_cut_off_has_its_penalty_before_its_tags_count() -> None:
    rewards = of("--apply_r1_style_format_reward", "--non_stop_penalty", "true").recipe["rewards"]
    assert [reward["type"] for reward in rewards] == ["math", "stop_properly", "regex"]


def test_a_system_prompt_of_a_file_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Be brief.\n", "utf-8")
    call = f"python open_instruct/grpo_fast.py {' '.join(GRPO[1:])} --system_prompt_override_file"
    for name, system in (("prompt.txt", "Be brief."), ("absent.txt", None)):
        (tmp_path / "run.sh").write_text(f"{call} {name}", "utf-8")
        translation = translate("open-instruct", [str(tmp_path / "run.sh")])
        assert translation.problem is None
        assert translation.recipe["data"].get("system") == system
        lost = [option.name for option in translation.draft.missing]
        assert ("system_prompt_override_file" in lost) == (system is None)


def test_replicas_of_sharded_state_are_groups_of_shards() -> None:
    learners = ("--num_learners_per_node", "8")
    translation = of(*learners, "--fsdp_shard_degree", "4", "--fsdp_num_replicas", "2")
    assert translation.recipe["learner"]["sharding"] == "zero3"
    assert translation.recipe["learner"]["shard_groups"] == 2
    translation = of(*learners, "--fsdp_shard_degree", "8", "--fsdp_num_replicas", "1")
    assert translation.recipe["learner"]["sharding"] == "zero3"
    assert "shard_groups" not in translation.recipe["learner"]
    translation = of(*learners, "--fsdp_num_replicas", "3")
    assert [option.name for option in translation.draft.missing] == ["fsdp_num_replicas"]


def test_pass_at_k_is_measured_where_something_is_evaluated() -> None:
    translation = of("--eval_pass_at_k", "4", "--dataset_mixer_eval_list", "e", "16")
    assert translation.recipe["eval"]["n_samples"] == 4
    assert translation.recipe["eval"]["pass_at"] == [1, 4]
    assert [option.name for option in of("--eval_pass_at_k", "4").draft.missing] == [
        "eval_pass_at_k"
    ]


def test_evaluations_are_sampled_as_training_where_nothing_else_is_said() -> None:
    held_out = ("--dataset_mixer_eval_list", "e", "16", "--temperature", "0.7")
    held_out += ("--truncated_importance_sampling_ratio_cap", "0.0")
    sampled = of(*held_out, "--vllm_top_p", "0.9").recipe["eval"]
    assert (sampled["temperature"], sampled["top_p"]) == (0.7, 0.9)
    sampled = of(*held_out, "--vllm_top_p", "0.9", "--eval_top_p", "1.0").recipe["eval"]
    assert (sampled["temperature"], sampled["top_p"]) == (0.7, 1.0)
    assert [option.name for option in of("--eval_top_p", "0.9").draft.missing] == ["eval_top_p"]


@pytest.mark.parametrize(
    "name", ["ai2-adapt-dev/rlvr_ifeval", "allenai/IF_multi_constraints_upto5"]
)
def test_instructions_count_by_the_share_that_is_followed(name: str) -> None:
    flags = ["--model_name_or_path", "m", "--dataset_mixer_list", name, "1.0"]
    translation = translate("open-instruct", ["grpo", *flags])
    assert translation.recipe["rewards"][0] == {
        "type": "ifeval",
        "weight": 10.0,
        "credit": "fraction",
        "instructions": "answer",
    }
    assert translation.recipe["data"]["answer"] == "ground_truth"
    assert "docs/rewards.md#instructions" in translation.draft.comments["rewards", 0, "type"]

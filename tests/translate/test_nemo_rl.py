"""NeMo RL: what the cases do not have."""

from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.translate.nemo_rl import flags_of
from postgrad.translate.translate import Translation, translate

CASES = Path(__file__).parent / "cases" / "configs"
ASYNC = "grpo.async_grpo"


def of(*overrides: str, config: str = "nemo-rl-base.yaml") -> Translation:
    return translate("nemo-rl", ["grpo", str(CASES / config), *overrides])


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing} - {"grpo.max_val_samples"}


def test_a_synchronous_config_has_no_samples_ahead() -> None:
    translation = of()
    assert translation.problem is None
    assert "max_staleness" not in translation.recipe["rollout"]
    assert "old_logprobs" not in translation.recipe["algorithm"]
    assert translation.recipe["data"]["split"] == "train_1M[:98%]"  # split_validation_size
    assert translation.recipe["eval"]["split"] == "train_1M[98%:]"
    assert translation.recipe["eval"]["limit"] == 128


def test_prompts_beyond_those_that_are_missing_are_lost_with_what_stands_for_them() -> None:
    translation = of("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5")
    reasons = {option.name: option.why for option in translation.draft.missing}
    assert "rollout.max_staleness" in reasons["grpo.batch_multiplier"]
    assert translation.recipe["rollout"]["dynamic_sampling"] is True
    assert "grpo.batch_multiplier" not in missing(of("grpo.batch_multiplier=1.0"))


def test_an_answer_may_use_what_the_longest_prompt_leaves() -> None:
    total = "policy.max_total_sequence_length=16384"
    answers = ("policy.generation.max_new_tokens=16384", total)
    bounded = of(*answers, "data.max_input_seq_length=2048")
    assert bounded.recipe["rollout"]["max_new_tokens"] == 14_336
    assert "data.max_input_seq_length" not in {option.name for option in bounded.draft.needless}
    free = of(*answers)  # prompts may be as long as the whole
    assert free.recipe["rollout"]["max_new_tokens"] == 8192
    stated = of(total, "policy.generation.max_new_tokens=512", "data.max_input_seq_length=2048")
    assert stated.recipe["rollout"]["max_new_tokens"] == 512


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_max_trajectory_age_steps_bounds_staleness(steps: int) -> None:
    translation = of(f"{ASYNC}.enabled=true", f"{ASYNC}.max_trajectory_age_steps={steps}")
    assert translation.problem is None
    assert translation.recipe["rollout"]["max_staleness"] == steps
    assert translation.recipe["rollout"]["in_flight_updates"] is False
    assert translation.recipe["algorithm"]["old_logprobs"] == "sampled"


def test_arguments_of_vllm_are_carried_unless_recipes_must_not_add_them() -> None:
    kwargs = "+policy.generation.vllm_kwargs"
    translation = of(
        f"{kwargs}.moe_backend=triton",
        f"{kwargs}.compilation_config.cudagraph_capture_sizes=[1,2]",
        f"{kwargs}.speculative_config.method=mtp",
        f"{kwargs}.trust_remote_code=true",
    )
    assert translation.problem is None
    assert translation.recipe["rollout"]["vllm"]["engine_args"] == {
        "moe_backend": "triton",
        "compilation_config": {"cudagraph_capture_sizes": [1, 2]},
    }
    lost = {entry.name.rpartition("vllm_kwargs.")[2] for entry in translation.draft.missing}
    assert {"speculative_config.method", "trust_remote_code"} <= lost


def test_caches_that_are_kept_over_new_weights_are_lost() -> None:
    kept = f"{ASYNC}.recompute_kv_cache_after_weight_updates"
    words = [f"{ASYNC}.enabled=true", f"{ASYNC}.in_flight_weight_updates=true", f"{kept}=false"]
    words += ["policy.generation.colocated.resources.gpus_per_node=4"]
    assert missing(of(*words)) == {kept}


@pytest.mark.parametrize(
    ("kind", "correction"),
    [("tis", "tis"), ("icepop", "icepop")],
)
def test_truncated_importance_sampling_is_a_correction(kind: str, correction: str) -> None:
    prefix = "loss_fn.truncated_importance_sampling_"
    words = ["loss_fn.use_importance_sampling_correction=true", f"{prefix}type={kind}"]
    words += [f"{prefix}ratio_min=null"] if kind == "tis" else []
    translation = of(*words, f"{ASYNC}.enabled=true")
    assert translation.problem is None
    assert translation.recipe["algorithm"]["correction"] == correction
    assert translation.recipe["algorithm"]["correction_high"] == 4.0


def test_a_sequence_mask_rejects_responses_beside_unbounded_weights() -> None:
    prefix = "loss_fn.truncated_importance_sampling_"
    words = ["loss_fn.use_importance_sampling_correction=true", f"{prefix}type=seq-mask-tis"]
    words += [f"{prefix}ratio_min=0.999", f"{prefix}ratio=1.002"]
    algorithm = of(*words, f"{ASYNC}.enabled=true").recipe["algorithm"]
    assert (algorithm["correction"], algorithm["rejection"]) == (
        "tis",
        {"geometric_mean": [0.999, 1.002]},
    )
    assert algorithm["correction_high"] > 1e8
    assert "old_logprobs" not in algorithm


def test_responses_of_a_large_error_are_rejected_with_weights_and_without() -> None:
    words = ["grpo.seq_logprob_error_threshold=2", f"{ASYNC}.enabled=true"]
    alone = of("loss_fn.use_importance_sampling_correction=false", *words)
    assert alone.problem is None
    assert alone.recipe["algorithm"]["rejection"] == {"mean_error": 2.0}
    assert not {"correction", "old_logprobs"} & alone.recipe["algorithm"].keys()
    both = of("loss_fn.use_importance_sampling_correction=true", *words).recipe["algorithm"]
    assert (both["correction"], both["rejection"]) == ("icepop", {"mean_error": 2.0})
    filtered = of(*words, "policy.generation.top_p=0.9")
    assert filtered.problem is None
    assert filtered.recipe["algorithm"]["correction_with_filters"] is True


def test_filters_of_sampling_bias_a_correction_openly() -> None:
    translation = of(f"{ASYNC}.enabled=true", "policy.generation.top_p=0.9")
    assert translation.problem is None
    assert translation.recipe["algorithm"]["correction"] == "tis"
    assert translation.recipe["algorithm"]["correction_with_filters"] is True


@pytest.mark.parametrize(
    ("words", "algorithm"),
    [
        (["grpo.normalize_rewards=true"], {"type": "grpo"}),
        (["grpo.use_leave_one_out_baseline=true"], {"type": "rloo"}),
        (["grpo.use_leave_one_out_baseline=true", "grpo.normalize_rewards=true"],
         {"type": "grpo", "leave_one_out": True}),
        (["grpo.use_leave_one_out_baseline=true", "loss_fn.use_cispo=true"],
         {"type": "cispo", "leave_one_out": True, "std_norm": False}),
        (["grpo.use_leave_one_out_baseline=true", "grpo.adv_estimator.name=gdpo"],
         {"type": "gdpo", "leave_one_out": True}),
        (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_max=5"],
         {"type": "cispo", "clip_low": 0.2, "clip_high": 5.0}),  # bounded below too, by default
        (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=5"], {"clip_low": 1.0}),  # none
        (["loss_fn.ratio_clip_c=3"], {"dual_clip": 3.0}),
        (["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.use_kl_in_reward=true"],
         {"kl_coef": 0.0}),  # out of the loss, and grpo's advantages read no KL
        (["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.use_kl_in_reward=true",
          "grpo.adv_estimator.name=reinforce_plus_plus"],
         {"type": "reinforce_pp_baseline", "kl_coef": 0.1, "kl_in": "reward"}),
        (["loss_fn.reference_policy_kl_penalty=0.1"], {"kl_in": "loss", "kl_corrected": True}),
        (["grpo.adv_estimator.name=reinforce_plus_plus"], {"type": "reinforce_pp_baseline"}),
        (["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false"],
         {"type": "reinforce_pp"}),
        (["loss_fn.use_importance_sampling_correction=true",
          "loss_fn.sequence_level_importance_ratios=true"],
         {"type": "gspo", "correction": "icepop", "correction_level": "sequence"}),
    ],
)  # fmt: skip
def test_losses_have_their_counterparts(words: list[str], algorithm: dict[str, object]) -> None:
    translation = of(*words)
    assert translation.problem is None
    assert translation.recipe["algorithm"].items() >= algorithm.items()


@pytest.mark.parametrize(
    ("words", "most", "lost"),
    [
        ([], 10.0, set()),
        (["++loss_fn.kl_output_clamp_value=8"], 8.0, set()),
        (["++loss_fn.kl_output_clamp_value=19.5"], 19.5, {"loss_fn.kl_input_clamp_value"}),
        (["++loss_fn.kl_output_clamp_value=null"], None, {"loss_fn.kl_input_clamp_value"}),
        (["++loss_fn.kl_output_clamp_value=19.5", "loss_fn.reference_policy_kl_type=k2"],
         19.5, set()),
        (["++loss_fn.kl_output_clamp_value=8", "loss_fn.use_kl_in_reward=true",
          "grpo.adv_estimator.name=reinforce_plus_plus"], 10.0, set()),
    ],
)  # fmt: skip
def test_the_bound_of_a_token_s_kl_is_kl_max(
    words: list[str], most: float | None, lost: set[str]
) -> None:
    """The log ratio of k3 is bounded at 20, where its KL is 19 or more."""
    kind = [] if "kl_type" in str(words) else ["++loss_fn.reference_policy_kl_type=k3"]
    words = ["++" + w.removeprefix("++") for w in words]
    translation = of("loss_fn.reference_policy_kl_penalty=0.1", *kind, *words)
    assert translation.problem is None
    assert translation.recipe["algorithm"].get("kl_max") == most
    assert missing(translation) == lost


@pytest.mark.parametrize(
    ("model", "stated", "frozen"),
    [
        ("Qwen/Qwen3-30B-A3B", "true", ["router"]),
        ("Qwen/Qwen3-30B-A3B", "false", None),
        ("Qwen/Qwen3.6-35B-A3B", "true", ["router", "vision", "projector"]),
        ("Qwen/Qwen3-8B", "true", None),  # a dense model inherits the switch
    ],
)
def test_routers_are_frozen_where_a_model_may_have_some(
    model: str, stated: str, frozen: list[str] | None
) -> None:
    option = "policy.megatron_cfg.freeze_moe_router"
    words = ["policy.dtensor_cfg.enabled=false", "++policy.megatron_cfg.enabled=true"]
    translation = of(*words, f"++{option}={stated}", f"policy.model_name={model}")
    assert translation.problem is None
    assert translation.recipe["model"].get("freeze") == frozen
    assert option not in missing(translation)


def test_rewards_are_shaped_as_there() -> None:
    shaping = "grpo.reward_shaping"
    overlong = of(
        f"{shaping}.enabled=true", f"{shaping}.overlong_buffer_penalty=0.5",
        f"{shaping}.max_response_length=512",
    )  # fmt: skip
    reward = {"type": "overlong", "buffer": 64, "factor": 0.5, "max_new_tokens": 512}
    assert overlong.recipe["rewards"][1] == reward
    stopped = of(f"{shaping}.enabled=true", f"{shaping}.stop_properly_penalty_coef=0.2")
    assert stopped.recipe["rewards"][1]["penalty"] == 0.2
    assert stopped.problem is None


def test_rewards_that_are_scaled_have_weights_and_offsets_cancel_in_their_groups() -> None:
    scaling, shaping = "+grpo.reward_scaling", "grpo.reward_shaping"
    scaled = (f"{scaling}.enabled=true", f"{scaling}.target_min=-1.0")
    translation = of(*scaled, f"{shaping}.enabled=true", f"{shaping}.overlong_buffer_penalty=0.5")
    rewards = translation.recipe["rewards"]
    assert (rewards[0]["type"], rewards[0]["weight"]) == ("math", 2.0)
    assert "weight" not in rewards[1]  # it is added to scaled rewards
    assert not any("reward_scaling" in name for name in missing(translation))
    stopped = (f"{shaping}.enabled=true", f"{shaping}.stop_properly_penalty_coef=0.2")
    assert "grpo.reward_scaling.target_min" in missing(of(*scaled, *stopped))
    assert "grpo.reward_scaling.source_max" in missing(of(*scaled, f"{scaling}.source_max=0.5"))
    empty = of(*scaled, f"{scaling}.source_min=1.0")
    assert "grpo.reward_scaling.source_max" in missing(empty)
    assert "weight" not in empty.recipe["rewards"][0]
    off = of(f"{scaling}.enabled=false", f"{scaling}.target_min=-1.0").recipe["rewards"]
    assert "weight" not in off[0]


def test_several_datasets_are_mixed(tmp_path: Path) -> None:
    text = """
grpo: { num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 9 }
policy: { model_name: m, max_total_sequence_length: 64, train_global_batch_size: 16 }
data:
  train:
    - { dataset_name: gsm8k, split: test }
    - { dataset_name: DeepScaler }
  validation:
    - { dataset_name: AIME2024, repeat: 16 }
    - { data_path: a/b.jsonl }
checkpointing: { metric_name: val:accuracy }
"""
    path = tmp_path / "two.yaml"
    path.write_text(text, "utf-8")
    translation = translate("nemo-rl", [str(path)])
    recipe = translation.recipe
    assert [entry["path"] for entry in recipe["data"]["sets"]] == [
        "openai/gsm8k", "agentica-org/DeepScaleR-Preview-Dataset",
    ]  # fmt: skip
    assert recipe["data"]["sets"][0]["split"] == "test"
    assert [entry["prompt"] for entry in recipe["eval"]["sets"]] == ["problem", "input"]
    assert "data.validation.0.repeat" in missing(translation)
    assert recipe["checkpoint"]["best_metric"] == "eval/aime_2024/accuracy"  # of a set, by its name


def test_a_single_set_that_repeats_its_rows_is_sampled_so_often(tmp_path: Path) -> None:
    text = """
grpo: { num_prompts_per_step: 4, num_generations_per_prompt: 4, max_val_samples: 100 }
policy: { model_name: m, max_total_sequence_length: 64, train_global_batch_size: 16 }
data:
  train: { dataset_name: gsm8k }
  validation: { dataset_name: AIME2024, repeat: 16 }
env: { math: { math_verify_impl: dapo_math_verify } }
"""
    path = tmp_path / "repeats.yaml"
    path.write_text(text, "utf-8")
    evaluation = translate("nemo-rl", [str(path)]).recipe["eval"]
    assert (evaluation["n_samples"], evaluation["limit"]) == (16, 7)  # 100 rows are 6.25 questions


def test_an_answer_that_is_compared_as_text_there_is_said_so() -> None:
    translation = of("env.math.math_verify_impl=dapo_math_verify", "data.train.dataset_name=DAPO")
    assert "env.math.math_verify_impl" not in missing(translation)
    assert "compared as text" in translation.draft.comments["rewards", 0, "type"]


def test_overrides_are_read_as_hydra_writes_them() -> None:
    words = [
        "--config",
        "a.yaml",
        "+a.b=1e-6",
        "++a.c=[1, x]",
        "d={e: true}",
        "~a.b",
        "f=",
        "g=a=b",
    ]
    assert flags_of(words) == {
        "config": "a.yaml", "a.b": None, "a.c": [1, "x"], "d.e": True, "f": "", "g": "a=b",
    }  # fmt: skip


def test_an_option_that_nobody_knows_is_listed() -> None:
    translation = of("+grpo.max_stalenes=3", "policy.megatron_cfg.nonsense=1")
    assert missing(translation) == {"grpo.max_stalenes"}  # the other backend trains
    assert "not an option that this translator knows" in translation.draft.missing[-1].why


def test_what_another_engine_or_loader_does_is_lost() -> None:
    words = ["policy.generation.backend=sglang", "policy.precision=float32"]
    assert missing(of(*words)) == {"policy.generation.backend"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+env.sliding_puzzle_game.cfg.max_moves=3", "grpo_sliding_puzzle: its game"),
        ("policy.model_name=Qwen/Qwen2.5-Omni-3B", "needs images or sound"),
        ("grpo.seed=${grpo.seed}", "refers to itself"),
    ],
)
def test_configs_of_other_programs_are_refused(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        translate("nemo-rl", [str(CASES / "nemo-rl-base.yaml"), override])


def test_tasks_of_nemo_gym_are_an_environment_to_be_written() -> None:
    data = "responses_create_params.input"
    words = ["+env.should_use_nemo_gym=true", "+env.nemo_gym.config_paths=[a.yaml]",
             "+env.should_log_nemo_gym_responses=true", "data.default.dataset_name=NemoGymDataset",
             "data.default.env_name=nemo_gym", "data.train.data_path=tasks.jsonl",
             "data.train.dataset_name=NemoGymDataset"]  # fmt: skip
    translation = of(*words)
    rows = translation.recipe["data"]
    assert (rows["path"], rows["messages"], rows["answer"]) == ("tasks.jsonl", data, "")
    assert translation.recipe["environment"] == {"type": "my_environment:NeMoGym"}
    assert "rewards" not in translation.recipe
    assert "env.nemo_gym.config_paths" in missing(translation)
    assert "my_environment" in str(translation.problem)  # until it is written
    idle = of("+env.nemo_gym.config_paths=[a.yaml]")  # a section of a base config, not played
    assert "env.nemo_gym.config_paths" not in missing(idle)


@pytest.mark.parametrize(
    ("words", "steps", "comment"),
    [
        (["name=in_order", "max_lookahead_versions=2"], 2, ""),
        (["name=in_order"], 1, ""),
        (["name=windowed", "max_staleness_versions=3"], 3, "windowed trains on what is ready"),
        (["name=in_order", "max_lookahead_versions=0"], None, ""),
    ],
)
def test_a_single_controller_s_sampler_says_how_far_samples_are_ahead(
    words: list[str], steps: int | None, comment: str
) -> None:
    again = "async_rl.recompute_kv_cache_after_weight_updates"
    translation = of(*(f"+async_rl.sampler.{word}" for word in words), f"+{again}=false",
                     "+async_rl.min_groups_for_streaming_train=1",
                     "+async_rl.max_inflight_prompts=4", "+async_rl.diagnostics=false",
                     "+async_rl.rollout_failure.backoff_base_s=1.0")  # fmt: skip
    rollout = translation.recipe["rollout"]
    assert rollout.get("max_staleness") == steps
    assert "in_flight_updates" not in rollout  # on, as there
    assert comment in translation.draft.comments.get(("rollout", "max_staleness"), "")
    lost = {"async_rl.min_groups_for_streaming_train", *([again] if steps else [])}
    assert {name for name in missing(translation) if name.startswith("async_rl")} == lost


def test_a_sampler_of_their_own_and_a_whole_batch_of_groups() -> None:
    custom = of("+async_rl.sampler.name=custom", "+async_rl.sampler.target=a:B")
    assert "async_rl.sampler.name" in missing(custom)
    assert "max_staleness" not in custom.recipe["rollout"]
    usual = of("+async_rl.min_groups_for_streaming_train=9999")
    assert "async_rl.min_groups_for_streaming_train" not in missing(usual)


def test_configs_that_inherit_from_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n", "utf-8")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\n", "utf-8")
    with pytest.raises(UsageError, match="lead through more than 20 files"):
        translate("nemo-rl", ["grpo", str(tmp_path / "a.yaml")])


def test_a_config_without_a_section_grpo_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sft: { max_num_steps: 3 }\n", "utf-8")
    with pytest.raises(UsageError, match="with a section grpo"):
        translate("nemo-rl", [str(tmp_path / "a.yaml")])


def test_a_dataset_is_read_where_older_configs_have_it_and_lost_validation_is_told(
    tmp_path: Path,
) -> None:
    """`data.dataset_name` came before data.train; the system's own validation has no rows here."""
    config = tmp_path / "old.yaml"
    config.write_text(
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 10, "
        "val_period: 5, max_val_samples: 480, val_at_start: true}\n"
        "policy: {model_name: m, train_global_batch_size: 32, train_micro_batch_size: 1, "
        "max_total_sequence_length: 512, optimizer: {kwargs: {lr: 1.0e-6}}}\n"
        "data: {dataset_name: DeepScaler}\nenv: {math: {num_workers: 4}}\n",
        "utf-8",
    )
    translation = translate("nemo-rl", ["grpo", str(config)])
    assert translation.problem is None
    assert translation.recipe["data"]["path"] == "agentica-org/DeepScaleR-Preview-Dataset"
    assert translation.recipe["data"]["prompt"] == "problem"
    lost = {option.name for option in translation.draft.missing}
    assert {"grpo.val_period", "grpo.max_val_samples", "grpo.val_at_start"} <= lost


PROMPT = "data.default.prompt_file"


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("Solve: {}", "Solve: {problem}"),
        ("In \\boxed{{}}: {}!", "In \\boxed{{}}: {problem}!"),
        ("No place", None),
        ("Two {} places {}", None),
        ("{question}", None),
        ("{", None),
    ],
)
def test_a_prompt_file_with_one_place_for_the_question_is_the_template(
    tmp_path: Path, text: str, template: str | None
) -> None:
    (tmp_path / "base.yaml").write_text((CASES / "nemo-rl-base.yaml").read_text("utf-8"), "utf-8")
    (tmp_path / "prompt.txt").write_text(text, "utf-8")
    translation = translate(
        "nemo-rl", ["grpo", str(tmp_path / "base.yaml"), f"{PROMPT}=prompt.txt"]
    )
    assert translation.problem is None
    assert translation.recipe["data"].get("template") == template
    assert translation.recipe["data"].get("prompt") == ("problem" if template is None else None)
    assert "template" not in translation.recipe["eval"]  # it is taken over from [data]
    assert missing(translation) == ({PROMPT} if template is None else set())


def test_a_prompt_file_that_is_not_here_is_lost_once() -> None:
    translation = of(f"{PROMPT}=absent.txt", "data.default.system_prompt_file=neither.txt")
    lost = [option.name for option in translation.draft.missing]
    assert lost == [PROMPT, "data.default.system_prompt_file"]
    assert "into data.template" in translation.draft.missing[0].why


def test_a_prompt_around_a_conversation_is_lost() -> None:
    words = ["data.train.dataset_name=DAPOMath17K", f"{PROMPT}=nemo-rl-question.txt"]
    translation = of(*words)
    assert PROMPT in missing(translation)
    assert translation.recipe["data"]["answer"] == "reward_model.ground_truth"


def test_rows_that_are_held_out_are_the_last_ones_of_which_max_val_samples_are_evaluated() -> None:
    part = "data.train.split_validation_size"
    recipe = of(f"{part}=0.05", "grpo.max_val_samples=64").recipe
    assert recipe["data"]["split"] == "train_1M[:95%]"
    assert (recipe["eval"]["split"], recipe["eval"]["limit"]) == ("train_1M[95%:]", 64)
    translation = of(f"{part}=0.005")  # no whole percent
    assert translation.recipe["data"]["eval_fraction"] == 0.005
    assert "limit" not in translation.recipe["eval"]
    assert "grpo.max_val_samples" in {option.name for option in translation.draft.missing}


def test_validation_has_filters_of_its_own_or_those_of_training() -> None:
    sampling = "policy.generation"
    recipe = of(f"{sampling}.top_p=0.9", f"{sampling}.top_k=40").recipe
    assert (recipe["eval"]["top_p"], recipe["eval"]["top_k"]) == (0.9, 40)
    val_filters = (f"+{sampling}.val_top_p=0.8", f"+{sampling}.val_top_k=null")
    recipe = of(f"{sampling}.top_p=0.9", f"{sampling}.top_k=40", *val_filters).recipe
    assert (recipe["eval"]["top_p"], recipe["eval"]["top_k"]) == (0.8, 0)


def test_settings_of_environments_that_are_not_played_are_not_needed() -> None:
    played, idle = "env.math.num_workers", "env.geometry3k.num_workers"
    translation = of("+env.geometry3k.num_workers=3")
    assert translation.recipe["scoring"]["workers"] == 4
    assert idle in {option.name for option in translation.draft.needless}
    functions = "+env.geometry3k.reward_functions=[{name: format, weight: 2}]"
    translation = of("data.default.env_name=geometry3k", "+env.geometry3k.num_workers=3", functions)
    assert translation.recipe["scoring"]["workers"] == 3
    assert [reward["weight"] for reward in translation.recipe["rewards"]] == [0.25, 0.75]
    assert played in {option.name for option in translation.draft.needless}


def test_a_dataset_whose_reader_splits_nothing_has_no_held_out_rows() -> None:
    share = "data.train.split_validation_size"
    translation = of("data.train.dataset_name=gsm8k", f"{share}=0.05")
    assert "split" not in translation.recipe["data"]
    assert "eval" not in translation.recipe
    assert share in {option.name for option in translation.draft.needless}


def test_ranks_share_experts_and_matrices() -> None:
    size = "policy.dtensor_cfg.expert_parallel_size"
    for more, tensor in (("policy.dtensor_cfg.tensor_parallel_size=1",), None), ((), 2):
        translation = of(f"{size}=4", *more)
        assert translation.problem is None
        assert translation.recipe["learner"]["expert_parallel"] == 4
        assert translation.recipe["learner"].get("tensor_parallel") == tensor
        assert size not in missing(translation)


def test_ranks_do_not_share_rows_or_matrices_of_layers_that_carry_a_state() -> None:
    sizes = "policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.context_parallel_size"
    for model, lost in (("Qwen/Qwen3.5-9B", {*sizes}), ("Qwen/Qwen3-VL-8B-Instruct", set[str]())):
        translation = of(f"policy.model_name={model}", *(f"{size}=2" for size in sizes))
        assert translation.problem is None
        assert missing(translation) & {*sizes} == lost
        assert ("tensor_parallel" in translation.recipe["learner"]) is not lost


def test_ranks_share_the_experts_of_a_model_that_reads_images() -> None:
    size, tensor_size = (
        "policy.dtensor_cfg.expert_parallel_size",
        "policy.dtensor_cfg.tensor_parallel_size=1",
    )
    translation = of("policy.model_name=Qwen/Qwen3.6-35B-A3B", f"{size}=4", tensor_size)
    assert translation.problem is None
    assert translation.recipe["learner"]["expert_parallel"] == 4


def test_checkpoints_against_failures_are_saved_between_those_that_stay() -> None:
    place = "checkpointing."
    oftener = [f"{place}save_period=100", f"{place}ft_save_period=20", f"{place}ft_keep_latest_k=2"]
    saves = of(*oftener, f"~{place}keep_top_k").recipe["checkpoint"]
    assert [saves[key] for key in ("save_steps", "keep_steps", "max_ckpt_num")] == [20, 100, 2]
    best = of(*oftener, f"{place}keep_top_k=3")
    saves = best.recipe["checkpoint"]
    assert (saves["save_steps"], saves["max_ckpt_num"]) == (20, 2)
    assert "keep_steps" not in saves
    assert "there the 3 best of every 100 steps too" in best.text
    odd = of(f"{place}save_period=100", f"{place}ft_save_period=30", f"{place}ft_keep_latest_k=2")
    assert odd.recipe["checkpoint"]["save_steps"] == 10
    assert "there every 100 and every 30" in odd.text


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [("-20", "20", 20.0), ("-5", "2", [-5.0, 2.0]), ("null", "5", [-1e6, 5.0])],
)
def test_bounds_of_advantages_are_carried(low: str, high: str, bounds: float | list[float]) -> None:
    translation = of(f"+grpo.advantage_clip_low={low}", f"+grpo.advantage_clip_high={high}")
    assert translation.problem is None
    assert translation.recipe["algorithm"]["advantage_clip"] == bounds
    assert missing(translation) == missing(of())


def test_bounds_of_advantages_without_0_within_are_lost() -> None:
    translation = of("+grpo.advantage_clip_low=1", "+grpo.advantage_clip_high=2")
    assert "advantage_clip" not in translation.recipe["algorithm"]
    assert missing(translation) - missing(of()) == {"grpo.advantage_clip_low"}

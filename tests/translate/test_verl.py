"""verl: what the cases do not have."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.translate.translate import Translation, translate
from postgrad.translate.verl import flags_of, program_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
BASE = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B", "algorithm.adv_estimator=grpo",
    "data.train_files=~/data/gsm8k/train.parquet", f"{ROLLOUT}n=8", "trainer.n_gpus_per_node=1",
    f"{ACTOR}ppo_micro_batch_size_per_gpu=8",
)  # fmt: skip


def of(*overrides: str, program: str = "ppo") -> Translation:
    return translate("verl", [program, *BASE, *overrides])


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


def algorithm(*overrides: str) -> dict[str, Any]:
    translation = of(*overrides)
    assert translation.problem is None
    return translation.recipe["algorithm"]


def test_defaults_of_verl_are_written_out() -> None:
    recipe = of(f"{ROLLOUT}tensor_model_parallel_size=1").recipe
    assert recipe["epochs"] == 30
    assert recipe["batch"]["rollout_batch_size"] == 1024
    assert recipe["batch"]["train_batch_size"] == 256 * 8
    assert recipe["data"]["max_len"] == 1024
    assert recipe["rollout"]["max_new_tokens"] == 512
    assert recipe["learner"]["lr"] == 1e-6
    assert recipe["learner"]["weight_decay"] == 0.01
    assert recipe["model"]["gradient_checkpointing"] is True
    assert recipe["run_dir"] == "checkpoints/verl_examples/gsm8k"
    assert "eval" not in recipe


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("verl.trainer.main_ppo", "main_ppo"),
        ("verl/trainer/main_ppo.py", "main_ppo"),
        ("/opt/verl/trainer/sft_trainer.py", "sft_trainer"),
        ("verl.experimental.one_step_off_policy.main_ppo", "one_step_off"),
        ("verl.experimental.fully_async_policy.fully_async_main", "fully_async_main"),
        ("recipe.dapo.main_dapo", "main_dapo"),
        ("trainer.project_name=verl/trainer/main_ppo.py", None),
        ("main_ppo", None),
    ],
)
def test_programs_are_named_by_module_or_path(program: str, name: str | None) -> None:
    assert program_of(program, "--x") == name


@pytest.mark.parametrize(
    ("estimator", "loss", "type"),
    [
        ("grpo", "vanilla", "grpo"),
        ("grpo", "cispo", "cispo"),
        ("grpo", "sapo", "sapo"),
        ("grpo", "geo_mean", "gmpo"),
        ("grpo", "gpg", "gpg"),
        ("gpg", "gpg", "gpg"),
        ("rloo", "vanilla", "rloo"),
        ("remax", "vanilla", "remax"),
        ("reinforce_plus_plus_baseline", "vanilla", "reinforce_pp_baseline"),
        ("opo", "vanilla", "opo"),
        ("gae", "vanilla", "ppo"),
    ],
)
def test_advantages_and_losses_are_algorithms_here(estimator: str, loss: str, type: str) -> None:
    stated = (f"algorithm.adv_estimator={estimator}", f"{ACTOR}policy_loss.loss_mode={loss}")
    assert algorithm(*stated)["type"] == type


@pytest.mark.parametrize(
    ("estimator", "loss", "type", "lost"),
    [
        ("gpg", "gpg", "gpg", False),
        ("grpo", "gpg", "gpg", True),  # advantages over their deviation, without a ratio
        ("gpg", "vanilla", "dr_grpo", True),  # PPO's clip of GPG's advantages
        ("rloo", "gpg", "rloo", False),  # with PPO's clip: the loss is lost
    ],
)
def test_half_of_gpg_says_what_is_lost(estimator: str, loss: str, type: str, *, lost: bool) -> None:
    stated = (f"algorithm.adv_estimator={estimator}", f"{ACTOR}policy_loss.loss_mode={loss}")
    assert algorithm(*stated)["type"] == type
    assert ("algorithm.adv_estimator" in missing(of(*stated))) is lost
    clipped = estimator == "rloo"
    assert (f"{ACTOR}policy_loss.loss_mode" in missing(of(*stated))) is clipped


def test_the_estimator_grpo_alone_reads_whether_it_divides_by_the_deviation() -> None:
    stated = "algorithm.norm_adv_by_std_in_grpo=False"
    assert algorithm(stated)["type"] == "dr_grpo"
    assert algorithm(stated, "algorithm.adv_estimator=grpo_vectorized")["type"] == "grpo"


def test_losses_of_covariances_have_no_dual_clip_and_kl_cov_no_clip() -> None:
    mode = f"{ACTOR}policy_loss.loss_mode="
    settings = algorithm(f"{mode}clip_cov", f"{ACTOR}clip_ratio_high=0.3")
    assert "dual_clip" not in settings
    assert (settings["clip_low"], settings["clip_high"]) == (0.2, 0.3)
    settings = algorithm(f"{mode}kl_cov", f"{ACTOR}clip_ratio_high=0.3")
    assert "dual_clip" not in settings
    assert settings["clip_low"] == 1.0
    assert settings["clip_high"] > math.exp(20.0)  # no ratio is larger


@pytest.mark.parametrize(("stated", "low"), [((), 0.2), ((f"{ACTOR}clip_ratio_low=10",), 1.0)])
def test_cispo_has_the_lower_bound_that_it_has_there(stated: tuple[str, ...], low: float) -> None:
    settings = algorithm(f"{ACTOR}policy_loss.loss_mode=cispo", *stated)
    assert (settings["type"], settings["clip_low"]) == ("cispo", low)


def test_weights_of_tokens_are_on_their_own_gradients_in_gspo() -> None:
    mode, correction = f"{ACTOR}policy_loss.loss_mode=", "algorithm.rollout_correction.rollout_is="
    assert algorithm(f"{mode}gspo", f"{correction}token")["by_token"] is True
    assert "by_token" not in algorithm(f"{mode}gspo", f"{correction}sequence")
    lost = "algorithm.rollout_correction.rollout_is"
    assert lost in missing(of(f"{mode}geo_mean", f"{correction}token"))
    assert lost not in missing(of(f"{mode}geo_mean", f"{correction}sequence"))


def test_an_estimator_that_is_not_here_is_lost() -> None:
    translation = of("algorithm.adv_estimator=optimal_token_baseline")
    assert "algorithm.adv_estimator" in missing(translation)
    assert translation.recipe["algorithm"]["type"] == "grpo"


def test_clip_ratio_alone_does_nothing_there_because_its_two_sides_have_defaults() -> None:
    translation = of(f"{ACTOR}clip_ratio=0.1")
    assert translation.recipe["algorithm"]["clip_low"] == 0.2
    assert f"{ACTOR}clip_ratio" in {option.name for option in translation.draft.needless}


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("token-mean", {"aggregation": "token"}),
        ("seq-mean-token-mean", {"aggregation": "sequence"}),
        ("seq-mean-token-sum", {"aggregation": "constant", "constant_length": 1}),
        ("seq-mean-token-sum-norm", {"aggregation": "constant", "constant_length": 512}),
    ],
)
def test_aggregations_have_their_denominators(mode: str, keys: dict[str, Any]) -> None:
    assert keys.items() <= algorithm(f"{ACTOR}loss_agg_mode={mode}").items()


@pytest.mark.parametrize(
    ("kind", "estimator", "bounded"),
    [("low_var_kl", "k3", True), ("kl", "k1", False), ("mse", "k2", False), ("k3+", "k2", False)],
)
def test_estimators_of_the_kl(kind: str, estimator: str, bounded: bool) -> None:
    settings = algorithm(f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type={kind}")
    assert (settings["kl_coef"], settings["kl_in"]) == (0.001, "loss")
    assert settings["kl_estimator"] == estimator
    assert settings.get("kl_max") == (10.0 if bounded else None)


@pytest.mark.parametrize(("kind", "estimator"), [("k1+", "k1"), ("k3+", "k3"), ("k2+", "k2")])
def test_a_plus_says_nothing_of_a_kl_in_the_reward_which_has_no_gradient(
    kind: str, estimator: str
) -> None:
    settings = algorithm("algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={kind}")
    assert (settings["kl_in"], settings["kl_estimator"]) == ("reward", estimator)


def test_entropy_that_would_collapse_is_kept_by_covariances() -> None:
    settings = algorithm(
        f"{ACTOR}policy_loss.loss_mode=kl_cov",
        f"{ACTOR}policy_loss.ppo_kl_coef=1.0",
        f"{ACTOR}policy_loss.kl_cov_ratio=0.02",
    )
    assert (settings["covariance"], settings["covariance_fraction"]) == ("kl", 0.02)
    assert settings["covariance_kl_coef"] == 1.0
    unstated = algorithm(f"{ACTOR}policy_loss.loss_mode=kl_cov")
    assert unstated["covariance_kl_coef"] == 0.1  # 1.0 here


@pytest.mark.parametrize(
    ("stated", "keys", "lost"),
    [
        (
            ("rollout_is=token", "rollout_is_threshold=3.0"),
            {"correction": "tis", "correction_high": 3.0},
            set[str](),
        ),
        (
            ("rollout_is=token", "rollout_is_threshold='0.5_5.0'"),
            {"correction": "icepop", "correction_low": 0.5, "correction_high": 5.0},
            set[str](),
        ),
        (
            # the mean of -log w is bounded there: exp(mean log w) within [1 / 1.25, 1 / 0.5]
            ("rollout_rs=seq_mean_k1", "rollout_rs_threshold='0.5_1.25'"),
            {"rejection": {"geometric_mean": [0.8, 2.0]}},
            set[str](),
        ),
        (
            ("rollout_rs=seq_mean_k1", "rollout_rs_threshold=1.25"),  # the lower one is 1 / 1.25
            {"rejection": {"geometric_mean": [0.8, 1.25]}},
            set[str](),
        ),
        (
            ("rollout_is=sequence",),
            {"correction": "tis", "correction_level": "sequence", "correction_high": 2.0},
            set[str](),
        ),
        (("rollout_rs=token_k1",), {}, {"rollout_rs"}),  # without a bound
        (
            ("rollout_is=token", "rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"),
            {"correction": "tis", "rejection": {"mean_k3": 0.01}},
            set[str](),
        ),
        (  # the ratio is of the sampler, and so are the weights that reject
            (
                "bypass_mode=True",
                "rollout_rs='token_k1,seq_sum_k1'",
                "rollout_rs_threshold='0.8_1.25,0.5_2.0'",
            ),
            {"old_logprobs": "sampled", "rejection": {"token": [0.8, 1.25], "product": [0.5, 2.0]}},
            set[str](),
        ),
        (  # one bound for both, of which the narrower holds
            ("rollout_rs='token_k1,token_k2'", "rollout_rs_threshold=1.25"),
            {"rejection": {"token": [0.8, 1.25]}},
            set[str](),
        ),
        (("rollout_rs=seq_max_k1", "rollout_rs_threshold=2"), {}, {"rollout_rs"}),  # unknown there
        (("rollout_is=token", "bypass_mode=True"), {"old_logprobs": "sampled"}, set[str]()),
        (
            ("rollout_is=token", "rollout_is_batch_normalize=True"),
            {"correction": "tis", "correction_normalised": True},
            set[str](),
        ),
        (  # the ratio is of the sampler, and there are no weights beside it
            ("rollout_is=token", "rollout_is_batch_normalize=True", "bypass_mode=True"),
            {"old_logprobs": "sampled", "correction_normalised": None},
            set[str](),
        ),
    ],
)
def test_rollout_correction_is_a_correction_here(
    stated: tuple[str, ...], keys: dict[str, Any], lost: set[str]
) -> None:
    place = "algorithm.rollout_correction."
    translation = of(*(place + words for words in stated))
    assert translation.problem is None
    algorithm = translation.recipe["algorithm"]
    assert {key: algorithm.get(key) for key in keys} == keys
    assert {f"{place}{name}" for name in lost} == missing(translation) - {
        f"{ROLLOUT}tensor_model_parallel_size"
    }


@pytest.mark.parametrize("bound", [1e-3, 0.05, 2.5])
@pytest.mark.parametrize("measure", ["k2", "k3"])
def test_bounds_of_a_token_s_kl_are_bounds_of_its_weight(measure: str, bound: float) -> None:
    place = "algorithm.rollout_correction."
    for kind, statistic in (("token", "token"), ("seq_max", "any_token")):
        stated = f"{place}rollout_rs={kind}_{measure}"
        settings = of(stated, f"{place}rollout_rs_threshold={bound}").recipe["algorithm"]
        low, high = settings["rejection"][statistic]
        assert low < 1.0 < high
        for w in (low, high):
            kl = math.log(w) ** 2 / 2 if measure == "k2" else w - 1.0 - math.log(w)
            assert kl == pytest.approx(bound, rel=1e-9)


def test_filtered_groups_are_dynamic_sampling() -> None:
    place = "algorithm.filter_groups."
    rollout = of(f"{place}enable=True", f"{place}max_num_gen_batches=5").recipe["rollout"]
    assert (rollout["dynamic_sampling"], rollout["max_rounds"]) == (True, 5)
    assert "dynamic_sampling" not in of(f"{place}max_num_gen_batches=5").recipe["rollout"]


def test_a_function_of_the_users_is_named_as_a_verifier() -> None:
    for place in ("custom_reward_function.", "reward.custom_reward_function."):
        translation = of(f"{place}path=/data/my_scores.py", f"{place}name=score_all")
        assert translation.recipe["rewards"] == [{"type": "my_scores:score_all"}]
        assert "/data/my_scores.py: write it as" in translation.text


def test_rows_that_verl_has_no_score_for_need_a_function() -> None:
    translation = of("data.train_files=/data/questions.parquet")
    assert translation.recipe["rewards"] == [{"type": "my_rewards:score"}]


@pytest.mark.parametrize(
    ("truncation", "filtered", "fate"),
    [
        ("error", "False", "error"),
        ("left", "False", "truncate"),
        ("error", "True", None),
        ("left", "True", None),
    ],
)
def test_long_prompts_have_the_same_fate(truncation: str, filtered: str, fate: str | None) -> None:
    stated = (f"data.truncation={truncation}", f"data.filter_overlong_prompts={filtered}")
    assert of(*stated).recipe["data"].get("on_too_long") == fate
    assert "data.truncation" in missing(of("data.truncation=middle"))


def test_an_evaluation_at_temperature_0_is_greedy() -> None:
    held_out = "data.val_files=~/data/gsm8k/test.parquet"
    evaluation = of(held_out, "trainer.test_freq=5").recipe["eval"]
    assert (evaluation["greedy"], evaluation["at_start"], evaluation["every"]) == (True, True, 5)
    recipe = of(held_out, f"{ROLLOUT}val_kwargs.temperature=0.6", f"{ROLLOUT}val_kwargs.n=4").recipe
    assert (recipe["eval"]["temperature"], recipe["eval"]["n_samples"]) == (0.6, 4)
    assert not {"top_p", "top_k"} & {*recipe["eval"]}
    filters = (f"{ROLLOUT}val_kwargs.top_p=0.95", f"{ROLLOUT}val_kwargs.top_k=20")
    evaluation = of(held_out, f"{ROLLOUT}val_kwargs.temperature=0.6", *filters).recipe["eval"]
    assert (evaluation["top_p"], evaluation["top_k"]) == (0.95, 20)
    assert not {"top_p", "top_k"} & {*of(held_out, *filters).recipe["eval"]}  # greedy
    unused = of(held_out, "trainer.val_before_train=False", *filters)
    assert "eval" not in unused.recipe
    assert not any("val_kwargs" in name for name in missing(unused))


def test_a_teacher_grades_the_students_tokens() -> None:
    place = "distillation."
    translation = of(
        f"{place}enabled=True",
        f"{place}teacher_models.teacher_model.model_path=Qwen/Qwen3-32B",
        f"{place}distillation_loss.loss_mode=k1",
        f"{place}distillation_loss.use_policy_gradient=True",
        f"{place}distillation_loss.use_task_rewards=False",
        f"{place}distillation_loss.distillation_loss_coef=0.5",  # of a sum with rewards alone
        f"{place}distillation_loss.loss_max_clamp=10.0",
        f"{place}distillation_loss.log_prob_min_clamp=-10.0",
        f"{place}n_gpus_per_node=4",
        f"{place}nnodes=1",
    )
    assert translation.problem is None
    assert translation.recipe["algorithm"]["type"] == "on_policy_distillation"
    assert translation.recipe["algorithm"]["teacher_clip"] == 10.0
    assert "teacher_coef" not in translation.recipe["algorithm"]
    assert translation.recipe["teacher"]["model"]["path"] == "Qwen/Qwen3-32B"
    assert translation.recipe["cluster"]["teacher"] == {"ranks": 4}
    assert "reward_coef" not in translation.recipe["algorithm"]
    assert missing(translation) <= {f"{ROLLOUT}tensor_model_parallel_size"}


def test_a_teacher_s_coefficient_is_read_with_rewards_and_its_clip_without() -> None:
    place = "distillation.distillation_loss."
    words = ["distillation.enabled=True", f"{place}loss_mode=k1",
             f"{place}distillation_loss_coef=0.5", f"{place}clip_ratio_high=0.28"]  # fmt: skip
    alone = of(*words, f"{place}use_task_rewards=False")
    assert "teacher_coef" not in alone.recipe["algorithm"]
    assert alone.recipe["algorithm"]["clip_high"] == 0.28
    both = of(*words)
    assert both.recipe["algorithm"]["teacher_coef"] == 0.5
    assert both.recipe["algorithm"]["clip_high"] == 0.2
    assert f"{place}clip_ratio_high" in missing(both)


def test_settings_of_a_teacher_that_is_off_are_not_needed() -> None:
    loss = "distillation.distillation_loss."
    alone = of(f"{ACTOR}clip_ratio_high=0.28", f"{loss}clip_ratio_high=0.3", f"{loss}loss_mode=k3")
    assert alone.recipe["algorithm"]["clip_high"] == 0.28
    assert not any("distillation" in name for name in missing(alone))


def test_engines_one_step_ahead_have_gpus_of_their_own() -> None:
    translation = translate("verl", [
        "one_step_off", *BASE, "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4",
        f"{ROLLOUT}tensor_model_parallel_size=2",
    ])  # fmt: skip
    assert translation.problem is None
    assert translation.recipe["rollout"]["max_staleness"] == 1
    assert translation.recipe["rollout"]["in_flight_updates"] is False
    assert translation.recipe["cluster"]["rollout"] == {"workers": 2}
    assert translation.recipe["algorithm"]["old_logprobs"] == "sampled"


def test_options_of_a_backend_that_does_not_train_say_nothing() -> None:
    translation = of(f"{ACTOR}megatron.pipeline_model_parallel_size=4", f"{ACTOR}strategy=fsdp2")
    assert missing(translation) <= {f"{ROLLOUT}tensor_model_parallel_size"}
    translation = of(f"{ACTOR}megatron.pipeline_model_parallel_size=4", f"{ACTOR}strategy=megatron")
    assert f"{ACTOR}megatron.pipeline_model_parallel_size" in missing(translation)


def test_weights_in_bfloat16_that_the_optimizer_updates_are_lost() -> None:
    assert f"{ACTOR}fsdp_config.model_dtype" in missing(of(f"{ACTOR}fsdp_config.model_dtype=bf16"))
    assert f"{ACTOR}fsdp_config.model_dtype" not in missing(
        of(f"{ACTOR}fsdp_config.model_dtype=fp32")
    )


def test_a_template_is_carried_and_a_changed_config_is_edited_in_a_copy() -> None:
    model = "actor_rollout_ref.model."
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    translation = of(
        f"{model}custom_chat_template='{template}'", f"+{model}override_config.rope_theta=1e6"
    )
    assert translation.recipe["data"]["chat_template"] == template
    assert f"{model}override_config.rope_theta" in missing(translation)
    assert f"{model}custom_chat_template" not in missing(translation)
    assert "docs/how-to/longer-rows.md" in translation.text


def test_the_choice_of_a_section_and_its_options_stand_side_by_side() -> None:
    assert flags_of(["engine=megatron", "engine.seed=1", "optim=megatron"]) == {
        "engine@engine": "megatron", "engine.seed": 1, "optim@optim": "megatron",
    }  # fmt: skip


def test_a_config_of_the_users_is_read_without_the_configs_that_it_begins_with(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "actor_rollout_ref:\n  model: {path: m/n}\n  rollout: {n: 4}\n"
        "data: {train_files: ~/gsm8k.parquet, max_prompt_length: 100}\n"
        "algorithm: {adv_estimator: grpo}\ntrainer:\n  project_name: p\n"
        "  default_local_dir: out/${trainer.project_name}/${oc.select:trainer.tag,x}\n",
        "utf-8",
    )
    translation = translate("verl", ["ppo", str(path), "data.max_response_length=28"])
    assert translation.recipe["model"]["path"] == "m/n"
    assert translation.recipe["data"]["max_len"] == 128
    assert translation.recipe["run_dir"] == "out/p/x"


def checkout(folder: Path) -> Path:
    """A script in a checkout, with a config and a file of tools that it names from the top."""
    configs = folder / "configs"
    configs.mkdir()
    (folder / "setup.py").write_text("")
    (configs / "own.yaml").write_text(
        "defaults: [ppo_trainer]\ndata: {train_batch_size: 32, max_response_length: 96}\n"
        "actor_rollout_ref: {rollout: {n: 4, multi_turn: {enable: true, max_user_turns: 3}}}\n"
    )
    (configs / "tools.yaml").write_text(
        "tools:\n- class_name: verl.tools.gsm8k_tool.Gsm8kTool\n  config: {type: native}\n"
        "  tool_schema: {type: function, function: {name: grade, description: d}}\n"
    )
    script = configs / "run.sh"
    words = [word for word in BASE if not word.startswith(f"{ROLLOUT}n=")]
    program = 'python -m verl.trainer.main_ppo --config-path="$(pwd)/configs" --config-name=own'
    script.write_text(f"{program} {' '.join(words)} data.max_response_length=64\n")
    return script


def test_a_config_of_the_user_s_is_read_below_the_overrides(tmp_path: Path) -> None:
    translation = translate("verl", [str(checkout(tmp_path))])
    assert translation.problem is None
    batch = translation.recipe["batch"]
    assert (batch["rollout_batch_size"], batch["n_samples_per_prompt"]) == (32, 4)
    assert translation.recipe["rollout"]["max_new_tokens"] == 64
    assert "data.train_batch_size" in translation.stated
    (tmp_path / "configs" / "own.yaml").unlink()
    alone = translate("verl", [str(tmp_path / "configs" / "run.sh")])
    assert "configs/own.yaml is not here, so what it says is missing" in alone.text


def test_tools_of_a_config_are_functions_that_the_user_writes(tmp_path: Path) -> None:
    option = f"{ROLLOUT}multi_turn.tool_config_path"
    script = str(checkout(tmp_path))
    translation = translate("verl", [script, f"{option}=configs/tools.yaml"])
    assert translation.recipe["environment"] == {
        "type": "tools", "tools": ["my_tools:grade"], "max_turns": 4, "longest_result": 256,
        "tool_format": "hermes",
    }  # fmt: skip
    assert "my_tools" in str(translation.problem)  # until it is written
    assert not {name for name in missing(translation) if "multi_turn" in name}
    elsewhere = translate("verl", [script, f"{option}=/etc/tools.yaml"])
    assert "environment" not in elsewhere.recipe
    assert option in missing(elsewhere)


def test_columns_within_columns_of_sft_have_dotted_names() -> None:
    translation = translate("verl", [
        "sft", "model.path=m", "data.train_files=x.parquet", "data.prompt_key=extra_info",
        "data.response_key=extra_info", "data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
    ])  # fmt: skip
    assert translation.problem is None
    assert translation.recipe["data"]["prompt"] == "extra_info.question"
    assert translation.recipe["data"]["answer"] == "extra_info.answer"
    assert missing(translation) == set()


def test_a_known_score_is_of_its_rows_alone_beside_files_of_others() -> None:
    translation = of("data.train_files=['~/gsm8k/train.parquet','~/mine/train.parquet']")
    (reward,) = translation.recipe["rewards"]
    assert (reward["type"], reward["when"]) == ("gsm8k", {"data_source": "openai/gsm8k"})
    assert "~/mine/train.parquet is not known" in translation.text


def test_another_program_is_told_what_stands_for_it() -> None:
    with pytest.raises(UsageError, match="postgrad generate"):
        translate("verl", ["python", "-m", "verl.trainer.main_generation_server", "data.n=1"])


def test_what_it_trains_is_guessed_from_the_options() -> None:
    assert translate("verl", list(BASE)).recipe["job"] == "rl"
    with pytest.raises(UsageError, match="say which of ppo, sft it is"):
        translate("verl", ["data.train_files=x.parquet"])


def test_numbers_that_cannot_be_read_name_their_option() -> None:
    with pytest.raises(UsageError, match=r"trainer\.n_gpus_per_node"):
        of("trainer.n_gpus_per_node=many")


def test_the_translation_as_json_has_the_lists() -> None:
    translation_json = json.loads(json.dumps(of(f"{ROLLOUT}name=sglang").to_json()))
    assert f"{ROLLOUT}name" in {option["name"] for option in translation_json["missing"]}


def test_a_misspelt_option_is_told_with_the_nearest_one() -> None:
    translation = of(
        "trainer.n_gpu_per_node=4", "data.train_batchsize=8", f"{ROLLOUT}temprature=1.0"
    )
    why = {option.name: option.why for option in translation.draft.missing}
    assert why["trainer.n_gpu_per_node"].endswith("did you mean trainer.n_gpus_per_node?")
    assert "not an option that this translator knows" in why["data.train_batchsize"]
    assert "not an option that this translator knows" in why[f"{ROLLOUT}temprature"]


def test_arguments_of_vllm_have_underscores_and_its_longest_row_is_data_max_len() -> None:
    place = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    translation = of(f"{place}.tool-call-parser=hermes", f"{place}.max-model-len=4096")
    assert translation.recipe["rollout"]["vllm"]["engine_args"] == {"tool_call_parser": "hermes"}
    assert "max-model-len" not in str(missing(translation))

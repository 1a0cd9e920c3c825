"""How models learn, as other systems say it: warm-ups, schedules, decay and clipping."""

from typing import Any

import pytest

from postgrad.translate.translate import Translation, translate

OPENRLHF = ["sft", "--pretrain", "m", "--dataset", "d"]
TRL = ["sft", "--model_name_or_path", "m", "--dataset_name", "d"]
OPEN = ["--model_name_or_path", "m", "--dataset_mixer_list", "d", "1.0"]
VERL = ["ppo", "actor_rollout_ref.model.path=m", "data.train_files=d",
        "algorithm.adv_estimator=gae", "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.n_gpus_per_node=1"]  # fmt: skip
NEMO = ["grpo", "policy.model_name=m", "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16",
        "grpo.max_num_steps=10", "policy.optimizer.name=torch.optim.AdamW",
        "policy.optimizer.kwargs.lr=1e-6"]  # fmt: skip


def learner(system: str, *words: str) -> dict[str, Any]:
    return translate(system, words, devices=1).recipe["learner"]


def comment(found: Translation, key: str, role: str = "learner") -> str:
    return found.draft.comments.get((*role.split("."), key), "")


@pytest.mark.parametrize(
    ("system", "words", "share"),
    [
        ("openrlhf", [*OPENRLHF, "--lr_scheduler"], {"warmup_ratio": 0.03}),
        ("trl", [*TRL, "--warmup_ratio", "0.1", "--lr_scheduler_type"], {"warmup_ratio": 0.1}),
        ("trl", [*TRL, "--warmup_steps", "9", "--lr_scheduler_type"], {"warmup_updates": 9}),
        ("open-instruct", ["sft", *OPEN, "--lr_scheduler_type"], {"warmup_ratio": 0.03}),
    ],
)
def test_transformers_constant_schedule_has_no_warm_up(
    system: str, words: list[str], share: dict[str, float]
) -> None:
    named = ("warmup_ratio", "warmup_updates", "schedule")
    at_once = learner(system, *words, "constant")
    assert {key: at_once[key] for key in named if key in at_once} == {"schedule": "constant"}
    warmed = learner(system, *words, "constant_with_warmup")
    assert {key: warmed[key] for key in named if key in warmed} == {"schedule": "constant"} | share


def test_a_stated_warm_up_of_a_constant_schedule_is_named_as_not_needed() -> None:
    found = translate("trl", [*TRL, "--warmup_ratio", "0.1", "--lr_scheduler_type", "constant"])
    assert "warmup_ratio" in {one.name for one in found.draft.needless}


def test_a_critic_of_a_constant_schedule_does_not_take_the_policy_s_warm_up() -> None:
    words = ["ppo", "--pretrain", "m", "--prompt_data", "d", "--reward_pretrain", "r"]
    found = translate("openrlhf", [*words, "--critic.lr_scheduler", "constant"], devices=1)
    assert found.recipe["learner"]["warmup_ratio"] == 0.03
    assert found.recipe["critic"]["learner"]["warmup_ratio"] == 0.0


def test_trl_s_other_settings_of_a_schedule_are_lost() -> None:
    found = translate("trl", [*TRL, "--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs",
                              '{"num_cycles": 2}'])  # fmt: skip
    assert [(one.name, one.value) for one in found.draft.missing] == [
        ("lr_scheduler_kwargs", {"num_cycles": 2})]  # fmt: skip


def test_verl_counts_warm_ups_in_steps_of_several_updates() -> None:
    options = ["actor_rollout_ref.actor.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps=3"]
    found = translate("verl", [*VERL, *options])  # four updates of 16 prompts a step
    assert found.recipe["learner"]["warmup_updates"] == 40
    assert found.recipe["critic"]["learner"]["warmup_updates"] == 12
    assert comment(found, "warmup_updates") == "10 steps of 4 updates"


def test_a_critic_that_warms_up_as_the_policy_leaves_it_out() -> None:
    options = ["actor_rollout_ref.actor.optim.lr_warmup_steps=10",
               "critic.optim.lr_warmup_steps=10"]  # fmt: skip
    found = translate("verl", [*VERL, *options])
    assert found.recipe["learner"]["warmup_updates"] == 40
    assert "warmup_updates" not in found.recipe["critic"]["learner"]


def test_the_fully_asynchronous_verl_counts_its_own_batches() -> None:
    words = [word for word in VERL[1:] if "gae" not in word]
    found = translate("verl", ["fully_async_main", *words, "algorithm.adv_estimator=grpo",
                      "rollout.total_rollout_steps=1000", "rollout.n_gpus_per_node=1",
                      "async_training.require_batches=2",
                      "actor_rollout_ref.actor.optim.lr_warmup_steps=10"])  # fmt: skip
    assert found.recipe["learner"]["warmup_updates"] == 20


def test_nemo_rl_counts_warm_ups_in_steps_and_falls_with_them() -> None:
    place = "policy.scheduler"
    found = translate("nemo-rl", [*NEMO, f"{place}.0.name=torch.optim.lr_scheduler.LinearLR",
                      f"{place}.0.kwargs.total_iters=13",
                      f"{place}.1.name=torch.optim.lr_scheduler.CosineAnnealingLR",
                      f"{place}.1.kwargs.T_max=10"], devices=1)  # fmt: skip
    assert found.recipe["learner"]["warmup_updates"] == 26  # two updates of 16 samples a step
    assert "there with each step of 2 updates" in comment(found, "schedule")


def test_nemo_rl_s_adamw_decays_as_torch_s_does_where_nothing_is_said() -> None:
    assert learner("nemo-rl", *NEMO)["weight_decay"] == 0.01
    stated = learner("nemo-rl", *NEMO, "policy.optimizer.kwargs.weight_decay=0.1")
    assert stated["weight_decay"] == 0.1


def test_systems_whose_norms_and_biases_decay_say_so() -> None:
    said = "of matrices; there of norms and biases too"
    for system, words in (
        ("verl", VERL),
        ("nemo-rl", NEMO),
        ("prime-rl", ["rl", "--model.name", "m"]),
        ("open-instruct", ["reward", *OPEN]),
        ("open-instruct", ["olmo_core_dpo", *OPEN, "--weight_decay", "0.1"]),
    ):
        assert said in comment(translate(system, words, devices=1), "weight_decay"), system
    for system, words in (
        ("verl", [*VERL, "model_engine=megatron"]),
        ("open-instruct", ["sft", *OPEN, "--weight_decay", "0.1"]),
    ):
        found = translate(system, words, devices=1)
        assert found.recipe["learner"]["weight_decay"] > 0
        assert said not in comment(found, "weight_decay"), system


@pytest.mark.parametrize("program", ["sft", "dpo", "reward", "olmo_core_dpo", "olmo_core_finetune"])
def test_open_instruct_clips_no_gradients_but_where_deepspeed_does(program: str) -> None:
    assert learner("open-instruct", program, *OPEN)["max_grad_norm"] == 0.0
    for program in ("grpo", "olmo_core_grpo"):
        assert "max_grad_norm" not in learner("open-instruct", program, *OPEN)  # 1 on both sides


@pytest.mark.parametrize("file", ["finetune.py", "dpo_tune_cache.py", "reward_modeling.py"])
def test_open_instruct_clips_at_1_under_deepspeed_whatever_is_stated(
    file: str, tmp_path: Any
) -> None:
    script = tmp_path / "run.sh"
    launch = "accelerate launch --num_processes 2 --use_deepspeed open_instruct/"
    script.write_text(f"{launch}{file} {' '.join(OPEN)} --max_grad_norm 0.5", "utf-8")
    found = translate("open-instruct", [str(script)])
    assert found.recipe["learner"].get("max_grad_norm", 1.0) == 1.0
    assert found.recipe["learner"]["sharding"] == "zero2"  # accelerate's stage where none is said
    assert "clip_grad_norm" in {one.name for one in found.draft.needless}


def test_open_instruct_s_programs_on_olmo_core_have_its_schedules_and_defaults(
    tmp_path: Any,
) -> None:
    constant = learner("open-instruct", "olmo_core_dpo", *OPEN, "--lr_scheduler_type", "constant")
    assert constant["warmup_ratio"] == 0.1
    cosine = learner("open-instruct", "olmo_core_dpo", *OPEN, "--lr_scheduler_type", "cosine")
    assert (cosine["schedule"], cosine["min_lr_ratio"]) == ("cosine", 0.1)
    script = tmp_path / "run.sh"
    script.write_text(f"python open_instruct/olmo_core_finetune.py {' '.join(OPEN)}", "utf-8")
    found = translate("open-instruct", [str(script)], devices=1)
    assert found.recipe["learner"]["lr"] == 8e-5
    assert found.recipe["learner"]["betas"] == [0.9, 0.95]
    assert found.recipe["epochs"] == 3


def test_open_instruct_s_grpo_without_groups_of_weights_decays_by_torch_s_default() -> None:
    words = ["grpo", *OPEN, "--weight_decay", "0.1"]
    assert learner("open-instruct", *words)["weight_decay"] == 0.1
    off = ["--set_weight_decay_on_bias_and_norm", "False"]
    assert learner("open-instruct", *words, *off)["weight_decay"] == 0.01


def test_a_mixture_of_experts_has_the_balance_loss_of_its_source() -> None:
    key, moe = "router_aux_loss_coef", "Qwen/Qwen3-30B-A3B"
    named = {
        "openrlhf": ["sft", "--pretrain", moe, "--dataset", "d"],
        "open-instruct": ["sft", "--model_name_or_path", moe, "--dataset_mixer_list", "d", "1.0"],
        "verl": [word.replace("=m", f"={moe}") for word in VERL],
        "trl": ["reward", "--model_name_or_path", moe, "--dataset_name", "d"],
    }
    for system, words in named.items():  # without the key the model's config has one
        assert translate(system, words, devices=1).recipe["model"][key] == 0.0, system
    trl = ["sft", "--model_name_or_path", moe, "--dataset_name", "d"]
    assert translate("trl", trl).recipe["model"][key] == 0.001  # TRL's default
    own = [*named["verl"], "model_engine=veomni"]  # whose loss is not known
    assert key not in translate("verl", own, devices=1).recipe["model"]
    stated = [*named["openrlhf"], "--aux_loss_coef", "0.01"]
    assert translate("openrlhf", stated).recipe["model"][key] == 0.01
    assert key not in translate("openrlhf", OPENRLHF).recipe["model"]  # no name of a mixture


def test_verl_s_sft_on_automodel_has_that_engine_s_schedule() -> None:
    words = ["sft", "model.path=m", "data.train_files=d", "trainer.n_gpus_per_node=1"]
    plain, own = learner("verl", *words), learner("verl", *words, "engine@engine=automodel")
    assert (plain["lr"], plain.get("schedule")) == (1e-3, None)
    assert (own["lr"], own["schedule"], own["min_lr_ratio"]) == (1e-5, "cosine", 0.01)

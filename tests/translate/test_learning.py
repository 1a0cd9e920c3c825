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
PRIME = ["rl", "--model.name", "m", "--max_steps", "100"]


def learner(system: str, *words: str) -> dict[str, Any]:
    return translate(system, words, devices=1).recipe["learner"]


def comment(translation: Translation, key: str, role: str = "learner") -> str:
    return translation.draft.comments.get((*role.split("."), key), "")


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
    translation = translate(
        "trl", [*TRL, "--warmup_ratio", "0.1", "--lr_scheduler_type", "constant"]
    )
    assert "warmup_ratio" in {option.name for option in translation.draft.needless}


def test_a_critic_of_a_constant_schedule_does_not_take_the_policy_s_warm_up() -> None:
    words = ["ppo", "--pretrain", "m", "--prompt_data", "d", "--reward_pretrain", "r"]
    translation = translate("openrlhf", [*words, "--critic.lr_scheduler", "constant"], devices=1)
    assert translation.recipe["learner"]["warmup_ratio"] == 0.03
    assert translation.recipe["critic"]["learner"]["warmup_ratio"] == 0.0


def test_trl_s_other_settings_of_a_schedule_are_lost() -> None:
    translation = translate("trl", [*TRL, "--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs",
                                    '{"num_cycles": 2}'])  # fmt: skip
    assert [(option.name, option.value) for option in translation.draft.missing] == [
        ("lr_scheduler_kwargs", {"num_cycles": 2})]  # fmt: skip


def test_trl_s_warm_up_stable_decay_falls_in_its_last_updates() -> None:
    words = [*TRL, "--lr_scheduler_type", "warmup_stable_decay", "--warmup_steps", "10",
             "--lr_scheduler_kwargs"]  # fmt: skip
    translation = translate("trl", [*words, '{"num_decay_steps": 40, "min_lr_ratio": 0.1}'])
    assert not translation.draft.missing
    named = ("schedule", "warmup_updates", "decay_updates", "min_lr_ratio")
    assert [translation.recipe["learner"][key] for key in named] == ["cosine", 10, 40, 0.1]
    line = learner("trl", *words, '{"num_decay_steps": 40, "decay_type": "1-sqrt"}')
    assert [line.get(key) for key in named] == ["1-sqrt", 10, 40, None]
    lost = '{"num_decay_steps": 40, "num_stable_steps": 9, "warmup_type": "cosine"}'
    (entry,) = translate("trl", [*words, lost]).draft.missing
    assert entry.name == "lr_scheduler_kwargs"
    assert entry.value == {"num_stable_steps": 9, "warmup_type": "cosine"}


def test_trl_s_warm_up_stable_decay_without_a_decay_is_told() -> None:
    words = [*TRL, "--lr_scheduler_type", "warmup_stable_decay"]
    place = ("learner", "schedule")
    note = translate("trl", words).draft.comments[place]
    assert "num_decay_steps is not said" in note
    translation = translate("trl", [*words, "--lr_scheduler_kwargs", '{"num_decay_steps": 40}'])
    assert place not in translation.draft.comments


def test_prime_rl_s_line_falls_in_its_last_steps() -> None:
    words = [*PRIME, "--trainer.optim.lr", "1e-5", "--trainer.scheduler.type", "linear"]
    translation = translate("prime-rl", words, devices=1)
    named = ("schedule", "warmup_updates", "decay_updates", "min_lr_ratio")
    assert [translation.recipe["learner"].get(key) for key in named] == ["linear", 10, 10, None]
    assert "prime-rl's default" in comment(translation, "decay_updates")
    assert not [entry for entry in translation.draft.missing if "scheduler" in entry.name]
    stated = [*words, "--trainer.scheduler.decay_steps", "20", "--trainer.scheduler.min_lr", "1e-6"]
    assert [learner("prime-rl", *stated).get(key) for key in named] == ["linear", 10, 20, 0.1]
    never = learner("prime-rl", *words, "--trainer.scheduler.decay_steps", "0")
    assert [never.get(key) for key in named] == [None, 10, None, None]


def test_megatron_s_schedule_falls_in_its_last_steps() -> None:
    optim = "actor_rollout_ref.actor.optim."
    words = [*VERL, "model_engine=megatron", f"{optim}lr=1e-6", f"{optim}min_lr=1e-7",
             f"{optim}lr_warmup_steps=10", f"{optim}lr_wsd_decay_steps=20"]  # fmt: skip
    style = f"{optim}lr_wsd_decay_style"
    translation = translate("verl", [*words, f"{optim}lr_decay_style=WSD", f"{style}=minus_sqrt"])
    named = ("schedule", "warmup_updates", "decay_updates", "min_lr_ratio")
    assert [translation.recipe["learner"][key] for key in named] == ["1-sqrt", 40, 80, 0.1]
    assert comment(translation, "decay_updates") == "20 steps of 4 updates"
    assert not [entry for entry in translation.draft.missing if "wsd" in entry.name]
    default = translate("verl", [*words, f"{optim}lr_decay_style=WSD"])
    assert default.recipe["learner"]["schedule"] == "linear"
    assert "2 * 0.5^p - 1" in default.text
    other = translate("verl", [*words, f"{optim}lr_decay_style=linear", f"{style}=cosine"])
    assert "decay_updates" not in other.recipe["learner"]
    assert {f"{optim}lr_wsd_decay_steps", style} <= {entry.name for entry in other.draft.needless}
    critic = translate("verl", [*words, f"{optim}lr_decay_style=WSD",
                       "critic.optim.lr_decay_style=linear"]).recipe["critic"]  # fmt: skip
    assert critic["learner"]["decay_updates"] == 0  # it does not take the policy's over
    section = "policy.megatron_cfg."
    nemo = [*NEMO, f"{section}enabled=true", f"{section}optimizer.lr=1e-6",
            f"{section}scheduler.lr_decay_style=WSD", f"{section}scheduler.lr_wsd_decay_iters=5",
            f"{section}scheduler.lr_wsd_decay_style=cosine"]  # fmt: skip
    translation = translate("nemo-rl", nemo, devices=1)
    assert translation.recipe["learner"]["schedule"] == "cosine"
    assert translation.recipe["learner"]["decay_updates"] == 10  # two updates a step


def test_verl_s_older_trainer_of_sft_falls_in_the_last_tenth() -> None:
    words = ["sft", "model.path=m", "data.train_files=d", "trainer.n_gpus_per_node=1",
             "optim.lr_scheduler=wsd", "optim.lr_warmup_steps_ratio=0.1"]  # fmt: skip
    settings = learner("verl", *words)
    assert (settings["schedule"], settings["decay_ratio"], settings["warmup_ratio"]) == (
        "cosine",
        0.09,
        0.1,
    )


def test_nemo_rl_s_list_falls_behind_a_constant() -> None:
    torch = "torch.optim.lr_scheduler."
    parts = {
        "0": {"name": f"{torch}LinearLR", "kwargs.start_factor": 0.1, "kwargs.total_iters": 2},
        "1": {"name": f"{torch}ConstantLR", "kwargs.factor": 1.0},
        "2": {"name": f"{torch}LinearLR", "kwargs.start_factor": 1.0, "kwargs.end_factor": 0.1,
              "kwargs.total_iters": 3},
    }  # fmt: skip

    def of() -> dict[str, Any]:
        words = [f"policy.scheduler.{number}.{key}={value}" for number, part in parts.items()
                 for key, value in part.items()]  # fmt: skip
        translation = translate("nemo-rl", [*NEMO, *words], devices=1)
        assert not [entry for entry in translation.draft.missing if "scheduler" in entry.name]
        return translation.recipe["learner"]

    named = ("schedule", "warmup_updates", "decay_updates", "min_lr_ratio")
    assert [of()[key] for key in named] == ["linear", 4, 6, 0.1]  # two updates a step
    assert of()["warmup_start_ratio"] == 0.1
    parts["2"] = {"name": f"{torch}CosineAnnealingLR", "kwargs.T_max": 4}
    assert [of().get(key) for key in named] == ["cosine", 4, 8, None]


@pytest.mark.parametrize(
    ("system", "words", "start"),
    [
        ("nemo-rl", ["scheduler.lr_warmup_init=1e-7"], 0.1),
        ("nemo-rl", ["scheduler.lr_warmup_init=0"], 0.0),
        ("verl", ["actor_rollout_ref.actor.optim.lr_warmup_init=2e-8"], 0.02),
        ("prime-rl", ["--trainer.scheduler.min_lr", "5e-7"], 0.5),
        ("trl", ["--lr_scheduler_kwargs", '{"min_lr_rate": 0.1, "warmup_lr_rate": 0.3}'], 0.3),
    ],
)
def test_where_a_warm_up_begins_is_a_share_of_the_rate(
    system: str, words: list[str], start: float
) -> None:
    section = "policy.megatron_cfg."
    usual = {
        "nemo-rl": [*NEMO, f"{section}enabled=true", f"{section}optimizer.lr=1e-6",
                    f"{section}scheduler.lr_warmup_iters=10", f"{section}{words[0]}"],
        "verl": [*VERL, "actor_rollout_ref.actor.optim.lr=1e-6",
                 "actor_rollout_ref.actor.optim.lr_warmup_steps=10", *words],
        "prime-rl": [*PRIME, "--trainer.optim.lr", "1e-6", "--trainer.scheduler.type", "linear",
                     *words],
        "trl": [*TRL, "--warmup_steps", "10", "--lr_scheduler_type", "cosine_warmup_with_min_lr",
                *words],
    }  # fmt: skip
    translation = translate(system, usual[system], devices=1)
    assert translation.recipe["learner"]["warmup_start_ratio"] == start
    assert not [entry for entry in translation.draft.missing if "warmup" in entry.name]


def test_a_warm_up_s_begin_above_the_rate_or_without_a_warm_up_is_not_carried() -> None:
    section = "policy.megatron_cfg."
    init, words = f"{section}scheduler.lr_warmup_init", [*NEMO, f"{section}enabled=true"]
    words += [f"{init}=1e-6", f"{section}optimizer.lr=1e-7"]
    without = translate("nemo-rl", words, devices=1).draft
    assert init in {entry.name for entry in without.needless}
    above = translate("nemo-rl", [*words, f"{section}scheduler.lr_warmup_iters=10"], devices=1)
    assert init in {entry.name for entry in above.draft.missing}


def test_a_critic_of_verl_begins_its_warm_up_where_its_own_options_say() -> None:
    actor = "actor_rollout_ref.actor.optim."
    words = [*VERL, f"{actor}lr_warmup_steps=10", f"{actor}lr_warmup_init=1e-7", f"{actor}lr=1e-6"]
    warm = translate("verl", [*words, "critic.optim.lr_warmup_steps=5"]).recipe["critic"]
    assert warm["learner"]["warmup_start_ratio"] == 0.0
    cold = translate("verl", words)
    assert "warmup_start_ratio" not in cold.recipe["critic"]["learner"]
    assert cold.problem is None  # a critic without a warm-up takes over no start of one


def test_verl_counts_warm_ups_in_steps_of_several_updates() -> None:
    options = ["actor_rollout_ref.actor.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps=3"]
    translation = translate("verl", [*VERL, *options])  # four updates of 16 prompts a step
    assert translation.recipe["learner"]["warmup_updates"] == 40
    assert translation.recipe["critic"]["learner"]["warmup_updates"] == 12
    assert comment(translation, "warmup_updates") == "10 steps of 4 updates"


def test_a_critic_that_warms_up_as_the_policy_leaves_it_out() -> None:
    options = ["actor_rollout_ref.actor.optim.lr_warmup_steps=10",
               "critic.optim.lr_warmup_steps=10"]  # fmt: skip
    translation = translate("verl", [*VERL, *options])
    assert translation.recipe["learner"]["warmup_updates"] == 40
    assert "warmup_updates" not in translation.recipe["critic"]["learner"]


def test_the_fully_asynchronous_verl_counts_its_own_batches() -> None:
    words = [word for word in VERL[1:] if "gae" not in word]
    translation = translate("verl", ["fully_async_main", *words, "algorithm.adv_estimator=grpo",
                            "rollout.total_rollout_steps=1000", "rollout.n_gpus_per_node=1",
                            "async_training.require_batches=2",
                            "actor_rollout_ref.actor.optim.lr_warmup_steps=10"])  # fmt: skip
    assert translation.recipe["learner"]["warmup_updates"] == 20


def test_nemo_rl_counts_warm_ups_in_steps_and_falls_with_them() -> None:
    place = "policy.scheduler"
    translation = translate("nemo-rl", [*NEMO, f"{place}.0.name=torch.optim.lr_scheduler.LinearLR",
                            f"{place}.0.kwargs.total_iters=13",
                            f"{place}.1.name=torch.optim.lr_scheduler.CosineAnnealingLR",
                            f"{place}.1.kwargs.T_max=10"], devices=1)  # fmt: skip
    assert translation.recipe["learner"]["warmup_updates"] == 26  # two updates of 16 samples a step
    assert "there with each step of 2 updates" in comment(translation, "schedule")


def test_nemo_rl_s_adamw_decays_as_torch_s_does_where_nothing_is_said() -> None:
    assert learner("nemo-rl", *NEMO)["weight_decay"] == 0.01
    stated = learner("nemo-rl", *NEMO, "policy.optimizer.kwargs.weight_decay=0.1")
    assert stated["weight_decay"] == 0.1


def test_systems_whose_norms_and_biases_decay_say_so() -> None:
    note = "of matrices; there of norms and biases too"
    for system, words in (
        ("verl", VERL),
        ("nemo-rl", NEMO),
        ("prime-rl", ["rl", "--model.name", "m"]),
        ("open-instruct", ["reward", *OPEN]),
        ("open-instruct", ["olmo_core_dpo", *OPEN, "--weight_decay", "0.1"]),
    ):
        assert note in comment(translate(system, words, devices=1), "weight_decay"), system
    for system, words in (
        ("verl", [*VERL, "model_engine=megatron"]),
        ("open-instruct", ["sft", *OPEN, "--weight_decay", "0.1"]),
    ):
        translation = translate(system, words, devices=1)
        assert translation.recipe["learner"]["weight_decay"] > 0
        assert note not in comment(translation, "weight_decay"), system


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
    translation = translate("open-instruct", [str(script)])
    assert translation.recipe["learner"].get("max_grad_norm", 1.0) == 1.0
    assert (
        translation.recipe["learner"]["sharding"] == "zero2"
    )  # accelerate's stage where none is said
    assert "clip_grad_norm" in {option.name for option in translation.draft.needless}


def test_open_instruct_s_programs_on_olmo_core_have_its_schedules_and_defaults(
    tmp_path: Any,
) -> None:
    constant = learner("open-instruct", "olmo_core_dpo", *OPEN, "--lr_scheduler_type", "constant")
    assert constant["warmup_ratio"] == 0.1
    cosine = learner("open-instruct", "olmo_core_dpo", *OPEN, "--lr_scheduler_type", "cosine")
    assert (cosine["schedule"], cosine["min_lr_ratio"]) == ("cosine", 0.1)
    script = tmp_path / "run.sh"
    script.write_text(f"python open_instruct/olmo_core_finetune.py {' '.join(OPEN)}", "utf-8")
    translation = translate("open-instruct", [str(script)], devices=1)
    assert translation.recipe["learner"]["lr"] == 8e-5
    assert translation.recipe["learner"]["betas"] == [0.9, 0.95]
    assert translation.recipe["epochs"] == 3


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
    for program in ("sft", "dpo", "kto", "grpo", "rloo"):  # TRL's defaults are the model's config
        trl = [
            program,
            "--model_name_or_path",
            moe,
            "--dataset_name",
            "d",
            "--num_generations",
            "8",
        ]
        assert key not in translate("trl", trl).recipe["model"]
    veomni_words = [*named["verl"], "model_engine=veomni"]  # whose loss is not known
    assert key not in translate("verl", veomni_words, devices=1).recipe["model"]
    stated = [*named["openrlhf"], "--aux_loss_coef", "0.01"]
    assert translate("openrlhf", stated).recipe["model"][key] == 0.01
    assert key not in translate("openrlhf", OPENRLHF).recipe["model"]  # no name of a mixture


def test_verl_s_sft_on_automodel_has_that_engine_s_schedule() -> None:
    words = ["sft", "model.path=m", "data.train_files=d", "trainer.n_gpus_per_node=1"]
    plain, automodel = learner("verl", *words), learner("verl", *words, "engine@engine=automodel")
    assert (plain["lr"], plain.get("schedule")) == (1e-3, None)
    assert (automodel["lr"], automodel["schedule"], automodel["min_lr_ratio"]) == (
        1e-5,
        "cosine",
        0.01,
    )

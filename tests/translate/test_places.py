"""Ranks, engines and roles of other systems: where they were, they are in [cluster] and [rollout].

Layouts are worked out by hand from what each system's launcher does with its flags.
"""

from pathlib import Path
from typing import Any

import pytest

from postgrad.fleet.session import wants_of
from postgrad.recipe.load import parse_recipe
from postgrad.translate.translate import Translation, translate

PPO = "--actor.model_name_or_path m --data.prompt_dataset d --data.input_key q"
GRPO = "--model_name_or_path m --dataset_mixer_list d 1.0"
TRL = "--model_name_or_path m --dataset_name d --reward_funcs accuracy_reward"


def openrlhf(flags: str, reward: str = "--reward.remote_url r.py") -> Translation:
    translation = translate("openrlhf", ["ppo", *f"{PPO} {reward} {flags}".split()])
    assert translation.problem is None
    return translation


def open_instruct(flags: str) -> Translation:
    translation = translate("open-instruct", ["grpo", *f"{GRPO} {flags}".split()])
    assert translation.problem is None
    return translation


def trl(tmp_path: Path, script: str) -> Translation:
    path = tmp_path / "run.sh"
    path.write_text(script, "utf-8")
    translation = translate("trl", [str(path)])
    assert translation.problem is None
    return translation


def missing(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


def place(translation: Translation) -> dict[str, Any]:
    return translation.recipe["cluster"]


def test_engines_that_share_the_policys_gpus_are_colocated_here() -> None:
    translation = openrlhf(
        "--actor.num_gpus_per_node 8 --vllm.num_engines 8 --train.colocate_all "
        "--vllm.gpu_memory_utilization 0.5 --vllm.enforce_eager --vllm.enable_sleep"
    )
    assert place(translation) == {"type": "ray", "policy": {"colocate": "rollout"}}
    assert translation.recipe["rollout"]["type"] == "vllm"
    assert translation.recipe["rollout"]["vllm"] == {"memory_fraction": 0.5, "eager": True}
    assert missing(translation) == set()


def test_a_colocated_engine_over_two_gpus_has_those_of_two_ranks() -> None:
    translation = openrlhf(
        "--actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 "
        "--train.colocate_all --train.batch_size 128"
    )
    policy = {"colocate": "rollout"}
    assert place(translation) == {"type": "ray", "policy": policy, "rollout": {"workers": 4}}
    assert translation.recipe["rollout"]["vllm"]["tensor_parallel"] == 2
    assert missing(translation) == set()
    policy_ranks, engines = wants_of(parse_recipe(dict(translation.recipe)), "cuda")
    assert (policy_ranks.processes, policy_ranks.together) == (8, 2)
    assert (engines.processes, engines.gpus, engines.inside) == (4, 2, "policy")


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [("3", "3 ranks of a machine do not divide into 2"), ("1", "one rank has one device")],
)
def test_a_colocated_engine_that_ranks_do_not_divide_into_is_told(gpus: str, reason: str) -> None:
    translation = openrlhf(
        f"--actor.num_gpus_per_node {gpus} --vllm.num_engines 1 --vllm.tensor_parallel_size 2 "
        "--train.colocate_all --train.batch_size 96 --rollout.batch_size 96"
    )
    assert "tensor_parallel" not in translation.recipe["rollout"]["vllm"]
    (loss,) = translation.draft.missing
    assert (loss.name, loss.value) == ("vllm.tensor_parallel_size", 2)
    assert loss.why.startswith(reason)
    assert "each device has an engine with all weights" in loss.why


def test_the_backend_of_weights_is_not_needed_because_the_way_is_chosen_by_place() -> None:
    for translation, name in (
        (openrlhf("--vllm.num_engines 2 --vllm.sync_backend nccl"), "vllm.sync_backend"),
        (open_instruct("--vllm_num_engines 2 --vllm_sync_backend gloo"), "vllm_sync_backend"),
    ):
        assert missing(translation) == set()
        (needless,) = (option for option in translation.draft.needless if option.name == name)
        assert "CUDA IPC, NCCL, else host memory" in needless.why


@pytest.mark.parametrize(
    ("flags", "expected", "reasons"),
    [
        ("--ref.offload", {"reference"}, set()),
        ("--reward.offload", {"reward_model"}, set()),
        ("--ref_reward_offload", {"reference", "reward_model"}, set()),
        ("--ref.offload --algo.kl.init_coef 0", set(), {"the run has no such model"}),
        (
            "--ref_reward_offload --ds.lora.rank 8 --algo.advantage.estimator reinforce",
            {"reward_model"},
            {"its weights lie under an adapter"},
        ),
        (
            "--ref.offload --ds.lora.rank 8 --ref.num_gpus_per_node 2",
            {"reference"},
            set(),
        ),
    ],
)
def test_a_frozen_model_that_rests_in_the_hosts_memory_does_so_here(
    flags: str, expected: set[str], reasons: set[str]
) -> None:
    translation = openrlhf(
        f"--actor.num_gpus_per_node 2 {flags}", reward="--reward.model_name_or_path r"
    )
    assert missing(translation) == set()
    offloaded = {role for role, table in place(translation).items() if "offload" in str(table)}
    assert offloaded == expected
    assert {
        option.why for option in translation.draft.needless if "offload" in option.name
    } == reasons


def test_engines_on_gpus_of_their_own_are_workers_of_as_many_gpus() -> None:
    translation = openrlhf(
        "--actor.num_nodes 2 --actor.num_gpus_per_node 8 --vllm.num_engines 4 "
        "--vllm.tensor_parallel_size 2 --rollout.batch_size 1024 --train.batch_size 128"
    )
    assert place(translation) == {
        "type": "ray",
        "policy": {"machines": 2},
        "rollout": {"workers": 4},
    }
    assert translation.recipe["learner"]["ranks"] == 16
    assert translation.recipe["rollout"]["vllm"] == {"tensor_parallel": 2, "memory_fraction": 0.95}


def test_asynchronous_training_has_its_engines_apart_even_where_models_share() -> None:
    translation = openrlhf(
        "--actor.num_gpus_per_node 4 --vllm.num_engines 2 --train.colocate_all --train.async_enable"
    )
    assert place(translation)["rollout"] == {"workers": 2}
    assert translation.recipe["rollout"]["max_staleness"] == 1


def test_names_of_openrlhf_0_8_say_the_same_layout() -> None:
    old = openrlhf(
        "--actor_num_gpus_per_node 8 --vllm_num_engines 8 --vllm_gpu_memory_utilization 0.6 "
        "--colocate_all_models --enforce_eager"
    )
    new = openrlhf(
        "--actor.num_gpus_per_node 8 --vllm.num_engines 8 --vllm.gpu_memory_utilization 0.6 "
        "--train.colocate_all --vllm.enforce_eager"
    )
    assert old.recipe == new.recipe
    assert missing(old) == set()


def test_without_engines_the_policy_samples_and_the_default_is_eight_gpus() -> None:
    translation = openrlhf("--train.batch_size 128")
    assert translation.recipe["learner"]["ranks"] == 8
    assert "type" not in translation.recipe["rollout"]
    assert "OpenRLHF's default" in translation.text


@pytest.mark.parametrize(
    ("flags", "apart"),
    [
        ("", {"reference", "critic", "reward_model"}),
        ("--train.colocate_all", set()),
        ("--train.colocate_actor_ref", {"critic", "reward_model"}),
        ("--algo.kl.init_coef 0", {"critic", "reward_model"}),
        ("--algo.advantage.estimator reinforce --train.colocate_actor_ref", {"reward_model"}),
    ],
)
def test_a_role_with_gpus_of_its_own_keeps_them(flags: str, apart: set[str]) -> None:
    roles = " ".join(f"--{role}.num_gpus_per_node 2" for role in ("ref", "critic", "reward"))
    translation = openrlhf(
        f"--actor.num_gpus_per_node 2 {roles} {flags}", reward="--reward.model_name_or_path r"
    )
    assert missing(translation) == set()
    placed = place(translation)
    assert {role: placed[role] for role in apart} == {role: {"ranks": 2} for role in apart}
    assert not ({"reference", "critic", "reward_model"} - apart) & set(placed)


def test_a_reward_model_shares_the_critics_gpus() -> None:
    roles = " ".join(f"--{role}.num_gpus_per_node 2" for role in ("critic", "reward"))
    translation = openrlhf(
        f"--actor.num_gpus_per_node 2 {roles} --train.colocate_critic_reward "
        "--train.colocate_actor_ref",
        reward="--reward.model_name_or_path r",
    )
    assert place(translation)["critic"] == {"ranks": 2}
    assert place(translation)["reward_model"] == {"colocate": "critic"}


def test_learners_and_engines_of_open_instruct_lie_apart() -> None:
    translation = open_instruct(
        "--num_learners_per_node 8 8 --vllm_num_engines 12 --vllm_tensor_parallel_size 4 "
        "--vllm_enforce_eager --deepspeed_stage 3"
    )
    assert place(translation) == {
        "type": "ray",
        "policy": {"machines": 2},
        "rollout": {"workers": 12},
    }
    assert translation.recipe["learner"] | {"lr": 0} == {
        "ranks": 16, "sharding": "zero3", "schedule": "linear", "lr": 0,
    }  # fmt: skip
    assert translation.recipe["rollout"]["vllm"] == {
        "tensor_parallel": 4, "memory_fraction": 0.9, "eager": True,
    }  # fmt: skip
    uneven = open_instruct("--num_learners_per_node 4 8 --vllm_num_engines 4")
    assert place(uneven) == {"type": "ray", "rollout": {"workers": 4}}
    assert uneven.recipe["learner"]["ranks"] == 12


def test_single_gpu_mode_is_one_process_beside_its_engine() -> None:
    translation = open_instruct(
        "--num_learners_per_node 1 --vllm_tensor_parallel_size 1 --single_gpu_mode "
        "--vllm_gpu_memory_utilization 0.3"
    )
    assert "cluster" not in translation.recipe
    assert translation.recipe["rollout"]["vllm"] == {"memory_fraction": 0.3}


def test_trl_colocates_an_engine_with_each_rank_by_default(tmp_path: Path) -> None:
    translation = trl(tmp_path, f"accelerate launch --num_processes 4 trl/scripts/grpo.py {TRL} "
                      "--use_vllm --vllm_importance_sampling_mode token_truncate")  # fmt: skip
    assert place(translation) == {"type": "ray", "policy": {"colocate": "rollout"}}
    assert translation.recipe["rollout"]["vllm"] == {"memory_fraction": 0.3}
    assert translation.recipe["algorithm"]["correction"] == "tis"
    assert translation.recipe["algorithm"]["correction_high"] == 3.0


def test_trls_server_is_read_from_the_command_that_starts_it(tmp_path: Path) -> None:
    served = (
        "CUDA_VISIBLE_DEVICES=0,1,2,3 trl vllm-serve --model m --tensor-parallel-size 2 "
        "--data-parallel-size 2 &\n"
    )
    train = (
        f"accelerate launch --num_processes 4 trl/scripts/grpo.py {TRL} --use_vllm "
        "--vllm_mode server --vllm_importance_sampling_correction False\n"
    )
    translation = trl(tmp_path, served + train)
    assert place(translation) == {"type": "ray", "rollout": {"workers": 2}}
    assert translation.recipe["rollout"]["vllm"] == {"tensor_parallel": 2, "memory_fraction": 0.9}
    assert "vllm-serve is not in this recipe: the run starts its engines itself" in translation.text
    again = trl(tmp_path, served.replace("trl vllm-serve --model m", "vllm serve m") + train)
    assert again.recipe == translation.recipe
    alone = trl(tmp_path, train)
    assert place(alone)["rollout"] == {"workers": 1}
    assert "does not start its vLLM server" in alone.text


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("", {"correction": "icepop", "correction_level": "sequence", "correction_low": 0.0}),
        ("sequence_truncate", {"correction": "tis", "correction_level": "sequence"}),
        ("token_truncate", {"correction": "tis"}),
        ("token_mask", {"correction": "icepop", "correction_low": 0.0}),
    ],
)
def test_bounds_of_tokens_and_of_sequences_are_those_of_trl(
    tmp_path: Path, mode: str, keys: dict[str, Any]
) -> None:
    stated = f"--vllm_importance_sampling_mode {mode}" if mode else ""
    translation = trl(tmp_path, f"trl grpo {TRL} --use_vllm {stated}")
    assert missing(translation) == set()
    corrections = {
        key: value
        for key, value in translation.recipe["algorithm"].items()
        if key.startswith("correction")
    }
    assert corrections == {**keys, "correction_high": 3.0}
    assert "correction" not in trl(tmp_path, f"trl grpo {TRL}").recipe["algorithm"]


def test_a_zero_stage_counts_as_lost_until_the_devices_are_known(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d "
                    "--zero_stage 3 --adam_offload --max_samples 1000", "utf-8")  # fmt: skip
    unknown = translate("openrlhf", [str(path)])
    assert missing(unknown) == {"ds.zero_stage", "ds.adam_offload"}
    on_four_devices = translate("openrlhf", [str(path)], devices=4)
    assert missing(on_four_devices) == set()
    assert on_four_devices.recipe["learner"]["sharding"] == "zero3"
    assert on_four_devices.recipe["learner"]["offload"] is True


def offload_of(translation: Translation, section: str = "learner") -> Any:
    table: Any = translation.recipe
    for key in section.split("."):
        table = table.get(key, {})
    return table.get("offload")


def test_a_learner_that_sleeps_while_engines_sample_on_its_gpus_does_so_here() -> None:
    sleeps = "--actor.num_gpus_per_node 4 --vllm.num_engines 4 --ds.enable_sleep"
    translation = openrlhf(f"{sleeps} --train.colocate_all")
    assert offload_of(translation) == "sampling"
    assert missing(translation) == set()
    parse_recipe(translation.recipe)


def test_one_whose_engines_have_gpus_of_their_own_has_nobody_to_leave_its_gpu_to() -> None:
    translation = openrlhf("--actor.num_gpus_per_node 4 --vllm.num_engines 4 --ds.enable_sleep")
    assert offload_of(translation) is None
    (reason,) = [
        option.why for option in translation.draft.needless if option.name == "ds.enable_sleep"
    ]
    assert reason == "no engine samples on the learner's devices"
    parse_recipe(translation.recipe)


VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet "
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm trainer.total_epochs=1 "
    "trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.n=4 "
)


@pytest.mark.parametrize(
    ("flags", "offload"),
    [
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", "sampling"),
        (
            "model_engine=megatron actor_rollout_ref.actor.megatron.param_offload=True "
            "actor_rollout_ref.actor.megatron.grad_offload=True",
            "sampling",
        ),
        ("actor_rollout_ref.actor.fsdp_config.offload_policy=True", True),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload=True "
            "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
            True,
        ),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=False", None),
    ],
)
def test_verls_offload_is_of_idle_phases_or_of_the_whole_run(
    flags: str, offload: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{VERL} algorithm.adv_estimator=grpo {flags}", "utf-8")
    translation = translate("verl", [str(path)])
    assert translation.problem is None
    assert offload_of(translation) == offload


def test_verls_critic_leaves_its_gpu_by_its_own_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    flags = "critic.model.path=m critic.fsdp.param_offload=True"
    path.write_text(f"{VERL} algorithm.adv_estimator=gae {flags}", "utf-8")
    translation = translate("verl", [str(path)])
    assert offload_of(translation, "critic.learner") == "sampling"
    assert offload_of(translation) is None

"""What a GPU holds beside tensors: lines that a user can read, and that decide what fits."""

import os
from typing import Any

import pytest
import torch

from postgrad.models.known_shapes import shape_of_model
from postgrad.parallel.device import Placement, apply
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.held import PHASES
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.reserved import CHANNEL, NCCL, VLLM, WORKSPACE, communicators
from postgrad.plan.sizes import Sharing
from postgrad.recipe.load import parse_recipe

RL: dict[str, Any] = {
    "job": "rl", "run_dir": "run", "steps": 9, "algorithm": {"type": "grpo"},
    "model": {"path": "Qwen/Qwen3-8B"}, "data": {"path": "rows.jsonl", "max_len": 1024},
    "batch": {"rollout_batch_size": 16, "n_samples_per_prompt": 8},
    "rollout": {"max_new_tokens": 512}, "rewards": [{"type": "gsm8k"}],
}  # fmt: skip
ADAPTER = {
    "path": "Qwen/Qwen3-8B", "lora": {"rank": 16, "alpha": 16}, "gradient_checkpointing": True,
}  # fmt: skip
ZERO3: dict[str, Any] = {
    "learner": {"ranks": 8, "sharding": "zero3"}, "cluster": {"type": "ray"},
}  # fmt: skip


def planned(changes: dict[str, Any], hardware: str = "H100") -> RunPlan:
    facts = Facts(shape_of_model, parse_hardware(hardware))
    return make_plan(parse_recipe({**RL, **changes}), facts)


def line(planned: RunPlan, purpose: str) -> dict[str, int]:
    """The bytes of a purpose by phase; {} where there is no such line."""
    bytes_by_line = [line.bytes for line in planned.memory.lines if line.purpose == purpose]
    return {phase: count for bytes_ in bytes_by_line for phase, count in bytes_.items() if count}


def vllm(**settings: Any) -> dict[str, Any]:
    rollout = {"type": "vllm", "max_new_tokens": 512, "vllm": settings}
    return {"rollout": rollout, "model": ADAPTER}


def test_a_gpu_has_workspaces_pages_and_holes_and_a_cpu_none_of_them() -> None:
    gpu, cpu = planned({}), planned({}, "CPU")
    for purpose in ("workspaces of cuBLAS", "pages", "holes between tensors"):
        assert line(gpu, purpose)
        assert not line(cpu, purpose)
    assert "load" not in line(gpu, "workspaces of cuBLAS")  # nothing is multiplied yet
    assert line(gpu, "holes between tensors").keys() <= {"score", "update"}  # of passes
    assert not line(gpu, NCCL)
    assert line(planned(ZERO3, "8xH100"), NCCL)


def test_the_workspace_is_the_one_that_a_run_asks_cublas_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    try:
        apply(Placement("cpu", 1, deterministic=True))
    finally:
        apply(Placement("cpu", threads, deterministic=False))
    _, kibibytes, count = os.environ["CUBLAS_WORKSPACE_CONFIG"].split(":")
    assert int(kibibytes) * 2**10 * int(count) == WORKSPACE


@pytest.mark.parametrize(
    ("sharing", "count"),
    [
        (Sharing(1, 1, 1, 1, scatters=False, gathers=False), 0),
        (Sharing(8, 1, 1, 1, scatters=False, gathers=False), 1),  # all ranks
        (Sharing(8, 1, 1, 8, scatters=True, gathers=True), 2),  # and the mesh of FSDP2
        (Sharing(8, 1, 1, 4, scatters=True, gathers=True), 3),  # and between the two groups
        (Sharing(4, 2, 1, 4, scatters=True, gathers=True), 4),  # its layers, the rest, matrices
        (Sharing(4, 1, 2, 8, scatters=True, gathers=True), 3),  # and those of a sequence
    ],
)
def test_a_rank_takes_part_in_so_many_communicators(sharing: Sharing, count: int) -> None:
    assert communicators(sharing) == count


def test_buffers_of_nccl_are_in_the_sum_and_not_in_what_a_run_measures() -> None:
    run_plan = planned(ZERO3, "8xH100")
    buffers = line(run_plan, NCCL)
    assert buffers["update"] == 2 * 32 * CHANNEL
    memory = run_plan.memory
    others = sum(own_line.bytes.get("update", 0) for own_line in memory.own_lines)
    assert memory.above_baseline("update") == others
    assert memory.at("update") >= others + buffers["update"]
    slow = planned(ZERO3, "8xRTX-4090")  # few channels over PCIe
    assert line(slow, NCCL)["update"] < buffers["update"] / 4


def test_a_vllm_on_the_learners_card_takes_its_share_of_it_while_it_samples() -> None:
    run_plan = planned(vllm(memory_fraction=0.5))
    share = line(run_plan, VLLM)
    assert share == dict.fromkeys(("rollout", "save"), int(0.5 * run_plan.memory.capacity))
    assert not line(run_plan, "key-value cache")
    assert run_plan.memory.at("rollout") > share["rollout"]
    assert run_plan.memory.above_baseline("rollout") < share["rollout"]  # another process's
    assert planned(vllm(memory_fraction=0.5)).fits
    assert not planned(vllm(memory_fraction=0.9)).fits
    awake = line(planned(vllm(memory_fraction=0.5, sleep=False)), VLLM)
    assert awake.keys() == set(PHASES)


def test_a_vllm_on_cards_of_its_own_takes_nothing_of_the_learners() -> None:
    assert not line(planned(vllm(memory_fraction=0.9), "2xH100"), VLLM)
    assert line(planned(vllm(memory_fraction=0.9, engines=2), "2xH100"), VLLM)
    behind = vllm(memory_fraction=0.9) | {"cluster": {"type": "ray", "rollout": {"workers": 1}}}
    assert not line(planned(behind, "2xH100"), VLLM)
    beside = vllm(memory_fraction=0.5) | {
        "cluster": {"type": "ray", "policy": {"colocate": "rollout"}}
    }
    assert line(planned(beside, "1xH100"), VLLM)


def test_a_divided_weight_is_gathered_on_its_way_to_the_engine() -> None:
    way = "weights on their way to the engine"
    embedding = 151_936 * 4096 * 4
    assert line(planned(ZERO3, "8xH100"), way) == {"save": int(embedding * (2 + 1 / 8))}
    assert not line(planned({}), way)
    merged = line(planned({"model": ADAPTER}), way)
    assert merged == {"save": 2 * 4 * 4096 * 12_288}
    sft = {"job": "sft", "algorithm": {"type": "sft"}, "rewards": [], "batch": {}}
    without = {key: value for key, value in RL.items() if key != "rollout"}
    recipe = parse_recipe({**without, **sft, **ZERO3})
    alone = make_plan(recipe, Facts(shape_of_model, parse_hardware("8xH100")))
    assert not line(alone, way)

"""A learner that leaves its device between updates learns the same bits.

A CPU stands in for the device: memory is freed there as on a GPU, and whatever read it would fail.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.rank_cases import Case, algorithm, experience, learner
from helpers.ranks import run_ranks
from postgrad.learner import eight_bits, offload
from postgrad.learner.learner import Learner
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.update import Update
from postgrad.parallel.ranks import Grid, Ranks

ALONE = {
    "adamw": (Case("none"), {}),
    "muon": (Case("none", optimizer="muon"), {}),
    "8bit": (Case("none"), {"optimizer_state": "8bit"}),
    "bfloat16": (Case("none", dtype="bfloat16", tied=False), {}),
    "float16": (Case("none", dtype="float16"), {}),
    "lora": (Case("none", dtype="bfloat16", lora=True, saved=True, tied=False), {}),
    "critic": (Case("none", kind="reward", dtype="bfloat16", checkpointing=True), {}),
    "experts": (Case("none", type="qwen3_moe", dtype="bfloat16"), {}),
}
ON_RANKS = [
    Case("none"),
    Case("zero1", optimizer="muon"),
    Case("zero2", dtype="bfloat16"),
    Case("zero3", dtype="bfloat16", groups=1),
    Case("zero3", lora=True, dtype="bfloat16"),
    Case("zero3", kind="reward"),
    Case("zero1", grid=Grid(tensor=2)),
    Case("zero2", type="qwen3_moe", grid=Grid(expert=2)),
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "frees_device_memory", lambda device: True)
    monkeypatch.setattr(eight_bits, "SMALLEST", 256)


def held(tensors: Any) -> int:
    """Bytes of memory behind tensors that torch has allocated, as all is on a GPU."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({s._cdata: s.nbytes() for s in storages if s.resizable()}.values())


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_device(trained_learner: Learner[Any]) -> dict[str, int]:
    """Bytes of a learner that are on its device, by what they are."""
    return {
        "computing": held(trained_learner.backbone.lm.parameters()),
        "masters": held(trained_learner.optimizer.master.values()),
        "moments": held(trained_learner.optimizer.held()),
        "average": held(
            trained_learner.average.weights.values() if trained_learner.average else ()
        ),
    }


def copied(trained_learner: Learner[Any]) -> dict[str, Tensor]:
    return {
        f"{stem}/{name}": tensor.clone()
        for stem, named in trained_learner.tensors().items()
        for name, tensor in named.items()
    }


def leave(trained_learner: Learner[Any], keep: Any) -> None:
    assert trained_learner.offload is not None
    trained_learner.offload.offload(keep)


def outputs_of(trained_learner: Learner[Any], case: Case) -> Tensor:
    """What it computes for some sequences."""
    sequences = experience(case, 99).sequences
    role: Any = trained_learner
    evaluate = role.logprobs if isinstance(trained_learner, PolicyLearner) else role.scores
    return torch.from_numpy(evaluate(sequences).result().values.copy())


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return first.keys() == second.keys() and all(
        torch.equal(bits(first[n]), bits(second[n])) for n in first
    )


def steps(trained_learner: Learner[Any], case: Case) -> list[dict[str, Tensor]]:
    """What three steps give, each with a publish and a checkpoint behind its update."""
    records: list[dict[str, Tensor]] = []
    for number in range(3):
        before = outputs_of(trained_learner, case)
        drawn = experience(case, number)
        result = trained_learner.update(
            Update(drawn, np.arange(len(drawn))), algorithm(case)
        ).result()
        outputs = torch.from_numpy(result.outputs.copy())
        if trained_learner.offload is not None:
            leave(trained_learner, "weights")
        probe = outputs_of(trained_learner, case)
        weights = {name: tensor.clone() for name, tensor in trained_learner.hub_weights()}
        if trained_learner.offload is not None:
            leave(trained_learner, "nothing")
        records.append(
            {
                "before": before,
                "outputs": outputs,
                "probe": probe,
                **weights,
                **copied(trained_learner),
            }
        )
    return records


def compare(ranks: Ranks, case: Case, settings: dict[str, Any]) -> None:
    stays = learner(case, ranks, **settings)
    leaves = learner(case, ranks, offload="sampling", **settings)
    for stayed, left in zip(steps(stays, case), steps(leaves, case), strict=True):
        assert same(stayed, left)
    assert sum(on_device(stays).values()) > 0
    assert set(on_device(leaves).values()) == {0}


def compare_all(ranks: Ranks, folder: Path, cases: list[Case]) -> None:
    offload.frees_device_memory = lambda device: True
    for case in cases:
        compare(ranks if case.grid is None else ranks.arranged(case.grid), case, {})


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("adamw", "lora", "critic") else pytest.param(name, marks=pytest.mark.slow)
        for name in ALONE
    ],
)
def test_it_learns_the_same_bits_and_holds_nothing_while_an_engine_samples(name: str) -> None:
    compare(Ranks(), *ALONE[name])


@pytest.mark.ranks
@pytest.mark.slow
def test_so_it_does_on_ranks_that_divide_its_state(tmp_path: Path) -> None:
    run_ranks(2, compare_all, tmp_path, ON_RANKS)


def test_what_comes_back_is_what_is_needed() -> None:
    case = Case("none", dtype="bfloat16")
    resting = learner(case, Ranks(), offload="sampling")
    drawn = experience(case, 0)
    update = Update(drawn, np.arange(len(drawn)))
    resting.update(update, algorithm(case)).result()
    all_of_it = on_device(resting)
    assert all(all_of_it.values())

    def here() -> set[str]:
        now = on_device(resting)
        assert all(now[kind] in (0, all_of_it[kind]) for kind in now)
        return {kind for kind, count in now.items() if count}

    leave(resting, "weights")
    assert here() == {"computing", "masters"}
    leave(resting, "computing weights")
    assert here() == {"computing"}
    leave(resting, "nothing")
    assert here() == set()
    resting.tensors()  # of a checkpoint
    resting.state_bytes()
    assert here() == set()
    outputs_of(resting, case)
    assert here() == {"computing"}
    dict(resting.hub_weights())
    assert here() == {"computing", "masters"}
    leave(resting, "nothing")
    resting.weights()  # which a reference follows
    assert here() == {"computing", "masters"}
    resting.update(update, algorithm(case)).result()
    assert here() == set(all_of_it)


def test_a_checkpoint_is_read_into_a_learner_that_rests() -> None:
    case = Case("none", dtype="bfloat16")
    saved, loaded = (learner(case, Ranks(), offload="sampling") for _ in range(2))
    steps(saved, case)
    files = {
        stem: {name: tensor.clone() for name, tensor in named.items()}
        for stem, named in saved.tensors().items()
    }
    leave(loaded, "nothing")
    loaded.load(files.__getitem__)
    assert same(copied(saved), copied(loaded))
    assert torch.equal(outputs_of(saved, case), outputs_of(loaded, case))


def test_without_the_setting_it_stays() -> None:
    assert learner(Case("none"), Ranks()).offload is None


def test_on_a_cpu_it_stays_whatever_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert learner(Case("none"), Ranks(), offload="sampling").offload is None


def test_an_adapter_off_and_on_again_reads_the_same_frozen_weights() -> None:
    """The reference beside a policy with an adapter is on its weights."""
    case = Case("none", lora=True, dtype="bfloat16")
    policy = learner(case, Ranks(), offload="sampling")
    assert isinstance(policy, PolicyLearner)
    reference = policy.under_adapter()
    assert reference is not None
    sequences = experience(case, 99).sequences
    before = reference.logprobs(sequences).result().values.tobytes()
    for _ in range(2):
        leave(policy, "nothing")
        assert reference.logprobs(sequences).result().values.tobytes() == before

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


def on_device(one: Learner[Any]) -> dict[str, int]:
    """Bytes of a learner that are on its device, by what they are."""
    return {
        "computing": held(one.backbone.lm.parameters()),
        "masters": held(one.optimizer.master.values()),
        "moments": held(one.optimizer.held()),
        "average": held(one.average.weights.values() if one.average else ()),
    }


def copied(one: Learner[Any]) -> dict[str, Tensor]:
    return {
        f"{stem}/{name}": tensor.clone()
        for stem, named in one.tensors().items()
        for name, tensor in named.items()
    }


def leave(one: Learner[Any], keep: Any) -> None:
    assert one.offload is not None
    one.offload.offload(keep)


def said(one: Learner[Any], case: Case) -> Tensor:
    """What it computes for some sequences."""
    sequences = experience(case, 99).sequences
    role: Any = one
    told = role.logprobs if isinstance(one, PolicyLearner) else role.scores
    return torch.from_numpy(told(sequences).result().values.copy())


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return one.keys() == two.keys() and all(torch.equal(bits(one[n]), bits(two[n])) for n in one)


def steps(one: Learner[Any], case: Case) -> list[dict[str, Tensor]]:
    """What three steps give, each with a publish and a checkpoint behind its update."""
    found: list[dict[str, Tensor]] = []
    for number in range(3):
        before = said(one, case)
        drawn = experience(case, number)
        result = one.update(Update(drawn, np.arange(len(drawn))), algorithm(case)).result()
        outputs = torch.from_numpy(result.outputs.copy())
        if one.offload is not None:
            leave(one, "weights")
        probe = said(one, case)
        whole = {name: tensor.clone() for name, tensor in one.hub_weights()}
        if one.offload is not None:
            leave(one, "nothing")
        found.append({"before": before, "outputs": outputs, "probe": probe, **whole, **copied(one)})
    return found


def compare(ranks: Ranks, case: Case, settings: dict[str, Any]) -> None:
    stays = learner(case, ranks, **settings)
    leaves = learner(case, ranks, offload="sampling", **settings)
    for one, two in zip(steps(stays, case), steps(leaves, case), strict=True):
        assert same(one, two)
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
    one = learner(case, Ranks(), offload="sampling")
    drawn = experience(case, 0)
    update = Update(drawn, np.arange(len(drawn)))
    one.update(update, algorithm(case)).result()
    all_of_it = on_device(one)
    assert all(all_of_it.values())

    def here() -> set[str]:
        now = on_device(one)
        assert all(now[what] in (0, all_of_it[what]) for what in now)
        return {what for what, count in now.items() if count}

    leave(one, "weights")
    assert here() == {"computing", "masters"}
    leave(one, "computing weights")
    assert here() == {"computing"}
    leave(one, "nothing")
    assert here() == set()
    one.tensors()  # of a checkpoint
    one.state_bytes()
    assert here() == set()
    said(one, case)
    assert here() == {"computing"}
    dict(one.hub_weights())
    assert here() == {"computing", "masters"}
    leave(one, "nothing")
    one.weights()  # which a reference follows
    assert here() == {"computing", "masters"}
    one.update(update, algorithm(case)).result()
    assert here() == set(all_of_it)


def test_a_checkpoint_is_read_into_a_learner_that_rests() -> None:
    case = Case("none", dtype="bfloat16")
    one, two = (learner(case, Ranks(), offload="sampling") for _ in range(2))
    steps(one, case)
    files = {
        stem: {name: tensor.clone() for name, tensor in named.items()}
        for stem, named in one.tensors().items()
    }
    leave(two, "nothing")
    two.load(files.__getitem__)
    assert same(copied(one), copied(two))
    assert torch.equal(said(one, case), said(two, case))


def test_without_the_setting_it_stays() -> None:
    assert learner(Case("none"), Ranks()).offload is None


def test_on_a_cpu_it_stays_whatever_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert learner(Case("none"), Ranks(), offload="sampling").offload is None


def test_an_adapter_off_and_on_again_reads_the_same_frozen_weights() -> None:
    """The reference beside a policy with an adapter is on its weights."""
    case = Case("none", lora=True, dtype="bfloat16")
    one = learner(case, Ranks(), offload="sampling")
    assert isinstance(one, PolicyLearner)
    reference = one.under_adapter()
    assert reference is not None
    sequences = experience(case, 99).sequences
    before = reference.logprobs(sequences).result().values.tobytes()
    for _ in range(2):
        leave(one, "nothing")
        assert reference.logprobs(sequences).result().values.tobytes() == before

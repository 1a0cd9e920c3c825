"""Ranks load a model in parts: each reads its own from the files, and no bit is other than when
every rank loaded all of it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.part_cases import Parts, Watched, load, save, trained, weight_bytes, write_model
from helpers.ranks import run_ranks
from postgrad.checkpoint.parts import Reader
from postgrad.learner.policy import PolicyLearner
from postgrad.models.stored import StoredTensor
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import local

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

DIVIDED = [  # every weight is on one rank alone
    Parts(),
    Parts("llama", tied=False, kept="bfloat16", shard="40KB"),
    Parts("gemma3_text", stage="zero1", dtype="bfloat16"),
    Parts("qwen2", stage="zero2", kind="reward"),
    Parts(kind="reward", kept="bfloat16", dtype="bfloat16", headed=True),
    Parts(lora=True, tied=False),
    Parts("qwen3_moe"),
    Parts("qwen3_moe", grid=Grid(expert=2)),
    Parts("mixtral", kept="bfloat16", tied=False),
    Parts(offload=True, lora=True),
]
OTHERS = [  # some ranks have the same weights, or a matrix is merged before it is divided
    Parts(stage="none"),
    Parts(stage="zero2", lora=True, dtype="bfloat16"),
    Parts(stage="none", kind="reward", lora=True),
    Parts("qwen2", lora=True, dora=True),
    Parts("qwen2", grid=Grid(tensor=2)),
    Parts("llama", stage="none", kept="bfloat16", lora=True, grid=Grid(tensor=2)),
    Parts(grid=Grid(groups=2)),
    Parts("qwen3_moe", stage="none", kept="bfloat16", grid=Grid(expert=2)),
    Parts(adapted=True, kept="bfloat16"),
    Parts("olmo2"),  # an untested type: the first rank probes it
]


def state(backbone: Any) -> dict[str, torch.Tensor]:
    named = [*backbone.lm.named_parameters(remove_duplicate=False), *backbone.lm.named_buffers()]
    assert not any(isinstance(tensor, StoredTensor) for _, tensor in named)
    return {name: local(tensor).clone() for name, tensor in named}


def same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], case: Parts) -> None:
    assert expected.keys() == actual.keys(), case
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype, (case, name)
        assert torch.equal(tensor, actual[name]), (case, name)


def compare(ranks: Ranks, folder: Path, cases: list[tuple[Parts, Path]], divided: bool) -> None:
    for case, path in cases:
        arranged = ranks.arranged(case.grid)
        before = load(case, path, arranged, unsharded=True)
        with Watched() as watched:
            backbone = load(case, path, arranged, unsharded=False)
        same(state(before), state(backbone), case)
        same(state(trained(case, before).backbone), state(trained(case, backbone).backbone), case)
        read = int(ranks.sum(watched.bytes))
        lm: Any = backbone.lm
        head = lm.score.weight.numel() * 2 if case.headed else 0  # every rank reads it
        if divided:
            assert read == weight_bytes(path) + 3 * head, case


@pytest.mark.parametrize(("cases", "divided"), [(DIVIDED, True), (OTHERS, False)])
def test_a_model_loaded_in_parts_has_the_bits_of_one_loaded_whole(
    cases: list[Parts], divided: bool, tmp_path: Path
) -> None:
    paths = [(case, write_model(case, tmp_path)) for case in cases]
    run_ranks(4, compare, tmp_path, paths, divided)


def count(ranks: Ranks, folder: Path, cases: list[tuple[Parts, Path]]) -> None:
    for case, path in cases:
        with Watched() as watched:
            load(case, path, ranks.arranged(case.grid), unsharded=False)
        assert int(ranks.sum(watched.bytes)) == weight_bytes(path), case


def test_eight_ranks_read_each_byte_of_a_file_once(tmp_path: Path) -> None:
    cases = [Parts(), Parts(kept="bfloat16", tied=False, shard="40KB"), Parts("qwen3_moe")]
    run_ranks(8, count, tmp_path, [(case, write_model(case, tmp_path)) for case in cases])


RESUMED = [Parts(tied=False), Parts("qwen2", grid=Grid(tensor=2)), Parts(stage="zero1")]


def resume(ranks: Ranks, folder: Path, cases: list[tuple[Parts, Path]]) -> None:
    for case, path in cases:
        arranged = ranks.arranged(case.grid)
        learner = trained(case, load(case, path, arranged, unsharded=False))
        to = folder / f"saved-{case.name}"
        to.mkdir(exist_ok=True)
        save(learner, arranged, to)
        arranged.gathered(0)  # all have written
        fresh = PolicyLearner(load(case, path, arranged, unsharded=False), learner.settings, 100)
        with Watched() as watched:
            fresh.load(Reader(to, frozenset(file.name for file in to.iterdir())))
        for stem, named in learner.tensors().items():
            resumed = fresh.tensors()[stem]
            assert resumed.keys() == named.keys()
            assert all(torch.equal(resumed[name], tensor) for name, tensor in named.items()), case
        tensor_bytes = sum(t.nbytes for named in learner.tensors().values() for t in named.values())
        assert watched.bytes == tensor_bytes + torch.int64.itemsize, (
            case
        )  # the number of updates: twice


def test_a_resume_reads_a_ranks_part_alone(tmp_path: Path) -> None:
    paths = [(case, write_model(case, tmp_path)) for case in RESUMED]
    run_ranks(4, resume, tmp_path, paths)

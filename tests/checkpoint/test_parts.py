"""Tensor files in parts: any number of ranks writes them, any number reads them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from postgrad.checkpoint.parts import Reader, part_name, write_part
from postgrad.core.errors import RunError

SHAPES = st.dictionaries(
    st.sampled_from(["a.weight", "b.weight", "norm.weight"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple),
    min_size=1,
)


def write(folder: Path, tensors: dict[str, torch.Tensor], ranks: int) -> frozenset[str]:
    """As FSDP2 divides: equal chunks of rows, the last ones short or empty."""
    for rank in range(ranks):
        mine = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 0:
                if rank == 0:
                    mine[name] = tensor, (), 0
                continue
            each = -(-len(tensor) // ranks)
            start = min(len(tensor), rank * each)
            mine[name] = tensor[start : start + each], tuple(tensor.shape), start
        write_part(folder / part_name("policy.weights", rank, ranks), mine)
    return frozenset(path.name for path in folder.iterdir())


@given(shapes=SHAPES, ranks=st.integers(1, 5))
def test_what_ranks_write_is_read_whole(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[int, ...]], ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    tensors["updates"] = torch.tensor(3)
    found = Reader(folder, write(folder, tensors, ranks))("policy.weights")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_missing_part_is_an_error_that_names_those_there(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": torch.rand(4, 2)}, 4)
    gone = part_name("policy.weights", 2, 4)
    with pytest.raises(RunError, match=r"only \[0, 1, 3\] of \[4\]"):
        Reader(tmp_path, files - {gone})("policy.weights")


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        '{"a": {"shape": [4, 2]}}',
        '{"a": {"shape": [4, -2], "start": 0}}',
        '{"a": {"shape": ["4", 2], "start": 0}}',
        '{"b": {"shape": [4, 2], "start": 0}}',
    ],
)
def test_a_header_that_does_not_place_its_tensors_is_refused(tmp_path: Path, said: str) -> None:
    name = part_name("policy.weights", 0, 1)
    save_file({"a": torch.rand(4, 2)}, tmp_path / name, {"parts": said})
    with pytest.raises(RunError, match=r"does not say|other tensors"):
        Reader(tmp_path, frozenset({name}))("policy.weights")


@pytest.mark.parametrize(("shape", "start"), [([5, 2], 0), ([4, 2], 1), ([4, 3], 0), ([3, 2], 0)])
def test_rows_that_do_not_make_the_whole_are_refused(
    tmp_path: Path, shape: list[int], start: int
) -> None:
    name = part_name("policy.weights", 0, 1)
    places = json.dumps({"a": {"shape": shape, "start": start}})
    save_file({"a": torch.rand(4, 2)}, tmp_path / name, {"parts": places})
    with pytest.raises(RunError, match="rows"):
        Reader(tmp_path, frozenset({name}))("policy.weights")["a"]

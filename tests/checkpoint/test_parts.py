"""Tensor files in parts: any number of ranks writes them, any number reads them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from postgrad.checkpoint.parts import Part, Reader, part_name, write_part
from postgrad.core.errors import RunError

SHAPES = st.dictionaries(
    st.sampled_from(["a.weight", "b.weight", "norm.weight"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple),
    min_size=1,
)


def write(
    folder: Path, tensors: dict[str, torch.Tensor], ranks: int, tensor_ranks: int = 1
) -> frozenset[str]:
    """As FSDP2 divides: equal chunks of rows, the last ones short or empty. Before that a matrix is
    cut by columns, one with an odd name by rows, where so many ranks share it.
    """
    size = ranks * tensor_ranks
    for number in range(size):
        rank, part = divmod(number, tensor_ranks)
        parts = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 0:
                if number == 0:
                    parts[name] = Part(tensor, (), ())
                continue
            dim = 1 if tensor.ndim == 2 and name != "a.weight" else 0
            cut = tensor_ranks > 1 and tensor.shape[dim] % tensor_ranks == 0
            if not cut and part:
                continue  # the first of those that hold it writes it
            offsets = [0] * tensor.ndim
            held = tensor.chunk(tensor_ranks, dim)[part] if cut else tensor
            offsets[dim] = part * held.shape[dim] if cut else 0
            each = -(-len(held) // ranks)
            start = min(len(held), rank * each)
            offsets[0] += start
            parts[name] = Part(held[start : start + each], tuple(tensor.shape), tuple(offsets))
        write_part(folder / part_name("policy.weights", number, size), parts)
    return frozenset(path.name for path in folder.iterdir())


@given(shapes=SHAPES, ranks=st.integers(1, 5), tensor_ranks=st.integers(1, 3))
def test_what_ranks_write_is_read_whole(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: dict[str, tuple[int, ...]],
    ranks: int,
    tensor_ranks: int,
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    tensors["updates"] = torch.tensor(3)
    tensors_read = Reader(folder, write(folder, tensors, ranks, tensor_ranks))("policy.weights")
    assert tensors_read.keys() == tensors.keys()
    assert all(torch.equal(tensors_read[name], tensors[name]) for name in tensors)


def test_a_missing_part_is_an_error_that_names_those_there(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": torch.rand(4, 2)}, 4)
    gone = part_name("policy.weights", 2, 4)
    with pytest.raises(RunError, match=r"only \[0, 1, 3\] of \[4\]"):
        Reader(tmp_path, files - {gone})("policy.weights")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "[]",
        '{"a": {"shape": [4, 2]}}',
        '{"a": {"shape": [4, -2], "start": 0}}',
        '{"a": {"shape": ["4", 2], "start": 0}}',
        '{"b": {"shape": [4, 2], "start": 0}}',
    ],
)
def test_a_header_that_does_not_place_its_tensors_is_refused(tmp_path: Path, header: str) -> None:
    name = part_name("policy.weights", 0, 1)
    save_file({"a": torch.rand(4, 2)}, tmp_path / name, {"parts": header})
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


@given(data=st.data())
def test_a_part_in_another_place_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Parts that overlap, leave a hole or reach over the edge never make a tensor."""
    folder = tmp_path_factory.mktemp("parts")
    right = [(row, column) for row in (0, 2) for column in (0, 3)]
    places = st.tuples(st.integers(0, 4), st.integers(0, 6))
    drawn = data.draw(st.lists(places, min_size=4, max_size=4) | st.permutations(right))
    for rank, (row, column) in enumerate(drawn):
        part = Part(torch.full((2, 3), float(rank)), (4, 6), (row, column))
        write_part(folder / part_name("policy.weights", rank, 4), {"a": part})
    read = Reader(folder, frozenset(path.name for path in folder.iterdir()))("policy.weights")
    if sorted(drawn) == right:
        assert read["a"].shape == (4, 6)
    else:
        with pytest.raises(RunError, match=r"rows"):
            read["a"]

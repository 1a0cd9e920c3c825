"""Tensors that stay in their files: every block is what the same operations on real ones give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from postgrad.core.errors import RunError
from postgrad.models.stored import StoredTensor, realise, stored_tensors

Operation = Callable[[dict[str, Tensor]], Any]
REAL = {
    "a": torch.randn(6, 4).bfloat16(),
    "b": torch.randn(3, 4),
    "c": torch.tensor(3),
    "e": torch.randn(2, 6, 4),
    "f": torch.randn(3, 4),
}
OPERATIONS: dict[str, Operation] = {
    "cast": lambda t: t["a"].float(),
    "another device": lambda t: t["a"].to(device="cpu", dtype=torch.float32),
    "narrow": lambda t: t["a"].narrow(0, 2, 3),
    "chunks": lambda t: t["a"].chunk(4, 0),
    "columns": lambda t: t["e"].split([1, 3], -1),
    "transposed": lambda t: t["a"].t().contiguous(),
    "permuted": lambda t: t["e"].permute(2, 0, 1),
    "rows of several": lambda t: torch.cat([t["b"], t["f"].clone()], 0),
    "columns of several": lambda t: torch.cat([t["b"], t["f"]], -1),
    "experts": lambda t: torch.stack([t["b"], t["f"]], 0),
    "merged experts": lambda t: torch.cat(
        [torch.stack([t["b"], t["f"]]), torch.stack([t["f"], t["b"]])], 1
    ),
    "of several dtypes": lambda t: torch.cat([t["a"], t["b"]], 0),
    "one of a stack": lambda t: t["e"][1],
    "all of a stack": lambda t: t["e"].unbind(1),
    "every second": lambda t: t["a"][::2],
    "interleaved": lambda t: t["e"].view(2, 2, 3, 4).transpose(1, 2).reshape(2, 6, 4),
    "a sum": lambda t: t["b"] + t["f"],
    "all": lambda t: t["a"][...],
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    path = tmp_path_factory.mktemp("stored") / "some.safetensors"
    save_file(REAL, path)
    return dict(stored_tensors([path], torch.device("cpu")))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_block_of_a_result_is_that_of_the_real_one(
    operation: Operation, stored: dict[str, Tensor], data: st.DataObject
) -> None:
    results, expected = operation(stored), operation(REAL)
    if isinstance(expected, Tensor):
        results, expected = [results], [expected]
    for result, tensor in zip(results, expected, strict=True):
        assert isinstance(result, StoredTensor)
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
        firsts = [data.draw(st.integers(0, size)) for size in tensor.shape]
        pairs = zip(firsts, tensor.shape, strict=True)
        box = tuple((first, data.draw(st.integers(0, size - first))) for first, size in pairs)
        block = tensor[tuple(slice(first, first + count) for first, count in box)]
        assert torch.equal(result.block(box), block)
        assert torch.equal(result.real(), tensor)


def test_rows_of_merged_experts_are_read_of_those_experts_alone(tmp_path: Path) -> None:
    experts = {f"{n}.{kind}": torch.randn(3, 4) for n in range(4) for kind in ("gate", "up")}
    save_file(experts, tmp_path / "x.safetensors")
    files = stored_tensors([tmp_path / "x.safetensors"], torch.device("cpu"))
    read: list[str] = []
    for name, tensor in files.items():
        tensor._read = lambda box, name=name, inner=tensor._read: read.append(name) or inner(box)
    kinds: list[list[Tensor]] = [
        [files[f"{n}.{kind}"] for n in range(4)] for kind in ("gate", "up")
    ]
    merged: Any = torch.cat([torch.stack(kind) for kind in kinds], 1)
    rows = torch.zeros(1, 6, 4)
    rows.copy_(merged.chunk(4, 0)[2])
    assert torch.equal(rows[0], torch.cat([experts["2.gate"], experts["2.up"]]))
    assert read == ["2.gate", "2.up"]


def test_a_forward_pass_reads_a_parameter_where_it_is_used(stored: dict[str, Tensor]) -> None:
    weight = nn.Parameter(stored["b"])
    assert isinstance(weight, StoredTensor)
    rows = torch.randn(5, 4, requires_grad=True)
    nn.functional.linear(rows, weight).sum().backward()
    assert torch.allclose(rows.grad, REAL["b"].sum(0).expand(5, 4))  # type: ignore[arg-type]
    assert int(stored["c"]) == 3
    assert torch.equal(stored["b"], REAL["b"])


def test_nothing_is_written_into_a_stored_tensor(stored: dict[str, Tensor]) -> None:
    with pytest.raises(TypeError, match="lies in its file"):
        stored["b"].mul_(2.0)
    with pytest.raises(TypeError, match="lies in its file"):
        stored["b"].copy_(REAL["b"])


def test_tied_parameters_are_read_once_and_stay_tied(stored: dict[str, Tensor]) -> None:
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    shared = nn.Parameter(stored["b"], requires_grad=False)
    model[0].weight = model[1].weight = shared
    realise(model)
    assert model[0].weight is model[1].weight
    assert type(model[0].weight) is nn.Parameter
    assert not model[0].weight.requires_grad
    assert torch.equal(model[0].weight, REAL["b"])


def test_a_tensor_of_a_dtype_without_numbers_here_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.uint16)}, tmp_path / "x.safetensors")
    with pytest.raises(RunError, match="a is of dtype U16"):
        stored_tensors([tmp_path / "x.safetensors"], torch.device("cpu"))

"""What a process computes with is chosen once and can be chosen again."""

import gc
import os

import psutil
import pytest
import torch

from postgrad.core.errors import RunError
from postgrad.parallel.device import (
    ALLOCATOR,
    Placement,
    apply,
    choose,
    compute_dtype,
    empty_cache,
    make_current,
    without_expandable,
)


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_a_stated_number_of_threads_is_taken() -> None:
    assert choose(3, True).threads == 3


def test_no_more_threads_are_chosen_than_the_process_may_use() -> None:
    assert 1 <= choose(None, True).threads <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("allowed", "physical", "wanted"),
    [(8, 4, 4), (2, 16, 2), (8, None, 1)],
    ids=["two a core", "part of a machine", "a container that hides its cores"],
)
def test_threads_are_the_physical_cores_that_this_process_may_use(
    allowed: int, physical: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose(None, True).threads == wanted


@pytest.mark.parametrize(("stated", "wanted"), [("3", 3), ("5,2", 5), ("0", 4), ("many", 4)])
def test_the_environments_number_of_threads_comes_before_that_of_cores(
    stated: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list is of nested levels. What OpenMP refuses counts as nothing, as it does there."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert choose(None, True).threads == wanted
    assert choose(2, True).threads == 2


@pytest.mark.parametrize(("there", "wanted"), [(True, "cuda"), (False, "cpu")])
def test_a_cuda_device_is_taken_where_there_is_one(
    there: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    placement = choose(1, False)
    assert placement.device == wanted
    assert Placement(**placement.to_json()) == placement  # pyright: ignore[reportArgumentType]


def test_the_same_placement_gives_the_same_bits() -> None:
    left, right = torch.randn(300, 400), torch.randn(400, 300)
    products = []
    for _ in range(2):
        apply(Placement("cpu", 1, True))
        products.append(left @ right)
        apply(Placement("cpu", 2, True))
    assert torch.equal(products[0], products[1])


def test_a_placement_sets_the_process_up() -> None:
    device = apply(Placement("cpu", 1, True))
    assert device == torch.device("cpu")
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    apply(Placement("cpu", 2, False))
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("stated", "wanted"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_gets_the_workspace_of_a_deterministic_run_unless_the_user_states_one(
    stated: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if stated:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", stated)
    apply(Placement("cpu", 1, True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == wanted


def test_a_run_of_another_device_is_not_continued_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    with pytest.raises(RunError, match=r"started on a CUDA device .* --allow-change device"):
        apply(Placement("cuda", threads + 1, True))
    assert torch.get_num_threads() == threads


def test_auto_is_bfloat16_on_cuda_and_float32_elsewhere() -> None:
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32
    assert compute_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert compute_dtype("float32", torch.device("cuda")) == torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), torch.float32), ((7, 5), torch.float32), ((8, 0), torch.bfloat16)],
)
def test_auto_is_float32_on_gpus_that_would_convert_bfloat16(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype("auto", torch.device("cuda")) == dtype
    assert compute_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16  # as it says


def test_new_tensors_of_a_deterministic_run_are_not_written_twice() -> None:
    apply(Placement("cpu", 1, True))
    assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("stated", [None, *ALLOCATOR])
def test_segments_of_a_gpu_grow_and_shrink_unless_the_user_says_how(
    stated: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # put back at the end, whatever is set below
        monkeypatch.delenv(name)
    if stated:
        monkeypatch.setenv(stated, "max_split_size_mb:64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    apply(Placement("cuda", 1, True))
    allocator_settings = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings == ({stated: "max_split_size_mb:64"} if stated else ours)


def test_a_run_on_a_cpu_leaves_the_allocator_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    apply(Placement("cpu", 1, True))
    assert not any(name in os.environ for name in ALLOCATOR)


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cuda", 1)])
def test_only_a_gpu_has_cached_memory_to_return(
    device: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    empty_cache(torch.device(device))
    assert len(emptied) == times


@pytest.mark.slow
def test_what_the_compiler_left_is_collected_once_before_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(gc, "collect", lambda *generation: calls.append("collect"))
    empty_cache(torch.device("cuda"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    calls.clear()
    empty_cache(torch.device("cuda"))
    empty_cache(torch.device("cuda"))
    assert calls == ["collect", "empty_cache", "empty_cache"]


def test_expandable_segments_are_taken_out_and_all_else_stays() -> None:
    powers = "roundup_power2_divisions:[256:1,512:2]"
    environment = {
        "PYTORCH_ALLOC_CONF": f"{powers},expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HOME": "/root",
    }
    left = without_expandable(environment)
    assert left == {"PYTORCH_ALLOC_CONF": powers, "HOME": "/root"}
    assert without_expandable(left) == left


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_a_device_without_an_index_is_the_current_one(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses "cuda" alone."""
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    make_current(torch.device(name))
    assert chosen == [index]

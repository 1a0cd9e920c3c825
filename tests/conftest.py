"""What all tests share: how many examples, what is slow, caches of their own, one cluster."""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers.worker_forks import StartWorker

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
from hypothesis import settings

from postgrad.core.process import heavy_imports

# A busy machine fails no test. The same commit draws the same examples, so that a change is not
# blamed for an example that it has nothing to do with; `make test-random` draws new ones.
settings.register_profile("same", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile("same")

# Thousands of tests leave objects that stay (reports, caches, modules), and the collector walked
# through them thirty thousand times: a twelfth of the CPU time of `make test`.
gc.set_threshold(20_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Tests wait for the processes that they start for a third of their time, so `-n auto` is half
    as many more as there are cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) * 3 // 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-points", default="3", help="kills a job gets in tests/faults")
    parser.addoption("--random-kills", default="6", help="of runs with samples ahead")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Four thousand tests and all that they import: the collector walks through none of it."""
    with heavy_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM and long ones are slow; those of vLLM need the Python of its environment."""
    missing = "POSTGRAD_VLLM_PYTHON names no Python that has vLLM: see `make test-vllm`"
    for item in items:
        if item.get_closest_marker("vllm") or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("vllm"):
            item.add_marker(
                pytest.mark.skipif(not os.environ.get("POSTGRAD_VLLM_PYTHON"), reason=missing)
            )


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """A kill loses nothing that was written, synced or not; only a machine that loses power would,
    and no test is one. Whole runs sync hundreds of times: a third of their time on a busy disk.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # refuses what is no open file, as fsync does
        yield


@pytest.fixture(scope="session", autouse=True)
def _problems_are_made_once() -> Iterator[None]:
    """Problems of reasoning-gym take a process of their own, over a CPU second; a run needs few
    tasks at a time, the tests together need the same few dozen again and again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postgrad.data.gym.KEPT", 64)
        yield


@pytest.fixture(scope="session", autouse=True)
def scoring_workers_are_forks() -> Iterator["StartWorker"]:
    """Eight hundred of them: see helpers.worker_forks."""
    from helpers.worker_forks import forked_workers

    with forked_workers() as start_worker:
        yield start_worker


@pytest.fixture
def own_workers(scoring_workers_are_forks: "StartWorker", monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scoring worker is an interpreter of its own, as outside of tests."""
    monkeypatch.setattr("postgrad.rewards.process.start_worker", scoring_workers_are_forks)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """No test reads or writes the tokens that a user keeps. Problems of reasoning-gym and shapes of
    models are kept in pytest's own cache, for all workers and later sessions: their files are named
    by all that they depend on, and read only with the bits that were written.
    """
    folder = tmp_path_factory.mktemp("cache")
    if (cache := getattr(pytestconfig, "cache", None)) is not None:  # else -p no:cacheprovider
        for content in ("problems", "shapes"):
            (folder / content).symlink_to(cache.mkdir(content), target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTGRAD_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def ray_forks() -> Iterator[None]:
    """Ray's processes are forks of one, and find the helpers. See helpers.ray_forks."""
    from helpers.ray_forks import forking
    from postgrad.cluster import connection

    tests = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch, forking():
        paths = [str(tests), str(tests / "helpers"), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield
        connection.stop()


@pytest.fixture
def ray_cluster(ray_forks: None) -> None:
    """A cluster that tests share until one of them needs another (`own_ray`): a start of Ray takes
    longer than most of them.
    """
    from postgrad.cluster import connection
    from postgrad.cluster.settings import ClusterSettings

    connection.start(ClusterSettings(type="ray", start_seconds=600.0))


@pytest.fixture
def own_ray(ray_forks: None) -> Iterator[None]:
    """No cluster is there before the test, and none stays."""
    from postgrad.cluster import connection

    connection.stop()
    yield
    connection.stop()

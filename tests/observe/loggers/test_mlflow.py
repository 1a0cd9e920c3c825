"""MLflow gets every number of a run once, under names that it permits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import logged
from helpers.packages import needs
from postgrad.observe.loggers.base import RunIdentity
from postgrad.observe.loggers.mlflow import MLflow, keys_of, metric_name

pytestmark = needs("mlflow", "alembic")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database for all tests here: MLflow takes seconds to create one."""
    variables = logged.mlflow_variables(tmp_path_factory.mktemp("mlflow"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables["MLFLOW_TRACKING_URI"]


def identity(folder: Path, id: str = "ab12") -> RunIdentity:
    """A run of the project that is named as the test's folder."""
    recipe = {"steps": 3, "data": {"sets": [{"path": "x" * 9000}], "max_len": 8}}
    return RunIdentity(folder, folder.name, f"name-{id}", id, 0, recipe)


def test_a_resumed_run_goes_on_behind_its_last_complete_step(tmp_path: Path, address: str) -> None:
    first = MLflow(identity(tmp_path))
    assert first.last == -1
    first.log(0, {"eval/accuracy": 0.25})
    first.log(1, {"loss": 0.5, "eval/accuracy": 0.5})
    killed = MLflow(identity(tmp_path))  # the first one never closed
    assert killed.last == 1
    killed.log(2, {"loss": 0.25})
    killed.close()
    assert MLflow(identity(tmp_path)).last == 2
    assert logged.mlflow(address, tmp_path.name) == {
        "name-ab12": {
            0: {"eval/accuracy": 0.25, "step": 0.0},
            1: {"loss": 0.5, "eval/accuracy": 0.5, "step": 1.0},
            2: {"loss": 0.25, "step": 2.0},
        }
    }


def test_a_step_that_a_kill_cut_is_logged_again(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More metrics than MLflow takes in one request; the kill comes between two of them."""
    logger = MLflow(identity(tmp_path))
    send, requests = logger._client.log_batch, list[int]()

    def once(*arguments: object, **named: object) -> None:
        requests.append(len(named["metrics"]))  # type: ignore[arg-type]
        if len(requests) > 1:
            raise KeyboardInterrupt
        send(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(logger._client, "log_batch", once)
    with pytest.raises(KeyboardInterrupt):
        logger.log(1, {f"metric/{n}": float(n) for n in range(1500)})
    assert requests == [1000, 501]
    assert MLflow(identity(tmp_path)).last == -1


def test_another_run_of_the_same_name_is_a_curve_of_its_own(tmp_path: Path, address: str) -> None:
    MLflow(identity(tmp_path)).log(1, {"loss": 1.0})
    other = MLflow(identity(tmp_path, "cd34"))
    assert other.last == -1
    other.log(1, {"loss": 2.0})
    losses = {
        name: steps[1]["loss"] for name, steps in logged.mlflow(address, tmp_path.name).items()
    }
    assert losses == {"name-ab12": 1.0, "name-cd34": 2.0}


def test_the_recipe_is_there_by_key_and_long_values_are_cut(tmp_path: Path, address: str) -> None:
    from mlflow.tracking import MlflowClient

    logger = MLflow(identity(tmp_path))
    params = MlflowClient(address).get_run(logger._run).data.params
    assert params["data.max_len"] == "8"
    assert len(params["data.sets"]) == 6000
    assert list(keys_of({"a": {"b": {"c": 1}, "d": None}})) == [("a.b.c", "1"), ("a.d", "None")]


def test_names_have_only_what_mlflow_permits() -> None:
    assert metric_name("eval/pass@4") == "eval/pass_at_4"
    assert metric_name("eval/org/name:train[:10]/accuracy") == "eval/org/name:train_:10_/accuracy"

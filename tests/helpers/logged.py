"""What loggers of others hold of a run, read with their own formats: {step: {metric: value}}."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

Steps = dict[int, dict[str, float]]
BLOCK, HEADER = 32768, 7


def tensorboard(run_dir: Path) -> Steps:
    """As TensorBoard's own reader draws it. A step that stands twice in a curve is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    steps_by_number: Steps = {}
    for tag in events.Tags()["scalars"]:
        for point in events.Scalars(tag):
            assert tag not in steps_by_number.setdefault(point.step, {}), (tag, point.step)
            steps_by_number[point.step][tag] = point.value
    return steps_by_number


def trackio(folder: Path, project: str) -> dict[str, Steps]:
    """Runs of a project's database. A step that stands twice is an error."""
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
    steps_by_run: dict[str, Steps] = {}
    for name, step, metrics in rows:
        assert step not in steps_by_run.setdefault(name, {}), (name, step)
        steps_by_run[name][step] = json.loads(metrics)
    return steps_by_run


def wandb_offline(run_dir: Path) -> list[tuple[str, Steps]]:
    """(run id, steps) of each process's files, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs_with_steps: list[tuple[str, Steps]] = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        steps: Steps = {}
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                step = int(items.pop("_step", record.history.step.num))
                values = {k: json.loads(v) for k, v in items.items() if not k.startswith("_")}
                assert step not in steps
                steps[step] = values
        runs_with_steps.append((path.stem.removeprefix("run-"), steps))
    return runs_with_steps


def mlflow_variables(folder: Path) -> dict[str, str]:
    """The environment in which MLflow keeps its runs in a database in `folder`, as its server does.
    Its small package insists on an address of a registry of models too, and asks it nothing.
    """
    return {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_REGISTRY_URI": "http://127.0.0.1:9",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def mlflow(address: str, project: str) -> dict[str, Steps]:
    """Runs of an experiment by their name. A step that stands twice in a curve is an error."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    runs: dict[str, Steps] = {}
    for run in client.search_runs([experiment.experiment_id]):
        steps = runs.setdefault(str(run.info.run_name), {})
        for name in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, name):
                assert name not in steps.setdefault(point.step, {}), (name, point.step)
                steps[point.step][name] = point.value
    return runs


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, as W&B writes one, up to where a kill cut it."""
    at, record = HEADER, b""  # the file has a header of its own, as long as a record's
    while at + HEADER <= len(data):
        if (rest := BLOCK - at % BLOCK) < HEADER:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        part = data[at + HEADER : at + HEADER + length]
        if kind == 0 or len(part) < length:
            return
        at += HEADER + length
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record

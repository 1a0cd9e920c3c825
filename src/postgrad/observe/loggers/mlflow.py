"""MLflow: a server or database, as MLFLOW_TRACKING_URI says."""

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from time import time
from typing import Any

from postgrad.observe.loggers.base import RunIdentity, Values

ID = "postgrad.id"  # the tag by which a resumed run finds its curve
STEP = "step"  # logged last in each batch, so a step that has it is complete
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # MLflow refuses larger requests
# A step waits for its request: by MLflow's own defaults a dead server holds it for four minutes.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


class MLflow:
    """Logs to the MLflow run that is tagged with the run's id, or creates it."""

    def __init__(self, run: RunIdentity) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        place = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(run.project)
        )
        earlier = self._client.search_runs([place], f"tags.`{ID}` = '{run.id}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            steps = self._client.get_metric_history(self._run, STEP)
            self.last = max((point.step for point in steps), default=-1)
            self._client.update_run(self._run, status="RUNNING")
            return
        self.last = -1
        self._run = self._client.create_run(place, run_name=run.name, tags={ID: run.id}).info.run_id
        params = [Param(name, value[:LONGEST_PARAM]) for name, value in keys_of(run.recipe)]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[at : at + MOST_PARAMS])

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        metrics = [Metric(metric_name(name), value, now, step) for name, value in values.items()]
        metrics.append(Metric(STEP, float(step), now, step))
        for at in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[at : at + MOST_METRICS])

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints, and --json needs stdout
            self._client.set_terminated(self._run)


def metric_name(name: str) -> str:
    """The name in characters that MLflow permits: pass@4 becomes pass_at_4."""
    return re.sub(r"[^\w./ :-]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a recipe with their tables' names before them, and their values as text."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield metric_name(prefix + name), str(value)

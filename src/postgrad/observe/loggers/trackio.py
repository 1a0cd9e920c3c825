"""trackio: its database is where TRACKIO_DIR says, else where trackio keeps all projects."""

import contextlib
import io

from postgrad.observe.loggers.base import RunIdentity, Values


class Trackio:
    """Logs to trackio. It finds a run again by its name, so the id is part of the name."""

    def __init__(self, run: RunIdentity) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it prints, and --json needs stdout
            self._run = trackio.init(
                project=run.project,
                name=f"{run.name}-{run.id}",
                resume="allow",
                config=dict(run.recipe),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._finish = trackio.finish
        self.last = self._run._next_step - 1  # the only place that says it

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()

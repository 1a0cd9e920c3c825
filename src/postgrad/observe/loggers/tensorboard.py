"""TensorBoard: event files in RUN_DIR/tensorboard."""

import time
from typing import Any

from postgrad.observe.loggers.base import RunIdentity, Values

FOLDER = "tensorboard"


class TensorBoard:
    """Writes one event for each step. After a resume a SessionLog.START event makes TensorBoard
    purge the steps that are logged again.
    """

    def __init__(self, run: RunIdentity) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        events: Any = event_pb2  # made at run time, without types
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        folder = run.directory / FOLDER
        held = folder.is_dir() and any(folder.iterdir())
        self.last = run.start if held else -1
        self._writer = EventFileWriter(str(folder))
        if held:
            start = events.SessionLog(status=events.SessionLog.START)
            for event in (
                events.Event(step=run.start + 1, file_version="brain.Event:2"),
                events.Event(step=run.start + 1, session_log=start),
            ):
                event.wall_time = time.time()
                self._writer.add_event(event)

    def log(self, step: int, values: Values) -> None:
        value_type = self._summary.Value
        entries = [value_type(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=entries)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # so that a kill loses nothing

    def close(self) -> None:
        self._writer.close()

"""TensorBoard: event files in RUN_DIR/tensorboard."""

import time

from postgrad.observe.loggers.base import RunIdentity, Values

FOLDER = "tensorboard"


class TensorBoard:
    """A step is one event with all its numbers. Steps after the one that a run goes on from are
    purged by a session's start, as TensorBoard calls it: it draws the new ones.
    """

    def __init__(self, run: RunIdentity) -> None:
        # protobuf makes these names when it is imported
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder = run.directory / FOLDER
        held = folder.is_dir() and any(folder.iterdir())
        self.last = run.start if held else -1
        self._writer = EventFileWriter(str(folder))
        if held:
            start = SessionLog(status=SessionLog.START)
            for event in (
                Event(step=run.start + 1, file_version="brain.Event:2"),
                Event(step=run.start + 1, session_log=start),
            ):
                event.wall_time = time.time()
                self._writer.add_event(event)

    def log(self, step: int, values: Values) -> None:
        one = self._summary.Value
        summary = self._summary(value=[one(tag=k, simple_value=v) for k, v in values.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # a killed run has what it told

    def close(self) -> None:
        self._writer.close()

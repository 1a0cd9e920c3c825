"""Engines that go as soon as they can: `rollout.schedule` "free", and "replay" of what happened.

Beside the learner all samples under way go on, those of later steps too, until the learner has
finished its update: then the engines are cut, wherever their samples are, and get the new weights.
So which weights write which token depends on the clock. What decides about it is little, and is
recorded: after how many decode steps each engine was cut, and at which of them its tickets came.
A replay holds each engine to that, and has the same bits.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError, UsageError
from postgrad.core.members import has_lines, open_lines
from postgrad.core.untrusted import parse_json
from postgrad.rollout.ahead import OverlappedSource, Progress
from postgrad.rollout.engine import Engine
from postgrad.rollout.pending import PendingArrays
from postgrad.rollout.sampling import Starved
from postgrad.rollout.source import LiveSource, Paused, Sampled, State

FILE = "schedule.jsonl"


@dataclass(frozen=True, slots=True)
class Track:
    """What one engine did from one cut to the next, by decode steps since the first of the two."""

    decode_steps: int  # until the second
    response_tokens: int
    arrivals: Mapping[int, tuple[int, ...]]  # decode step -> tickets that came before it, in order
    lost: bool = False  # its process died meanwhile, so its samples went on elsewhere

    def to_json(self) -> dict[str, Any]:
        """Its part of a line of schedule.jsonl."""
        return {
            "decode_steps": self.decode_steps,
            "response_tokens": self.response_tokens,
            "arrivals": [[step, list(tickets)] for step, tickets in self.arrivals.items()],
            "lost": self.lost,
        }

    @classmethod
    def from_json(cls, data: Any) -> "Track":
        """The track of `to_json`; raises ValueError where `data` is not one."""
        fields = cast(dict[str, Any], data) if isinstance(data, dict) else {}
        steps, tokens, arrivals, lost = (
            fields.get(name) for name in ("decode_steps", "response_tokens", "arrivals", "lost")
        )
        if not (_counts([steps, tokens]) and isinstance(arrivals, list) and isinstance(lost, bool)):
            raise ValueError("an engine needs decode_steps, response_tokens, arrivals and lost")
        came: dict[int, tuple[int, ...]] = {}
        for entry in cast(list[Any], arrivals):
            pair = cast(list[Any], entry) if isinstance(entry, list) else []
            if len(pair) != 2 or not _counts(pair[:1]) or not _counts(pair[1]):
                raise ValueError("arrivals needs pairs of a decode step and a list of tickets")
            came[pair[0]] = tuple(pair[1])
        return cls(cast(int, steps), cast(int, tokens), came, lost)


def _counts(values: Any) -> bool:
    """Whether these are numbers of things."""
    return isinstance(values, list) and all(
        type(value) is int and value >= 0 for value in cast(list[Any], values)
    )


class FreeEngine(Engine, Protocol):
    """An engine of processes that can be stopped between two tokens."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def follow(self, tracks: Sequence[Track] | None) -> None:
        """Until the next cut nobody waits for anybody: `completed` lets every process go on,
        whoever is awaited, and returns [] where it is stopped or nothing may go on. tracks: of each
        process, which it repeats and then stands still; None: it goes as far as it comes.
        """
        ...

    def stop(self) -> None:
        """From any thread: all processes stand still after the token that they are at."""
        ...

    def tracks(self) -> list[Track]:
        """What each process did from `follow` to the cut after it."""
        ...


class RecordedSchedule:
    """The schedule of a run: its schedule.jsonl.

    Raises UsageError where there is no such file, or where it is not one.
    """

    def __init__(self, path: str | Path) -> None:
        """path: a run directory, or the file."""
        location = Path(path)
        self.path = location / FILE if location.is_dir() else location
        if not has_lines(self.path):
            raise UsageError(
                f"rollout.schedule_path: no file {self.path}; give the directory of a run with "
                'rollout.schedule = "free"'
            )
        self._steps: dict[int, list[Track]] = {}
        with open_lines(self.path) as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = parse_json(raw)
                    step, engines = line["step"], line["engines"]
                    if not _counts([step]) or not isinstance(engines, list):
                        raise ValueError("a line needs step and engines")
                    self._steps[step] = [Track.from_json(data) for data in cast(list[Any], engines)]
                except (KeyError, TypeError, ValueError) as error:
                    raise UsageError(
                        f"{self.path}:{number}: not a step of a schedule: {error!r}"
                    ) from error

    def tracks(self, step: int, engines: int) -> list[Track]:
        """Of each engine in a step. Raises RunError where the step was not recorded, or cannot be
        repeated; UsageError where there were more or fewer engines.
        """
        tracks = self._steps.get(step)
        if tracks is None:
            raise RunError(
                f"{self.path} has no step {step} (its last is {max(self._steps, default=0)}): "
                'replay fewer steps, or go on from here with rollout.schedule = "free"'
            )
        if len(tracks) != engines:
            raise UsageError(
                f"{self.path} is of {len(tracks)} rollout workers, and this run has {engines}: "
                "cluster.rollout.workers has to be the same"
            )
        lost = [str(number) for number, track in enumerate(tracks) if track.lost]
        if lost:
            raise RunError(
                f"{self.path}: rollout worker {', '.join(lost)} died in step {step}, which cannot "
                'be repeated; rollout.source = "replay" trains on the samples of such a run'
            )
        return tracks


class FreeSource(OverlappedSource):
    """A live source that samples while the policy learns, and is cut where the learner is ready."""

    def __init__(
        self,
        live: LiveSource,
        thread: ThreadPoolExecutor,
        progress: Progress,
        engine: FreeEngine,
        recorded: RecordedSchedule | None = None,
    ) -> None:
        """engine: of `live`. recorded: what is repeated."""
        super().__init__(live, thread, progress)
        self._engine = engine
        self._recorded = recorded
        self._step = 0  # of the run
        self._expected: Sequence[Track] | None = None  # of the step
        self._tickets: list[int] = []  # that the step settled

    def pause(self) -> Paused:
        """Source.pause, at once: the engine is cut where it is, or in a replay where it was. The
        result has the line of schedule.jsonl. Raises RunError where a replay did something else
        than was recorded.
        """
        if self._expected is None:
            self._engine.stop()
        paused = super().pause()
        tracks = self._engine.tracks()
        if self._expected is not None:
            self._require_same(self._expected, tracks)
        line = {
            "step": self._step,
            "version": self._step - 1,
            "tickets": self._tickets,
            "engines": [track.to_json() for track in tracks],
        }
        return replace(paused, schedule=line)

    def _take(self, step: int, cursor: Cursor, state: State, pending: PendingArrays) -> Sampled:
        self._expected = None
        if self._recorded is not None:
            self._expected = self._recorded.tracks(step, self._engine.size)
        self._engine.follow(self._expected)
        self._step = step
        try:
            sampled = super()._take(step, cursor, state, pending)
        except Starved:
            if self._expected is not None:  # a track ends too early: the replay does otherwise
                self._require_same(self._expected, self._engine.tracks())
            raise
        self._tickets = [group.prompt.ticket for group in sampled.all]
        return sampled

    def _sample_ahead(self) -> None:
        self._live.sample_on()

    def _cut(self) -> Paused:
        if self._expected is not None:  # in the last step of a run too, which does not go on
            self._live.sample_on()
        return super()._cut()

    def _require_same(self, expected: Sequence[Track], tracks: Sequence[Track]) -> None:
        assert self._recorded is not None
        for number, (there, here) in enumerate(zip(expected, tracks, strict=True)):
            if there != here:
                raise RunError(
                    f"{self._recorded.path}: rollout worker {number} wrote {there.response_tokens} "
                    f"tokens in {there.decode_steps} decode steps of step {self._step}, and "
                    f"{here.response_tokens} in {here.decode_steps} in this replay: it needs the "
                    "recipe, weights, slots, threads and kind of processor of the recorded run"
                )

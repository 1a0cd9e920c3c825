"""All sentinels of a run: who looks, what is remembered, and what follows when one speaks."""

from collections.abc import Mapping
from typing import Any, Protocol

from postgrad.checkpoint.schema import require
from postgrad.core.errors import RunError
from postgrad.observe.sentinels.base import Action, Look, Seen, Sentinel, SentinelStop
from postgrad.observe.settings import SentinelSettings
from postgrad.observe.sinks import Logs


class Tells(Protocol):
    """The part of a console that sentinels need."""

    def warn(self, text: str) -> None:
        """Tell a person."""
        ...

    def spoken(self, name: str, text: str | None) -> None:
        """What sentinel `name` says now; None: nothing any more."""
        ...


class Sentinels:
    """Shows every look's numbers to every sentinel, records what they say, and acts.

    A sentinel that goes on speaking has one event and one warning, at its first step, and one event
    when it falls silent. What it remembers is in the state that `look` gives back: {name: {"since":
    step or None, "memory": ...}}.
    """

    def __init__(self, settings: SentinelSettings, logs: Logs, console: Tells) -> None:
        self._logs = logs
        self._console = console
        self._sentinels = settings.looking()
        self._stopping: str | None = None

    def look(
        self, step: int, seen: Seen, state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The state after a look at the numbers of a step, or of an evaluation after it, and the
        metrics sentinel/NAME. `stop` then says whether the run may go on.
        """
        after, metrics = dict(state), dict[str, float]()
        for name, sentinel in self._sentinels.items():
            known = state.get(name, {"since": None, "memory": {}})
            found = sentinel.look(seen, known["memory"])
            if found is None:
                continue
            if found.value is not None:
                metrics[f"sentinel/{name}"] = found.value
            since = self._hear(name, sentinel, found, step, known["since"])
            after[name] = {"since": since, "memory": found.after}
        return after, metrics

    def require(self, state: Mapping[str, Any]) -> None:
        """Raises RunError where what a checkpoint says of a sentinel is not what that remembers."""
        for name, sentinel in self._sentinels.items():
            if name in state:
                try:
                    require(sentinel.remembers, state[name]["memory"])
                except ValueError as error:
                    raise RunError(
                        f"state.json of the checkpoint: sentinels.{name}.memory: {error}; resume "
                        "from a copy of the run that nobody changed"
                    ) from error

    def at_once(self, step: int, seen: Seen) -> None:
        """Before anything rests on these numbers: a sentinel that stops raises at once."""
        self.look(step, seen, {})
        self.stop()

    def stop(self) -> None:
        """Raises SentinelStop where the last looks ask for it."""
        if self._stopping is not None:
            raise SentinelStop(self._stopping)

    def _hear(
        self, name: str, sentinel: Sentinel, found: Look, step: int, since: int | None
    ) -> int | None:
        """The step since which it speaks, None while it is silent."""
        message, action = found.message, sentinel.action
        if action != "observe":
            self._console.spoken(name, message)
        if message is None:
            if since is not None:
                text = f"sentinel {name} has fallen silent; it had spoken since step {since}"
                self._logs.event("sentinel_silent", text, sentinel=name, step=step, since=since)
            return None
        if action == "stop" and self._stopping is None:
            self._stopping = f"sentinel {name}: {message}"
        if since is None:
            self._speak(name, action, message, step)
        return step if since is None else since

    def _speak(self, name: str, action: Action, message: str, step: int) -> None:
        self._logs.event("sentinel", message, sentinel=name, action=action, step=step)
        if action == "warn":
            self._console.warn(f"sentinel {name}: {message}")

"""Runs all sentinels on a step's metrics, keeps what they remember, and acts on their messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from postgrad.checkpoint.schema import require
from postgrad.core.errors import RunError
from postgrad.core.records import ScoredGroup
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.observe.sentinels.base import Action, Look, Seen, Sentinel, SentinelStop
from postgrad.observe.sentinels.entropy import sampled_entropy
from postgrad.observe.sentinels.no_gradient import stuck
from postgrad.observe.sentinels.repetition import repeated
from postgrad.observe.sentinels.verifier import failed
from postgrad.observe.settings import SentinelSettings
from postgrad.observe.sinks import Logs


class Tells(Protocol):
    """The methods of a console that sentinels use."""

    def warn(self, text: str) -> None:
        """Prints a warning for people."""
        ...

    def spoken(self, name: str, text: str | None) -> None:
        """Shows the message of the sentinel `name` until it is None."""
        ...


class Sentinels:
    """Passes metrics to every sentinel, records their messages as events, warns and stops.

    A sentinel that speaks for several steps has one event and one warning, at the first of them,
    and one event when it falls silent. The state that `look` returns is {name: {"since": first step
    of the message or None, "memory": what the sentinel remembers}}.
    """

    def __init__(self, settings: SentinelSettings, logs: Logs, console: Tells) -> None:
        self._logs = logs
        self._console = console
        self._sentinels = settings.looking()
        self._stopping: str | None = None

    def look(
        self, step: int, seen: Seen, state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Looks at the metrics of a step, or of an evaluation after it.

        Returns the new state and the metrics sentinel/NAME. Call `stop` then.
        """
        after, metrics = dict(state), dict[str, float]()
        for name, sentinel in self._sentinels.items():
            remembered = state.get(name, {"since": None, "memory": {}})
            look = sentinel.look(seen, remembered["memory"])
            if look is None:
                continue
            if look.value is not None:
                metrics[f"sentinel/{name}"] = look.value
            since = self._hear(name, sentinel, look, step, remembered["since"])
            after[name] = {"since": since, "memory": look.after}
        return after, metrics

    def require(self, state: Mapping[str, Any]) -> None:
        """Raises RunError where a memory in a checkpoint's state has not its sentinel's type."""
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
        """Looks at metrics without state, and raises SentinelStop before the run uses them."""
        self.look(step, seen, {})
        self.stop()

    def stop(self) -> None:
        """Raises SentinelStop where a sentinel with the action "stop" has spoken."""
        if self._stopping is not None:
            raise SentinelStop(self._stopping)

    def _hear(
        self, name: str, sentinel: Sentinel, look: Look, step: int, since: int | None
    ) -> int | None:
        """Acts on a look. Returns the step since which the sentinel speaks, None while silent."""
        message, action = look.message, sentinel.action
        if action != "observe":
            self._console.spoken(name, message)
        if message is None:
            if since is not None:
                text = f"sentinel {name} is silent again; it had fired since step {since}"
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


def of_samples(
    groups: Sequence[ScoredGroup], batch: RolloutBatch, *, greedy: bool
) -> dict[str, float]:
    """Metrics of all the samples of a step; batch: those that were kept. greedy: sample 0 of each
    prompt was drawn at temperature 0.
    """
    return {
        **sampled_entropy(batch, greedy=greedy),
        **stuck(groups),
        **repeated(groups),
        **failed(groups),
    }

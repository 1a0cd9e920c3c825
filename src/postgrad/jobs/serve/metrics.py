"""What a server has done, as Prometheus reads it (text exposition format 0.0.4)."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

PREFIX = "postgrad_reward_"
_HELP = {
    "requests_total": ("counter", "Requests answered, by path and status."),
    "sequences_total": ("counter", "Sequences scored."),
    "tokens_total": ("counter", "Tokens scored."),
    "batches_total": ("counter", "Calls of the model."),
    "request_seconds": ("summary", "From a request's headers to its answer, of /score."),
    "queue_seconds": ("summary", "What a request waited before its last sequence was scored."),
    "model_seconds": ("summary", "What a call of the model lasted."),
    "queue_sequences": ("gauge", "Sequences that wait for the model."),
    "queue_tokens": ("gauge", "Tokens that wait for the model."),
    "open_requests": ("gauge", "Requests under way."),
}


_LABELLED = ("requests_total",)  # not there before they count something


class Metrics:
    """Counters and sums; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {  # name -> labels -> how often
            name: Counter() for name, (kind, _) in _HELP.items() if kind == "counter"
        }
        self._times = {name: (0.0, 0) for name, (kind, _) in _HELP.items() if kind == "summary"}
        for name, counts in self._counts.items():
            if name not in _LABELLED:
                counts[""] = 0

    def add(self, name: str, n: int = 1, **labels: str) -> None:
        """Count n more of `name`. Labels are words of this package, never of a request."""
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        with self._lock:
            self._counts[name][text] += n

    def took(self, name: str, seconds: float) -> None:
        """One more of a summary."""
        with self._lock:
            total, times = self._times[name]
            self._times[name] = (total + seconds, times + 1)

    def total(self, name: str) -> int:
        """A counter's sum over its labels."""
        with self._lock:
            return self._counts[name].total()

    def mean(self, name: str) -> float:
        """Of a summary, in seconds; 0 before its first."""
        with self._lock:
            total, times = self._times[name]
            return total / times if times else 0.0

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything, one family after the other."""
        with self._lock:
            return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Mapping[str, float]) -> Iterator[str]:
        for name, (kind, meaning) in _HELP.items():
            yield f"# HELP {PREFIX}{name} {meaning}"
            yield f"# TYPE {PREFIX}{name} {kind}"
            if kind == "gauge":
                yield f"{PREFIX}{name} {gauges[name]!r}"
            elif kind == "summary":
                total, times = self._times[name]
                yield f"{PREFIX}{name}_sum {total!r}"
                yield f"{PREFIX}{name}_count {times}"
            else:
                for labels, n in sorted(self._counts[name].items()):
                    yield f"{PREFIX}{name}{{{labels}}} {n}" if labels else f"{PREFIX}{name} {n}"

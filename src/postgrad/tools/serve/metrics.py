"""What a server has done, as Prometheus reads it (text exposition format 0.0.4)."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Summary,
    disable_created_metrics,
    generate_latest,
)

PREFIX = "postgrad_reward_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one server, in a registry of its own; safe to use from several threads."""

    def __init__(self) -> None:
        disable_created_metrics()  # the page has no time series of when each metric began
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered, by path and status.")
        self.sequences = self._counter("sequences", "Sequences scored.")
        self.tokens = self._counter("tokens", "Tokens scored.")
        self.batches = self._counter("batches", "Calls of the model.")
        self.request_seconds = self._summary(
            "request_seconds", "From a request's headers to its answer, of /score."
        )
        self.queue_seconds = self._summary(
            "queue_seconds", "What a request waited before its last sequence was scored."
        )
        self.model_seconds = self._summary("model_seconds", "What a call of the model lasted.")
        self.queue_sequences = self._gauge("queue_sequences", "Sequences that wait for the model.")
        self.queue_tokens = self._gauge("queue_tokens", "Tokens that wait for the model.")
        self.open_requests = self._gauge("open_requests", "Requests under way.")

    def count_answer(self, path: str, status: int) -> None:
        """One more request that was answered. path: a word of this package, never of a request."""
        self.requests.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        labels = ["path", "status"] if name == "requests" else []
        return Counter(PREFIX + name, meaning, labels, registry=self._registry)

    def _summary(self, name: str, meaning: str) -> Summary:
        return Summary(PREFIX + name, meaning, registry=self._registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(PREFIX + name, meaning, registry=self._registry)


def total(counter: Counter) -> int:
    """The sum of a counter over its labels."""
    samples = [sample for family in counter.collect() for sample in family.samples]
    return int(sum(sample.value for sample in samples))

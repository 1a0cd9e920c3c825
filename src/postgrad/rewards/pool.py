"""Pools of killable workers: jobs in, outcomes out, whatever a verifier does.

`Lanes` has a `Pool` for each kind of verifier: those that wait for a server do not hold up those
that compute, and third-party ones that may run a sample's text as code have sandboxed workers.

Each worker runs one batch of jobs at a time and answers job by job, so that the pool knows which
sample is running. When a worker is killed only that sample is affected: the rest of its batch goes
back to the head of the queue. When a job fails:

- CPU time over the limit: a failure with the cause `cpu_time`. It is not measured in wall-clock
  time, so a busy host changes no score.
- Wall-clock time over the limit, or a crash: tried once more, alone in a fresh worker, then a
  failure with the cause `wall_clock` or `crash`.

There is no thread: everything happens inside `poll`, and only time between close polls counts as
wall-clock time of a score.
"""

import selectors
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from postgrad.core.errors import RunError, UsageError
from postgrad.rewards import protocol
from postgrad.rewards.learned import AskedHere
from postgrad.rewards.process import WorkerProcess, environment
from postgrad.rewards.protocol import JobEnd, Returned, ScoreJob, VerifierTraits
from postgrad.rewards.registry import controller_verifier
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rewards.verifier import Verifier

Lane = Literal["computing", "waiting", "sandboxed"]

WORKER_BYTES = 33_000_000  # resident, of a worker with postgrad's own imports; measured
START_SECONDS = 120.0  # for a worker's imports
_LONGEST_GAP = 0.5  # seconds between two polls that count at most as watched
_JUDGE_SECONDS = 0.1  # how often a long score's CPU time is looked up
_TICK = 0.05  # seconds of one select
_MOST, _LEAST = 64, 1  # jobs of a batch
_SHORT_BATCH, _LONG_BATCH = 0.02, 0.1  # seconds; batches outside of these double or halve


def lane(reward: RewardSettings, verifier: Verifier) -> Lane:
    """Which workers run a verifier: the recipe's `sandbox` and `waits` override its own."""
    if verifier.sandboxed if reward.sandbox is None else reward.sandbox:
        return "sandboxed"
    return "waiting" if (verifier.waits if reward.waits is None else reward.waits) else "computing"


def workers_by_lane(
    lanes: Sequence[Lane], scoring: ScoringSettings
) -> Iterator[tuple[Lane, list[int], int]]:
    """(name, components, number of workers) of each lane that has components.

    lanes: the lane of each component, by its index.
    """
    for name in get_args(Lane):
        components = [component for component, place in enumerate(lanes) if place == name]
        if components:
            workers = scoring.waiting_workers if name == "waiting" else scoring.workers
            yield name, components, workers


class Lanes:
    """A Pool for each lane that has components, with the methods of one pool.

    lanes: the lane of each of `rewards`. Close it, or use `with`.
    """

    def __init__(
        self, rewards: Sequence[RewardSettings], lanes: Sequence[Lane], scoring: ScoringSettings
    ) -> None:
        self._components = len(rewards)
        self._pools: list[Pool] = []
        self._selector = selectors.DefaultSelector()
        self._way: dict[int, tuple[Pool, int]] = {}  # component -> its pool, its number there
        self._halted = False
        for name, components, workers in workers_by_lane(lanes, scoring):
            pool = Pool([rewards[c] for c in components], workers, sandboxed=name == "sandboxed")
            self._pools.append(pool)
            self._selector.register(pool, selectors.EVENT_READ)
            self._way |= {component: (pool, place) for place, component in enumerate(components)}

    def __enter__(self) -> "Lanes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, jobs: Sequence[ScoreJob]) -> None:
        """Queue each job at the pool of its component; keys must differ."""
        for pool in self._pools:
            routes = [(job, self._way[job.component]) for job in jobs]
            pool.submit(
                replace(job, component=place) for job, (owner, place) in routes if owner is pool
            )

    def traits(self) -> list[VerifierTraits]:
        """Of the verifier of each component; waits for workers."""
        by_pool = {id(pool): pool.traits() for pool in self._pools}
        routes = [self._way[component] for component in range(self._components)]
        return [by_pool[id(pool)][place] for pool, place in routes]

    def poll(self, wait: bool) -> list[JobEnd]:
        """The jobs that ended since the last call; with `wait`, at least one if any is open. Raises
        RunError where `halt` was called.
        """
        ended = [end for pool in self._pools for end in pool.poll(wait=False)]
        while wait and not ended and any(pool.is_busy() for pool in self._pools):
            if self._halted:
                raise RunError("scoring was ended")
            self._selector.select(_TICK)
            ended = [end for pool in self._pools for end in pool.poll(wait=False)]
        return ended

    def halt(self) -> None:
        """From any thread: a `poll` that waits ends, and none waits any more."""
        self._halted = True

    def close(self) -> None:
        """Kill and reap every worker; open jobs are forgotten."""
        self._selector.close()
        for pool in self._pools:
            pool.close()


def worker_bytes(rewards: Sequence[RewardSettings], scoring: ScoringSettings) -> int:
    """Resident bytes of all of a run's workers, without what third-party verifiers import.

    rewards: with the rollout's settings filled in (registry.for_rollout).
    """
    every = [(reward, controller_verifier(reward)) for reward in rewards]
    worked = [
        (reward, verifier) for reward, verifier in every if not isinstance(verifier, AskedHere)
    ]
    imports = [verifier.imports_bytes for _, verifier in worked]
    lanes: list[Lane] = [lane(reward, verifier) for reward, verifier in worked]
    return sum(
        workers * (WORKER_BYTES + sum(imports[component] for component in components))
        for _, components, workers in workers_by_lane(lanes, scoring)
    )


class Pool:
    """Runs jobs for the components `rewards` in `workers` processes. Close it, or use `with`.

    sandboxed: the processes put a sandbox around themselves (sandbox/enclosure.py).
    The thread that creates the pool must live as long as it: Linux kills a worker with its thread.
    """

    def __init__(
        self, rewards: Sequence[RewardSettings], workers: int, sandboxed: bool = False
    ) -> None:
        self._hello = protocol.hello(rewards, sandboxed)
        self._environment = environment(rewards, sandboxed)
        self._queue: deque[ScoreJob] = deque()
        self._ended: list[JobEnd] = []
        self._selector = selectors.DefaultSelector()
        self._batch = 8
        self._sent: dict[int, float] = {}  # pid -> when its batch was sent
        self._looked = time.monotonic()
        self._workers: dict[WorkerProcess, None] = {}  # in the order in which they were started
        for _ in range(workers):
            self._start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, jobs: Iterable[ScoreJob]) -> None:
        """Queue jobs and hand them to idle workers. Keys must differ."""
        self._queue.extend(jobs)
        self._hand_out()

    def traits(self) -> list[VerifierTraits]:
        """Of the verifier of each component; waits for a worker.

        Raises UsageError where a verifier cannot be built or prepared.
        """
        while True:
            for worker in self._workers:
                if worker.traits is not None:
                    return worker.traits
            self._look(_TICK)

    def poll(self, wait: bool) -> list[JobEnd]:
        """The jobs that have ended since the last call; with `wait`, at least one if any is open.

        Raises RunError where no worker can be started any more.
        """
        self._look(0.0)
        while wait and not self._ended and self.is_busy():
            self._look(_TICK)
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        """A descriptor for `select`: readable when a poll would find something new."""
        return self._selector.fileno()

    def close(self) -> None:
        """Kill and reap every worker; open jobs are forgotten."""
        for worker in list(self._workers):
            self._forget(worker)
            worker.end()
        self._selector.close()

    def is_busy(self) -> bool:
        """Whether a job is open."""
        return bool(self._queue) or any(worker.jobs or worker.first for worker in self._workers)

    # Workers come and go.

    def _start(self, first: ScoreJob | None = None) -> None:
        worker = WorkerProcess(self._hello, self._environment)
        self._workers[worker] = None
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        self._selector.register(worker.stderr, selectors.EVENT_READ, worker)
        worker.first = first
        self._write(worker)

    def _forget(self, worker: WorkerProcess) -> None:
        self._workers.pop(worker, None)
        self._sent.pop(worker.pid, None)
        for descriptor in (worker.stdin, worker.stdout, worker.stderr):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    def _replace(self, worker: WorkerProcess, cause: str, message: str, grace: float = 0.0) -> None:
        """Ends a worker whose running job has failed and starts another; its other jobs are kept.

        cause: "crash", "cpu_time" or "wall_clock". grace: see WorkerProcess.end.
        """
        printed = worker.printed()
        self._forget(worker)
        ending = worker.end(grace)
        last_words = f"; it printed: {printed[-300:]}" if printed else ""
        if worker.traits is None:
            raise RunError(
                f"a reward worker {ending} before it was ready{last_words}"
                if cause == "crash"
                else f"a reward worker was not ready after {START_SECONDS:g} s{last_words}"
            )
        failed = worker.jobs.popleft() if worker.jobs else None
        self._queue.extendleft(reversed(worker.jobs))
        if failed is None:
            self._start()
        elif failed.second or cause == "cpu_time":
            if cause == "crash":
                message = f"the worker {ending}{message}{last_words}"
            self._ended.append(JobEnd(failed.key, cause=cause, message=message))
            self._start()
        else:
            failed.second = True
            self._start(failed)
        self._hand_out()

    # What happens at every look.

    def _look(self, timeout: float) -> None:
        events = self._selector.select(timeout)
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, _LONGEST_GAP), now
        for worker in self._workers:  # before an answer starts the clock of the next job
            worker.observed += gap
        for ready, _ in events:
            worker: WorkerProcess = ready.data
            if worker not in self._workers:  # replaced a moment ago
                continue
            if ready.fd == worker.stdin:
                self._write(worker)
            elif ready.fd == worker.stdout:
                self._read(worker)
            elif not worker.read_printed():
                self._selector.unregister(worker.stderr)
        for worker in list(self._workers):
            self._judge(worker)
        self._hand_out()

    def _write(self, worker: WorkerProcess) -> None:
        unwritten = worker.write()
        registered = worker.stdin in self._selector.get_map()
        if unwritten and not registered:
            self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        elif registered and not unwritten:
            self._selector.unregister(worker.stdin)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            answers, ended = worker.read()
            for answer in answers:
                self._take(worker, answer)
        except (ValueError, KeyError):
            self._replace(worker, "crash", ": a verifier wrote on the pipe of its scores")
            return
        if not worker.jobs:
            self._adapt(worker)
        if ended:
            self._replace(worker, "crash", "", grace=1.0)

    def _take(self, worker: WorkerProcess, answer: dict[str, Any]) -> None:
        if "refused" in answer:
            raise UsageError(answer["refused"])
        if "ready" in answer:
            traits = [VerifierTraits(*each) for each in answer["ready"]]
            worker.became_ready(traits, answer["cpu"])
            if worker.first is not None:
                worker.send([worker.first])
                worker.first = None
                self._write(worker)
            return
        job, seconds = worker.finished(answer["key"], answer["cpu"])
        if seconds > job.cpu_seconds:
            end = JobEnd(job.key, cause="cpu_time", message=_over_cpu(job))
        elif "error" in answer:
            end = JobEnd(job.key, cause=answer["cause"], message=answer["error"])
        else:
            end = JobEnd(job.key, Returned(answer["scores"], answer["text"]))
        self._ended.append(end)

    def _judge(self, worker: WorkerProcess) -> None:
        if worker.traits is None:
            if worker.observed > START_SECONDS:
                self._replace(worker, "wall_clock", "")
            return
        if not worker.jobs:
            return
        job = worker.jobs[0]
        late = worker.observed > job.wall_seconds
        if not late and worker.observed - worker.judged < _JUDGE_SECONDS:
            return
        worker.judged = worker.observed
        dead, used = worker.is_dead(), worker.cpu_of_running()
        if worker.has_answered():  # since it was read, so what it uses now may be another job's
            self._read(worker)
            if worker not in self._workers or not worker.jobs or worker.jobs[0] is not job:
                return
        if dead:
            self._replace(worker, "crash", "")
        elif used > job.cpu_seconds:
            self._replace(worker, "cpu_time", _over_cpu(job))
        elif late:
            self._replace(worker, "wall_clock", _over_wall(job))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.traits is None or worker.jobs:
                continue
            share = -(-len(self._queue) // len(self._workers))
            jobs = [self._queue.popleft() for _ in range(min(self._batch, share))]
            worker.send(jobs)
            self._sent[worker.pid] = time.monotonic()
            self._write(worker)

    def _adapt(self, worker: WorkerProcess) -> None:
        """Adapts the batch size: large enough for little overhead, small enough to balance load."""
        sent = self._sent.pop(worker.pid, None)
        if sent is None:
            return
        seconds = time.monotonic() - sent
        if seconds < _SHORT_BATCH:
            self._batch = min(_MOST, 2 * self._batch)
        elif seconds > _LONG_BATCH:
            self._batch = max(_LEAST, self._batch // 2)


def _over_cpu(job: ScoreJob) -> str:
    return f"used more than {job.cpu_seconds:g} s of CPU time{_for_several(job)}"


def _over_wall(job: ScoreJob) -> str:
    return f"lasted more than {job.wall_seconds:g} s of wall-clock time{_for_several(job)}"


def _for_several(job: ScoreJob) -> str:
    samples = len(job.rollouts or ())
    return f" for the {samples} samples of a group" if samples > 1 else ""

"""A training loop that stands still between rounds.

Trainers run to their end and cannot be asked for one step. So a loop runs in a thread of its own,
and what it calls at the end of a step waits there until the next round is asked for: the loop is
the product's own, and nothing of it runs between two rounds.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping

Counts = Mapping[str, int]
Ended = Callable[[Counts], None]


class Rounds:
    """Call it for one round; returns the counts of the work done.

    loop: runs for ever, and calls what it is given at the end of every step with the counts. It
    begins, and loads, in the first round, which the harness does not count.
    """

    def __init__(self, loop: Callable[[Ended], None]) -> None:
        self._loop = loop
        self._asked = threading.Semaphore(0)
        self._answers: queue.SimpleQueue[Counts | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def __call__(self) -> Counts:
        if not self._thread.is_alive():
            self._thread.start()
        self._asked.release()
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self) -> None:
        self._asked.acquire()
        try:
            self._loop(self._ended)
            raise RuntimeError("the training loop has come to its end")
        except BaseException as error:  # noqa: BLE001  # told to whoever asked for the round
            self._answers.put(error)

    def _ended(self, counts: Counts) -> None:
        self._answers.put(counts)
        self._asked.acquire()


class Fastest:
    """The quickest of several ways to do the same rounds; call it for one round.

    Each way is made and tried in the first call: one round to warm up and one that is timed, in
    CPU time. `chosen` is its name afterwards. It is made anew, so that its rounds begin where the
    other side's do.
    """

    def __init__(self, ways: Mapping[str, Callable[[], Callable[[], Counts]]]) -> None:
        self._ways = ways
        self._round: Callable[[], Counts] | None = None
        self.chosen = ""
        self.seconds: dict[str, float] = {}

    def __call__(self) -> Counts:
        if self._round is None:
            self._round = self._choose()
        return self._round()

    def _choose(self) -> Callable[[], Counts]:
        for name, make in self._ways.items() if len(self._ways) > 1 else ():
            candidate = make()
            candidate()
            began = time.process_time()
            candidate()
            self.seconds[name] = time.process_time() - began
        self.chosen = min(self._ways, key=lambda name: self.seconds.get(name, 0.0))
        return self._ways[self.chosen]()

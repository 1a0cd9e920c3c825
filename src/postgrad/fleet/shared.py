"""A rollout engine of several processes on a cluster, each of which may die and is replaced alone.

Tickets are dealt in turn. What a process samples is a list of turns: the requests that came since
its last answer, then its next completions. A turn begins when all requests that follow from the
turn before have come, so what shares a batch depends on tickets, samples and token counts alone,
however long the other processes take: completions come as they come, and have the same bits. Where
only some tickets are awaited, a process stops after the turn that ends the last of its awaited
samples, so a cut finds it at the same token in every run.

A process that dies is started again beside the others. The built-in engine then repeats its turns
since it was idle, and gives the bits that it would have given. For other engines, where weights
came meanwhile, and where processes may come later, the open samples are asked again from their
beginning, of the others if there are any. A sample is taken once. One that dies after a turn and
before a cut, or in a thread that cannot ask the policy, has its samples written again from where
they were cut last.

Processes may come later and leave (cluster.rollout.least). One that the cluster has room for while
the run goes on joins at the next publish: it gets weights there, and tickets are dealt to it from
then on. One whose place is gone leaves, and joins again in the same way. Whatever process samples a
ticket draws the same random numbers; its logprobs are the same up to the rounding of products that
other samples share.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.cluster.workers import Workers
from postgrad.core.errors import RunError, WorkerLost
from postgrad.core.process import Handle
from postgrad.core.records import Logprobs, PlacedImage
from postgrad.fleet.members import NO_WORK, TITLE, EngineLauncher, Member, Roster, TurnAnswer
from postgrad.fleet.pacing import FreePace, TurnPace
from postgrad.fleet.publishing import RankPublisher
from postgrad.fleet.remote import RankedRole, RankedWeights
from postgrad.observe.sinks import Logs
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sent,
    WeightHandover,
    in_order,
)
from postgrad.rollout.free import Track
from postgrad.rollout.stats import EngineStats, agreed
from postgrad.rollout.transport.route import Stated

Images = Sequence[tuple[PlacedImage, ...]]
# What `logprobs` was asked, and its answer.
Probe = tuple[tuple[Sequence[NDArray[np.int32]], float, Images], list[Logprobs]]


class SharedEngine:
    """The Engine protocol over processes with one engine each, all with the same weights."""

    def __init__(
        self,
        launcher: EngineLauncher,
        members: Sequence[Workers],
        dtype: str,
        *,
        exact: bool,
        most: int,
        later: int = 0,
        transport: Stated = "auto",
    ) -> None:
        """dtype: what the engines compute in. exact: an engine that repeats its turns gives the
        same bits. most: how often a process may be lost in a row (cluster.max_restarts). later: how
        many processes come when the cluster has room for them. transport: rollout.transport.
        """
        self._launcher = launcher
        # Where the number of processes changes by itself no bits are promised, and the samples of a
        # lost one go on in the others at once.
        self._repeats = exact and not later
        self._roster = Roster(launcher, members, later, exact=self._repeats, most=most)
        self._members = self._roster.members
        self.stats: EngineStats = self._roster.stats
        self._dtype = dtype
        self._exact = exact
        self._version: int | None = None  # None: no weights were loaded
        self._probe: Probe | None = None  # of the weights that are loaded
        self._ended: list[Completion] = []  # that `completed` has still to return
        self._closed = False
        self._interrupted = False
        self._transport: Stated = transport
        self._publisher = self._new_publisher()
        self._pace = TurnPace()
        self._followed: FreePace | None = None  # the newest one

    @property
    def streams(self) -> int:
        """Engine.streams: the processes that tickets are dealt to."""
        return len(self._roster.dealt) if self._exact else 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self._members)

    def follow(self, tracks: Sequence[Track] | None) -> None:
        """FreeEngine.follow: from now until the next cut."""
        number = 1 if self._followed is None else self._followed.number + 1
        self._pace = self._followed = FreePace(number, self._members, tracks)

    def stop(self) -> None:
        """FreeEngine.stop, of the processes that follow nobody."""
        self._pace.stop()

    def tracks(self) -> list[Track]:
        """FreeEngine.tracks: what was done since `follow`."""
        return [] if self._followed is None else self._followed.tracks()

    def submit(self, request: Request) -> None:
        """Engine.submit. A request that is too long is refused by `completed`."""
        dealt = self._roster.dealt
        member = dealt[request.ticket % len(dealt)]
        if not member.serves and not (self._repeats and member.coming):
            member = self._roster.other_than(member, request.ticket)
        member.give(request, self._repeats)

    def completed(self, awaited: Collection[int] | None = None) -> list[Completion]:
        """Completions of whichever processes have some, by ticket and sample. Raises RunError where
        it is interrupted or closed.
        """
        completions, self._ended = self._ended, []
        while not completions:
            if self._interrupted or self._closed:
                raise RunError(f"nobody waits for the {TITLE}s any more")
            if not any(member.open for member in self._members):
                self._roster.stats.settle()
                return []
            asked = [member for member in self._members if self._pace.goes_on(member, awaited)]
            if not asked or self._pace.stopped:
                return []
            for member in asked:
                self._ask(member)
            wait(self._under_way(), None, FIRST_COMPLETED)
            if self._closed:
                raise RunError(f"the {TITLE}s have ended")
            for member in self._members:
                if member.asked is not None and member.asked.done():
                    completions += self._taken(member, member.asked)
            self._join()
            self._roster.stats.count()
        return sorted(completions, key=lambda c: (c.ticket, c.sample, c.turn))

    def load_weights(self, weights: WeightHandover, version: int) -> Sent:
        """Engine.load_weights: ranks send all of them to every process."""
        self._join()
        self._probe = None
        for member in self._members:
            member.note_emptied()
            if member.open:  # it goes on with other weights, which no repetition would
                member.repeats = False
                if member.workers is None:
                    self._roster.ask_again(member)
        live = [member for member in self._members if member.workers is not None]
        waiting = [member for member in live if member.absent]
        sent = self._send(live, weights, version)
        self._version = version
        self._launcher.note_published()
        for member in waiting:
            if member.serves:
                member.takes_part = True
        for member in waiting:
            if member.serves:
                self._tell_joined(member)
        return sent

    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperature: float,
        images: Images = (),
    ) -> list[Logprobs]:
        """Engine.logprobs, of every process. Raises RunError where one has other weights."""
        while True:
            self._join(needed=True)
            results = self._of_all("logprobs", list(sequences), temperature, list(images))
            if results:
                logprobs = agreed(results, self._dtype, TITLE)
                self._probe = (list(sequences), temperature, list(images)), logprobs
                return logprobs

    def cut(self) -> list[Request]:
        """Engine.cut, of every process after its turn. What a process that dies had written since
        it was cut last is lost, and its requests are those of then.
        """
        for member in self._members:
            if member.asked is not None:  # one that was replaced repeats its turns
                self._ended += self._taken(member, member.asked)
        handles = {
            member.number: member.call("cut")
            for member in self._members
            if member.open and member.serves
        }
        cuts: dict[int, list[Request]] = {}
        for number, handle in handles.items():
            member = self._members[number]
            try:
                cuts[number], ended, sums = handle.result()
            except WorkerLost as error:
                self._lose(member, error)
            else:
                self._ended += member.take(ended, sums)
        requests = [
            request
            for member in self._members
            for request in member.cut(cuts.get(member.number, []))
        ]
        self._roster.stats.count()
        self._roster.stats.settle()
        self._pace = TurnPace()
        return in_order(requests)

    def sleep(self) -> None:
        self._pace.stop()
        self._join()
        self._of_all("sleep")
        for member in self._members:
            member.note_emptied()

    def interrupt(self) -> None:
        """Ends the sampling of whichever thread is at it: the run ends, or restarts its ranks."""
        self._interrupted = True

    def pause(self, logs: Logs) -> bool:
        """Drops what is under way and sleeps, while the ranks are restarted from a checkpoint. A
        process that was lost is started again beside them. logs: of the run from now on. False
        where none is left that has weights.
        """
        self._launcher.logs, self._launcher.policy, self._launcher.published = logs, None, None
        self._ended, self._pace = [], TurnPace()
        self._publisher = self._new_publisher()  # its ways lead to ranks that have ended
        for member in self._members:
            member.take_back()
            if member.asked is not None:
                self._taken(member, member.asked)
        self._of_all("drop")
        for member in self._members:
            if member.workers is None and member.starting is None:  # it had left
                self._roster.start(member)
        self._roster.stats.count()
        self._roster.stats.settle()
        self.sleep()
        return any(member.serves for member in self._members)

    def resume(self, policy: RankedRole | None) -> dict[int, Workers]:
        """Ends a pause. policy: whose weights are published next; the engine has older ones until
        then. Returns the processes that stayed, by number.
        """
        self._launcher.policy, self._interrupted = policy, False
        return {m.number: m.workers for m in self._members if m.workers is not None}

    def close(self) -> None:
        """Ends all processes, those that are starting too."""
        self._closed = True
        self._roster.close()

    def _under_way(self) -> list[Future[Any]]:
        """What is waited for. Raises WorkerLost where no process can sample."""
        under_way = [
            *(member.asked for member in self._members if member.asked is not None),
            *self._roster.coming(),
        ]
        if not under_way:
            raise WorkerLost(f"no {TITLE} is left that has the policy's weights")
        return under_way

    def _ask(self, member: Member) -> None:
        """Begins the next turn of a process that has none under way and something to do."""
        if not member.serves or member.asked is not None or not member.open:
            return
        requests, *pace = self._pace.next_turn(member)
        member.note_asked(requests)
        member.asked = member.call("turn", requests, len(self._roster.dealt), *pace)

    def _taken(self, member: Member, handle: Handle[TurnAnswer]) -> list[Completion]:
        """The completions of a turn that has ended, those of the process's earlier life left
        out; none where it was lost.
        """
        member.asked = None
        try:
            completions, sums = handle.result()
        except WorkerLost as error:
            self._lose(member, error)
            return []
        member.lost = 0
        return member.take(completions, sums)

    def _new_publisher(self) -> RankPublisher:
        return RankPublisher(self._transport, self._dtype, self._lose_number)

    def _lose_number(self, number: int, error: RunError) -> None:
        self._lose(self._members[number], error)

    def _lose(self, member: Member, error: RunError) -> None:
        """A process was lost, or could not be started again: see Roster.lose."""
        self._pace.note_lost(member)
        self._roster.lose(member, error)

    def _join(self, *, needed: bool = False) -> None:
        """Takes in the processes that were started again. needed: waits while none serves."""
        while True:
            for member in self._members:
                if member.starting is not None and member.starting.done():
                    self._take_in(member, member.starting)
            starting = self._roster.coming()
            if not needed or not starting or self._roster.stats.serving:
                return
            wait(starting, None, FIRST_COMPLETED)

    def _take_in(self, member: Member, starting: Future[Workers]) -> None:
        """A process that was started takes part: in a lost one's place now, else from the next
        publish on.
        """
        member.starting, member.sums = None, NO_WORK
        try:
            member.workers = workers = starting.result()
        except RunError as error:
            self._lose(member, error)
            return
        if not member.takes_part:
            member.absent = True
        elif self._version is not None:
            weights = self._launcher.weights()
            if weights is None:
                self._wait_for_weights(member)
            else:
                self._send(
                    [member], WeightHandover(weights, self._launcher.offload_policy), self._version
                )
        if not member.serves:
            return
        try:
            self._prove(workers)
            if member.repeats and member.turns:
                member.asked = workers.call("repeat", member.turns)
        except RunError as error:
            self._lose(member, error)
            return
        self._tell_joined(member)

    def _tell_joined(self, member: Member) -> None:
        """Logs a process that samples from now on."""
        workers, version = member.workers, self._version
        assert workers is not None
        way = self._publisher.routes[member.number].way if version is not None else None
        text, places = workers.description(), workers.places
        more = {"places": places, "version": version, "way": way}
        self._roster.tell("engine_joined", member, text, **more)

    def _wait_for_weights(self, member: Member) -> None:
        """The policy has learned since: the process takes part from the next publish on."""
        member.absent = True
        if any(other.serves or other.coming for other in self._members):
            self._roster.ask_again(member)

    def _prove(self, workers: Workers) -> None:
        """Raises RunError where a process has not the weights that all were probed with."""
        if self._probe is not None:
            asked, expected = self._probe
            logprobs = workers.call("logprobs", *asked).result()
            agreed([expected, logprobs], self._dtype, TITLE)

    def _send(self, members: Sequence[Member], weights: WeightHandover, version: int) -> Sent:
        """Ranks send weights to some processes; one that dies meanwhile is lost alone."""
        if not isinstance(weights.weights, RankedWeights):
            raise RunError(f"a {TITLE} takes weights from ranks alone")
        engines = {m.number: m.workers for m in members if m.workers is not None}
        sent = self._publisher.send(weights.weights, engines, version, weights.after)
        for member in members:
            if member.workers is not None and member.workers is engines.get(member.number):
                member.absent = False
        return sent

    def _of_all(self, method: str, *arguments: object) -> list[list[Logprobs]]:
        """The results of a call to every process that serves; one that dies is lost alone."""
        handles: list[tuple[Member, Handle[list[Logprobs]]]] = [
            (member, member.call(method, *arguments)) for member in self._members if member.serves
        ]
        results: list[list[Logprobs]] = []
        for member, handle in handles:
            try:
                results.append(handle.result())
            except WorkerLost as error:
                self._lose(member, error)
        return results

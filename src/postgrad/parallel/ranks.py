"""Ranks: the processes that hold one backbone together, and their collectives.

Whoever starts the processes (Ray, a launcher, a test) passes rank, size and an address; the group
then lasts as long as the process. A single process needs no group, and every collective returns its
input. Collectives add in float32 or float64 and never average; every rank adds in the same order,
so that all have the same bits afterwards.

How ranks are arranged: which ranks share sequences, matrices, experts and state.

    rank = ((group * replicas in a group + replica) * context + c) * tensor + t
    rank = (group * expert groups in a group + expert group) * expert + e

Neighbouring ranks exchange most: those of one tensor or expert group in every layer, those of one
replica in every attention, all ranks once a micro-batch or update. A `group` holds a whole copy of
the state, divided among its ranks (HSDP), for example one group a node.
"""

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]

from postgrad.core.errors import RunError, UsageError

LIMIT_SECONDS = 600.0  # of one collective
LIMIT = timedelta(seconds=LIMIT_SECONDS)
START_SECONDS = 60.0  # until all processes are there
STORE_SECONDS = 5.0  # for reading from the store which ranks are late


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of the arrangement; 1: nothing is shared."""

    context: int = 1  # ranks that share the tokens of a sequence (context_parallel)
    tensor: int = 1  # ranks that share each matrix of one copy of the model (tensor_parallel)
    groups: int = 1  # whole copies of the divided state (shard_groups)
    expert: int = 1  # ranks that share the experts of one copy of the model (expert_parallel)

    @property
    def sharers(self) -> int:
        """Ranks of one replica, which share a layout."""
        return self.context * self.tensor

    def require_ranks(self, size: int) -> None:
        """Raises UsageError where `size` ranks cannot be arranged so."""
        if self.expert > 1 and size % (self.expert * self.groups):
            raise UsageError(
                f"{size} ranks cannot be arranged in {self.groups} groups (shard_groups) of copies "
                f"of the experts on {self.expert} (expert_parallel): learner.ranks has to be a "
                f"multiple of {self.expert * self.groups}"
            )
        if size % (self.sharers * self.groups):
            raise UsageError(
                f"{size} ranks cannot be arranged in {self.groups} groups (shard_groups) of "
                f"replicas of {self.sharers} (tensor_parallel * context_parallel): learner.ranks "
                f"has to be a multiple of {self.sharers * self.groups}"
            )


UNDIVIDED = Grid()


class Groups:
    """The process groups of one rank of a grid; None where the rank is alone in a group.

    context: ranks of the replica with the same part of each matrix and other rows of the layout.
    tensor: those with other parts of each matrix and the same rows. replica: all of the replica.
    data: all ranks with the same part of each matrix. expert: ranks with other experts of one copy
    of the model. expert_data: all ranks with the same experts.
    """

    def __init__(
        self, rank: int, size: int, grid: Grid, device: str, limit: timedelta = LIMIT
    ) -> None:
        """limit: of a collective in any of them. torch gives a group that is made later its own
        default, 30 minutes, whatever the first group was given.
        """
        grid.require_ranks(size)
        self._limit = limit
        self._device = device
        self._grid = grid
        self._size = size
        self._meshes: tuple[DeviceMesh, DeviceMesh, DeviceMesh] | None = None
        places = np.arange(size).reshape(-1, grid.context, grid.tensor)
        by_context = places.transpose(0, 2, 1).reshape(-1, grid.context)
        self.context = _group(rank, by_context, limit)
        self.tensor = _group(rank, places.reshape(-1, grid.tensor), limit)
        self.replica = _group(rank, places.reshape(-1, grid.sharers), limit)
        self.data = _group(rank, places.reshape(-1, grid.tensor).T, limit)
        self.expert = _group(rank, places.reshape(-1, grid.expert), limit)
        self.expert_data = _group(rank, places.reshape(-1, grid.expert).T, limit)

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks: ([group,] shard)."""
        return self._device_meshes()[0]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks of `data`: ([group,] shard)."""
        return self._device_meshes()[1]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The ranks of `expert_data`: ([group,] shard)."""
        return self._device_meshes()[2]

    def _device_meshes(self) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
        """`mesh`, `data_mesh` and `expert_mesh`, created at the first call, by all ranks: that is a
        collective.
        """
        if self._meshes is None:
            names = ("group", "shard") if self._grid.groups > 1 else ("shard",)
            flat = self._mesh_of(1)[names]
            by_tensor, by_expert = (
                flat if parts == 1 else self._mesh_of(parts)[names]
                for parts in (self._grid.tensor, self._grid.expert)
            )
            self._meshes = flat, by_tensor, by_expert
        return self._meshes

    def _mesh_of(self, parts: int) -> DeviceMesh:
        """All ranks, of which `parts` neighbours have different parts of what is divided."""
        places = torch.arange(self._size).view(self._grid.groups, -1, parts)
        mesh = DeviceMesh(self._device, places, mesh_dim_names=("group", "shard", "part"))
        for dim in range(mesh.ndim):
            _set_pg_timeout(self._limit, mesh.get_group(dim))
        return mesh


def _group(rank: int, rows: NDArray[np.int64], limit: timedelta) -> Any:
    """The process group of the row of `rows` [groups, ranks] that has this rank. All ranks have to
    call, since every rank takes part in creating every group.
    """
    if rows.shape[1] == 1:
        return None
    if len(rows) == 1:
        return dist.group.WORLD
    groups = [dist.new_group(row.tolist(), timeout=limit) for row in rows]
    return groups[int(np.flatnonzero((rows == rank).any(1))[0])]


class Ranks:
    """This process, number `rank` of `size`, arranged as `grid` says: rank `sharer` of replica
    `replica` out of `replicas`. store: where each rank writes what it is about to do, so that the
    others can name a rank that is late; None in a single process.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: str = "cpu",
        store: Any = None,
        grid: Grid = UNDIVIDED,
        limit: timedelta = LIMIT,
    ) -> None:
        self.rank = rank
        self.size = size
        self.grid = grid
        self.replica, self.sharer = divmod(rank, grid.sharers)
        self.replicas = size // grid.sharers
        self.context_rank, self.tensor_rank = divmod(self.sharer, grid.tensor)
        self.shard_group = rank // (size // grid.groups)
        self.expert_rank = rank % grid.expert
        self.groups = Groups(rank, size, grid, device, limit)
        self._limit = limit
        self._store = store
        self._count = 0
        self._device = device

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        address: str,
        *,
        device: str = "cpu",
        grid: Grid = UNDIVIDED,
        limit_seconds: float = LIMIT_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> "Ranks":
        """Joins the other processes at `address` (HOST:PORT; rank 0 listens there).

        device: "cpu" (gloo) or "cuda" (NCCL, and gloo for tensors that are offloaded to the host).
        limit_seconds: timeout of a collective. Raises UsageError where `size` does not fit the
        grid, RunError where the port is taken or not all ranks join within start_seconds.
        """
        grid.require_ranks(size)
        host, _, port = address.rpartition(":")
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        limit = timedelta(seconds=limit_seconds)
        try:
            store = TCPStore(host, int(port), size, rank == 0, timedelta(seconds=start_seconds))
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"rank {rank} of {size} could not join the others at {address} within "
                f"{start_seconds:g} seconds: {_first_line(error)}; is the port free, do all ranks "
                "run, and can they reach that address?"
            ) from error
        # NCCL connects a group at its first collective, for which ranks wait in the store.
        store.set_timeout(limit)
        return cls(rank, size, device, store, grid, limit)

    def arranged(self, grid: Grid) -> "Ranks":
        """The same processes in another grid. All ranks have to call it."""
        grid.require_ranks(self.size)
        return Ranks(self.rank, self.size, self._device, self._store, grid, self._limit)

    def leave(self) -> None:
        """Ends the group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def doing(self, task: str) -> Generator[None]:
        """Marks a task that all ranks do. A collective that fails inside is a RunError that names
        the ranks that did not arrive.
        """
        if self.size == 1:
            yield
            return
        self._count += 1
        self._store.set(f"at/{self.rank}", f"{self._count} {task}")
        try:
            yield
        except RuntimeError as error:
            if not _is_collective_error(error):
                raise
            raise RunError(self._timeout_message(task, error)) from error

    def sum_(self, tensors: Iterable[Tensor], group: Any = None) -> None:
        """Adds each tensor over the ranks of a group, all of them where none is named, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    def sum(self, value: float) -> float:
        """The sum of a number over all ranks, in float64."""
        if self.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(held)
        return float(held)

    def most(self, count: int) -> int:
        """The largest `count` of all ranks."""
        if self.size == 1:
            return count
        held = torch.tensor(count, device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)

    def merged(
        self, values: NDArray[np.float32], computed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Values [N] of which each replica computed some, and no two the same. Returns all of them
        and where any replica computed them; elsewhere this rank's values stay.
        """
        if self.size == 1:
            return values, computed
        if self.sharer:  # the first rank of a replica contributes its values
            computed = np.zeros_like(computed)
        both = np.stack([np.where(computed, values, np.float32(0.0)), computed.astype(np.float32)])
        held = torch.from_numpy(both).to(self._device)
        dist.all_reduce(held)
        sums, seen = held.cpu().numpy()
        everywhere = seen > 0.0
        return np.where(everywhere, sums, values), everywhere

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums by name over replicas, added in the order of ranks. A name that a replica lacks
        counts as 0.
        """
        if self.size == 1:
            return dict(values)
        totals: dict[str, float] = {}
        for rank_values in self.gathered(dict(values))[:: self.grid.sharers]:
            for name, value in rank_values.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def gathered(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank. NaN and infinities are allowed."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        sizes[self.rank] = len(text)
        dist.all_reduce(sizes)
        widest = int(sizes.max())
        padded = torch.zeros(widest, dtype=torch.uint8, device=self._device)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        pairs = zip(parts, sizes.tolist(), strict=True)
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in pairs]

    def require_same(self, name: str, value: str) -> None:
        """Raises RunError where `value` is not the same on all ranks."""
        values = self.gathered(value)
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                raise RunError(
                    f"rank {rank} and rank 0 disagree on {name}: {theirs} and {values[0]}; all "
                    "ranks have to be of one run, with the same files and packages"
                )

    def _timeout_message(self, task: str, error: RuntimeError) -> str:
        here = f"{self._count} {task}"
        late = [f"rank {rank} ({at})" for rank, at in self._places() if at != here]
        missing = ", ".join(late) or "no rank, all arrived: one of them failed"
        return (
            f"rank {self.rank} of {self.size} waited in vain in {task!r} (number {self._count}): "
            f"missing: {missing}. torch says: {_first_line(error)}"
        )

    def _places(self) -> list[tuple[int, str]]:
        """(rank, task that it last began) of each other rank."""
        places: list[tuple[int, str]] = []
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                places.append((rank, self._store.get(f"at/{rank}").decode()))
            except RuntimeError:
                places.append((rank, "cannot be asked"))
        return places


ALONE = Ranks()


def _is_collective_error(error: RuntimeError) -> bool:
    """Whether a collective failed; gloo raises plain RuntimeErrors where a peer is late or gone."""
    message = str(error)
    return isinstance(error, dist.DistError) or any(
        word in message for word in ("gloo", "Timed out waiting", "Connection closed by peer")
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

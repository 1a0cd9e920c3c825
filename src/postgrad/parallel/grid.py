"""How ranks are arranged: what each shares with which others.

    rank = ((group * replicas in a group + replica) * context + c) * tensor + t

Ranks next to each other exchange most: those of one tensor group in every layer, those of one
replica in every attention, all ranks once a micro-batch or update. A `group` holds a whole copy of
the state, divided among its ranks (HSDP): one for each node, say.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from postgrad.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Grid:
    """context: ranks that share the sequences of one replica. tensor: ranks that share each matrix
    of one copy of the model. groups: whole copies of what is divided.
    """

    context: int = 1
    tensor: int = 1
    groups: int = 1

    @property
    def sharers(self) -> int:
        """Ranks of one replica: they have one layout."""
        return self.context * self.tensor

    def require_ranks(self, size: int) -> None:
        """Raises UsageError where `size` ranks cannot be arranged so."""
        if size % (self.sharers * self.groups):
            raise UsageError(
                f"{size} ranks cannot be arranged in {self.groups} groups (shard_groups) of "
                f"replicas of {self.sharers} (tensor_parallel * context_parallel): learner.ranks "
                f"has to be a multiple of {self.sharers * self.groups}"
            )


UNDIVIDED = Grid()


class Groups:
    """The process groups of one rank of a grid. None: it is alone in it.

    context: with the same rows of a matrix, other rows of the sequences. tensor: the other way
    round. replica: both. data: those that hold the same part of each divided matrix.
    """

    def __init__(self, rank: int, size: int, grid: Grid, device: str) -> None:
        grid.require_ranks(size)
        self._device = device
        self._grid = grid
        self._size = size
        self._meshes: tuple[DeviceMesh, DeviceMesh] | None = None
        places = np.arange(size).reshape(-1, grid.context, grid.tensor)
        self.context = _group(rank, places.transpose(0, 2, 1).reshape(-1, grid.context))
        self.tensor = _group(rank, places.reshape(-1, grid.tensor))
        self.replica = _group(rank, places.reshape(-1, grid.sharers))
        self.data = _group(rank, places.reshape(-1, grid.tensor).T)

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks: ([group,] shard)."""
        return self._device_meshes()[0]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks of `data`: ([group,] shard)."""
        return self._device_meshes()[1]

    def _device_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """Once, and by all ranks: making one is a collective."""
        if self._meshes is None:
            places = torch.arange(self._size).view(self._grid.groups, -1, self._grid.tensor)
            by_tensor = DeviceMesh(
                self._device, places, mesh_dim_names=("group", "shard", "tensor")
            )
            flat = by_tensor
            if self._grid.tensor > 1:
                both = places.flatten(1)[:, :, None]
                flat = DeviceMesh(self._device, both, mesh_dim_names=("group", "shard", "tensor"))
            names = ("group", "shard") if self._grid.groups > 1 else ("shard",)
            self._meshes = flat[names], by_tensor[names]
        return self._meshes


def _group(rank: int, rows: NDArray[np.int64]) -> Any:
    """Of `rows`, the one that has this rank. Every rank has a part in making each of them."""
    if rows.shape[1] == 1:
        return None
    if len(rows) == 1:
        return dist.group.WORLD
    groups = [dist.new_group(row.tolist()) for row in rows]
    return groups[int(np.flatnonzero((rows == rank).any(1))[0])]

"""How ranks are arranged: which ranks share sequences, matrices and state.

    rank = ((group * replicas in a group + replica) * context + c) * tensor + t

Neighbouring ranks exchange most: those of one tensor group in every layer, those of one replica in
every attention, all ranks once a micro-batch or update. A `group` holds a whole copy of the state,
divided among its ranks (HSDP), for example one group a node.
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
    """The sizes of the arrangement; 1: nothing is shared."""

    context: int = 1  # ranks that share the tokens of a sequence (context_parallel)
    tensor: int = 1  # ranks that share each matrix of one copy of the model (tensor_parallel)
    groups: int = 1  # whole copies of the divided state (shard_groups)

    @property
    def sharers(self) -> int:
        """Ranks of one replica, which share a layout."""
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
    """The process groups of one rank of a grid; None where the rank is alone in a group.

    context: ranks of the replica with the same part of each matrix and other rows of the layout.
    tensor: those with other parts of each matrix and the same rows. replica: all of the replica.
    data: all ranks with the same part of each matrix.
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
        """`mesh` and `data_mesh`, created at the first call, by all ranks: that is a collective."""
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
    """The process group of the row of `rows` [groups, ranks] that has this rank. All ranks have to
    call, since every rank takes part in creating every group.
    """
    if rows.shape[1] == 1:
        return None
    if len(rows) == 1:
        return dist.group.WORLD
    groups = [dist.new_group(row.tolist()) for row in rows]
    return groups[int(np.flatnonzero((rows == rank).any(1))[0])]

"""A save that several ranks write together: processes beside the one that commits it."""

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from helpers.saves import FAILED, UNTIDY, state, store_in, tensors
from postgrad.checkpoint.parts import Divided, Part, part_name, write_part
from postgrad.checkpoint.store import SaveFailed, Untidy
from postgrad.core.errors import RunError

RANK_DIED = 5  # exit code of `save`, beside those of helpers.saves


class OnProcesses(Divided):
    """Tensors whose parts are written by `ranks` forks of this process, two of which share each
    matrix: the files of a run behind Ray, without Ray.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: int) -> None:
        self._tensors = tensors
        self._ranks = ranks

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def copied(self) -> "OnProcesses":
        return self

    def write(self, folder: Path, stem: str) -> list[str]:
        """Raises what the group of a run raises: OSError for a disk, RunError for a rank."""
        forks = [self._fork(rank, folder, stem) for rank in range(self._ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
        for rank, code in enumerate(codes):
            if code < 0:
                raise RunError(f"rank {rank} died: was it killed, or out of memory?")
        if any(codes):
            raise OSError(max(codes), os.strerror(max(codes)))
        return [part_name(stem, rank, self._ranks) for rank in range(self._ranks)]

    def _fork(self, rank: int, folder: Path, stem: str) -> int:
        fork = os.fork()
        if fork:
            return fork
        code = 0
        try:
            write_part(folder / part_name(stem, rank, self._ranks), self._parts(rank))
        except Exception as error:  # noqa: BLE001  safetensors has an exception of its own
            code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        os._exit(code)

    def _parts(self, rank: int) -> dict[str, Part]:
        """Rows by pairs of ranks; of a pair each has half of a matrix's columns, the first what has
        none.
        """
        pair, half = divmod(rank, 2)
        parts: dict[str, Part] = {}
        for name, tensor in self._tensors.items():
            each = -(-len(tensor) // (self._ranks // 2))
            start = min(len(tensor), pair * each)
            held = tensor[start : start + each]
            if held.ndim == 2:
                width = -(-held.shape[1] // 2)
                held = held[:, half * width : (half + 1) * width]
                parts[name] = Part(held, tuple(tensor.shape), (start, half * width))
            elif half == 0:
                parts[name] = Part(held, tuple(tensor.shape), (start,))
        return parts


def save(root: str, step: int, best: int, ranks: int) -> int:
    """helpers.saves.save on so many ranks, an even number."""
    divided = {stem: OnProcesses(named, ranks) for stem, named in tensors(step).items()}
    try:
        store_in(Path(root)).save(state(step, best), divided, best=step == best)
    except SaveFailed as error:
        print(error)
        return FAILED
    except Untidy as error:
        print(error)
        return UNTIDY
    except RunError as error:
        print(error)
        return RANK_DIED
    return 0

"""What runs on one rank: the same roles as in one process, each on this rank's part of a backbone.

Every rank gets every call with the same arguments and takes its share of the work; rank 0 answers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from postgrad.checkpoint.parts import Part, part_name, write_part
from postgrad.core.array_files import disk_error
from postgrad.core.batch import BatchGeometry
from postgrad.core.files import sync_file
from postgrad.core.media import images_kept_in
from postgrad.fleet.choices import Choices
from postgrad.fleet.local import LocalFleet
from postgrad.fleet.sending import RankSender
from postgrad.learner.loss_scale import NUMBERS
from postgrad.learner.offload import KeptOnDevice
from postgrad.learner.optimizer import UPDATES
from postgrad.learner.tensor import grid_of
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.parallel.sharding import WHOLE, TensorPiece, whole_tensor
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe

SENT_BYTES = 2**26  # of whole weights in one answer


@dataclass(slots=True)
class _WorkerContext:
    recipe: Recipe
    geometry: BatchGeometry
    choices: Choices


class RankWorker:
    """One rank of a run. recipe: as its dump; choices: what was chosen at the run's start."""

    def __init__(self, recipe: Mapping[str, Any], choices: Choices) -> None:
        loaded = recipe_from_json(dict(recipe))
        choices.apply()
        self._context = _WorkerContext(loaded, loaded.geometry(), choices)
        self._ranks = ALONE
        self._fleet = LocalFleet(self._context)
        self._opened = ExitStack()  # until the process ends
        self._kept: dict[str, Mapping[str, Tensor]] = {}  # by stem, until it is written
        self._sending: Iterator[tuple[str, Tensor]] = iter(())
        self._sender = RankSender(device=choices.device)

    def join(self, rank: int, size: int, address: str, device: str, limit_seconds: float) -> None:
        """Meets the other ranks, and sees that all of them are of one run."""
        learner = self._context.recipe.learner
        ranks = Ranks.join(
            rank,
            size,
            address,
            device=device,
            grid=grid_of(learner),
            limit_seconds=limit_seconds,
        )
        recipe = json.dumps(self._context.recipe.dump(), sort_keys=True).encode()
        ranks.require_same("the recipe (its SHA-256)", hashlib.sha256(recipe).hexdigest())
        ranks.require_same("torch", torch.__version__)
        self._ranks, self._fleet = ranks, LocalFleet(self._context, ranks)
        self._sender = RankSender(ranks, device)

    def keep_images(self, folders: Sequence[str]) -> None:
        """From now on images are read in `folders`, which all machines see: see image_folders."""
        self._opened.enter_context(images_kept_in(*map(Path, folders)))

    def load_role(
        self, method: str, geometry: BatchGeometry, arguments: Sequence[Any]
    ) -> Mapping[str, str]:
        """Calls a method of this rank's fleet. Returns the hashes of frozen weights, by role."""
        self._context.geometry = geometry
        getattr(self._fleet, method)(*arguments)
        return self._context.choices.frozen

    def release(self, role: str) -> None:
        self._fleet.release(role)

    def free_memory(self, keep: KeptOnDevice = "all") -> None:
        self._fleet.free_memory(keep)

    def start(self, role: str, name: str) -> None:
        """Calls a policy before its first update `name`, as a role of its own."""
        self._fleet.roles[name] = self._fleet.roles[role].start()

    def do(self, role: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a role; its handle's value."""
        answer = getattr(self._fleet.roles[role], method)(*arguments).result()
        return answer if self._ranks.rank == 0 else None

    def follow(self, step: int) -> None:
        """The reference follows the policy."""
        self._fleet.roles["reference"].after_step(step, self._fleet.roles["policy"])

    def updates(self, role: str) -> int:
        """How many a role has had."""
        return self._fleet.roles[role].updates

    def state_bytes(self, role: str) -> int:
        """What a checkpoint of the role takes, of all ranks."""
        return int(self._ranks.sum(self._fleet.roles[role].state_bytes()))

    def load(self, role: str, read: Any) -> None:
        """Goes on from a checkpoint, which every rank reads for itself."""
        self._fleet.roles[role].load(read)

    def describe(self, role: str) -> dict[str, tuple[list[str], int]]:
        """By file stem: the names of a role's tensors, and their bytes on all ranks."""
        by_stem: dict[str, tuple[list[str], int]] = {}
        for stem, named in self._fleet.roles[role].tensors().items():
            counted = sum(t.nbytes for name, t in named.items() if self._piece(role, name).first)
            by_stem[stem] = list(named), int(self._ranks.sum(counted))
        return by_stem

    def gather(self, role: str, stem: str, name: str) -> Tensor | None:
        """One tensor, whole, on the CPU."""
        part = self._fleet.roles[role].tensors()[stem][name]
        tensor = whole_tensor(part, self._piece(role, name))
        return tensor.cpu() if self._ranks.rank == 0 else None

    def send(self, role: str, first: bool, adapter: bool) -> list[tuple[str, Tensor]]:
        """The next of a role's whole weights by hub name, or of its adapter's, some SENT_BYTES;
        none: that was all.
        """
        if first:
            self._sending = self._to_send(role, adapter)
        portion: list[tuple[str, Tensor]] = []
        held = 0
        for name, tensor in self._sending:
            if self._ranks.rank == 0:
                portion.append((name, tensor.cpu()))
            held += tensor.nbytes
            if held >= SENT_BYTES:
                break
        return portion

    def publish(self, action: str, *arguments: Any) -> Any:
        """A step of a publish to rollout workers: a method of RankSender. That of a publish's begin
        names a role.
        """
        if action == "open":
            role, adapter, *more = arguments
            arguments = (self._to_send(role, adapter), *more)
        with self._ranks.doing(f"publish ({action})"):
            return getattr(self._sender, action)(*arguments)

    def _to_send(self, role: str, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        weights = self._fleet.roles[role]
        return weights.adapter_weights() if adapter else weights.hub_weights()

    def drop_engine(self, engine: int) -> None:
        """Beside a step of a publish: nothing more is sent to this engine."""
        self._sender.drop(engine)

    def keep(self, role: str, stem: str) -> None:
        """Copies the tensors of a stem to the CPU, to be written later."""
        named = self._fleet.roles[role].tensors()[stem]
        self._kept[stem] = {
            name: part.detach().to("cpu", copy=True) for name, part in named.items()
        }

    def write(self, role: str, folder: str, stem: str, kept: bool) -> list[str]:
        """Writes what was kept, or else what is there now; returns the names of all ranks' files.
        Raises OSError.
        """
        ranks = self._ranks
        named = self._kept.pop(stem) if kept else self._fleet.roles[role].tensors()[stem]
        pieces = {name: self._piece(role, name) for name in named}
        try:
            if any(piece.divided for piece in pieces.values()):
                parts = {
                    name: Part(part.detach().cpu(), pieces[name].shape, pieces[name].offsets)
                    for name, part in named.items()
                    if pieces[name].first
                }
                names = [part_name(stem, rank, ranks.size) for rank in range(ranks.size)]
                write_part(Path(folder) / names[ranks.rank], parts)
                return names
            path = Path(folder) / f"{stem}.safetensors"
            if ranks.rank == 0:
                save_file({name: t.detach().cpu().contiguous() for name, t in named.items()}, path)
                sync_file(path)
        except SafetensorError as error:
            raise disk_error(error) from error
        return [path.name]

    def _piece(self, role: str, name: str) -> TensorPiece:
        """Of a weight, or of a moment that is called after it."""
        pieces: Mapping[str, TensorPiece] = self._fleet.roles[role].pieces
        if name in (UPDATES, *NUMBERS):
            return replace(WHOLE, first=self._ranks.rank == 0)
        return pieces[name] if name in pieces else pieces[name.rpartition(".")[0]]

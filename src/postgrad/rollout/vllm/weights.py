"""What a publish to vLLM's processes needs: their places, names of weights, files of adapters."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from postgrad.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from postgrad.models.settings import LoraSettings, longest_first
from postgrad.rollout.engine import ExpectedWeights
from postgrad.rollout.transport.broadcast import LOOPBACK, BroadcastGroup, Meeting, listening
from postgrad.rollout.transport.parcel import Carrier
from postgrad.rollout.transport.route import Place, Route, Stated, carrier_of, choose


@dataclass(frozen=True, slots=True)
class Called:
    """A call that all processes work on."""

    collect: Callable[[], list[Any]]

    def result(self) -> list[Any]:
        """The value of each process; raises the error of one that failed."""
        return self.collect()


# Calls an action in all processes, with arguments of each, or the same for all.
CallEach = Callable[[str, Sequence[Mapping[str, Any]]], Called]


class Seats:
    """Where vLLM's workers compute, and the way to them from this process."""

    def __init__(self, each: CallEach, learner: torch.device, transport: Stated) -> None:
        """learner: the device that this process's weights come from."""
        self._each = each
        self._learner = learner
        self._transport: Stated = transport
        self._places: list[list[Place]] = []  # of each process's workers
        self._route: Route | None = None
        self._group: BroadcastGroup | None = None

    def places(self) -> list[Place]:
        """Of all workers, in the order of their seats in a group."""
        if not self._places:
            answers = self._each("places", [{}]).result()
            self._places = [[Place(**place) for place in places] for places in answers]
        return [place for places in self._places for place in places]

    def meet(self, meeting: Meeting, first: int) -> Called:
        """All workers join a group, as members `first` and following."""
        self.places()
        calls: list[dict[str, Any]] = []
        for places in self._places:
            calls.append({"meeting": asdict(meeting), "first": first})
            first += len(places)
        return self._each("meet", calls)

    def way(self) -> tuple[Route, Carrier]:
        """The way from this process, chosen once, and the sender's end for one publish."""
        if self._route is None:
            places = self.places()
            on_cards = all(place.card for place in places)
            here = Place.here(self._learner if on_cards else torch.device("cpu"))
            self._route = choose(self._transport, [here], places)
            if self._route.way in ("nccl", "gloo"):
                listener, address = listening(LOOPBACK)
                meeting = Meeting(address, 1 + len(places), self._route.way)
                joining = self.meet(meeting, 1)
                self._group = BroadcastGroup(meeting, 0, self._learner, listener)
                joining.result()
        return self._route, carrier_of(self._route.way, self._learner, self._group)


class WeightNames:
    """Gives tied weights the name that vLLM reads, and counts which weights have come."""

    def __init__(self, skeleton: nn.Module) -> None:
        """skeleton: the model, on the meta device."""
        self._skeleton = skeleton
        self._read = {id(parameter): name for name, parameter in skeleton.named_parameters()}
        self.begin()

    def begin(self) -> None:
        """Forgets which weights have come."""
        self._expected = ExpectedWeights(self._skeleton)

    def of(self, parcel: Mapping[str, Any]) -> dict[str, Any]:
        """A parcel with the names that vLLM reads. Raises RunError for a weight that the model does
        not have, or has in another shape.
        """
        tensors: list[dict[str, Any]] = []
        for packed in parcel["tensors"]:
            parameter = self._expected.parameter(packed["name"], packed["shape"])
            tensors.append({**packed, "name": self._read[id(parameter)]})
        return {**parcel, "tensors": tensors}

    def require_all(self) -> None:
        """Raises RunError where a weight has not come."""
        self._expected.require_all()


def write_adapter(
    folder: Path, version: int, tensors: Mapping[str, Tensor], settings: LoraSettings
) -> dict[str, Any]:
    """Writes an adapter as PEFT's directory, for one process of vLLM; returns the arguments of its
    call "load_adapter".

    tensors: by PEFT's names, on the CPU. Versions before this one are removed.
    """
    for old in folder.glob("adapter-*"):
        shutil.rmtree(old)
    path = folder / f"adapter-{version}"
    path.mkdir()
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "rank_pattern": longest_first(settings.rank_pattern),
        "alpha_pattern": longest_first(settings.alpha_pattern),
        "use_rslora": settings.rslora,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    payload = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    (path / ADAPTER_CONFIG).write_text(json.dumps(config), "utf-8")
    (path / ADAPTER_WEIGHTS).write_bytes(payload)
    digest = hashlib.sha256(payload).hexdigest()
    return {"path": str(path), "sha256": digest, "version": version}

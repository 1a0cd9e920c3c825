"""Weights as they arrive in a rollout worker: loaded by its engine, or handed on to vLLM."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.rollout.engine import Engine, WeightIntake
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.transport.broadcast import Meeting
from postgrad.rollout.transport.memory import MemoryCarrier
from postgrad.rollout.transport.parcel import Parcel
from postgrad.rollout.transport.route import Inlet, Place
from postgrad.rollout.vllm.engine import VLLMEngine


class WorkerWeights:
    """One rollout worker's part of a publish; its methods are called one after the other.

    The built-in engine loads parcels here. vLLM's processes take them by themselves, but for those
    of gloo, which this process receives and hands on in host memory: a group over gloo has the same
    torch on both sides then, whatever vLLM's environment has. An adapter is gathered here, and
    changes nothing before its commit.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        """device: what the built-in engine works on."""
        if not isinstance(engine, LocalEngine | VLLMEngine):
            raise RunError("this rollout engine takes no weights")
        self._engine: LocalEngine | VLLMEngine = engine
        on_host = isinstance(engine, VLLMEngine)
        self._device = torch.device("cpu") if on_host else device
        self._inlet: Inlet | None = None
        self._intake: WeightIntake | None = None
        self._relay: MemoryCarrier | None = None
        self._adapter: dict[str, Tensor] = {}  # what came of one

    def places(self) -> tuple[str, list[dict[str, Any]]]:
        """The version of torch here, and the places of the processes that take parcels."""
        places = [Place.here(self._device)]
        if isinstance(self._engine, VLLMEngine) and not self._engine.takes_adapter:
            places = self._engine.places()
        return torch.__version__, [place.to_json() for place in places]

    def meet(self, meeting: Mapping[str, Any]) -> None:
        """Joins the group of this engine and the rank that sends to it; vLLM's workers do so by
        themselves where it is one of NCCL.
        """
        where = Meeting(**meeting)
        if isinstance(self._engine, VLLMEngine) and where.backend == "nccl":
            self._engine.meet(where, 1)
        else:
            self._opened().join(where, 1)

    def begin(self) -> None:
        """The engine has no weights to work with from here on, until `commit`."""
        self._opened().receiver.begin()
        self._adapter = {}
        if isinstance(self._engine, LocalEngine):
            self._intake = self._engine.begin_weights()
        elif not self._engine.takes_adapter:
            self._relay = MemoryCarrier()
            self._engine.begin_weights()

    def take(self, parcel: Mapping[str, Any]) -> None:
        """Loads a parcel. Raises RunError where it is damaged, or came before."""
        if isinstance(self._engine, LocalEngine):
            assert self._intake is not None  # since it began
            self._intake.take(self._opened().receiver.take(Parcel.from_json(parcel)))
        elif self._engine.takes_adapter:
            received = self._opened().receiver.take(Parcel.from_json(parcel))
            self._adapter |= {name: tensor.clone() for name, tensor in received}
        else:
            near = self._handed_on(parcel) if parcel["way"] == "gloo" else parcel
            self._engine.take_weights(near).result()

    def commit(self, version: int, manifest: Mapping[str, Any]) -> None:
        """What was taken are the engine's weights. Raises RunError where that is not all that the
        manifest has.
        """
        if isinstance(self._engine, VLLMEngine) and not self._engine.takes_adapter:
            self._engine.commit_weights(version, manifest)
        else:
            self._opened().receiver.require_complete(manifest)
            if isinstance(self._engine, LocalEngine):
                self._engine.finish_weights(version)
            else:
                self._engine.load_adapter(self._adapter, version)
        self._intake = None
        if self._relay is not None:
            self._relay.close()

    def _opened(self) -> Inlet:
        if self._inlet is None:
            self._inlet = Inlet(self._device)
        return self._inlet

    def _handed_on(self, parcel: Mapping[str, Any]) -> dict[str, Any]:
        """A parcel of gloo, received here, as one in host memory: its bytes stay as they are."""
        assert self._relay is not None  # since it began
        received = Parcel.from_json(parcel)
        payload = self._opened().receiver.payload(received)
        self._relay.room(received.size).copy_(payload)
        return {**parcel, "way": self._relay.way, "where": self._relay.where()}

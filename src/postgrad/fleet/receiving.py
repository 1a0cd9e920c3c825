"""Weights as they arrive in a rollout worker: loaded by its engine, or handed on to vLLM."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.models.adapter_reader import LAYER
from postgrad.models.settings import LoraSettings
from postgrad.rollout.engine import Engine, WeightIntake
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.transport.broadcast import Meeting
from postgrad.rollout.transport.memory import MemoryCarrier
from postgrad.rollout.transport.parcel import Parcel
from postgrad.rollout.transport.route import Inlet, Place
from postgrad.rollout.vllm.engine import VLLMEngine


class WorkerWeights:
    """The target of a publish in one rollout worker (rollout/transport/send.py).

    The built-in engine loads parcels here. vLLM's processes take them by themselves, but for those
    of gloo, which this process receives and hands on in host memory: a group over gloo has the same
    torch on all sides then, whatever vLLM's environment has.
    """

    def __init__(self, engine: Engine, device: torch.device, lora: LoraSettings | None) -> None:
        """device: what the built-in engine works on. lora: of the policy's adapter."""
        if not isinstance(engine, LocalEngine | VLLMEngine):
            raise RunError("this rollout engine takes no weights")
        self._engine = engine
        self._device = device if isinstance(engine, LocalEngine) else torch.device("cpu")
        self._lora = lora
        self._inlet: Inlet | None = None
        self._intake: WeightIntake | None = None
        self._relay: MemoryCarrier | None = None
        self._adapter: dict[str, Tensor] | None = None  # of the publish that is under way
        self._base: dict[str, Tensor] = {}  # matrices without the adapter, in host memory

    def places(self, adapter: bool) -> list[dict[str, Any]]:
        """Of the processes that take parcels. adapter: only an adapter is sent."""
        if adapter:
            return [Place.here(torch.device("cpu")).to_json()]
        if isinstance(self._engine, VLLMEngine):
            return [place.to_json() for place in self._engine.places()]
        return [Place.here(self._device).to_json()]

    def meet(self, meeting: Mapping[str, Any], first: int) -> None:
        """Joins a group as member `first`, or lets vLLM's workers join as those from it on."""
        where = Meeting(**meeting)
        if isinstance(self._engine, VLLMEngine) and where.backend == "nccl":
            self._engine.meet(where, first)
        else:
            self._opened().join(where, first)

    def begin(self, adapter: bool) -> None:
        """Target.begin_weights. An adapter changes nothing before its commit."""
        self._opened().receiver.begin()
        self._adapter = {} if adapter else None
        if adapter:
            return
        if isinstance(self._engine, VLLMEngine):
            self._relay = MemoryCarrier()
            self._engine.begin_weights()
        else:
            self._intake = self._engine.begin_weights()

    def take(self, parcel: Mapping[str, Any]) -> None:
        """Target.take_weights: returns when the parcel is loaded."""
        if self._adapter is not None:
            received = self._opened().receiver.take(Parcel.from_json(parcel))
            self._adapter |= {name: tensor.clone() for name, tensor in received}
        elif isinstance(self._engine, VLLMEngine):
            near = self._handed_on(parcel) if parcel["way"] == "gloo" else parcel
            self._engine.take_weights(near).result()
        else:
            assert self._intake is not None  # since it began
            self._intake.take(self._opened().receiver.take(Parcel.from_json(parcel)))

    def commit(self, version: int, manifest: Mapping[str, Any]) -> None:
        """Target.commit_weights of what was taken."""
        vllm = isinstance(self._engine, VLLMEngine)
        if self._adapter is not None or not vllm:
            self._opened().receiver.require_complete(manifest)
        if isinstance(self._engine, VLLMEngine):
            if self._adapter is not None:
                self._engine.load_adapter(self._adapter, version)
            else:
                self._engine.commit_weights(version, manifest)
        elif self._adapter is not None:
            intake = self._engine.begin_weights()
            intake.take(self._merged(intake, self._adapter))
            self._engine.finish_weights(version, partly=True)
        else:
            self._engine.finish_weights(version)
        self._adapter = self._intake = None
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

    @torch.no_grad()
    def _merged(
        self, intake: WeightIntake, adapter: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(hub name, W + (alpha / rank) B A in float32), of the bits of Adapter.merged: W are the
        matrices that the engine had before the first adapter.
        """
        assert self._lora is not None  # of a policy with an adapter
        matrices: dict[str, dict[str, Tensor]] = {}
        for name, tensor in adapter.items():
            if (layer := LAYER.fullmatch(name)) is None:
                raise RunError(f"weights: {name} is no matrix of an adapter")
            matrices.setdefault(f"{layer[1]}.weight", {})[layer[2]] = tensor
        parameters = dict(intake.lm.named_parameters())
        for name, pair in matrices.items():
            if name not in parameters or pair.keys() != {"A", "B"}:
                raise RunError(f"weights: the adapter's matrices of {name} fit no layer")
            if name not in self._base:
                self._base[name] = parameters[name].detach().to("cpu", copy=True)
            base = self._base[name].to(parameters[name].device).float()
            a, b = (pair[key].to(base.device) for key in ("A", "B"))
            yield name, torch.addmm(base, b, a, alpha=self._lora.alpha / self._lora.rank)

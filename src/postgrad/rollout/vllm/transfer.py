"""A weight transfer engine for vLLM's workers, behind vLLM's own interface.

It takes the parcels of rollout/transport, by whichever way they come, and loads them layer by layer
as vLLM loads a checkpoint. vLLM's own engines for NCCL and IPC are written for a trainer with the
same torch, and their IPC handles are pickled objects. vLLM's workers import this module, the
controller never does.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_rank,
)
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.layers.fused_moe.routed_experts import (  # pyright: ignore[reportMissingImports]
    RoutedExperts,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from postgrad.rollout.transport.broadcast import Meeting
from postgrad.rollout.transport.parcel import Parcel
from postgrad.rollout.transport.route import Inlet, Place


@dataclass
class Nothing(WeightTransferInitInfo):
    """No data: this engine needs no setup before the first update."""


@dataclass
class Arrival(WeightTransferUpdateInfo):
    """Some of the weights."""

    parcel: dict[str, Any]  # rollout.transport.parcel.Parcel as JSON


class ParcelTransfer(WeightTransferEngine[Nothing, Arrival]):
    """Loads weights from parcels."""

    init_info_cls = Nothing
    update_info_cls = Arrival
    inlet: Inlet

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Opens the ends of all ways that the device has."""
        self.inlet = Inlet(self.device)

    def start_weight_update(self) -> None:
        """From here on vLLM keeps loaded weights until those of their layer are complete."""
        self.inlet.receiver.begin()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a parcel. vLLM's own method would wait for an accelerator, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Arrival) -> None:
        """Load the weights of one parcel into the worker's model."""
        weights = list(self.inlet.receiver.take(Parcel.from_json(update_info.parcel)))
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Finish layers whose weights did not all come; on CPUs pack what vLLM leaves unpacked."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_heads(self.model)
            pack_experts(self.model)

    def shutdown(self) -> None:
        """Leaves the groups that weights came by."""
        self.inlet.close()


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads that are tied to the embedding again, from its new weight.

    On a CPU a layer computes with a packed copy of its weight. No weight comes under the name of a
    tied head, so vLLM 0.32 would keep the packed copy of its first weights and sample with them.
    """
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    for head in heads:
        method: Any = head.quant_method
        others = (module for module in model.modules() if module is not head)
        if any(getattr(module, "weight", None) is head.weight for module in others):
            method.process_weights_after_loading(head)


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of experts, all of which have come.

    On a CPU the kernel for mixtures reads packed weights. vLLM 0.32 packs those of its first load
    alone, and later reads plain ones as if they were packed.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            experts: Any = module
            experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)


def read_either_layout() -> None:
    """Let vLLM read both layouts that weights of Qwen3-VL's experts have.

    Checkpoints on the hub have [experts, inputs, outputs], and vLLM 0.32 takes every weight to be
    so. But transformers 5 computes with [experts, outputs, inputs]: so are the weights of its
    checkpoints and of every publish.
    """
    plain = RoutedExperts.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        if self.is_fused_checkpoint_transposed:
            hidden: int = self.moe_config.hidden_dim_unpadded
            weights = (as_on_the_hub(*named, hidden) for named in weights)
        return plain(self, weights)

    RoutedExperts.load_weights = load_weights


def as_on_the_hub(name: str, weight: torch.Tensor, hidden: int) -> tuple[str, torch.Tensor]:
    """A weight of all experts as [experts, inputs, outputs], by the place of the hidden size. As in
    transformers, one that fits both layouts is taken for transformers' own.
    """
    place = {"gate_up_proj": 2, "down_proj": 1}.get(name.rpartition(".")[2])
    if weight.ndim == 3 and place is not None and weight.shape[place] == hidden:
        return name, weight.transpose(1, 2)
    return name, weight


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    model_runner: Any
    device: torch.device
    weight_transfer_engine: Any

    def place(self) -> dict[str, Any]:
        """Where this worker computes."""
        return asdict(Place.here(self.device))

    def meet(self, meeting: dict[str, Any], first: int) -> None:
        """Join a group: this engine's workers are its members from `first` on."""
        member = first + get_tensor_model_parallel_rank()
        self.weight_transfer_engine.inlet.join(Meeting(**meeting), member)

    def require_complete(self, manifest: dict[str, Any]) -> None:
        """Raise RunError where what arrived is not what was sent."""
        self.weight_transfer_engine.inlet.receiver.require_complete(manifest)

    def clear_cache(self) -> None:
        """Set all keys and values to 0. A block's places behind its sequence keep what another
        sequence left there; vLLM's attention multiplies it by 0, which leaves NaN as it is.
        """
        for layer in self.model_runner.kv_caches:
            for cache in layer if isinstance(layer, list | tuple) else (layer,):
                cache.zero_()

    def divide_logits(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on; 1.0 turns it off."""
        model = self.model_runner.model
        vars(model).pop("compute_logits", None)
        if temperature == 1.0:
            return
        plain = model.compute_logits

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = plain(*args, **kwargs)
            return None if logits is None else logits.float() / temperature

        model.compute_logits = divided


read_either_layout()
WeightTransferEngineFactory.register_engine("postgrad", ParcelTransfer)

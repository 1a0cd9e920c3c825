"""A weight transfer engine for vLLM's workers, behind vLLM's own interface.

vLLM's own engines need a process group with the trainer (NCCL) or handles of its GPU memory. This
one reads safetensors from memory that the controller shares, so it works on every device, CPUs
included, and with different versions of torch on the two sides. vLLM's workers import this module,
the controller never does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class Nothing(WeightTransferInitInfo):
    """No data: this engine needs no setup before the first update."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights."""

    path: str  # of a safetensors file with their Hugging Face names


class SharedMemory(WeightTransferEngine[Nothing, Bucket]):
    """Loads weights from safetensors layer by layer, as vLLM loads a checkpoint."""

    init_info_cls = Nothing
    update_info_cls = Bucket

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Does nothing: there is no process group to join."""

    def start_weight_update(self) -> None:
        """From here on vLLM keeps loaded weights until those of their layer are complete."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a bucket. vLLM's own method would wait for an accelerator, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """Load the weights of one bucket into the worker's model."""
        with safe_open(update_info.path, framework="pt") as bucket:
            weights = [(name, bucket.get_tensor(name)) for name in bucket.keys()]  # noqa: SIM118
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Finish layers whose weights did not all come, and pack tied heads on CPUs."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Does nothing: no memory is held between updates."""


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


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    model_runner: Any

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


WeightTransferEngineFactory.register_engine("postgrad", SharedMemory)

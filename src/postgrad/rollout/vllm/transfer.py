"""How weights reach vLLM's workers: a transfer engine of ours, behind vLLM's own interface.

vLLM's other engines need a process group with the trainer (NCCL) or handles of its GPU memory. This
one reads safetensors from memory that the controller shares, so it works for every device and every
version of torch on the two sides, on CPUs too. Imported by the workers of vLLM, never by the
controller.
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
    """There is nobody to meet before the first update."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights. path: of safetensors, by their Hugging Face names."""

    path: str


class SharedMemory(WeightTransferEngine[Nothing, Bucket]):
    """Weights from safetensors, layer by layer, as vLLM loads a checkpoint."""

    init_info_cls = Nothing
    update_info_cls = Bucket

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """See Nothing."""

    def start_weight_update(self) -> None:
        """What is loaded from here on is kept until its layer is whole."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own waits for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket."""
        with safe_open(update_info.path, framework="pt") as bucket:
            weights = [(name, bucket.get_tensor(name)) for name in bucket.keys()]  # noqa: SIM118
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Layers that are not whole yet are made so, and heads that read the embedding."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def pack_tied_heads(model: torch.nn.Module) -> None:
    """On a CPU a layer computes with a packed copy of its weight. No weight comes under the name of
    a head that is tied to the embedding, so that vLLM 0.32 leaves its copy as it was first loaded
    (the sampler then goes on with the old head): it is packed again from the new embedding.
    """
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    for head in heads:
        method: Any = head.quant_method
        others = (module for module in model.modules() if module is not head)
        if any(getattr(module, "weight", None) is head.weight for module in others):
            method.process_weights_after_loading(head)


class WorkerExtension:
    """What vLLM's workers can do beside their own."""

    model_runner: Any

    def divide_logits(self, temperature: float) -> None:
        """Logits of everything that is computed from now on; 1.0: as they are."""
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

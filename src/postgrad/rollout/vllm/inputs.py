"""What vLLM's engine is made with, and the prompts that it is given.

A prompt with images comes with what the model's image processor made of them here: arrays, by names
that its tower takes. vLLM processes no picture, and expands no placeholder: tokens, places and
pixels are the learner's. As child.py it imports the standard library and vLLM's environment only.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from postgrad.rollout.vllm.protocol import Start, lora_room

TOGETHER = 4096  # least max_num_batched_tokens where prompts are not computed in chunks
TRANSFER = "postgrad.rollout.vllm.transfer"  # the module that vLLM's workers import
Shown = Sequence[Mapping[str, Any]]  # a prompt's images in order: protocol.py says of what


def engine_arguments(start: Start) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs. Raises ValueError for one that this vLLM lacks."""
    if start.more:
        _require_known(start.more)
    together = max(TOGETHER, start.max_len + 1) if start.whole_prompts else None
    adapter: dict[str, Any] = {}
    if start.lora_rank:
        adapter = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": lora_room(start.lora_rank),
            # without the head, on which vLLM 0.32 could not score prompts
            "lora_target_modules": list(start.lora_targets),
        }
    return {
        **adapter,
        **(_of_images(start) if start.images else {}),
        "enable_chunked_prefill": not start.whole_prompts,
        "max_num_batched_tokens": together,
        "model": start.model,
        "revision": start.revision,
        "tokenizer_revision": start.revision,
        "dtype": start.dtype,
        "max_model_len": start.max_len + 1,  # a scored sequence is followed by a token
        "max_num_seqs": start.slots,
        "kv_cache_memory_bytes": start.cache_bytes,
        "gpu_memory_utilization": start.memory_fraction,
        "tensor_parallel_size": start.tensor_parallel,
        "distributed_executor_backend": "mp" if start.tensor_parallel > 1 else "uni",
        "enforce_eager": start.eager,
        "enable_sleep_mode": start.sleep,
        # vLLM keeps states at the ends of a prompt's chunks: without chunks none are shared.
        "enable_prefix_caching": not (start.states and start.whole_prompts),
        "logprobs_mode": "processed_logprobs",  # of what was drawn from: temperature and filters
        "generation_config": "vllm",  # the recipe says how samples are drawn, not the model
        "structured_outputs_config": {"backend": "guidance"},  # the built-in engine's library
        "trust_remote_code": False,
        "disable_log_stats": True,
        # Where samples have no seeds, all are drawn with this one: of each engine another.
        "seed": 0 if start.seeded else secrets.randbits(31),
        "weight_transfer_config": {"backend": "postgrad"},
        "worker_extension_cls": f"{TRANSFER}.WorkerExtension",
        **({"enable_return_routed_experts": True} if start.experts else {}),
        **start.more,
        "hf_overrides": {**start.config, **start.more.get("hf_overrides", {})},
    }


def _require_known(names: Iterable[str]) -> None:
    vllm = import_module("vllm")
    arguments = [field.name for field in fields(vllm.EngineArgs)]
    for name in names:
        if name not in arguments:
            nearest = get_close_matches(name, arguments, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(
                f"rollout.vllm.engine_args: vLLM {vllm.__version__} has no argument {name!r}{hint}"
            )


def _of_images(start: Start) -> dict[str, Any]:
    """Arguments for a model that reads images. Raises RuntimeError where its torchvision, which
    vLLM and transformers import for such models, is missing or broken.
    """
    try:
        import_module("torchvision")
    except Exception as error:  # of any type: a build for another torch fails in its operators
        raise RuntimeError(
            "vLLM imports torchvision for models that read images, and here that ends in "
            f"{type(error).__name__}: {error}. Install the torchvision that belongs to vLLM's "
            f"torch ({torch.__version__}) in its environment"
        ) from error
    return {
        "limit_mm_per_prompt": {"image": 1, "video": 0},  # of its own processing, which is not used
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # pixels come as the tower takes them
        # The memory of its largest image is measured only where vLLM sizes the cache by itself.
        "skip_mm_profiling": start.cache_bytes is not None,
    }


class PromptInputs:
    """Makes prompts for one engine, an LLMEngine of vLLM."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def of(
        self, tokens: Sequence[list[int]], pixels: str = "", images: Sequence[Shown] = ()
    ) -> list[dict[str, Any]]:
        """Prompts of token ids. pixels: the file with the arrays of their images, which is removed.
        images: of each prompt; (): none has any. Raises RuntimeError for an image whose tokens are
        not as many as vLLM would give it.
        """
        if not pixels:
            return [{"prompt_token_ids": ids} for ids in tokens]
        arrays: dict[str, dict[str, torch.Tensor]] = {}
        for name, array in load_file(pixels).items():
            digest, _, argument = name.partition("/")
            arrays.setdefault(digest, {})[argument] = array
        Path(pixels).unlink()
        items = {digest: self._item(of_image) for digest, of_image in arrays.items()}
        for image in chain.from_iterable(images):
            counted = sum(count for _, count in image["runs"])
            if (expected := items[image["digest"]][1]) != counted:
                raise RuntimeError(
                    f"image {image['digest']} has {counted} tokens in its prompt, and vLLM gives "
                    f"it {expected}: this version of vLLM expands images of this model otherwise; "
                    'sample with rollout.type = "local"'
                )
        return [
            self._with_images(ids, shown, items) if shown else {"prompt_token_ids": ids}
            for ids, shown in zip(tokens, images, strict=True)
        ]

    def _item(self, arrays: Mapping[str, torch.Tensor]) -> tuple[Any, int]:
        """An image as vLLM's models take it, and the tokens that vLLM gives it."""
        inputs, parse = import_module("vllm.multimodal.inputs"), "vllm.multimodal.parse"
        processor = self._engine.renderer.mm_processor
        fields = processor._get_mm_fields_config(arrays, {})
        items = inputs.MultiModalKwargsItems.from_hf_inputs(arrays, fields)
        none = import_module(parse).MultiModalDataItems({})
        updates = processor._get_prompt_updates(none, {}, items)
        (update,) = [update for update in updates if update.modality == "image"]
        content = update.resolve(0).content
        embedded = content.is_embed
        count = len(content.full) if embedded is None else int(embedded(content.full).sum())
        return items["image"][0], count

    def _with_images(
        self, ids: list[int], shown: Shown, items: Mapping[str, tuple[Any, int]]
    ) -> dict[str, Any]:
        kwargs = import_module("vllm.multimodal.inputs").MultiModalKwargsItems
        return {
            "type": "multimodal",
            "prompt_token_ids": ids,
            "mm_kwargs": kwargs({"image": [items[image["digest"]][0] for image in shown]}),
            "mm_hashes": {"image": [image["digest"] for image in shown]},
            "mm_placeholders": {"image": [_placeholder(image["runs"]) for image in shown]},
        }


def _placeholder(runs: Sequence[Sequence[int]]) -> Any:
    """Where an image stands. runs: (first token, tokens), ..."""
    begin, end = runs[0][0], sum(runs[-1])
    embedded = torch.zeros(end - begin, dtype=torch.bool)
    for first, count in runs:
        embedded[first - begin : first - begin + count] = True
    where = import_module("vllm.multimodal.inputs").PlaceholderRange
    return where(begin, end - begin, is_embed=None if embedded.all() else embedded)

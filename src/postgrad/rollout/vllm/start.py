"""Starts vLLM engines as a recipe says."""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from transformers import GenerationConfig

from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.models.adapter_parameters import ends_of
from postgrad.models.adapter_targets import target_layers, target_weights
from postgrad.models.attention import text_config
from postgrad.models.config import load_config, load_generation_config
from postgrad.models.config_check import rope_tables
from postgrad.models.end_tokens import with_ends
from postgrad.models.headers import read_headers
from postgrad.models.image_reader import ImageReader
from postgrad.models.known_shapes import any_shape
from postgrad.models.load import require_readable, skeleton, weight_files
from postgrad.models.mxfp4 import mxfp4_weights
from postgrad.models.rope import scaled_length
from postgrad.models.routers import routed_layers
from postgrad.models.settings import LoraSettings
from postgrad.models.shapes import ModelShape
from postgrad.models.states import state_mixers
from postgrad.models.supported import causal_class, experts_of, reads_images
from postgrad.models.tokenizer import load_tokenizer
from postgrad.rollout.local.budget import EngineSizes, choose_sizes
from postgrad.rollout.local.rows import eos_token_ids
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.vllm.engine import VLLMEngine
from postgrad.rollout.vllm.model import SampledModel
from postgrad.rollout.vllm.process import Arrived, ProcessOptions, VLLMProcess, interpreter
from postgrad.rollout.vllm.protocol import Start

IMAGE_TYPES = (  # of models that read images, those that are tested
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
# Types whose delta rules vLLM 0.32 computes on CPUs in bfloat16 alone.
HALF_ON_CPUS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Types on text alone that vLLM has in one module with those that read images.
OF_IMAGE_MODELS = ("qwen3_5_text", "qwen3_5_moe_text")
BLOCK = (
    128  # token places of a block of vLLM's cache on CPUs; a sequence's last block is partly empty
)


def read_model(
    path: str,
    dtype: torch.dtype,
    max_len: int,
    adapter: LoraSettings | None = None,
    eos_token: Sequence[str] = (),
) -> SampledModel:
    """The model without its weights. adapter: see SampledModel. eos_token: see with_ends. Raises
    UsageError as load_model does, for weights in MXFP4, and as require_images_sampled.
    """
    config, tokenizer = load_config(path), load_tokenizer(path)
    require_images_sampled(config, path)
    reader = ImageReader(path, config, tokenizer) if reads_images(config) else None
    require_readable(path, config, causal_class(config))  # vLLM would unpickle
    _require_plain_weights(path)
    meta = skeleton(config, causal_class(config), path)
    # a directory without generation_config.json has what its config says
    generation = load_generation_config(path) or GenerationConfig.from_model_config(config)
    generation = with_ends(generation, tokenizer, eos_token)
    eos = eos_token_ids(SimpleNamespace(generation_config=generation), tokenizer)
    if adapter is not None and (weights := target_weights(meta, adapter)):
        raise UsageError(
            'rollout.vllm.lora = "adapter" beside an adapter on experts or routers '
            f"({', '.join(ends_of(weights))}): vLLM applies it to linear layers alone; use "
            '"merged"'
        )
    return SampledModel(meta, tokenizer, eos, dtype, max_len, adapter, reader)


def require_images_sampled(config: Any, path: str) -> None:
    """Raises UsageError for a model that reads images and that vLLM does not sample here. config:
    of the model at `path`.
    """
    if reads_images(config) and config.model_type not in IMAGE_TYPES:
        raise UsageError(
            f'rollout.type = "vllm": {path} is a model of type {config.model_type}, which is not '
            f"tried with images in vLLM; tried are {', '.join(IMAGE_TYPES)}: sample with "
            'type = "local"'
        )


def _require_plain_weights(path: str) -> None:
    """vLLM would hold experts packed, and a publish sends them as plain numbers."""
    if packed := mxfp4_weights(read_headers(weight_files(path))):
        raise UsageError(
            f'rollout.type = "vllm": {path} has weights in MXFP4 (such as {packed[0]}), which vLLM '
            'keeps packed, so that no trained weights could be sent to it: use type = "local", '
            "or name a copy with plain weights, such as an export of postgrad"
        )


def sizes_of(
    path: str, settings: RolloutSettings, dtype: torch.dtype, *, sequences: int, max_len: int
) -> EngineSizes:
    """The sizes of each engine. On a GPU vLLM sizes the cache, unless the recipe states it."""
    shape = _shape(path)
    return choose_sizes(
        settings,
        sequences=-(-sequences // settings.vllm.engines),
        max_len=max_len,
        token_bytes=shape.cache_bytes_per_token(dtype.itemsize),
        row_bytes=state_pages(shape, dtype.itemsize).row_bytes if shape.state_bytes else 0,
        free_bytes=psutil.virtual_memory().available // settings.vllm.engines,
    )


def start(
    path: str,
    settings: RolloutSettings,
    model: SampledModel,
    sizes: EngineSizes,
    *,
    device: torch.device,
    threads: int,
    logs: Path | None,
    beside_learner: bool = False,
) -> VLLMEngine:
    """Engines that can sample, with the weights of `path`. logs: the directory of their logs, made
    if it is missing; None: a temporary one, removed when the engine closes. beside_learner: a
    learner works on this process's first GPU, so an engine there sleeps while the learner works.

    Raises UsageError where vLLM's environment or the devices are missing, and RunError with the end
    of the log where vLLM does not start.
    """
    vllm = settings.vllm
    shared = text_config(model.skeleton).model_type in OF_IMAGE_MODELS
    python = interpreter(vllm.python, torchvision=shared or model.reader is not None)
    cpu = device.type == "cpu"
    if cpu:
        _require_on_cpu(vllm.sleep, model)
    if settings.router_replay == "sampled":
        model = _recording(model, cpu=cpu)
    devices = None if cpu else _devices(vllm.engines, vllm.tensor_parallel)
    shares = beside_learner and any(_first_device() in visible for visible in devices or ())
    level = _sleep_level(vllm.sleep, shares=shares, base=model.adapter is not None)
    message = _start_message(path, settings, model, sizes, cpu=cpu, sleep=level > 0)
    inbox: SimpleQueue[Arrived] = SimpleQueue()
    with ExitStack() as started:
        if logs is None:
            logs = Path(mkdtemp(prefix="postgrad-vllm-logs-"))
            started.callback(shutil.rmtree, logs)
        logs.mkdir(exist_ok=True)
        processes: list[VLLMProcess] = []
        for number in range(vllm.engines):
            visible = devices[number] if devices is not None else None
            options = ProcessOptions(python, threads, visible, _log(logs, number))
            processes.append(VLLMProcess(number, options, message, inbox))
            started.callback(processes[-1].close)
        engine = VLLMEngine(
            processes, inbox, model, level=level, learner=device, transport=settings.transport
        )
        engine.ready(vllm.start_seconds)
        engine.on_close(started.pop_all())
    return engine


def _require_on_cpu(sleep: bool | None, model: SampledModel) -> None:
    """Raises UsageError for what vLLM cannot do without a GPU."""
    if sleep:
        raise UsageError("rollout.vllm.sleep: vLLM cannot sleep on a CPU; leave it out")
    kind = text_config(model.skeleton).model_type
    if kind in HALF_ON_CPUS and model.dtype != torch.bfloat16:
        raise UsageError(
            f'rollout.dtype: on a CPU vLLM computes the delta rules of {kind} in "bfloat16" alone, '
            f'not in "{str(model.dtype).removeprefix("torch.")}": set rollout.dtype = "bfloat16"'
        )
    if model.adapter is not None and experts_of(model.skeleton.config):
        raise UsageError(
            'rollout.vllm.lora = "adapter": beside an adapter, on whatever layers, vLLM computes '
            f'the experts of {kind} by Triton kernels, which need a GPU: use "merged"'
        )


def _recording(model: SampledModel, *, cpu: bool) -> SampledModel:
    """The model, whose samples come with experts. Raises UsageError for a dense one."""
    if cpu:  # vLLM 0.32: "AuxOutput Connector requires Model Runner V2", which "requires Triton"
        raise UsageError(
            'rollout.router_replay = "sampled": vLLM records the experts of samples on GPUs '
            'alone; use "old", or rollout.type = "local"'
        )
    return replace(model, routed=routed_layers(model.skeleton))


def _sleep_level(stated: bool | None, *, shares: bool, base: bool) -> int:
    """vLLM's level of sleep: 2 on a learner's GPU, 1 on GPUs of its own where the recipe asks for
    it, 0 for none. Level 1 copies the weights to the host's memory and back. Level 2 drops them:
    before an engine samples again, a publish brings new ones anyway; but not the `base` under an
    adapter, which is therefore kept.
    """
    if base:
        return int(shares if stated is None else stated)
    if stated is None:
        return 2 if shares else 0
    return (2 if shares else 1) if stated else 0


def _start_message(
    path: str,
    settings: RolloutSettings,
    model: SampledModel,
    sizes: EngineSizes,
    *,
    cpu: bool,
    sleep: bool,
) -> Start:
    """The first message to every process."""
    vllm, lora = settings.vllm, model.adapter
    name, revision = split_revision(path)
    adapted = () if lora is None else target_layers(model.skeleton, lora)
    return Start(
        model=str(Path(path).resolve()) if Path(path).is_dir() else name,
        revision=revision,
        dtype=str(model.dtype).removeprefix("torch."),
        max_len=model.max_len,
        slots=sizes.slots,
        cache_bytes=_cache_bytes(path, settings, model.dtype, sizes, cpu=cpu),
        tensor_parallel=vllm.tensor_parallel,
        memory_fraction=vllm.memory_fraction,
        eager=cpu if vllm.eager is None else vllm.eager,
        sleep=sleep,
        whole_prompts=cpu and vllm.seeded,
        seeded=vllm.seeded,
        images=model.reader is not None,
        experts=bool(model.routed),
        config=more_positions(path, model),
        states=bool(state_mixers(model.skeleton)),
        more=vllm.engine_args,
        lora_rank=0 if lora is None else lora.largest_rank,
        lora_targets=tuple(sorted({layer.rpartition(".")[2] for layer in adapted})),
    )


def more_positions(path: str, model: SampledModel) -> dict[str, Any]:
    """What vLLM reads in place of the model's config, so that it has positions for the longest
    sequence; {}: it has them.

    Rotary positions go on behind max_position_embeddings. vLLM computes them ahead, in tables of
    that length, and reads behind a table's end without an error. Tables of yarn have the length
    that its factor gives. Raises UsageError where that is too short.
    """
    config: Any = model.skeleton.config
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if stated is None or model.max_len <= stated:
        return {}
    for table in rope_tables(getattr(text, "rope_parameters", None)):
        if "yarn" not in str(table.get("rope_type")):
            continue
        places = scaled_length(stated, table)
        if places is not None and model.max_len > places:
            raise UsageError(
                f'rollout.type = "vllm": with rope_type {table["rope_type"]!r} vLLM has {places} '
                f"positions for {path}, and sequences may have {model.max_len} tokens: set "
                'data.max_len to that or less, or sample with type = "local"'
            )
    room = {"max_position_embeddings": model.max_len}
    return room if text is config else {"text_config": room}


def _log(folder: Path, number: int) -> Path:
    return folder / f"vllm-{number}.log"


def _shape(path: str) -> ModelShape:
    config: dict[str, Any] = load_config(path).to_dict()
    return any_shape(config, path)


def _cache_bytes(
    path: str, settings: RolloutSettings, dtype: torch.dtype, sizes: EngineSizes, *, cpu: bool
) -> int | None:
    """Cache bytes on one rank; None: vLLM decides. On a CPU it would take most of the memory."""
    if not cpu and settings.cache_tokens is None:
        return None
    shape = _shape(path)
    if shape.state_bytes:
        needed = state_pages(shape, dtype.itemsize).needed(sizes)
    else:
        places = sizes.cache_tokens + (sizes.slots + 1) * BLOCK
        needed = places * shape.cache_bytes_per_token(dtype.itemsize)
    return needed // settings.vllm.tensor_parallel


@dataclass(frozen=True, slots=True)
class StatePages:
    """vLLM's cache of a model some of whose layers carry states: pages of one size, each with the
    state of a sequence in one layer, or with one layer's keys and values of a block of tokens. vLLM
    0.32 divides the layers into groups of as many (the last ones of a kind filled up), and gives
    pages to a whole group.
    """

    page_bytes: int
    page_tokens: int  # whose keys and values in one layer fill a page
    attending: int  # layers with keys and values, filled up to whole groups
    stateful: int  # layers with states, filled up to whole groups
    group: int  # layers of a group

    @property
    def row_bytes(self) -> int:
        """Of one sequence beside the pages that its tokens fill: a last one in each attending
        layer, and two states in each other layer, while it goes from one page to the next.
        """
        return self.page_bytes * (self.attending + 2 * self.stateful)

    def needed(self, sizes: EngineSizes) -> int:
        """Bytes for all tokens and rows of an engine, one more row, and the page of each group
        that vLLM keeps empty.
        """
        filled = self.attending * (sizes.cache_tokens // self.page_tokens)
        return self.page_bytes * (filled + self.group) + self.row_bytes * (sizes.slots + 1)


def state_pages(shape: ModelShape, dtype_bytes: int) -> StatePages:
    """The pages of a shape that has states, in a dtype of so many bytes."""
    attending = shape.attending
    stateful = shape.layers - attending or shape.layers  # Falcon-H1's layers do both
    state = -(-shape.state_bytes // stateful)
    if not attending:
        return StatePages(state, 1, 0, stateful, group=stateful)
    block = BLOCK * shape.cache_bytes_per_token(dtype_bytes) // attending
    blocks = -(-state // block)
    fewer, more = sorted((attending, stateful))
    group = more if more < 1.5 * fewer else fewer
    attending, stateful = (-(-layers // group) * group for layers in (attending, stateful))
    return StatePages(blocks * block, blocks * BLOCK, attending, stateful, group)


def _devices(engines: int, tensor_parallel: int) -> list[tuple[str, ...]]:
    """The CUDA devices of each engine, from the last one backwards: the learner has the first, and
    shares it where there are too few. Raises UsageError where the engines need more than there are.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if tensor_parallel > len(devices):
        raise UsageError(
            f"rollout.vllm.tensor_parallel = {tensor_parallel}: this machine has "
            f"{len(devices)} GPUs"
        )
    places = len(devices) // tensor_parallel
    if engines > places:
        raise UsageError(
            f"rollout.vllm.engines = {engines} of {tensor_parallel} GPUs each: there is room for "
            f"{places} on the {len(devices)} GPUs of this machine"
        )
    backwards = devices[::-1]
    return [
        tuple(backwards[i * tensor_parallel : (i + 1) * tensor_parallel]) for i in range(engines)
    ]


def _first_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[0] if visible else "0"

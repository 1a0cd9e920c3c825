"""Writes weights as a Hugging Face directory, and checks it by a reload with plain transformers."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from postgrad.core.array_files import head_of
from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import write_json
from postgrad.core.hub import pretrained
from postgrad.models.adapter_merge import merge_adapter
from postgrad.models.adapter_reader import read_adapter
from postgrad.models.config import load_config, load_generation_config, reading
from postgrad.models.end_tokens import with_ends
from postgrad.models.files import INDEX, SUFFIX, WEIGHTS, is_adapter, weights_source
from postgrad.models.frozen_parts import frozen_names
from postgrad.models.headers import require_room
from postgrad.models.image_reader import ImageReader, processor_files
from postgrad.models.images import ImageTower
from postgrad.models.load import Loading, read_weights, require_readable, skeleton
from postgrad.models.named_templates import with_template
from postgrad.models.rendering import Unrenderable, rendered
from postgrad.models.save import save_model
from postgrad.models.score import (
    MEAN,
    SEPARATOR,
    STD,
    STEP_LABELS,
    RewardScale,
    require_padding,
    two_labels,
)
from postgrad.models.stored import DTYPES, Box, StoredTensor, of_tensors, real
from postgrad.models.supported import causal_class, reads_images
from postgrad.models.tokenizer import load_tokenizer

PROBE = "The quick brown fox jumps over the lazy dog."
CPU = torch.device("cpu")
SHARD_BYTES = 5 * 10**9  # of one file
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")  # of generation_config.json
TOLERANCE = 1e-5  # largest difference of logits; the same weights in one dtype differ by less


def read_plain(path: str, kind: Any, dtype: torch.dtype) -> Any:
    """The model of a directory as anybody's transformers reads it, with its own attention."""
    adapter = read_adapter(path) if is_adapter(path) else None
    source = weights_source(path)
    require_readable(source, load_config(source), kind)
    name, at = pretrained(source)
    with reading(f"the model {source} cannot be loaded", "write it again"):
        lm: Any = kind.from_pretrained(name, dtype=dtype, use_safetensors=True, **at)
    if adapter is not None:
        merge_adapter(lm, adapter, path)
    return lm


def export_hf(
    weights: Mapping[str, Tensor],
    base: str,
    to: Path,
    *,
    dtype: torch.dtype,
    scale: RewardScale | None = None,
    separator: str | None = None,
    overwrite: bool = False,
    chat_template: str = "",
    eos_token: Sequence[str] = (),
    card: str | None = None,
    tokenizer: Any = None,
) -> None:
    """Writes config, weights (safetensors), tokenizer, chat template and generation config.

    weights: by hub name, a tied one once; each is asked for when it is written, and again for the
    check, so that a mapping may gather or read them one by one. base: the directory or hub id of
    the model that they were trained from. scale: of a critic or reward model, which is written as a
    model for sequence classification with one label; None for a policy. separator: between two
    steps, of a process reward model, which is written as a model for token classification with two
    labels, and has no scale. chat_template: data.chat_template, which replaces the tokenizer's; ""
    keeps it. eos_token: ends of a policy's answers (with_ends). card: the text of the model card.
    tokenizer: in place of the base's, with more tokens, for which `weights` have rows.

    `to` exists only after a reload has given the same logits and tokens. Raises UsageError where it
    exists already, RunError where it cannot be written or the reload differs; nothing is left then.
    """
    if to.exists() and not (overwrite and to.is_dir()):
        raise UsageError(f"{to} already exists: choose another directory")
    config = load_config(base)
    if tokenizer is not None:
        _resize(config, len(tokenizer))
    tokenizer = with_template(tokenizer or load_tokenizer(base), chat_template)
    policy = kind = causal_class(config)
    if separator is not None:
        kind, weights = _describe_steps(config, separator), two_labels(weights)
    elif scale is not None:
        kind = AutoModelForSequenceClassification
        _describe_scores(config, tokenizer, base, scale)
    meta = skeleton(config, kind, base)
    require_room(meta, sum(p.nbytes for p in meta.parameters()), base)  # buffers
    lm = _model_of(weights, _buffers(meta, base, kind, dtype), meta, dtype)
    if kind is policy:
        lm.generation_config = _generation_config(base, tokenizer, eos_token)
    saver = _Saver(lm, processor_files(base) if reads_images(config) else [])
    check = partial(_compare, lm, tokenizer)
    save_model(saver, tokenizer, to, check=check, replace=overwrite, card=card)


def _describe_scores(config: Any, tokenizer: Any, base: str, scale: RewardScale) -> None:
    require_padding(tokenizer, base)
    config.num_labels = 1
    for part in (config, config.get_text_config()):
        part.pad_token_id = tokenizer.pad_token_id  # what transformers finds the last token by
    setattr(config, MEAN, scale.mean)
    setattr(config, STD, scale.std)


def _describe_steps(config: Any, separator: str) -> Any:
    """The Auto class of a process reward model: its labels are read at the last token of a step."""
    config.num_labels = len(STEP_LABELS)
    config.id2label = dict(enumerate(STEP_LABELS))
    config.label2id = {label: number for number, label in enumerate(STEP_LABELS)}
    setattr(config, SEPARATOR, separator)
    return AutoModelForTokenClassification


def _resize(config: Any, tokens: int) -> None:
    """Gives a config rows for so many tokens, where it has fewer."""
    rows = max(config.get_text_config().vocab_size, tokens)
    for part in (config, config.get_text_config()):
        if getattr(part, "vocab_size", None) is not None:
            part.vocab_size = rows


def _buffers(meta: Any, base: str, kind: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the base's files hold beside weights, and no update changes: the bias that a router
    chooses experts by (DeepSeek), constants of activations (Apertus).
    """
    parameters = dict(meta.named_parameters(remove_duplicate=False))
    names = [name for name in meta.state_dict() if name not in parameters]
    if not names:
        return {}
    lm, _ = read_weights(base, load_config(base), kind, Loading(dtype, CPU, in_files=True))
    held = dict(lm.named_buffers())
    return {name: real(held[name]) for name in names}


def frozen_weights(base: str, freeze: Collection[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a model that model.freeze kept from training, by hub name, in their files."""
    config = load_config(base)
    lm, _ = read_weights(base, config, causal_class(config), Loading(dtype, CPU, in_files=True))
    frozen = frozen_names(lm, freeze)
    return {name: p.detach() for name, p in lm.named_parameters() if name in frozen}


def _model_of(
    weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], meta: Any, dtype: torch.dtype
) -> Any:
    """A model like `meta`, whose weights are taken from `weights` each time that they are needed,
    and never held.
    """
    parameters = dict(meta.named_parameters(remove_duplicate=False))
    unknown = [name for name in weights if name not in parameters]
    present = {parameters[name] for name in weights if name in parameters}
    missing = [name for name, parameter in parameters.items() if parameter not in present]
    if unknown or missing:
        raise _another_model(unknown, missing, [])
    stored: dict[str, Tensor] = dict(buffers)
    for name in weights:
        shape = parameters[name].shape
        stored[name] = StoredTensor(shape, dtype, CPU, partial(_block, weights, name, shape))
    problem = f"transformers cannot hold the weights of this {meta.config.model_type} model"
    with reading(problem, "they are still in the run's checkpoints"):
        lm, _ = of_tensors(type(meta), meta.config, dtype, stored, meta.config._attn_implementation)
    lm._weight_conversions = None  # so that transformers converts them as the hub has them
    return lm.eval()


def _block(weights: Mapping[str, Tensor], name: str, shape: torch.Size, box: Box) -> Tensor:
    """A block of a weight; reading one of its own over ranks gathers it in this process."""
    tensor = real(weights[name]).detach().cpu()
    if tensor.shape != shape:
        raise _another_model([], [], [name])
    return tensor[tuple(slice(at, at + count) for at, count in box)]


def _another_model(unknown: list[str], missing: list[str], shapes: list[str]) -> RunError:
    return RunError(
        f"the weights are of another model: unknown {unknown[:3]}, missing {missing[:3]}, of "
        f"another shape {shapes[:3]}; is the directory that model.path names the one that the run "
        "began with?"
    )


@dataclass(frozen=True, slots=True)
class _Saver:
    """A model of stored weights with the method save_pretrained, which reads them one by one."""

    lm: Any
    processor: Sequence[Path]  # the files of its image processor, which are copied

    @torch.no_grad()
    def save_pretrained(self, folder: Path) -> None:
        self.lm.save_pretrained(folder, state_dict={})  # the configs, and no weights
        for file in self.processor:
            shutil.copyfile(file, folder / file.name)
        state: dict[str, Tensor] = dict(self.lm.named_parameters())  # tied ones once
        named = dict(self.lm.named_parameters(remove_duplicate=False))
        state |= {name: t for name, t in self.lm.state_dict().items() if name not in named}
        state = revert_weight_conversion(self.lm, state)
        shards = _shards(state)
        files = [WEIGHTS]
        if len(shards) > 1:
            files = [f"model-{n + 1:05d}-of-{len(shards):05d}{SUFFIX}" for n in range(len(shards))]
            size = sum(tensor.nbytes for tensor in state.values())
            pairs = zip(files, shards, strict=True)
            places = {name: file for file, names in pairs for name in names}
            write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
        for file, names in zip(files, shards, strict=True):
            _write(folder / file, {name: state[name] for name in names})


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the bytes that safetensors' save_file would, but reads each tensor when its turn comes
    and keeps none: save_file wants all tensors of a file in memory.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    shapes = {name: (codes[tensors[name].dtype], tensors[name].shape) for name in names}
    head = head_of(shapes, [tensors[name].nbytes for name in names], {"format": "pt"})
    with path.open("wb") as file:
        file.write(head)
        for name in names:
            numbers = real(tensors[name]).detach().contiguous()
            file.write(numbers.reshape(-1).view(torch.uint8).numpy().data)


def _shards(state: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the tensors of each file: SHARD_BYTES at most, or a single one."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in state.items():
        if shards[-1] and held + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.nbytes
    return shards


def _generation_config(
    base: str, tokenizer: Any, eos_token: Sequence[str]
) -> GenerationConfig | None:
    """The base's generation config, else one with the end-of-sequence and padding tokens alone.

    Without the base's penalties: they change what the weights say by what was written before, and
    no loss, sample or evaluation had them. vLLM and `generate` would apply them unasked.
    """
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    generation = load_generation_config(base) or GenerationConfig(**ends)
    for penalty in PENALTIES:
        setattr(generation, penalty, None)
    return with_ends(generation, tokenizer, eos_token)


@torch.no_grad()
def _compare(lm: Any, tokenizer: Any, written: Path) -> None:
    read_tokenizer: Any = AutoTokenizer.from_pretrained(written)
    kind: Any = (
        AutoModelForSequenceClassification if hasattr(lm, "score") else causal_class(lm.config)
    )
    if type(lm).__name__.endswith("ForTokenClassification"):
        kind = AutoModelForTokenClassification
    read = read_plain(str(written), kind, lm.dtype)
    text = _probe(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if read_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
        raise RunError(f"export: the tokenizer read back from {written} gives other tokens")
    if read_tokenizer.chat_template != tokenizer.chat_template:
        raise RunError(f"export: the chat template read back from {written} is another")
    batch = torch.tensor([ids])
    difference = float((lm(batch).logits.float() - read(batch).logits.float()).abs().max())
    if not difference <= TOLERANCE:
        raise RunError(
            f"export: the model read back from {written} gives other logits (by {difference:.3g})"
        )
    if reads_images(lm.config):
        _compare_towers(lm, read, ImageReader(str(written), read.config, read_tokenizer))


def _compare_towers(lm: Any, read: Any, reader: ImageReader) -> None:
    """Raises RunError where two models encode a picture differently."""
    from PIL import Image  # installed where there is a reader

    pixels = reader.inputs(Image.radial_gradient("L").convert("RGB"), "the picture of an export")
    images = {"": pixels}
    towers = (ImageTower(each, images.__getitem__) for each in (lm, read))
    pairs = zip(*(tower.encoded(images)[""] for tower in towers), strict=True)
    if any(float((a.float() - b.float()).abs().max()) > TOLERANCE for a, b in pairs):
        raise RunError("export: the model read back encodes an image differently")


def _probe(tokenizer: Any) -> str:
    """PROBE as a user's message in the chat template; PROBE itself where the template fails."""
    messages = [{"role": "user", "content": PROBE}]
    (texts,) = rendered(tokenizer, [(messages, [(1, True)])], {})
    return PROBE if isinstance(texts, Unrenderable) else texts[0]

"""Loads models from Hugging Face directories or the hub, with our attention, without foreign code.

Every command loads through here. Files are checked before a library reads them (models.files,
models.config_check), and any error that a library raises over them becomes one UsageError.
"""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers import __version__ as transformers_version
from transformers.utils.hub import cached_file, cached_files

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.hub import pretrained
from postgrad.models import files
from postgrad.models.adapter_reader import HEAD, merge_adapter, read_adapter
from postgrad.models.attention import carries_states, carry_context, implementation_of
from postgrad.models.config_check import require_config
from postgrad.models.decoder import move_together
from postgrad.models.four_bits import Quantize, loading_arguments
from postgrad.models.headers import read_headers, require_fit, require_whole
from postgrad.models.linear import fuse_norms, speed_up
from postgrad.models.probe import require_same_outputs
from postgrad.models.recompute import recompute_activations
from postgrad.models.rope import hold_frequencies
from postgrad.models.settings import Recompute, looks_local
from postgrad.models.stored import (
    mxfp4_weights,
    of_tensors,
    real,
    realise,
    stored_tensors,
    unpacked_mxfp4,
)
from postgrad.models.supported import (
    causal_class,
    give_score_class,
    is_tested,
    may_carry_states,
    require_interface,
    require_supported,
    require_writer,
    without_dropout,
)
from postgrad.parallel.ranks import ALONE, Ranks

SCALE_KEYS = ("reward_mean", "reward_std")  # in config.json of a reward model
LONGEST = 400  # characters of a library's message that are shown


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, or a score model, on its device."""

    lm: nn.Module
    tokenizer: Any  # a fast tokenizer of transformers
    config: Any  # transformers' config, every dropout at 0
    source: str  # directory or hub id that it was loaded from: "org/name@REVISION"


@dataclass(frozen=True, slots=True)
class Loading:
    """How weights are read: see load_model."""

    dtype: torch.dtype
    device: torch.device
    quantize: Quantize = "none"
    ranks: Ranks = ALONE
    in_files: bool = False
    together: bool = False

    @property
    def stored(self) -> bool:
        """Whether weights stay in their files until somebody needs them."""
        return (self.in_files or self.ranks.size > 1) and self.quantize == "none"


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    gradient_checkpointing: Recompute = False,
    quantize: Quantize = "none",
    together: bool = False,
    ranks: Ranks = ALONE,
    in_files: bool = False,
    images: bool = False,
) -> LoadedModel:
    """The model of a directory or hub id, computing in `dtype`, dropout off.

    path: also "org/name@REVISION" (core.hub), or the directory of a PEFT adapter, which is merged
    into its base (models.adapter_reader), here and in the other functions. quantize: "4bit" holds
    the matrices of the layers so, for a model that gets an adapter. together: the weights are in
    one piece of memory (models.decoder.move_together). ranks: those that will divide the model. If
    there are several, its weights stay in their files (models.stored) until Backbone.divide takes
    this rank's part; those in four bits do not. in_files: True does so in one process too.
    images: whether the caller trains models that read images too; others refuse them.
    The model attends with our attention, so `hidden_states` can run it over layouts. It is in eval
    mode; with gradient checkpointing, which acts in train mode alone, in that.
    Raises UsageError for a path without a model or tokenizer, for files that are damaged or not
    safetensors, and for a model whose outputs here are not those of transformers.
    """
    config = load_config(path)
    require_writer(config, path, images=images)
    tokenizer = load_tokenizer(path)
    how = Loading(dtype, device or torch.device("cpu"), quantize, ranks, in_files, together)
    lm, missing = read_weights(path, config, causal_class(config), how)
    require_whole(path, missing=missing)
    place(lm, path, how, gradient_checkpointing=gradient_checkpointing)
    return LoadedModel(lm, tokenizer, config, path)


def place(lm: Any, path: str, how: "Loading", *, gradient_checkpointing: Recompute) -> None:
    """Moves a model to its device, swaps in our faster layers, and sets its mode as load_model
    says. A model of an untested type is probed there (models.probe), by the first rank alone.
    """
    if how.stored:  # stored weights are of their device already
        for module in lm.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else real(buffer).to(how.device)
    elif how.together and how.quantize == "none":
        move_together(lm, how.device)
    else:
        lm.to(how.device)
    speed_up(lm, how.device)
    fuse_norms(lm, how.device)
    hold_frequencies(lm, path)
    lm.eval()
    if may_carry_states(lm.config):
        from postgrad.models.states import carry_states  # of types without states nothing is read

        carry_states(lm)
    if not is_tested(lm.config) and not carries_states(lm):
        carry_context(lm)
    if how.ranks.rank == 0 and not is_tested(lm.config):
        require_same_outputs(lm, path)
    if gradient_checkpointing:
        recompute_activations(lm.train(), gradient_checkpointing)


def load_config(path: str) -> Any:
    """The model's config with every dropout at 0. Raises UsageError as load_model does, before a
    weight is read.
    """
    _require_directory(path, "model")
    is_merged, path = files.is_adapter(path), files.weights_source(path)
    with reading(f"no model at {path}", "model.path is a directory with config.json, or a hub id"):
        file = _config_file(path)
        stated = files.read_object(file)
        require_config(stated, file)
        if stated["model_type"] not in CONFIG_MAPPING:
            code = "; code of its own (auto_map) is never run" if "auto_map" in stated else ""
            raise UsageError(
                f"no model at {path}: model type {stated['model_type']} is not supported because "
                f"transformers {transformers_version} does not have it{code}"
            )
        name, at = pretrained(path)
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False, **at)
    if (stated.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        del config.quantization_config  # weights are read as numbers (models.stored)
    require_supported(config, path)
    without_dropout(config)
    for key in SCALE_KEYS if is_merged else ():
        config.__dict__.pop(key, None)  # of the base's scores, which the adapter changes
    return config


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, checked: an end-of-sequence token, offsets. Of an adapter its own,
    or where its directory has none its base's.
    """
    _require_directory(path, "tokenizer")
    if files.is_adapter(path) and not files.has_tokenizer(Path(path)):
        path = files.weights_source(path)
    wanted = "model.path is a directory with tokenizer.json, or a hub id"
    with reading(f"no tokenizer at {path}", wanted):
        if Path(path).is_dir():
            files.require_tokenizer_files(Path(path))
        name, at = pretrained(path)
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **at)
        size = len(tokenizer)
    if not tokenizer.is_fast or not size:
        raise UsageError(
            f"the tokenizer at {path} gives no offsets, which loss masks need: convert it "
            "to tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer at {path} has no end-of-sequence token: no answer could ever end; set "
            "eos_token in tokenizer_config.json"
        )
    return tokenizer


def require_same_tokens(
    path: str,
    key: str,
    policy_tokenizer: Any,
    *,
    remedy: str = "take a model of the same family",
) -> None:
    """Raises UsageError where the model at `path`, which will read the policy's token ids, has
    another vocabulary. key: the recipe's key that names the model.
    """
    tokenizer = load_tokenizer(path)
    if tokenizer.get_vocab() != policy_tokenizer.get_vocab():
        raise UsageError(
            f"{key}: {path} has another tokenizer than the policy ({len(tokenizer)} and "
            f"{len(policy_tokenizer)} tokens): the policy's token ids mean other text to it; "
            f"{remedy}"
        )


def load_generation_config(path: str) -> GenerationConfig | None:
    """What generation_config.json of a model says; None where it has none. Of an adapter its own,
    or else its base's. Raises UsageError for one that cannot be read.
    """
    if files.is_adapter(path) and not files.has_generation(Path(path)):
        path = files.weights_source(path)
    with reading(f"no generation config at {path}", f"fix {files.GENERATION}, or remove it"):
        if Path(path).is_dir() and not files.has_generation(Path(path)):
            return None
        name, at = pretrained(path)
        try:
            return GenerationConfig.from_pretrained(name, **at)
        except OSError:  # a hub id without one
            return None


def read_weights(path: str, config: Any, kind: Any, how: Loading) -> tuple[Any, list[str]]:
    """The model as `kind`, an Auto class, and the names of weights that its files lack.

    Raises UsageError where the files cannot be read or a weight has another shape than its config
    says.
    """
    if files.is_adapter(path):
        return _read_merged(path, config, kind, how)
    meta = require_readable(path, config, kind)
    require_interface(meta, path)
    wanted = "it takes a config and weights as safetensors in the layout of Hugging Face"
    attention = implementation_of(config)
    name, at = pretrained(path)
    with reading(f"the model {path} cannot be loaded", wanted):
        packed = bool(mxfp4_weights(read_headers(weight_files(path))))
        if packed and how.quantize != "none":
            raise UsageError(
                f"model.quantize: {path} has experts in MXFP4, which are read as {how.dtype}, and "
                "the experts of a mixture are not held in four bits here; leave it out"
            )
        if how.stored or packed:
            weights = unpacked_mxfp4(stored_tensors(weight_files(path), how.device))
            read: Any = of_tensors(type(meta), config, how.dtype, weights, attention)
            if not how.stored:
                realise(read[0])
        else:
            read = kind.from_pretrained(
                name,
                config=config,
                dtype=how.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are named below
                **at,
                **loading_arguments(how.quantize, how.device),
            )
    lm, report = read
    require_whole(path, mismatched=[name for name, *_ in report["mismatched_keys"]])
    return lm, list(report["missing_keys"])


def _read_merged(path: str, config: Any, kind: Any, how: Loading) -> tuple[Any, list[str]]:
    """As read_weights, of an adapter's directory."""
    if how.quantize != "none":
        raise UsageError(
            f"model.quantize: {path} is an adapter, which cannot be merged into weights of four "
            f"bits; write the merged model first (postgrad export {path} --to MODEL), and name it"
        )
    adapter = read_adapter(path)
    lm, missing = read_weights(files.weights_source(path), config, kind, how)
    merge_adapter(lm, adapter, path)
    return lm, [name for name in missing if not (adapter.scores and name == f"{HEAD}.weight")]


def require_readable(path: str, config: Any, kind: Any) -> Any:
    """The model on the meta device (`skeleton`). Raises UsageError, before a weight is read or
    memory taken for one, where its files are not safetensors or do not fit its config.
    """
    path = files.weights_source(path)
    files.has_generation(Path(path))  # transformers reads it with the weights
    headers = read_headers(weight_files(path))
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > len(headers):
        raise UsageError(
            f"{path}/{files.CONFIG}: num_hidden_layers is {layers}, and the files hold "
            f"{len(headers)} weights in all: they are not of one model"
        )
    meta = skeleton(config, kind, path)
    require_fit(meta, headers, path)
    return meta


def skeleton(config: Any, kind: Any, path: str) -> Any:
    """The model of a config as `kind`, an Auto class, on the meta device: shapes without memory.
    Raises UsageError where transformers cannot make one.
    """
    if kind in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        give_score_class(config, kind)
    problem = f"transformers makes no model of {path}/{files.CONFIG}"
    with reading(problem, "take the config.json that belongs to the weights"), torch.device("meta"):
        return kind.from_config(copy.deepcopy(config))


@contextmanager
def reading(problem: str, remedy: str) -> Generator[None]:
    """Turns any error of a library inside into a UsageError of problem, reason and remedy. Lack of
    memory and our own errors pass unchanged.
    """
    try:
        yield
    except (PostgradError, MemoryError, torch.OutOfMemoryError):
        raise
    except RecursionError as error:
        raise UsageError(f"{problem}: its JSON is nested too deep; {remedy}") from error
    except Exception as error:
        raise UsageError(f"{problem}: {_message_of(error)}; {remedy}") from error
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UsageError(f"{problem}: {_message_of(error)}; {remedy}") from error


def _message_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    plain = isinstance(error, OSError | ValueError | ImportError)
    return text if plain and text else f"{type(error).__name__}: {text}"


def _require_directory(path: str, kind: str) -> None:
    if looks_local(path) and not Path(path).is_dir():
        hint = _written_by_a_run(Path(path).parent)
        raise UsageError(f"no {kind} at {path}: there is no such directory (model.path){hint}")


def _written_by_a_run(folder: Path) -> str:
    """What to do where `folder` is that of a run, which writes its model only if it is told to."""
    if not (folder / "checkpoints").is_dir():
        return ""
    export = f"postgrad export {folder} --to DIR"
    return f"; {folder} is a run: {export} writes its model, as checkpoint.save_hf = true does"


def _config_file(path: str) -> Path:
    file = Path(path) / files.CONFIG
    if not Path(path).is_dir():
        name, at = pretrained(path)
        file = Path(cached_file(name, files.CONFIG, **at) or file)
    elif not file.is_symlink() and not file.exists():
        raise UsageError(
            f"no model at {path}: it has no {files.CONFIG}; model.path is a directory with one, or "
            f"a hub id{_written_by_a_run(Path(path))}"
        )
    return file


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a directory, or of a hub id, which are fetched."""
    if Path(path).is_dir():
        return files.weight_files(Path(path))
    name, at = pretrained(path)
    quiet = {"_raise_exceptions_for_missing_entries": False, **at}
    with reading(f"no model at {path}", "a hub id needs the network, or files fetched before"):
        if single := cached_file(name, files.WEIGHTS, **quiet):
            return [Path(single)]
        index = cached_file(name, files.INDEX, **quiet)
        if index is None:
            raise UsageError(
                f"no model at {path}: it has neither {files.WEIGHTS} nor {files.INDEX}, and "
                f"nothing else is read; {files.CONVERT}"
            )
        shards = cached_files(name, files.shard_names(Path(index)), **at)
    return [Path(file) for file in shards or ()]

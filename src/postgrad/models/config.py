"""Configs of models: config.json and generation_config.json of a directory or hub id.

A config is checked before transformers reads it (models.config_check). `reading` turns the errors
of libraries that read a model's files into a UsageError.
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging
from transformers.utils.hub import cached_file

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.hub import pretrained
from postgrad.models import files
from postgrad.models.config_check import require_config
from postgrad.models.settings import looks_local
from postgrad.models.supported import require_supported, without_dropout

SCALE_KEYS = ("reward_mean", "reward_std")  # in config.json of a reward model
LONGEST = 400  # characters of a library's message that are shown


def load_config(path: str) -> Any:
    """The model's config with every dropout at 0. Raises UsageError as load_model does, before a
    weight is read.
    """
    require_directory(path, "model")
    is_merged, path = files.is_adapter(path), files.weights_source(path)
    with reading(f"no model at {path}", "model.path is a directory with config.json, or a hub id"):
        file = _config_file(path)
        stated = files.read_object(file)
        require_config(stated, file)
        if stated["model_type"] not in CONFIG_MAPPING:
            code = "; code of its own (auto_map) is never run" if "auto_map" in stated else ""
            raise UsageError(
                f"no model at {path}: model type {stated['model_type']} is not supported because "
                f"transformers {transformers_version} does not have it (a newer release may){code}"
            )
        name, at = pretrained(path)
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False, **at)
    if (stated.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        del config.quantization_config  # weights are read as numbers (models.mxfp4)
    require_supported(config, path)
    without_dropout(config)
    for key in SCALE_KEYS if is_merged else ():
        config.__dict__.pop(key, None)  # of the base's scores, which the adapter changes
    return config


def stored_dtype(path: str) -> torch.dtype:
    """The dtype of a model's files as its config says, float32 where it says none."""
    dtype = load_config(path).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


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


@contextmanager
def reading(problem: str, remedy: str) -> Generator[None]:
    """Turns any error of a library inside into a UsageError of problem, reason and remedy. Lack of
    memory and our own errors pass unchanged.
    """
    try:
        with without_bars():
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


@contextmanager
def without_bars() -> Generator[None]:
    """Without transformers' bars, which a program in Python has on: the console is the run's."""
    shown, of_hub = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            with warnings.catch_warnings():  # of a variable that keeps the hub's off
                warnings.simplefilter("ignore", UserWarning)
                logging.enable_progress_bar()  # and the hub's
        if shown and not of_hub:
            disable_progress_bars()


def _message_of(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    plain = isinstance(error, OSError | ValueError | ImportError)
    return text if plain and text else f"{type(error).__name__}: {text}"


def require_directory(path: str, kind: str, key: str | None = None) -> None:
    """Raises UsageError where a local path is no directory, or that of a run in place of its model.
    key: of the recipe, for the message; None where the path may be an argument of a command.
    """
    folder = Path(path)
    of_key = f" ({key})" if key else ""
    if looks_local(path) and not folder.is_dir():
        is_file = folder.is_file()
        why = "it is a file: name its directory" if is_file else "there is no such directory"
        hint = _written_by_a_run(folder.parent)
        hint = "; ~ is no folder here: write the whole path" if path.startswith("~") else hint
        raise UsageError(f"no {kind} at {path}: {why}{of_key}{hint}")
    has_files = (folder / files.CONFIG).exists() or files.has_tokenizer(folder)
    if folder.is_dir() and not has_files and (hint := _written_by_a_run(folder)):
        raise UsageError(f"no {kind} at {path}{of_key}{hint}")


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

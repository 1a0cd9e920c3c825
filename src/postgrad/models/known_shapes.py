"""Where a model's shape is read: its directory, the table of common models, or the hub."""

import threading
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.core.text import nearest
from postgrad.models.config_check import require_config
from postgrad.models.files import CONFIG, adapter_base, is_adapter, read_object
from postgrad.models.settings import IMAGE_TYPES, ModelSettings, looks_local
from postgrad.models.shapes import TYPES, ModelShape, shape_of, shape_of_init, stated_type

HUB_SECONDS = 2.0  # how long the hub is waited for; a plan as a whole may take five seconds
VARIANTS = ("instruct", "base", "chat", "it", "pt", "meta")  # parts of names that change no shape


def find_shape(source: str) -> ModelShape:
    """The shape of the model in a directory or of a hub id ("org/name@REVISION" too), without a
    weight or a tokenizer; of an adapter's directory the shape of its base.

    Ids of the table of common models are looked up there (case does not matter, nor -Instruct and
    -Base), others on the hub, where it answers within two seconds. Raises UsageError where there is
    no config.json to be had, and for models that are not trained here (shape_of).
    """
    path, revision = split_revision(source)
    if is_adapter(path):  # merged into its base, whose shape it keeps
        return find_shape(adapter_base(path))
    if looks_local(path):
        return any_shape(_local(Path(path)), path)
    if row := _rows().get(_plain(path)):
        return shape_of(row, path)
    config, why = _from_hub(path, revision)
    if config is None:
        near = nearest(_plain(path), _rows())
        hint = f"did you mean {_rows()[near]['id']}? " if near else ""
        raise UsageError(
            f"the shape of {path} is not known: it is not in the table of common models, and its "
            f"config.json could not be read from the hub ({why}). {hint}A directory with "
            "the model's config.json works too (model.path)"
        )
    return any_shape(config, path)


def any_shape(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of a config.json: by formulas for the tested types, else counted from the modules
    that transformers makes of it, in a child process where torch is not loaded. source: a path or
    name for messages. Raises UsageError for models that are not trained here.
    """
    reads_more = {"text_config", "vision_config"} & set(config) or config.get("is_encoder_decoder")
    kind = stated_type(config, source)
    if not (kind in IMAGE_TYPES and reads_more) and (kind in TYPES or reads_more):
        return shape_of(config, source)
    from postgrad.models.counted import counted_shape  # torch, unless a child process counts

    return counted_shape(config, source)


def shape_of_model(model: ModelSettings) -> ModelShape:
    """The shape of what a [model] table names: its path, or the fresh model of its init.

    Raises UsageError as find_shape does, and where the table names neither.
    """
    if model.source is not None:
        return find_shape(model.source)
    if model.init is None:
        raise UsageError("no model is named: set model.path, or [model.init] for a fresh one")
    return shape_of_init(model.init)


def in_table(source: str) -> bool:
    """Whether a hub id is in the table of common models, all of which are dense."""
    return _plain(split_revision(source)[0]) in _rows()


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    """The rows of shapes.toml by `_plain` id: {"qwen/qwen3-0.6b": {"id": "Qwen/Qwen3-0.6B", ...}}.
    A row of several ids ("also") is there for each of them; "id" is its first.
    """
    text = files("postgrad.models").joinpath("shapes.toml").read_text("utf-8")
    table = tomllib.loads(text)
    return {
        _plain(name): row | {"id": id}
        for id, row in table.items()
        for name in (id, *row.get("also", ()))
    }


def _plain(path: str) -> str:
    """An id in small letters, without the parts that tell variants of one shape apart."""
    owner, _, name = path.lower().rpartition("/")
    return f"{owner}/{'-'.join(part for part in name.split('-') if part not in VARIANTS)}"


def _local(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        problem = f"has no {CONFIG}" if folder.is_dir() else "is not there"
        raise UsageError(f"no model at {folder}: the directory {problem} (model.path)")
    return _config(path)


def _config(path: Path) -> Mapping[str, Any]:
    config = read_object(path)
    require_config(config, path)
    return config


def _from_hub(path: str, revision: str | None) -> tuple[Mapping[str, Any] | None, str]:
    """The hub's config.json, or None and why not. Nobody waits for a slow network: the thread is
    left behind.
    """
    # these imports take a while, and only ids that the table lacks need them
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    config_files: list[str] = []
    reasons = [f"no answer in {HUB_SECONDS:g} seconds"]

    def fetch() -> None:
        try:
            # asks once, where a download would try again and again, and say so on the console
            get_hf_file_metadata(
                hf_hub_url(path, "config.json", revision=revision), timeout=HUB_SECONDS
            )
            config_files.append(hf_hub_download(path, "config.json", revision=revision))
        except Exception as error:  # noqa: BLE001  # each network client has its own
            reasons[0] = str(error).strip().partition("\n")[0].rstrip(".")

    try:
        config_files.append(
            hf_hub_download(path, "config.json", revision=revision, local_files_only=True)
        )
    except LocalEntryNotFoundError:
        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        thread.join(HUB_SECONDS)
    except ValueError as error:  # no hub id
        reasons[0] = str(error).rstrip(".")
    return (_config(Path(config_files[0])), "") if config_files else (None, reasons[0])

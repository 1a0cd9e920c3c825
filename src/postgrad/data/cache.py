"""Tokens of a dataset, kept for the next run under a hash of everything that they depend on.

Rows are always read, filtered and mapped anew: that is a hundredth of the time, and so the hash can
be of the messages themselves. A changed file, function or dataset on the hub gives another hash.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import postgrad
from postgrad.core.array_files import read_arrays, write_arrays
from postgrad.core.ragged import Ragged
from postgrad.core.versions import version
from postgrad.data import templates
from postgrad.data.messages import Message
from postgrad.models import render_child, rendering

SMALLEST = 1000  # rows; fewer are tokenised about as fast as a file is found, read and hashed
Columns = Mapping[str, Ragged]  # token_ids: int32; loss_mask, starts: bool


class TokenCache:
    """The entries that one tokenizer made. An entry is one file, written whole or not at all."""

    def __init__(self, tokenizer: Any, folder: Path | None = None) -> None:
        """folder: `cache_folder()` where none is given."""
        self._tokenizer = tokenizer
        self._folder = folder or cache_folder()

    def columns(
        self,
        messages: Sequence[Sequence[Message]],
        call: Mapping[str, Any],
        how: str,
        make: Callable[[], Columns],
        notes: list[str],
    ) -> Columns:
        """What `make` returns, from the cache where it is there: the same bits.

        call: templates.template_call; how: what else decides the tokens, in a word. An entry that
        is damaged is made again, one that cannot be written is not kept: `notes` say so.
        """
        if len(messages) < SMALLEST or self._reads_the_clock(call):
            return make()
        if self._folder is None:
            notes.append("tokens are not kept: there is no home folder; POSTGRAD_CACHE names one")
            return make()
        key = self._key(messages, call, how)
        path = self._folder / f"{key}.safetensors"
        try:
            found = _read(path, len(messages))
        except FileNotFoundError:
            found = None
        except (OSError, KeyError, ValueError) as error:
            notes.append(f"the cache entry {path} cannot be used: {error}; it is made again")
            found = None
        if found is not None:
            notes.append("tokens from the cache (data.cache)")
            return found
        made = make()
        try:
            _write(path, made)
        except OSError as error:
            notes.append(f"tokens are not kept for the next run: {error} (data.cache, {path})")
        return made

    def _reads_the_clock(self, call: Mapping[str, Any]) -> bool:
        """Such a template writes another date tomorrow (Llama 3.2's does, unless it is given)."""
        return "strftime_now" in str(call.get("chat_template", self._tokenizer.chat_template))

    def _key(self, messages: Sequence[Sequence[Message]], call: Mapping[str, Any], how: str) -> str:
        whole = hashlib.sha256(json.dumps([self._made_by, how, call], sort_keys=True).encode())
        for one in messages:
            whole.update(b"\n" + json.dumps([list(message.items()) for message in one]).encode())
        return whole.hexdigest()

    @cached_property
    def _made_by(self) -> list[Any]:
        """The tokenizer with its template, and the code: ours by its text, others by version."""
        tokenizer = self._tokenizer
        code = hashlib.sha256()
        for module in (templates, rendering, render_child):
            code.update(Path(str(module.__file__)).read_bytes())
        libraries = ("transformers", "tokenizers", "jinja2")
        return [
            hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            type(tokenizer).__qualname__,
            str(tokenizer.chat_template),
            {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
            postgrad.__version__,
            code.hexdigest(),
            [version(name) for name in libraries],
        ]


def cache_folder() -> Path | None:
    """$POSTGRAD_CACHE/tokens, else postgrad/tokens in the user's cache folder ($XDG_CACHE_HOME or
    ~/.cache); None where there is no home.
    """
    if own := os.environ.get("POSTGRAD_CACHE"):
        return Path(own) / "tokens"
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "postgrad" / "tokens"
    try:
        return Path.home() / ".cache" / "postgrad" / "tokens"
    except RuntimeError:  # a user without an entry and without $HOME, as in some containers
        return None


def _write(path: Path, columns: Columns) -> None:
    tensors = {"lengths": columns["token_ids"].lengths}
    tensors |= {name: column.values for name, column in columns.items()}
    write_arrays(path, tensors)


def _read(path: Path, rows: int) -> Columns:
    """Raises ValueError where the content is not what was written."""
    tensors = read_arrays(path)
    lengths = tensors.pop("lengths")
    if len(lengths) != rows:
        raise ValueError(f"it has {len(lengths)} rows, not {rows}")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return {name: Ragged(values, offsets) for name, values in tensors.items()}

"""A cache of tokenised datasets on disk, keyed by a hash of everything that the tokens depend on.

Rows are read, filtered and mapped again in every run, which takes a twentieth of the time. So the
hash covers the messages themselves: a changed file, function or hub dataset gives another hash.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from postgrad._version import __version__
from postgrad.core.array_files import Arrays, open_arrays, write_arrays
from postgrad.core.files import cache_folder, version
from postgrad.data.chat_format import Message
from postgrad.data.packed import PackedJson, StoredBytes, StoredColumn
from postgrad.data.texts import TokenColumns
from postgrad.models import render_child, rendering
from postgrad.models.named_templates import includes_own

SMALLEST = 1000  # rows; fewer are tokenised about as fast as a cache entry is read and hashed


class TokenCache:
    """Cached columns of one tokenizer. An entry is one safetensors file, replaced atomically. Runs
    read it where it lies: one that is deleted or replaced meanwhile is still there for them.
    """

    def __init__(self, tokenizer: Any, folder: Path | None = None) -> None:
        """folder: where entries lie; None: the user's."""
        self._tokenizer = tokenizer
        self._folder = folder or cache_folder("tokens")

    def columns(
        self,
        messages: PackedJson[list[Message]],
        call: Mapping[str, Any],
        how: str,
        make: Callable[[], TokenColumns],
        notes: list[str],
        rows_each: int = 1,
    ) -> TokenColumns:
        """The columns that `make` computes, bit for bit, from the cache where they are there.

        messages: of each conversation, part of the key; `make` gives `rows_each` rows for each.
        call: from templates.template_call, part of the key. how: whatever else decides the tokens,
        as text. notes: gets a line where an entry was used, was damaged and made again, or could
        not be written.
        """
        if len(messages) < SMALLEST or self._reads_the_clock(call):
            return make()
        if self._folder is None:
            notes.append("tokens are not kept: there is no home folder; POSTGRAD_CACHE names one")
            return make()
        key = self._key(messages, call, how)
        path = self._folder / f"{key}.safetensors"
        try:
            cached = _read(path, len(messages) * rows_each)
        except FileNotFoundError:
            cached = None
        except (OSError, KeyError, ValueError) as error:
            notes.append(f"the cache entry {path} cannot be used: {error}; it is computed again")
            cached = None
        if cached is not None:
            notes.append("tokens from the cache (data.cache)")
            return cached
        columns = make()
        try:
            _write(path, columns)
            return _read(path, len(messages) * rows_each)  # the file of the run is not needed now
        except (OSError, ValueError) as error:
            notes.append(f"tokens are not kept for the next run: {error} (data.cache, {path})")
        return columns

    def _reads_the_clock(self, call: Mapping[str, Any]) -> bool:
        """Whether the chat template writes today's date, as Llama 3.2's does where none is given:
        such tokens are not cached.
        """
        original, stated = str(self._tokenizer.chat_template), call.get("chat_template")
        read = original if stated is None else stated + original if includes_own(stated) else stated
        return "strftime_now" in read

    def _key(self, messages: PackedJson[list[Message]], call: Mapping[str, Any], how: str) -> str:
        digest = hashlib.sha256(json.dumps([self._made_by, how, call], sort_keys=True).encode())
        digest.update(b"\n")
        for piece in messages.stored.pieces():  # a line of JSON for each, its keys in their order
            digest.update(piece)
        return digest.hexdigest()

    @cached_property
    def _made_by(self) -> list[Any]:
        """What made the tokens, for the key: the tokenizer with its template, the text of all code
        of this room and of what renders, and the versions of other libraries.
        """
        tokenizer = self._tokenizer
        code = hashlib.sha256()
        renderers = (str(module.__file__) for module in (rendering, render_child))
        for path in (*sorted(Path(__file__).parent.glob("*.py")), *map(Path, renderers)):
            code.update(path.read_bytes())
        libraries = ("transformers", "tokenizers", "jinja2")
        return [
            hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            type(tokenizer).__qualname__,
            str(tokenizer.chat_template),
            {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
            __version__,
            code.hexdigest(),
            [version(name) for name in libraries],
        ]


def _write(path: Path, columns: TokenColumns) -> None:
    """Writes an entry: the columns, what they share, and no more than a piece of them in memory."""
    arrays: Arrays = {
        **columns.by_name,
        "lengths": columns["token_ids"].lengths,
        "further": columns.further,
    }
    write_arrays(path, arrays)


def _read(path: Path, rows: int) -> TokenColumns:
    """The columns of an entry, which stay there. Raises ValueError where the content is not what
    was written.
    """
    arrays = open_arrays(path)
    lengths, further = arrays.pop("lengths").array(), arrays.pop("further").array()
    if len(lengths) != rows:
        raise ValueError(f"it has {len(lengths)} rows, not {rows}")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    columns = {
        name: StoredColumn(StoredBytes(array), array.dtype, offsets)
        for name, array in arrays.items()
    }
    return TokenColumns(columns, further)

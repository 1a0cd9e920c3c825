"""The text of each token of a sample, so that a page can colour them one by one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from postgrad.observe.run_dir import TOKENIZER

UNKNOWN = "�"  # what bytes that are no character decode to


class Pieces:
    """Token ids to the text that each stands for, special tokens too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        anchors = tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor: list[int] = anchors[-1:]
        self._start = len(self._decode(self._anchor))

    def text(self, token: int) -> str:
        """What a token adds to a text that it stands within."""
        if token not in self._known:
            self._known[token] = self._decode([*self._anchor, token])[self._start :]
        return self._known[token]

    def exceptions(self, tokens: Sequence[int]) -> dict[int, str]:
        """Place -> text where a token's own text is not what it stands for there.

        A character may be cut over several tokens: the last of them gets it, the others nothing.
        """
        if not any(UNKNOWN in self.text(token) for token in tokens):
            return {}
        stream = DecodeStream(skip_special_tokens=False)
        found: dict[int, str] = {}
        for place, token in enumerate(tokens):
            text = stream.step(self._tokenizer, token) or ""
            if text != self.text(token):
                found[place] = text
        return found

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def pieces_of(run_dir: Path, model: Any) -> Pieces | None:
    """From the tokenizer of a run: the one that it kept, that of its exported or fresh model, or of
    the one that it started from.

    model: the recipe's [model]. None where there is no readable tokenizer.json.
    """
    own = (run_dir / name for name in (TOKENIZER, f"model/{TOKENIZER}", f"init/{TOKENIZER}"))
    for path in (*(one for one in own if one.is_file()), *tokenizer_files(model)):
        try:
            return Pieces(Tokenizer.from_file(str(path)))
        except Exception:  # noqa: BLE001  # the library raises no other; the page shows numbers
            continue
    return None


def tokenizer_files(model: Any) -> list[Path]:
    """The tokenizer.json of what a run started from, where it is on this machine: in the directory
    that its [model] names, or in the cache of the hub.
    """
    found: list[Path] = []
    path = model.get("path") if isinstance(model, dict) else None
    if isinstance(path, str) and path:
        found.append(Path(path) / TOKENIZER)
        if not Path(path).exists() and path.count("/") <= 1:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(path, TOKENIZER, revision=model.get("revision"))
            if isinstance(cached, str):
                found.append(Path(cached))
    return [one for one in found if one.is_file()]

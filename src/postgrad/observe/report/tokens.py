"""The text of each token of a sample, so that a page can colour tokens one by one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from postgrad.observe.run_dir import TOKENIZER

UNKNOWN = "�"  # what bytes that are not UTF-8 decode to


class Pieces:
    """The text of token ids, special tokens included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        anchors = tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor: list[int] = anchors[-1:]
        self._start = len(self._decode(self._anchor))

    def text(self, token: int) -> str:
        """The text that a token adds inside a longer text."""
        if token not in self._texts:
            self._texts[token] = self._decode([*self._anchor, token])[self._start :]
        return self._texts[token]

    def exceptions(self, tokens: Sequence[int]) -> dict[int, str]:
        """Index -> text where a token of the sequence has another text than `text(token)`.

        A character may be split over several tokens: the last of them gets it, the others "".
        """
        if not any(UNKNOWN in self.text(token) for token in tokens):
            return {}
        stream = DecodeStream(skip_special_tokens=False)
        changed: dict[int, str] = {}
        for place, token in enumerate(tokens):
            text = stream.step(self._tokenizer, token) or ""
            if text != self.text(token):
                changed[place] = text
        return changed

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def pieces_of(run_dir: Path, model: Any) -> Pieces | None:
    """The texts of a run's tokens; None where there is no readable tokenizer.json.

    The tokenizer is the run's copy, else that of its exported or fresh model, else that of the
    model that it started from. model: the recipe's [model].
    """
    kept = (run_dir / name for name in (TOKENIZER, f"model/{TOKENIZER}", f"init/{TOKENIZER}"))
    for path in (*(file for file in kept if file.is_file()), *tokenizer_files(model)):
        try:
            return Pieces(Tokenizer.from_file(str(path)))
        except Exception:  # noqa: BLE001  # the library raises no other; the page shows numbers
            continue
    return None


def tokenizer_files(model: Any) -> list[Path]:
    """The tokenizer.json of the model that a run started from, where this machine has it: in the
    directory that [model] names, or in the cache of the hub.
    """
    files: list[Path] = []
    path = model.get("path") if isinstance(model, dict) else None
    if isinstance(path, str) and path:
        files.append(Path(path) / TOKENIZER)
        if not Path(path).exists() and path.count("/") <= 1:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(path, TOKENIZER, revision=model.get("revision"))
            if isinstance(cached, str):
                files.append(Path(cached))
    return [file for file in files if file.is_file()]

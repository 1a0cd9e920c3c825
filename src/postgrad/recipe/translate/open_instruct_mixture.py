"""Open-Instruct's mixtures of datasets as entries of [data] and [eval]."""

from typing import Any, cast


def mixture(given: Any, splits: list[str]) -> list[dict[str, Any]]:
    """Sets of `name share name share ...`, or of a table: a whole number is rows, 1.0 is all."""
    if isinstance(given, dict):
        pairs = list(cast(dict[str, Any], given).items())
    else:
        said = cast(list[Any], given) if isinstance(given, list) else [given]
        words = [part for word in said for part in str(word).split()]
        pairs: list[tuple[str, Any]] = list(zip(words[::2], words[1::2], strict=False))
    entries: list[dict[str, Any]] = []
    for number, (path, share) in enumerate(pairs):
        split = splits[min(number, len(splits) - 1)] if splits else "train"
        entries.append({"path": str(path), **_share(str(share), split)})
    return entries


def _share(share: str, split: str) -> dict[str, Any]:
    split_said = {} if split == "train" else {"split": split}
    if "." not in share:
        return {**split_said, "limit": int(share)}
    part = float(share)
    if part < 1:
        return {"split": f"{split}[:{part * 100:g}%]"}
    return {**split_said, **({"weight": part} if part > 1 else {})}

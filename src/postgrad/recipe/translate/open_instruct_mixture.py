"""Open-Instruct's mixtures of datasets as entries of [data] and [eval]."""

from typing import Any, cast


def mixture(mixer: Any, splits: list[str]) -> list[dict[str, Any]]:
    """Entries of [[data.sets]]. mixer: "NAME SHARE NAME SHARE ...", as one text or a list of words,
    or a table NAME -> SHARE. A share is a number of rows (100) or a part of them (0.5, 1.0: all).
    splits: one for each name; the last one stands for those that are left.
    """
    if isinstance(mixer, dict):
        pairs = list(cast(dict[str, Any], mixer).items())
    else:
        texts = cast(list[Any], mixer) if isinstance(mixer, list) else [mixer]
        words = [word for text in texts for word in str(text).split()]
        pairs: list[tuple[str, Any]] = list(zip(words[::2], words[1::2], strict=False))
    entries: list[dict[str, Any]] = []
    for number, (path, share) in enumerate(pairs):
        split = splits[min(number, len(splits) - 1)] if splits else "train"
        entries.append({"path": str(path), **_share(str(share), split)})
    return entries


def _share(share: str, split: str) -> dict[str, Any]:
    """The keys of an entry that select a share of a split."""
    of_split = {} if split == "train" else {"split": split}
    if "." not in share:
        return {**of_split, "limit": int(share)}
    part = float(share)
    if part < 1:
        return {"split": f"{split}[:{part * 100:g}%]"}
    return {**of_split, **({"weight": part} if part > 1 else {})}

"""Rotary positions whose frequencies depend on how long a sequence is: "dynamic" and "longrope".

transformers takes the length from the largest position of a forward. Packed, that is somebody
else's: a short sequence would be rotated by what shares its pack, and keys in a cache by the length
that there was when they were made. Up to the model's original length nothing depends on it. So the
original frequencies are held, and a longer sequence is refused.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.config_check import rope_tables

REMEDY = "set data.max_len to that or less (--max-len of a chat)"


def fixed_length(config: Any) -> int | None:
    """Tokens of the longest sequence whose frequencies are the original ones; None where they are
    the same at every length.
    """
    tables = [*rope_tables(getattr(config, "rope_parameters", None))]
    lengths = [_length(config, table) for table in tables if _moves(table.get("rope_type", ""))]
    return min(lengths, default=None)


def max_positions(config: Any) -> int | None:
    """Tokens of the longest sequence that a model can have here; None where it names no limit."""
    limits = (getattr(config, "max_position_embeddings", None), fixed_length(config))
    return min((limit for limit in limits if limit is not None), default=None)


def require_length(config: Any, max_len: int, path: str) -> None:
    """Raises UsageError where sequences of max_len tokens are longer than `fixed_length`."""
    limit = fixed_length(config)
    if limit is not None and max_len > limit:
        raise UsageError(_too_long(config, limit, max_len, path))


def hold_frequencies(lm: nn.Module, path: str) -> None:
    """The rotations of a model keep their original frequencies, and refuse later positions."""
    config: Any = lm.config
    limit = fixed_length(config)
    if limit is None:
        return
    refuse = partial(_refuse_beyond, config, limit, path)
    for module in lm.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str) and _moves(kind):
            module.rope_type = "default"  # pyright: ignore[reportArgumentType]  # what forward asks
        elif isinstance(kind, dict) and any(map(_moves, kind.values())):
            held = {layer: "default" if _moves(type_) else type_ for layer, type_ in kind.items()}
            module.rope_type = held  # pyright: ignore[reportArgumentType]
        else:
            continue
        module.register_forward_pre_hook(refuse, with_kwargs=True)


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _length(config: Any, table: Any) -> int:
    if table["rope_type"] == "longrope":
        stated = table.get("original_max_position_embeddings")
        stated = stated or getattr(config, "original_max_position_embeddings", None)
        return int(stated or config.max_position_embeddings)
    return int(config.max_position_embeddings)


def _refuse_beyond(
    config: Any, limit: int, path: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    positions: Tensor = named["position_ids"] if "position_ids" in named else args[1]
    if (longest := int(positions.max()) + 1) > limit:
        raise UsageError(_too_long(config, limit, longest, path))


def _too_long(config: Any, limit: int, longest: int, path: str) -> str:
    kinds = {table.get("rope_type", "") for table in rope_tables(config.rope_parameters)}
    kind = ", ".join(sorted(filter(_moves, kinds)))
    return (
        f"{path} rotates by the length of the whole sequence beyond {limit} tokens (rope_type "
        f"{kind}), which neither packed samples nor a cache can follow; here sequences may have "
        f"{longest}: {REMEDY}"
    )

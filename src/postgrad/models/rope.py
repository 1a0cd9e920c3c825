"""How long a sequence may be: no longer than a table of positions, or than the original length of
rotary positions whose frequencies depend on the length ("dynamic", "longrope"). And how long rows
may be for good answers: as in training, or as far as scaled positions reach ("linear", "yarn").

For those transformers takes the length from the largest position of a forward. In a packed forward
that may be another sequence's, and keys in a cache were rotated by an earlier length. Up to the
model's original length the frequencies are constant. So these are kept, and longer sequences are
refused. Other rotary positions go on behind those that the model was trained on.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.config_check import rope_tables
from postgrad.models.supported import refused_types

REMEDY = "set data.max_len to that or less (--max-len of a chat)"


def fixed_length(config: Any) -> int | None:
    """The longest sequence, in tokens, that still has the original frequencies; None where they do
    not depend on the length.
    """
    tables = [*rope_tables(getattr(config, "rope_parameters", None))]
    lengths = [_length(config, table) for table in tables if _moves(table.get("rope_type", ""))]
    return min(lengths, default=None)


def table_length(config: Any) -> int | None:
    """The positions of a type that has a table of them, learned or computed; None of other types,
    which compute any position.
    """
    kinds = refused_types()["without"]["longer rows"]["types"]
    return int(config.max_position_embeddings) if config.model_type in kinds else None


def max_positions(config: Any) -> int | None:
    """The longest sequence, in tokens, that a model was trained on, or takes here; None where it
    names no limit. Rotary positions that "linear" or "yarn" scales reach `factor` times as far as
    the original ones (Chen et al. 2023, arXiv:2306.15595; Peng et al. 2023, arXiv:2309.00071): a
    config that a user extends so often keeps its max_position_embeddings.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if stated is not None:
        tables = [*rope_tables(getattr(config, "rope_parameters", None))]
        stated = max([stated, *(scaled_length(stated, table) or stated for table in tables)])
    limits = (stated, fixed_length(config))
    return min((limit for limit in limits if limit is not None), default=None)


def scaled_length(stated: int, table: Mapping[str, Any]) -> int | None:
    """How far rotary positions reach that a table scales, in tokens; None where it does not scale
    them so. stated: max_position_embeddings, which is the original length where a table of "yarn"
    names none, and always for "linear".
    """
    kind = str(table.get("rope_type"))
    if "yarn" in kind:
        stated = int(table.get("original_max_position_embeddings") or stated)
    elif kind != "linear":
        return None
    return int(stated * table["factor"])


def require_length(config: Any, max_len: int, path: str) -> None:
    """Raises UsageError where sequences of max_len tokens are longer than `fixed_length`, or than
    `table_length`.
    """
    limit, table = fixed_length(config), table_length(config)
    if limit is not None and max_len > limit:
        raise UsageError(_too_long(config, limit, max_len, path))
    if table is not None and max_len > table:
        raise UsageError(
            f"{path} has a table of {table} positions (a {config.model_type} model, "
            f"max_position_embeddings), and sequences may have {max_len} tokens here: {REMEDY}"
        )


def unseen_length(config: Any, max_len: int, path: str) -> str | None:
    """What to tell where sequences of max_len tokens have positions that the model computes but was
    never trained on; None where they have none.
    """
    limit = max_positions(config)
    if limit is None or max_len <= limit:
        return None
    return (
        f"sequences may have {max_len} tokens (data.max_len, eval.max_len), and {path} was never "
        f"trained on more than {limit} (max_position_embeddings): behind them it may answer badly, "
        f"and rows that are longer train it to go on; set data.max_len = {limit} or less if that "
        "is not meant"
    )


def hold_frequencies(lm: nn.Module, path: str) -> None:
    """Makes a model keep its original frequencies, and refuse positions beyond `fixed_length`."""
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
    """Whether the frequencies of a rope_type depend on the length of the sequence."""
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
        f"{kind}), which packed samples and a cache do not support; sequences may have {longest} "
        f"tokens here: {REMEDY}"
    )

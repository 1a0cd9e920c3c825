"""What is said where a model lacks what a recipe asks of it: by a plan, which knows the shape of a
model alone, and by a run that has loaded it. kind: the type of the model.
"""

from collections.abc import Iterable, Mapping

from postgrad.core.errors import UsageError
from postgrad.models.settings import LoraSettings, is_target


def no_z_loss(coefficient: float, kind: str) -> UsageError:
    """Of model.router_z_loss_coef where there are no routers."""
    return UsageError(
        f"model.router_z_loss_coef = {coefficient:g}: a {kind} model has no routers here; leave it "
        "out"
    )


def no_balance_loss(coefficient: float, kind: str) -> UsageError:
    """Of model.router_aux_loss_coef where transformers has no such loss."""
    return UsageError(
        f"model.router_aux_loss_coef = {coefficient:g}: transformers has no balance loss for a "
        f"{kind} model; leave it out"
    )


def no_replay(kind: str) -> UsageError:
    """Of rollout.router_replay where no routers are known."""
    return UsageError(
        f"rollout.router_replay: a {kind} model is no mixture of experts, or transformers does not "
        "say where its routers are: leave it out"
    )


def no_router_dtype(kind: str, key: str) -> UsageError:
    """Of router_dtype in a [model] table where routers cannot have a dtype of their own. key: where
    it stands; tables of other roles take it over from [model].
    """
    return UsageError(
        f'{key} = "float32": a {kind} model is no mixture of experts, transformers does not say '
        "where its routers are, or something else than they chooses its experts: take "
        f'{key} = "auto"'
    )


def several_matrices(holder: str, kind: str) -> UsageError:
    """Of model.quantize where a weight is not one matrix. holder: what has it."""
    return UsageError(
        f'model.quantize = "4bit": {holder} of this {kind} model keeps several matrices in one '
        'weight, which is not quantised: use "none"'
    )


def no_dropout(kind: str) -> UsageError:
    """Of model.lora.dropout beside layers that carry a state."""
    return UsageError(
        f"model.lora.dropout: layers of a {kind} model, which carry a state along the sequence, "
        "compute rows in another order than that of the masks: use 0"
    )


def no_part_of_mixtures(key: str, weights: Iterable[str]) -> UsageError:
    """Of model.lora.KEY, dropout, dora or init, beside adapters on experts or routers. weights: the
    ends of the names of what they stand on.
    """
    return UsageError(
        f"model.lora.{key}: adapters on experts and routers ({', '.join(weights)}) have none, in "
        f"PEFT neither: leave {key} out, or name linear layers alone in model.lora.targets"
    )


def tied_apart() -> UsageError:
    """Of model.lora.modules_to_save where embeddings and output head are one matrix: one would
    become two, which the model's config, and so an export, has no place for.
    """
    return UsageError(
        "model.lora.modules_to_save: this model's output head is its embedding matrix "
        "(tie_word_embeddings), and trained apart they would be two: leave it out, or train the "
        "model whole, without [model.lora]"
    )


def no_linear_layers(kind: str) -> UsageError:
    """kind: the model's type."""
    return UsageError(
        f"[model.lora]: this {kind} decoder has no linear layers that an adapter could be attached "
        "to: train all its weights"
    )


def require_effect(
    lora: LoraSettings, names: Mapping[str, str], layers: int, *, numbered: bool = True
) -> None:
    """Raises UsageError for what [model.lora] says of layers that a model has none of.

    names: of all that adapters may stand on, with its kind. layers: how many the decoder has.
    numbered: also for names that hold the number of a layer.
    """
    for number in lora.layers_to_transform:
        if number >= layers:
            raise UsageError(
                f"model.lora.layers_to_transform: there is no layer {number}: this decoder has 0 "
                f"to {layers - 1}"
            )
    adapted = {name: kind for name, kind in names.items() if lora.adapts(name, kind)}
    stated = {
        "exclude_modules": (lora.exclude_modules, names, "this model has"),
        "rank_pattern": (lora.rank_pattern, adapted, "has an adapter"),
        "alpha_pattern": (lora.alpha_pattern, adapted, "has an adapter"),
    }
    for key, (ends, meant, has) in stated.items():
        for end in ends:
            if not numbered and any(part.isdecimal() for part in end.split(".")):
                continue
            if not any(is_target(end, name, kind) for name, kind in meant.items()):
                raise UsageError(f"model.lora.{key}: {end!r} ends the name of no layer that {has}")
    if not adapted and (lora.exclude_modules or lora.layers_to_transform):
        raise UsageError(
            "model.lora: exclude_modules and layers_to_transform leave no layer that has an "
            "adapter: name fewer, or other targets"
        )

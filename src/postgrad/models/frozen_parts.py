"""Parts of a model that model.freeze keeps from training: their weights have no gradient, and stay
those of the model that the run starts from.
"""

from collections.abc import Collection
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.models.adapter_targets import target_layers, target_weights
from postgrad.models.images import image_part
from postgrad.models.routers import router_weights
from postgrad.models.settings import ROUTER, ModelSettings, no_such_part


def frozen_names(lm: Any, freeze: Collection[str]) -> frozenset[str]:
    """The names of the weights of a model that model.freeze means; on the meta device too."""
    names = {name for name, _ in lm.named_parameters() if image_part(name) in freeze}
    return frozenset(names | (router_weights(lm) if ROUTER in freeze else set()))


def freeze_parts(lm: Any, settings: ModelSettings, key: str = "model.freeze") -> None:
    """Stops the training of what settings.freeze names. To be called before an adapter is added.
    key: where it stands in the recipe.

    Raises UsageError for a part that the model does not have, and for an adapter of
    settings.lora that would stand on one.
    """
    for part in settings.freeze:
        if not (names := frozen_names(lm, (part,))):
            raise no_such_part(part, lm.config.model_type, key)
        for name in names:
            lm.get_parameter(name).requires_grad_(False)
    if settings.lora is not None:
        frozen = frozen_names(lm, settings.freeze)
        linear = [f"{name}.weight" for name in target_layers(lm, settings.lora)]
        adapted = [*linear, *target_weights(lm, settings.lora)]
        if both := [name for name in adapted if name in frozen]:
            raise UsageError(
                f"{key} = {list(settings.freeze)}: the adapter would change {both[0]}: name layers "
                "beside it in model.lora.targets, or leave its part out of freeze"
            )

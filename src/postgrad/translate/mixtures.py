"""Mixtures of experts as several systems state them: what their routers compute in, whether they
train, and what balances them.

Configs state most of it of dense models too, where it does nothing there and is refused here.
"""

import re
from typing import Any

from postgrad.models.known_shapes import in_table
from postgrad.translate.draft import Draft
from postgrad.translate.images import MODEL, freeze
from postgrad.translate.rules import Options, Rule, decimal, flag, missing, needless

_MIXTURE = re.compile(r"(?i)-A\d+(\.\d+)?B\b|moe|mixtral|gpt-oss|deepseek-v[23]")  # in names
_DENSE = "a dense model has no routers"
_IF_ANY = "of a mixture of experts; leave it out of a dense model"
_SAME_EXPERTS = "float64 there; float32 chooses the same experts: docs/models.md"
_BALANCE = (
    "a loss of each layer there; model.router_aux_loss_coef is of all layers together: about this "
    "times the number of layers with experts, over the experts of a token"
)
_Z = (
    "a loss of each layer there; model.router_z_loss_coef is of all layers together: this times "
    "the number of layers with experts"
)
_NO_BALANCE = "no balance loss there"


def _is_mixture(draft: Draft) -> bool:
    """Whether the name of the draft's model says so."""
    return bool(_MIXTURE.search(str(draft.get("model.path"))))


def named_in(options: Options) -> bool:
    """Whether a source names a mixture as its model."""
    stated = options.stated.items()
    return any(MODEL.search(name) and _MIXTURE.search(str(value)) for name, value in stated)


def balanced(draft: Draft, coefficient: float = 0.0) -> None:
    """The balance loss of a mixture of experts whose source states none. Where a recipe says
    nothing, the model's config does.
    """
    key = "model.router_aux_loss_coef"
    if draft.get(key) is None and _is_mixture(draft):
        none = "no balance loss there, whatever the model's config says"
        draft.put(key, coefficient, f"{draft.system}'s default" if coefficient else none)


def frozen_routers(draft: Draft, name: str, value: Any, _: str) -> None:
    """A rule: whether the routers of a mixture of experts are kept from training."""
    if flag(value) and not in_table(str(draft.get("model.path"))):
        freeze(draft, "router", comment=_IF_ANY)
    else:
        draft.skip(name, value, f"routers train unless model.freeze names them; {_DENSE}")


def router_dtype(draft: Draft, name: str, value: Any, default: str) -> None:
    """A rule: what routers compute in. A default is taken over for models alone whose names say
    that they are mixtures.
    """
    spelling = str(value).lower().replace("float", "fp")
    mixture = _is_mixture(draft)
    if in_table(str(draft.get("model.path"))) or (default and not mixture):
        draft.skip(name, value, _DENSE)
    elif spelling in ("fp32", "fp64"):
        comment = default if spelling == "fp32" else _SAME_EXPERTS
        draft.put("model.router_dtype", "float32", comment or ("" if mixture else _IF_ANY))
    else:
        draft.skip(name, value, "routers compute in model.dtype, or as their type's own code does")


def balances(options: Options, section: str) -> bool:
    """Whether Megatron balances routers by a loss. section: what its options begin with. Where
    nothing is said the systems that train with it turn that off.
    """
    stated = options.stated.get(f"{section}moe_router_load_balancing_type") or "none"
    coefficient = options.stated.get(f"{section}moe_aux_loss_coeff")
    nothing = coefficient is not None and decimal(coefficient) == 0.0
    return str(stated).lower() != "none" and not nothing


def megatron(options: Options, section: str) -> dict[str, Rule]:
    """The rules of Megatron's options of routers, by their whole names."""
    on = balances(options, section)
    rules: dict[str, Rule] = {
        "freeze_moe_router": frozen_routers,
        "moe_router_dtype": router_dtype,
        "moe_router_load_balancing_type": missing(_BALANCE) if on else needless(_NO_BALANCE),
        "moe_aux_loss_coeff": needless("of a balance loss, which is lost where it is on"),
        "moe_z_loss_coeff": missing(_Z),
        "moe_router_bias_update_rate": missing("no update changes a bias that routers choose by"),
        "moe_router_enable_expert_bias": needless(
            "a bias that routers choose by is the model's own; its updates are lost where they are"
        ),
    }
    return {f"{section}{name}": rule for name, rule in rules.items()}

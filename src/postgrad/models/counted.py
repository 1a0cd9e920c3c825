"""The shape of a model of any type, counted from the modules that transformers makes of a config.

The modules are made on the meta device, so that 671 billion weights take no memory. That imports
torch and transformers, which takes seconds: `known_shapes` comes here only for types whose sizes
`shapes` does not compute, and a process without torch, such as `postgrad plan`, asks a child:

    python -m postgrad.models.counted NAME < config.json

The child answers with JSON: {"shape": {...}} or {"problem": "..."}.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from postgrad._version import __version__
from postgrad.core.errors import UsageError
from postgrad.core.files import computed_once, version
from postgrad.models.matrices import MatrixGroup, matrix_groups
from postgrad.models.settings import ModelSettings
from postgrad.models.shapes import (
    OUTSIDE,
    SOFT_CAPPED,
    WITH_SINKS,
    AdaptableLayers,
    CountedWeights,
    KeptByLayers,
    ModelShape,
    stated_type,
)
from postgrad.models.towers import TowerShape, tower_shape

CHILD_SECONDS = 120.0  # torch and transformers are imported in 5 to 40, on a busy machine
ROUTED = re.compile(r"(?:^|\.)experts(?:\.(\d+))?\.")  # in the names of weights of routed experts
SHARED = re.compile(r"(?:^|\.)experts\.\w+$")  # of those that have one weight a layer
EACH_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
REPEATED = ("jetmoe",)  # types that repeat keys for all query heads before they attend
GATED = 3  # matrices of a feed-forward, which ModelShape.intermediate_size stands for
_shapes: dict[str, ModelShape] = {}  # by config; a run asks for one several times


def counted_shape(config: Mapping[str, Any], path: str) -> ModelShape:
    """The shape of a config.json of any type that transformers has a causal language model for:
    counted once, and then read from the user's cache.

    path: of the model, for messages. Raises UsageError for models that cannot be trained here.
    """
    text = json.dumps(config)
    if text not in _shapes:
        count = _count if "torch" in sys.modules else _from_child
        answer = computed_once("shapes", _made_by(text), lambda: json.dumps(count(text, path)))
        _shapes[text] = _shape_in(json.loads(answer))
    return _shapes[text]


def _made_by(config: str) -> str:
    libraries = {name: version(name) for name in ("torch", "transformers")}
    code = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    return json.dumps([config, __version__, libraries, code])


def _from_child(config: str, path: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", __name__, path]
    try:
        done = subprocess.run(
            command, input=config, capture_output=True, text=True, timeout=CHILD_SECONDS
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"the weights of {path} were not counted within {CHILD_SECONDS:g} seconds: the machine "
            "is busy, try again"
        ) from error
    except ValueError:
        answer = {}
    if problem := answer.get("problem"):
        raise UsageError(problem)
    if "shape" not in answer:
        last = (done.stderr.strip() or "no answer").splitlines()[-1]
        raise UsageError(f"the weights of {path} could not be counted: {last}")
    return answer["shape"]


def _shape_in(shape: dict[str, Any]) -> ModelShape:
    """The shape that JSON has as an object."""
    weights: dict[str, Any] = shape["counted"]
    several = {
        "adaptable": tuple(_adaptable_in(layers) for layers in weights["adaptable"]),
        "matrix_groups": tuple(
            MatrixGroup(**{**g, "shape": tuple(g["shape"])}) for g in weights["matrix_groups"]
        ),
        "kept": tuple(KeptByLayers(**kept) for kept in weights["kept"]),
    }
    counted = CountedWeights(**{**weights, **several})
    return ModelShape(**{**shape, "counted": counted, "tower": _tower_in(shape["tower"])})


def _adaptable_in(layers: dict[str, Any]) -> AdaptableLayers:
    linears = tuple((str(name), int(m), int(n)) for name, m, n in layers["linears"])
    stacks = tuple((str(n), int(e), int(i), int(o)) for n, e, i, o in layers["stacks"])
    return AdaptableLayers(tuple(map(int, layers["numbers"])), linears, stacks)


def _tower_in(value: dict[str, Any] | None) -> TowerShape | None:
    """The tower that JSON has as an object."""
    if value is None:
        return None
    pairs = tuple((int(inputs), int(outputs)) for inputs, outputs in value["projections"])
    return TowerShape(**{**value, "projections": pairs})


def _count(config_json: str, path: str) -> dict[str, Any]:
    # these take seconds, and a plan of a known type needs none of them
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from postgrad.models.config import reading
    from postgrad.models.kept import kept_by_layers
    from postgrad.models.load import skeleton
    from postgrad.models.supported import causal_class, require_interface, require_supported

    config = json.loads(config_json)
    kind = stated_type(config, path)
    if kind not in CONFIG_MAPPING:
        raise UsageError(f"{path} is a {kind} model, which transformers does not have")
    with reading(f"no shape of {path}", "take the config.json that belongs to the weights"):
        parsed: Any = CONFIG_MAPPING[kind].from_dict(json.loads(config_json, object_hook=_number))
    require_supported(parsed, path)
    lm = skeleton(parsed, causal_class(parsed), path)
    require_interface(lm, path)
    shape = _shape_of(lm)
    assert shape.counted is not None
    counted = dataclasses.replace(shape.counted, kept=kept_by_layers(lm))
    return dataclasses.asdict(dataclasses.replace(shape, counted=counted))


def _number(stated: dict[str, Any]) -> Any:
    """A JSON object, or the number that it stands for: transformers writes {"__float__":
    "Infinity"}.
    """
    return float(stated["__float__"]) if set(stated) == {"__float__"} else stated


def _shape_of(lm: Any) -> ModelShape:
    """The shape of a model on the meta device."""
    from postgrad.models.attention import layers_of
    from postgrad.models.four_bits import packable

    config = lm.config.get_text_config()
    layers = list(layers_of(lm))
    mixing = _mixing(lm)
    weights = {
        f"{number}.{name}": tuple(weight.shape)
        for number, layer in enumerate(layers)
        for name, weight in layer.named_parameters()
    }
    matrices = {name: shape for name, shape in weights.items() if len(shape) in (2, 3)}
    active = {name: math.prod(s) * _share(name, s, config) for name, s in matrices.items()}
    attending = sum(size for name, size in active.items() if "attn" in name or "attention" in name)
    hidden, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", 1))
    widths = [
        _key_width(layer, each, hidden // heads)
        for layer, each in zip(layers, layer_configs(config), strict=True)
    ]
    kv_heads = _kv_heads(layer_configs(config)[0])
    return ModelShape(
        model_type=str(config.model_type),
        vocab_size=int(lm.get_input_embeddings().weight.shape[0]),
        hidden_size=hidden,
        intermediate_size=round((sum(active.values()) - attending) / len(layers) / GATED / hidden),
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=round(sum(widths) / len(widths) / kv_heads) if mixing["attending"] else 0,
        tied=lm.get_output_embeddings().weight is lm.get_input_embeddings().weight,
        scores=_scores(config, weights),
        latent=_latent(lm),
        **_norms(weights, hidden),
        counted=CountedWeights(
            parameters=sum(weight.numel() for weight in lm.parameters()),
            layers=sum(map(math.prod, weights.values())),
            matrices=sum(map(math.prod, matrices.values())),
            active=round(sum(active.values())),
            largest=max(weight.numel() for weight in lm.parameters()),
            adaptable=_adaptable(lm),
            matrix_groups=matrix_groups(lm),
            **mixing,
            packed=sum(m.weight.numel() for layer in layers for *_, m in packable(layer)),
            **_experts(lm, weights, config),
        ),
        tower=_tower_of(lm),
    )


def _norms(weights: Mapping[str, tuple[int, ...]], hidden: int) -> dict[str, Any]:
    """What ModelShape says of norms: whether queries and keys have some, and how many the residual
    stream has in a layer; 2 where they are called otherwise.
    """
    named = [name for name in weights if name.startswith("0.") and name.endswith("norm.weight")]
    of_stream = sum(weights[name] == (hidden,) for name in named)
    return {"qk_norm": "0.self_attn.q_norm.weight" in weights, "norms": of_stream or 2}


def _scores(config: Any, weights: Iterable[str]) -> int:
    """ModelShape.scores: torch's own attention has neither soft-caps nor sinks."""
    if getattr(config, "attn_logit_softcapping", None):
        return SOFT_CAPPED
    return WITH_SINKS if any("sink" in name for name in weights) else 0


def _latent(lm: Any) -> int:
    """Numbers of a token's latent and of the rotated part of its key; 0 of a model without."""
    from postgrad.models.latent import latents_of

    config = lm.config.get_text_config()
    return config.kv_lora_rank + config.qk_rope_head_dim if latents_of(lm) else 0


def _experts(lm: Any, weights: Mapping[str, tuple[int, ...]], config: Any) -> dict[str, Any]:
    """What CountedWeights says of routers, and of routed experts: of weights [experts, ...], which
    ranks can share. weights: the shapes of all layers' by name.
    """
    from postgrad.models.routers import balance_of, router_weights

    shared = {name: shape for name, shape in weights.items() if SHARED.search(name)}
    layers = {name.partition(".")[0] for name in shared}
    return {
        "balance": balance_of(lm.config, ModelSettings()),
        "routed": sum(map(math.prod, shared.values())),
        "chosen": int(_each_token(config) or 1),
        "choices": len(layers) * int(_each_token(config) or 1),
        "experts": max((shape[0] for shape in shared.values()), default=0),
        "routers": sum(lm.get_parameter(name).numel() for name in router_weights(lm)),
    }


def _tower_of(lm: Any) -> TowerShape | None:
    """The tower of a model on the meta device; None of one that reads text alone."""
    from postgrad.models.images import image_part
    from postgrad.models.supported import reads_images

    if not reads_images(lm.config):
        return None
    named = list(lm.named_parameters())
    parts = [
        sum(weight.numel() for name, weight in named if image_part(name) == part)
        for part in ("vision", "projector")
    ]
    return tower_shape(lm.config.to_dict(), parameters=parts[0], projector_parameters=parts[1])


def _mixing(lm: Any) -> dict[str, Any]:
    """What CountedWeights says of layers that attend, and of those that carry a state."""
    import torch

    from postgrad.models.attention import layers_of, text_config
    from postgrad.models.states import attends, continues, state_mixers, state_of_one_token

    layers, mixers = layers_of(lm), state_mixers(lm)
    if not mixers:
        return {"attending": len(layers), "states": 0}
    hidden = torch.empty(1, 1, text_config(lm).hidden_size, dtype=lm.dtype, device="meta")
    states = [state for mixer in mixers for state in state_of_one_token(mixer, hidden).values()]
    return {
        "attending": sum(any(attends(type(m)) for m in layer.modules()) for layer in layers),
        "states": sum(state.numel() for state in states),
        "continued": all(continues(type(mixer)) for mixer in mixers),
    }


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer: where layers differ (gemma4) transformers refuses to read what they
    differ in from the config of all.
    """
    layers = int(config.num_hidden_layers)
    if getattr(config, "_heterogeneity_spec", None) is None:
        return [config] * layers
    return [config.per_layer_config[layer] for layer in range(layers)]


def _kv_heads(config: Any) -> int:
    """Heads of keys as they reach attention."""
    heads = int(getattr(config, "num_attention_heads", 1))
    if config.model_type in REPEATED:
        return heads
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _key_width(layer: Any, config: Any, default: int) -> int:
    """Numbers in the keys of a token, and in its values: their mean where they differ. Where a
    config has a width of values alone (mimo_v2_flash), layers differ in heads too: the modules say.
    """
    if getattr(config, "v_head_dim", None) and not getattr(config, "qk_head_dim", None):
        outputs = {name.rpartition(".")[2]: number for name, _, number in _linears(layer)}
        if {"k_proj", "v_proj"} <= set(outputs):
            return (outputs["k_proj"] + outputs["v_proj"]) // 2
    return _kv_heads(config) * _head_dim(config, default)


def _head_dim(config: Any, default: int) -> int:
    """Width of a head; of multi-head latent attention the mean of its keys' and its values' width,
    in which they reach the learner's attention.
    """
    keys, values = getattr(config, "qk_head_dim", None), getattr(config, "v_head_dim", None)
    if keys and values:
        return (int(keys) + int(values)) // 2
    stated = getattr(config, "attention_head_dim", None) or getattr(config, "head_dim", None)
    return int(stated or default)


def _linears(layer: Any, beside: Set[int] = frozenset()) -> tuple[tuple[str, int, int], ...]:
    """(name, inputs, outputs) of a layer's linear modules, which adapters may stand on. beside: the
    identities of those that do not count.
    """
    from torch import nn

    return tuple(
        (name, module.in_features, module.out_features)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in beside
    )


def _adaptable(lm: Any) -> tuple[AdaptableLayers, ...]:
    """What adapters may stand on in each kind of layer: where some attend and others carry a state
    (qwen3_next, lfm2), or some have experts, they differ. Gemma 3n has some outside of them.
    """
    from postgrad.models.adapter_mixtures import mixture_weights
    from postgrad.models.attention import layers_of
    from postgrad.models.states import weights_read_by

    weights = {id(lm.get_parameter(name)) for name in mixture_weights(lm)}
    kinds: dict[tuple[Any, ...], list[int]] = {}
    modules = [module for layer in layers_of(lm) for module in layer.modules()]
    read = {
        id(module)
        for above in modules
        for name, module in above.named_children()
        if name in weights_read_by(type(above))
    }
    for number, layer in enumerate(layers_of(lm)):
        kinds.setdefault((_linears(layer, read), _stacks(layer, weights)), []).append(number)
    inside = set(map(id, modules))
    if outside := _linears(lm.get_decoder(), inside):
        kinds[(outside, ())] = [OUTSIDE]
    return tuple(AdaptableLayers(tuple(numbers), *kind) for kind, numbers in kinds.items())


def _stacks(layer: Any, weights: Set[int]) -> tuple[tuple[str, int, int, int], ...]:
    """(name, experts, inputs, outputs) of a layer's weights of experts, and of its router, whose
    `experts` is 1. weights: the identities of those of all layers.
    """
    stacks: list[tuple[str, int, int, int]] = []
    for name, weight in layer.named_parameters():
        if id(weight) in weights:
            owner = layer.get_submodule(name.rpartition(".")[0])
            sides = [int(side) for side in reversed(weight.shape[-2:])]
            if weight.ndim == 3 and getattr(owner, "is_transposed", False):
                sides.reverse()
            experts = int(weight.shape[0]) if weight.ndim == 3 else 1
            stacks.append((name, experts, sides[0], sides[1]))
    return tuple(stacks)


def _each_token(config: Any) -> Any:
    """How many experts a token is sent to; None where a config does not say."""
    return next((getattr(config, key) for key in EACH_TOKEN if getattr(config, key, None)), None)


def _share(name: str, shape: tuple[int, ...], config: Any) -> float:
    """The share of a matrix that one token is multiplied with: of routed experts' those that it is
    sent to.
    """
    if not ROUTED.search(name):
        return 1.0
    sent = _each_token(config)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    stated = next((getattr(config, key) for key in counts if getattr(config, key, None)), 1)
    experts = shape[0] if len(shape) == 3 else int(stated)
    return 1.0 if sent is None else min(1.0, sent / experts)


def main() -> None:
    """Answers one question on standard input, for `counted_shape` of another process."""
    try:
        shape = _count(sys.stdin.read(), sys.argv[1])
    except UsageError as error:
        print(json.dumps({"problem": str(error)}))
        return
    print(json.dumps({"shape": shape}))


if __name__ == "__main__":
    main()

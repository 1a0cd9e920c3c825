"""Draws values of recipe keys for benchmarks/drawn_recipes.py, by their types or from a list."""

import random
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

Table = dict[str, Any]
ROLES = ("critic", "reference", "reward_model", "teacher")
# Not drawn, by section: what stands in every recipe, what needs ranks, servers or other runs, what
# only a clock decides.
NOT_DRAWN = {
    "": "run_dir job steps total_episodes epochs algorithm cluster environment rewards "
    "reward_model",
    "model": "path init revision compile attention",
    "teacher": "server align sets",
    "learner": "ranks threads sharding offload shard_groups tensor_parallel context_parallel "
    "expert_parallel",
    "rollout": "type vllm openai source replay_path schedule schedule_path",
    "checkpoint": "ckpt_path mirror push_to_hub push_private save_minutes",
    "observe": "loggers",
    "eval": "sets",
    "sentinels": "stall",
    "data": "path name revision split filter map sets task size seed environment template messages "
    "text input prompt answer chosen rejected completion label completions labels",
}
LEFT_OUT = {f"{s}.{key}".strip(".") for s, keys in NOT_DRAWN.items() for key in keys.split()}
# Values of keys whose types do not say enough, or allow what takes too long.
VALUES: dict[str, tuple[Any, ...]] = {
    "algorithm.component_weights": ({"regex": 2.0, "stop_properly": -1.0}, {"f1": 0.5}),
    "algorithm.rejection": (
        {"any_token": [0.8, 1.5], "mean_error": 1.05},
        {"geometric_mean": [0.99, 1.01]},
        {"product": [0.5, 2.0], "sum_k2": 0.1},
        {"sum_k3": 1e-4, "mean_k2": 1e-3},
    ),
    "batch.micro_train_tokens": (128, 200, "auto"),
    "batch.rollout_batch_size": (1, 2, 3),
    "batch.train_batch_size": (1, 2, 3, 6),
    "checkpoint.best_metric": ("eval/accuracy", "eval/loss", "eval/reward"),
    "data.chat_template": ("chatml", "tulu", "llama3", '{{ "" }}{% include "tokenizer" %}'),
    "data.max_len": (24, 40, 64),
    "data.system": ("", "Be brief."),
    "eval.component": ("regex", "stop_properly"),
    "learner.betas": ([0.0, 0.0], [0.5, 0.9]),
    "learner.lr": (1e-7, 1e-3, 1e-2),
    "model.eos_token": ([], "<|im_end|>"),
    "model.lora.alpha": (2, 8),
    "model.lora.alpha_pattern": ({"q_proj": 9}, {"layers.0.mlp.down_proj": 1, "o_proj": 4}),
    "model.lora.exclude_modules": (["q_proj"], ["v_proj", "mlp.up_proj"], ["experts"]),
    "model.lora.init": ("kaiming", "pissa", "pissa_niter_2"),
    "model.lora.layers_to_transform": ([0], [1], [0, 1]),
    "model.lora.modules_to_save": (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]),
    "model.lora.rank": (1, 2, 5),
    "model.lora.rank_pattern": ({"q_proj": 3}, {"layers.0.mlp.down_proj": 4, "o_proj": 1}),
    "model.lora.targets": (["q_proj", "down_proj"], ["experts"], ["router", "o_proj"]),
    "rollout.cache_tokens": (64, 256),
    "rollout.filter_on": ("regex", "total"),
    "rollout.max_new_tokens": (1, 3, 6),
    "rollout.max_staleness": (1, 2),
    "rollout.slots": (1, 3, 16, "auto"),
    "rollout.stop": (["a"], ["1", "."]),
    "scoring.max_failed_fraction": (0.1, 1.0),
    "scoring.waiting_workers": (1,),
    "scoring.workers": (1,),
}


def keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a settings class and of the tables below it, but those of LEFT_OUT."""
    for name, field in kind.model_fields.items():
        if shared(key := f"{prefix}{name}") in LEFT_OUT:
            continue
        tables = [
            hint for hint in (field.annotation, *get_args(field.annotation)) if _is_table(hint)
        ]
        if tables:
            yield from keys_of(tables[0], f"{key}.")
        else:
            yield key, field


def _is_table(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def shared(key: str) -> str:
    """A key without its role: roles have the tables [model] and [learner] as the policy does."""
    role, _, rest = key.partition(".")
    is_shared = role in ROLES and rest.partition(".")[0] in ("model", "learner")
    return rest if is_shared else key


def drawn(key: str, field: FieldInfo, rng: random.Random) -> Any:
    """A value of a key; None where its type has none that could be drawn."""
    if shared(key) in VALUES:
        return rng.choice(VALUES[shared(key)])
    hint: Any = Annotated[(field.annotation, field, *field.metadata)]  # pyright: ignore
    schema = TypeAdapter[Any](hint).json_schema()
    return _value(schema, rng, schema.get("$defs", {}))


def _value(schema: Table, rng: random.Random, named: Table) -> Any:
    """A value of a JSON schema, corners of its bounds among them."""
    if "$ref" in schema:
        return _value(named[schema["$ref"].rpartition("/")[2]], rng, named)
    if "anyOf" in schema:
        return _value(rng.choice(schema["anyOf"]), rng, named)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        least = schema.get("minimum", 0)
        return rng.choice([least, least + 1, least + 2, least + 7])
    if kind == "number":
        inside = {
            "minimum": 0.0,
            "maximum": 0.0,
            "exclusiveMinimum": 1e-6,
            "exclusiveMaximum": -1e-3,
        }
        corners = [schema[bound] + step for bound, step in inside.items() if bound in schema]
        return float(rng.choice([*corners, 0.05, 0.3, 0.5, 0.9, 1.0, 1.5, 3.0]))
    if kind == "array" and "prefixItems" in schema:
        return [_value(each, rng, named) for each in schema["prefixItems"]]
    if kind == "array":
        return [_value(schema["items"], rng, named) for _ in range(rng.randint(0, 2))]
    if kind == "object" and "propertyNames" in schema:
        names = [_value(schema["propertyNames"], rng, named) for _ in range(2)]
        return {name: _value(schema["additionalProperties"], rng, named) for name in names}
    return None

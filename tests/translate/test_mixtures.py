"""Mixtures of experts: what systems say of routers, and of the losses that balance them."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.translate.draft import toml_value
from postgrad.translate.translate import Translation, translate

MIXTURE, DENSE, UNKNOWN = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B", "nvidia/Nano-12B-v2"
CONFIG = Path(__file__).parent / "cases" / "configs" / "nemo-rl-base.yaml"
MEGATRON = "policy.megatron_cfg."
ACTOR = "actor_rollout_ref.actor."
LAYERS = f"{ACTOR}megatron.override_transformer_config."
SOURCE = '[[orchestrator.train.source]]\n[orchestrator.train.source.env.taskset]\nid = "sums"\n'


def nemo_rl(model: str = MIXTURE, /, **stated: str) -> Translation:
    """Trained by Megatron, with options of its section."""
    backends = ("policy.dtensor_cfg.enabled=false", f"++{MEGATRON}enabled=true")
    words = [f"++{MEGATRON}{name}={value}" for name, value in stated.items()]
    return translate(
        "nemo-rl", ["grpo", str(CONFIG), *backends, f"policy.model_name={model}", *words]
    )


def verl(model: str = MIXTURE, /, **stated: str) -> Translation:
    words = [f"+{LAYERS}{name}={value}" for name, value in stated.items()]
    return translate(
        "verl",
        [
            "ppo", f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo",
            "data.train_files=~/data/gsm8k/train.parquet", "actor_rollout_ref.rollout.n=8",
            "trainer.n_gpus_per_node=1", f"{ACTOR}ppo_micro_batch_size_per_gpu=8",
            f"{ACTOR}strategy=megatron", *words,
        ],
    )  # fmt: skip


def prime_rl(tmp_path: Path, model: str = MIXTURE, /, **stated: Any) -> Translation:
    options = {"max_steps": 10, "orchestrator.group_size": 4, "model.name": model}
    options |= {f"trainer.model.{name}": value for name, value in stated.items()}
    path = tmp_path / "rl.toml"
    lines = "".join(f"{name} = {toml_value(value)}\n" for name, value in options.items())
    path.write_text(lines + SOURCE, "utf-8")
    return translate("prime-rl", [str(path)])


def model(translation: Translation) -> dict[str, Any]:
    assert translation.problem is None
    return translation.recipe["model"]


def missing(translation: Translation) -> set[str]:
    names = {option.name.rpartition(".")[2] for option in translation.draft.missing}
    return {name for name in names if name.startswith("moe_")}


@pytest.mark.parametrize("system", [nemo_rl, verl])
@pytest.mark.parametrize(
    ("name", "stated", "dtype"),
    [
        (MIXTURE, "fp32", "float32"),
        (MIXTURE, "fp64", "float32"),
        (MIXTURE, "null", None),
        (UNKNOWN, "fp32", "float32"),
        (DENSE, "fp64", None),
    ],
)
def test_megatrons_dtype_of_routers_is_carried(
    system: Any, name: str, stated: str, dtype: str | None
) -> None:
    translation = system(name, moe_router_dtype=stated)
    assert model(translation).get("router_dtype") == dtype
    assert missing(translation) == set()
    comment = translation.draft.comments.get(("model", "router_dtype"), "")
    assert ("float64 there" in comment) == (dtype is not None and stated == "fp64")
    assert ("leave it out of a dense model" in comment) == (name == UNKNOWN)


@pytest.mark.parametrize(
    ("name", "stated", "dtype"),
    [
        (MIXTURE, {}, "float32"),  # prime-rl's default
        (MIXTURE, {"moe_router_dtype": "float32"}, "float32"),
        (MIXTURE, {"moe_router_dtype": "bfloat16"}, None),
        (MIXTURE, {"impl": "hf"}, None),
        (UNKNOWN, {}, None),
        (UNKNOWN, {"moe_router_dtype": "float32"}, "float32"),
        (DENSE, {"moe_router_dtype": "float32"}, None),
    ],
)
def test_prime_rls_dtype_of_routers_is_carried_also_where_nothing_is_said(
    name: str, stated: dict[str, Any], dtype: str | None, tmp_path: Path
) -> None:
    translation = prime_rl(tmp_path, name, **stated)
    assert model(translation).get("router_dtype") == dtype
    assert missing(translation) == set()


@pytest.mark.parametrize("system", [nemo_rl, verl])
@pytest.mark.parametrize(
    ("stated", "coefficient", "lost"),
    [
        ({}, 0.0, set()),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": "0.1"}, 0.0, set()),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.0"}, 0.0, set()),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.01"},
            None,
            {"moe_router_load_balancing_type"},
        ),
    ],
)
def test_a_balance_loss_that_is_off_there_is_off_here(
    system: Any, stated: dict[str, str], coefficient: float | None, lost: set[str]
) -> None:
    translation = system(MIXTURE, **stated)
    assert model(translation).get("router_aux_loss_coef") == coefficient
    assert missing(translation) == lost
    assert "router_aux_loss_coef" not in model(system(DENSE, **stated))


@pytest.mark.parametrize("system", [nemo_rl, verl])
@pytest.mark.parametrize(
    ("rate", "lost"), [("0.0", set()), ("0.001", {"moe_router_bias_update_rate"})]
)
def test_a_bias_that_updates_move_is_lost(system: Any, rate: str, lost: set[str]) -> None:
    bias = {"moe_router_enable_expert_bias": "true", "moe_router_bias_update_rate": rate}
    assert missing(system(MIXTURE, **bias)) == lost


@pytest.mark.parametrize(("stated", "lost"), [("0.0", set()), ("0.001", {"moe_z_loss_coeff"})])
def test_a_z_loss_of_layers_is_lost_with_what_to_take(stated: str, lost: set[str]) -> None:
    translation = verl(MIXTURE, moe_z_loss_coeff=stated)
    assert missing(translation) == lost
    for option in translation.draft.missing:
        assert "z_loss" not in option.name or "times the number of layers" in option.why

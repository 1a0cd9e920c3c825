"""The options and defaults of TRL as it is installed: none is unknown, and no default is stale."""

from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

import pytest
from packaging.version import Version

from helpers.packages import TRL
from postgrad.translate.tables.trl import DEFAULTS, SHARED
from postgrad.translate.translate import translate

pytestmark = [pytest.mark.slow, TRL]  # TRL takes seconds to load

INSTALLED = sorted(set(DEFAULTS) - {"ppo", "prm", "minillm"})  # which 1.16 does not have
# Read by their own names here, or as another value.
GROUPS = ("grpo", "gmpo", "async_grpo", "rloo", "sdft", "sdpo")  # of 8 completions
OTHERWISE = {"bf16", "max_length", "loss_type"}


def configs(program: str) -> tuple[type, ...]:
    """The classes whose fields are a command's options."""
    import trl
    from trl.experimental import async_grpo, cpo, gkd, gmpo, online_dpo, orpo, sdft, sdpo

    if Version(trl.__version__) < Version("1.16"):
        pytest.skip("defaults are of 1.16")
    trained = {
        "sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "grpo": trl.GRPOConfig,
        "reward": trl.RewardConfig, "rloo": trl.RLOOConfig, "cpo": cpo.CPOConfig,
        "distillation": trl.DistillationConfig, "orpo": orpo.ORPOConfig, "gkd": gkd.GKDConfig,
        "online_dpo": online_dpo.OnlineDPOConfig, "gmpo": gmpo.GMPOConfig,
        "async_grpo": async_grpo.AsyncGRPOConfig, "sdft": sdft.SDFTConfig, "sdpo": sdpo.SDPOConfig,
    }  # fmt: skip
    return trained[program], trl.ModelConfig, trl.ScriptArguments


def options(program: str) -> dict[str, Any]:
    """Each option of a command with its default, None where it has none."""
    named: dict[str, Any] = {}
    for config in configs(program):
        for field in fields(config):
            fresh = None if field.default_factory is MISSING else field.default_factory()
            value = fresh if field.default is MISSING else field.default
            named[field.name] = value.value if isinstance(value, Enum) else value
    return named


@pytest.mark.parametrize("program", INSTALLED)
def test_every_option_of_the_installed_trl_is_known(program: str) -> None:
    words = [program, "--model_name_or_path", "m", "--dataset_name", "d"]
    stated = ["--num_generations", "8"] if program in GROUPS else []
    unknown: list[str] = []
    for name, value in options(program).items():
        if isinstance(value, list | dict):
            continue
        translation = translate(
            "trl", [*words, *stated, f"--{name}", "1" if value is None else str(value)]
        )
        unknown += [option.name for option in translation.draft.missing
                    if option.name == name and option.why.startswith("not an option")]  # fmt: skip
    assert unknown == []


@pytest.mark.parametrize("program", INSTALLED)
def test_defaults_are_those_of_the_installed_trl(program: str) -> None:
    theirs = options(program)
    ours = {name: value for name, value in {**SHARED, **DEFAULTS[program]}.items()
            if name not in OTHERWISE}  # fmt: skip
    assert ours == {name: theirs[name] for name in ours}

"""Who scores the answers of Open-Instruct's RL: verifiers by the names of rows, judges, tools."""

from typing import Any

import pytest

from postgrad.translate.translate import Translation, translate


def of(*flags: str, data: str = "org/rows") -> Translation:
    return translate("open-instruct", ["grpo", "--model_name_or_path", "m", "--dataset_mixer_list",
                                       *(word for path in data.split() for word in (path, "1.0")),
                                       *flags])  # fmt: skip


def rewards(*flags: str, data: str = "org/rows") -> dict[str, dict[str, Any]]:
    translation = of(*flags, data=data)
    assert translation.problem is None
    return {reward["type"]: reward for reward in translation.recipe["rewards"]}


def lost(translation: Translation) -> set[str]:
    return {option.name for option in translation.draft.missing}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("org/rlvr_gsm8k_zs", "gsm8k"),
        ("org/DAPO-Math-17k org/polaris_53k", "math"),
        ("org/IF_multi_constraints_upto5", "ifeval"),
        ("org/rlvr_acecoder org/the-algorithm-python", "code"),
    ],
)
def test_one_verifier_scores_all_rows_where_all_names_say_so(data: str, kind: str) -> None:
    (reward,) = rewards(data=data).values()
    assert (reward["type"], reward["weight"]) == (kind, 10.0)
    assert "when" not in reward


def test_rows_say_their_verifier_where_names_of_datasets_do_not() -> None:
    unsaid = rewards()
    assert list(unsaid) == ["gsm8k", "math", "ifeval"]
    assert unsaid["math"]["when"] == {"dataset": ["math", "MATH"]}
    several = rewards(data="org/math_mix org/code_mix org/general_mix")
    assert list(several) == ["math", "code", "judge"]
    assert several["code"]["when"] == {"dataset": ["code", "code_stdio"]}
    assert "is refused at the start" in of(data="org/rows").text.replace("\n# ", " ")
    judged = rewards("--llm_judge_model", "hosted_vllm/Qwen/Qwen3-32B", data="org/math_mix")
    assert list(judged) == ["math", "judge"]  # who names a judge has rows for it


def test_a_name_that_is_remapped_is_scored_by_the_other_s_verifier() -> None:
    flags = ("--remap_verifier", "math_dapo=math")
    assert rewards(*flags)["math"]["when"] == {"dataset": ["math", "MATH", "math_dapo"]}
    single = of(*flags, data="org/math")
    assert "when" not in single.recipe["rewards"][0]
    assert lost(single) == set()
    assert lost(of("--remap_verifier", "general_rubric=rubric")) == {"remap_verifier"}


def test_programs_are_tested_here_as_long_as_there() -> None:
    reward = rewards("--code_api_url", "http://x", "--code_max_execution_time", "6.0")["code"]
    assert (reward["test_cpu_seconds"], reward["cpu_seconds"]) == (6.0, 60.0)
    assert reward["partial"] is True
    every = rewards("--code_pass_rate_reward_threshold", "0.99", data="org/code")["code"]
    assert every["partial"] is False
    half = of("--code_pass_rate_reward_threshold", "0.5", data="org/code")
    assert lost(half) == {"code_pass_rate_reward_threshold"}


def test_a_judge_has_the_settings_of_there() -> None:
    judge = "--llm_judge"
    flags = (f"{judge}_model", "hosted_vllm/Qwen/Qwen3-32B", f"{judge}_timeout", "600",
             f"{judge}_max_tokens", "512", f"{judge}_max_context_length", "32768")  # fmt: skip
    assert rewards(*flags)["judge"] == {
        "type": "judge", "base_url": "http://localhost:8000/v1", "model": "Qwen/Qwen3-32B",
        "temperature": 1.0, "max_tokens": 512, "timeout": 600.0, "weight": 10.0,
        "when": {"dataset": ["general-quality", "general-quality_ref"]},
    }  # fmt: skip
    assert lost(of(*flags)) == {"llm_judge_max_context_length"}


def test_tools_are_functions_that_the_user_writes_or_those_of_here() -> None:
    translation = of(
        "--tools", "python", "serper_search", "--tool_call_names", "code", "search",
        "--max_steps", "5", "--tool_parser_type", "vllm_hermes", "--per_turn_max_tokens", "64",
        "--pool_size", "8",
    )  # fmt: skip
    assert translation.recipe["environment"] == {
        "type": "tools", "tools": ["python", "my_tools:search"], "max_turns": 5,
        "tool_format": "hermes", "turn_tokens": [64], "concurrent": 8,
    }  # fmt: skip
    assert "my_tools" in str(translation.problem)  # until it is written
    assert lost(translation) == set()
    legacy = of("--tools", "python", "--tool_parser_type", "legacy")
    assert legacy.problem is None
    assert lost(legacy) == {"tool_parser_type"}


def test_a_server_of_tools_is_asked_at_its_address() -> None:
    translation = of("--tools", "generic_mcp", "--tool_configs",
                     '{"server_url": "http://localhost:8765/mcp"}')  # fmt: skip
    assert translation.problem is None
    assert translation.recipe["environment"] == {
        "type": "tools", "max_turns": 5, "mcp": {"server": {"url": "http://localhost:8765/mcp"}},
    }  # fmt: skip


def test_rows_of_an_environment_are_rewarded_by_it_alone() -> None:
    played = of("--max_steps", "20", data="org/rlenv-wordle-nothink")
    assert played.recipe["environment"] == {"type": "my_environment:Wordle", "max_turns": 20}
    assert "rewards" not in played.recipe
    beside = of("--tools", "generic_sandbox", data="org/math")
    assert beside.recipe["environment"]["type"] == "my_environment:GenericSandbox"
    assert [reward["type"] for reward in beside.recipe["rewards"]] == ["math"]
    assert lost(of("--tools", "wordle", "python")) == {"tools"}

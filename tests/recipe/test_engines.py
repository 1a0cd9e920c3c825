"""Engines that cannot be are refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.compare import compare
from postgrad.recipe.load import load_recipe, parse_recipe

BASE: dict[str, Any] = {
    "job": "rl",
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "some/model"},
    "data": {"path": "some.jsonl", "max_len": 64},
    "rewards": [{"type": "math"}],
    "algorithm": {"type": "grpo"},
    "batch": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
}
SERVER = {"base_url": "http://127.0.0.1:8000/v1"}


def with_arguments(**arguments: Any) -> dict[str, Any]:
    return {"type": "vllm", "vllm": {"engine_args": arguments}}


def recipe(**rollout: Any) -> Any:
    return parse_recipe({**BASE, "rollout": {"max_new_tokens": 8, **rollout}})


def test_an_engines_table_is_read() -> None:
    vllm_recipe = recipe(
        type="vllm", vllm={"engines": 2, "tensor_parallel": 4, "python": "/v/python"}
    )
    assert (vllm_recipe.rollout.vllm.engines, vllm_recipe.rollout.vllm.tensor_parallel) == (2, 4)
    other = recipe(type="openai", openai={**SERVER, "endpoint": "completions"})
    assert other.rollout.openai.base_url == SERVER["base_url"]
    assert parse_recipe(other.dump()) == other


def test_samples_ahead_are_for_engines_in_this_process_and_in_workers() -> None:
    sections = {**BASE, "algorithm": {"type": "grpo", "correction": "tis"}}
    rollout = {"type": "vllm", "max_new_tokens": 8, "max_staleness": 2}
    assert parse_recipe({**sections, "rollout": rollout}).rollout.max_staleness == 2
    behind_ray = {"cluster": {"type": "ray", "rollout": {"workers": 1}}}
    recipe = parse_recipe({**sections, **behind_ray, "rollout": rollout})
    assert recipe.rollout.max_staleness == 2
    assert recipe.samples_while_learning


APART = {"cluster": {"type": "ray", "rollout": {"workers": 1}}}
REPLAY = {"schedule": "replay", "schedule_path": "runs/that"}


@pytest.mark.parametrize(
    ("rollout", "cluster", "message"),
    [
        ({"schedule": "free"}, {}, 'rollout.schedule.*"free" is of engines that sample while'),
        ({"schedule": "free", "max_staleness": 0}, APART, "rollout.schedule.*these do not"),
        (
            {"schedule": "free", "in_flight_updates": False},
            APART,
            "rollout.schedule.*in_flight_updates = false lets none be cut",
        ),
        ({**REPLAY, "type": "vllm"}, APART, "rollout.schedule.*no engine but the built-in"),
        (
            REPLAY,
            {"cluster": {"type": "ray", "rollout": {"workers": 2, "least": 1}}},
            r"cluster\.rollout\.least: a replay repeats what each of all workers did",
        ),
        ({"schedule": "replay"}, APART, "rollout.schedule_path.*needs the run directory"),
        ({"schedule_path": "runs/that"}, APART, 'schedule_path.*only where schedule = "replay"'),
    ],
)
def test_a_schedule_that_no_engine_can_follow_is_named(
    rollout: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    sections = {**BASE, "algorithm": {"type": "grpo", "correction": "tis"}, **cluster}
    asked = {"max_new_tokens": 8, "max_staleness": 2, **rollout}
    with pytest.raises(UsageError, match=message):
        parse_recipe({**sections, "rollout": asked})


@pytest.mark.parametrize(
    "rollout", [{"schedule": "free"}, {"schedule": "free", "type": "vllm"}, REPLAY]
)
def test_engines_apart_may_go_as_soon_as_they_can(rollout: dict[str, Any]) -> None:
    sections = {**BASE, "algorithm": {"type": "grpo", "correction": "tis"}, **APART}
    asked = {"max_new_tokens": 8, "max_staleness": 2, **rollout}
    assert parse_recipe({**sections, "rollout": asked}).rollout.schedule == rollout["schedule"]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"vllm": {"engines": 2}}, 'rollout.vllm.*is read only where rollout.type = "vllm"'),
        ({"openai": SERVER}, 'rollout.openai.*is read only where rollout.type = "openai"'),
        ({"type": "vllm", "openai": SERVER}, "rollout.openai.*is read only"),
        ({"type": "vllm", "slots": "auto"}, 'rollout.slots.*"auto" tries the built-in engine'),
        ({"type": "vllm", "vllm": {"engines": 0}}, "rollout.vllm.engines"),
        ({"type": "vllm", "vllm": {"memory_fraction": 1.5}}, "rollout.vllm.memory_fraction"),
        ({"type": "vllm", "vllm": {"tensorparallel": 2}}, "tensor_parallel"),
        (with_arguments(dtype="half"), "'dtype' of vLLM is not for .*says it with rollout.dtype"),
        (with_arguments(logprobs_mode="raw_logits"), "'logprobs_mode' .*: the run sets it"),
        (with_arguments(trust_remote_code=True), "'trust_remote_code'.* must not load code"),
        (with_arguments(speculative_config={"model": "a/draft"}), "no weights of a second model"),
        ({"type": "openai"}, "rollout.openai.base_url.*which server"),
        ({"type": "openai", "openai": {"base_url": "here"}}, "rollout.openai.base_url"),
        (
            {"type": "openai", "openai": {"base_url": "http://me:key@host/v1"}},
            "variable that rollout.openai.api_key_env names",
        ),
        ({"type": "sglang"}, "rollout.type"),
    ],
)
def test_what_cannot_be_is_named(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe(**rollout)


def test_turns_and_a_chat_server_do_not_go_together() -> None:
    for endpoint in ("chat", "completions"):
        raw = {
            **BASE,
            "environment": {"type": "guess_number"},
            "rollout": {
                "type": "openai",
                "max_new_tokens": 8,
                "openai": {**SERVER, "endpoint": endpoint},
            },
        }
        del raw["rewards"]
        if endpoint == "completions":
            parse_recipe(raw)
        else:
            with pytest.raises(UsageError, match=r"rollout\.openai\.endpoint"):
                parse_recipe(raw)


def test_a_transport_that_nothing_would_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in processes of their own .* this one has none"):
        recipe(transport="memory")
    assert recipe(type="vllm", transport="ipc").rollout.transport == "ipc"
    workers = {"type": "ray", "rollout": {"workers": 1}}
    rollout = {"transport": "broadcast", "max_new_tokens": 8}
    behind = parse_recipe({**BASE, "rollout": rollout, "cluster": workers})
    assert behind.rollout.transport == "broadcast"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "and it has none"),
        ({"lora": {}, "quantize": "4bit"}, 'model.quantize = "4bit": vLLM would apply it to other'),
        ({"lora": {"dora": True}}, "vLLM applies no lengths of rows"),
        (
            {"lora": {"init": "pissa"}},
            r'init = "pissa", whose change of the base has twice the rank',
        ),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "vLLM takes no whole modules"),
    ],
)
def test_an_adapter_that_vllm_could_not_apply_is_refused(
    model: dict[str, Any], message: str
) -> None:
    rollout = {"type": "vllm", "max_new_tokens": 8, "vllm": {"lora": "adapter"}}
    with pytest.raises(UsageError, match=message):
        parse_recipe({**BASE, "model": {**BASE["model"], **model}, "rollout": rollout})
    adapted = {**BASE, "model": {**BASE["model"], "lora": {}}}
    assert parse_recipe({**adapted, "rollout": rollout}).rollout.sends_adapter
    assert not parse_recipe({**adapted, "rollout": {"max_new_tokens": 8}}).rollout.sends_adapter


def test_arguments_of_vllm_are_read_from_a_flag_and_refused_to_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'job = "rl"\nrun_dir = "run"\nsteps = 1\nalgorithm.type = "grpo"\n'
        'model.path = "m"\ndata.path = "d"\n[[rewards]]\ntype = "math"\n'
        '[rollout]\ntype = "vllm"\nvllm.engine_args.speculative_config.method = "ngram"\n'
    )
    flags = ["--rollout.vllm.engine_args.kv_cache_dtype", "fp8"]
    before, after = load_recipe(path), load_recipe(path, flags)
    ngram = {"speculative_config": {"method": "ngram"}}
    assert after.rollout.vllm.engine_args == {**ngram, "kv_cache_dtype": "fp8"}
    with pytest.raises(UsageError, match=r"rollout\.vllm\.engine_args"):
        compare(before, after, [], tmp_path)
    other = load_recipe(path, ["--rollout.vllm.memory_fraction", "0.4"])
    assert compare(before, other, [], tmp_path) == ["rollout.vllm.memory_fraction"]

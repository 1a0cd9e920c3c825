"""What a plan says of passes: one role at a time, and never more logits than there are entries."""

from dataclasses import replace
from typing import Any

from postgrad.core.process import TRIM_BYTES
from postgrad.models import linear
from postgrad.models.head import chunk_rows
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import ModelInit, ModelSettings
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.held import PHASES
from postgrad.plan.memory import Memory
from postgrad.plan.passes import PART, Head
from postgrad.plan.plan import Facts, make_plan
from postgrad.recipe.load import parse_recipe
from postgrad.rewards.math import Math
from postgrad.rewards.pool import WORKER_BYTES

INIT: dict[str, Any] = {"tokenizer": {"vocab_size": 4096}}


def planned(more: dict[str, Any], hardware: str = "CPU") -> Memory:
    recipe = parse_recipe(
        {
            "job": "rl",
            "run_dir": "run",
            "steps": 9,
            "model": {"init": INIT, "dtype": "float32"},
            "data": {"path": "rows.jsonl", "max_len": 512},
            "rewards": [{"type": "gsm8k"}],
            "algorithm": {"type": "grpo"},
            "batch": {"micro_train_tokens": 2048},
            "rollout": {"slots": 16, "cache_tokens": 16_384, "max_new_tokens": 128},
            **more,
        }
    )
    return make_plan(recipe, Facts(shape_of_model, parse_hardware(hardware))).memory


def roles_with(memory: Memory, wanted_purpose: str) -> set[str]:
    return {
        line.role
        for line in memory.lines
        if line.purpose == wanted_purpose and line.bytes.get("update")
    }


def test_critic_and_policy_learn_one_after_the_other() -> None:
    both = planned({"algorithm": {"type": "ppo"}})
    assert roles_with(both, "weights") == {"policy", "critic", "engine"}
    assert roles_with(both, "activations") == roles_with(both, "gradients") == {"policy"}


def test_verifiers_are_processes_of_their_own_beside_what_the_run_adds_to_its_process() -> None:
    with_math = {"rewards": [{"type": "gsm8k"}, {"type": "math"}], "scoring": {"workers": 3}}
    plain, more = planned({"scoring": {"workers": 3}}), planned(with_math)
    added = 3 * (WORKER_BYTES + Math.imports_bytes)  # it is shut in, in workers of its own
    for phase in PHASES:
        assert more.at(phase) - plain.at(phase) == added
        assert more.above_baseline(phase) == plain.above_baseline(phase) > 0
    workers = 3 * WORKER_BYTES + added
    most = max(more.above_baseline(phase) for phase in PHASES)
    assert more.with_held(500) == 500 + most + workers
    assert not [line for line in planned(with_math, "H100").lines if line.role == "verifiers"]


def test_nothing_is_verified_where_nothing_is_sampled() -> None:
    assert "verifiers" in {line.role for line in planned({}).lines}
    sft: dict[str, Any] = {"job": "sft", "epochs": 1, "steps": None, "algorithm": {"type": "sft"}}
    assert "verifiers" not in {line.role for line in planned(sft).lines}


def test_an_engine_in_the_policys_process_borrows_what_is_float32() -> None:
    def weights(changes: dict[str, Any]) -> int:
        (weight_bytes,) = [
            line.bytes["update"]
            for line in planned(changes).lines
            if line.role == "engine" and line.purpose == "weights"
        ]
        return weight_bytes

    shape = shape_of_model(ModelSettings(init=ModelInit.model_validate(INIT)))
    layers, hidden, inner = shape.layers, shape.hidden_size, shape.intermediate_size
    queries_keys_values = hidden * (shape.query_size + 2 * shape.key_size)
    fused = layers * 4 * (queries_keys_values + 2 * hidden * inner)
    assert weights({}) == fused < 4 * shape.parameters()
    assert (
        weights({"rollout": {"max_new_tokens": 128, "dtype": "bfloat16"}}) == 2 * shape.parameters()
    )
    ranks = {"learner": {"ranks": 2}, "cluster": {"type": "ray"}}
    assert weights(ranks) == 4 * shape.parameters()
    merged = fused + layers * 4 * hidden * (shape.query_size + inner)  # the other two matrices too
    lora = {"model": {"init": INIT, "lora": {"rank": 4, "alpha": 4}}}
    assert weights(lora) == merged


def copied(memory: Memory) -> dict[str, int]:
    lines = [line for line in memory.lines if line.purpose == "copy of the state"]
    return {phase: count for line in lines for phase, count in line.bytes.items() if count}


def test_a_copy_of_the_state_is_there_only_where_saves_are_written_behind_steps() -> None:
    each = {"checkpoint": {"save_steps": 1}}
    assert not copied(planned({}))
    assert not copied(planned(each, "H100"))  # it is in the host's memory
    assert copied(planned(each)).keys() == {"rollout", "score", "save"}  # written while it samples


def test_a_copy_stands_beside_what_the_next_forward_pass_has_kept_by_then() -> None:
    sft = {
        "job": "sft", "run_dir": "run", "steps": 9, "data": {"path": "rows.jsonl", "max_len": 512},
        "batch": {"micro_train_tokens": 1024},
        "model": {"init": {**INIT, "hidden_size": 768, "num_hidden_layers": 12}},
    }  # fmt: skip
    facts = Facts(shape_of_model, parse_hardware("CPU"))
    last, each = (
        make_plan(parse_recipe({**sft, "checkpoint": {"save_steps": steps}}), facts).memory
        for steps in (0, 1)
    )
    beside = copied(each)
    assert 0 < beside["update"] < beside["save"]
    assert last.peak_bytes < each.peak_bytes < last.peak_bytes + beside["save"]


def test_what_an_update_left_in_the_heap_is_given_back_before_an_engine_samples() -> None:
    wide = {"model": {"init": {**INIT, "hidden_size": 768, "num_hidden_layers": 24}}}
    (kept,) = (
        line.bytes for line in planned(wide).lines if line.purpose == "kept by the allocator"
    )
    assert kept["update"] > TRIM_BYTES == kept["rollout"] == kept["save"]
    (kept,) = (line.bytes for line in planned({}).lines if line.purpose == "kept by the allocator")
    assert 0 < kept["update"] == kept["rollout"] == kept["save"] < TRIM_BYTES


def test_logits_of_few_entries_are_less_than_a_chunk() -> None:
    shape = shape_of_model(ModelSettings(init=ModelInit.model_validate(INIT)))
    few, many = (Head(shape, 4, entries, cpu=True, trains=True) for entries in (1024, 10_000))
    matrix = 4096 * 256 * 4
    assert few.backward() == (1024 * 4096 * 4, matrix)
    assert many.backward() == (2**26, 2 * matrix)  # the sum of the chunks before, and the next


def test_the_gradient_of_a_large_head_is_added_in_place_on_a_cpu() -> None:
    init = {**INIT, "tokenizer": {"vocab_size": 151_936}}
    shape = shape_of_model(ModelSettings(init=ModelInit.model_validate(init)))
    assert 151_936 * 256 > PART == linear.LARGE_WEIGHT > 4096 * 256
    wide, narrow = (Head(shape, width, 10_000, cpu=True, trains=True) for width in (4, 2))
    assert (wide.backward()[1], wide.waiting(), wide.ending()) == (0, 0, 0)
    matrix = 151_936 * 256 * 2
    assert (narrow.backward()[1], narrow.waiting(), narrow.ending()) == (0, 0, matrix)
    sharded = replace(narrow, sharded=True)  # the float32 sum of chunks, and what is added to it
    assert (sharded.backward()[1], sharded.waiting()) == (4 * matrix, matrix)


def test_a_gpu_reads_at_least_1024_rows_at_a_time_and_a_chunk_of_512_mib() -> None:
    few, many = chunk_rows(32_000, cpu=False), chunk_rows(151_936, cpu=False)
    assert (few, many) == (2**29 // (4 * 32_000), 1024)
    assert chunk_rows(151_936, cpu=True) == 110


def test_compiled_layers_keep_less_where_a_run_compiles_them() -> None:
    def activations(hardware: str, model: dict[str, Any], **more: Any) -> int:
        chosen = {"init": INIT, "dtype": "bfloat16", **model}
        memory = planned({"model": chosen, **more}, hardware)
        return sum(
            line.bytes["update"] for line in memory.lines
            if line.role == "policy" and line.purpose == "activations"
        )  # fmt: skip

    eager = activations("1xH100", {})
    compiled = activations("1xH100", {"compile": "auto"})
    assert compiled < 0.8 * eager
    assert activations("1xH100", {"compile": True}) == compiled
    assert activations("1xH100", {"compile": "auto", "attention": "sdpa"}) >= eager
    two = {"learner": {"ranks": 2, "context_parallel": 2}, "cluster": {"type": "ray"}}
    assert activations("2xH100", {"compile": "auto"}, **two) < 0.8 * activations(
        "2xH100", {}, **two
    )
    assert activations("CPU", {"compile": "auto"}) == activations("CPU", {})


def test_a_compiled_head_stores_no_float32_logits() -> None:
    shape = shape_of_model(ModelSettings(path="Qwen/Qwen3-0.6B"))
    eager, compiled = (
        Head(shape, 2, 4096, cpu=False, trains=True, compiled=compiled)
        for compiled in (False, True)
    )
    chunk = 1024 * 151_936
    assert compiled.forward() == 2 * chunk
    assert eager.forward() == (2 + 2 * 4) * chunk
    assert sum(compiled.backward()) < sum(eager.backward())

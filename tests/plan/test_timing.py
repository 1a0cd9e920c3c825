"""Time that a plan estimates grows as that of runs does: with tokens, squared lengths, passes."""

from typing import Any

import pytest

from helpers.model_types import config_of
from postgrad.models.known_shapes import any_shape, shape_of_model
from postgrad.models.settings import LoraSettings, ModelInit, ModelSettings
from postgrad.plan.adapters import start_scratch, start_seconds
from postgrad.plan.batches import batch_json
from postgrad.plan.hardware import Hardware, catalogue
from postgrad.plan.lengths import RowLengths
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.timing import START, Timing
from postgrad.recipe.load import parse_recipe

# CPU seconds of one thread of an AMD EPYC, November 2026: benchmarks.growth, a fresh 6M Qwen2.
UPDATES = {
    (4, 128): 0.22, (8, 128): 0.32, (16, 128): 0.64, (32, 128): 1.40, (64, 128): 2.58,
    (4, 256): 0.38, (4, 512): 0.84, (4, 1024): 2.26, (4, 2048): 6.20,
}  # fmt: skip
ROLLOUTS = {
    (16, 32): 0.17, (32, 32): 0.35, (64, 32): 0.84, (128, 32): 1.55, (256, 32): 3.31,
    (16, 64): 0.37, (16, 128): 0.87, (16, 256): 1.86, (16, 512): 4.46,
}  # fmt: skip
INIT: dict[str, Any] = {
    "type": "qwen2", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tokenizer": {"vocab_size": 4096},
}  # fmt: skip
PROMPT = 16  # tokens, of a rollout


def planned(table: dict[str, Any], lengths: RowLengths) -> Timing:
    common = {"run_dir": "run", "steps": 1, "model": {"init": INIT, "dtype": "float32"}}
    recipe = parse_recipe({**common, **table})
    one_core = Hardware(count=1, device=catalogue({})["CPU-BF16"])
    facts = Facts(shape_of_model, one_core, lengths)
    return make_plan(recipe, facts).timing


def update(sequences: int, length: int) -> float:
    table = {
        "job": "sft",
        "data": {"path": "rows.jsonl", "max_len": 2048},
        "batch": {"train_batch_size": sequences, "micro_train_tokens": 2048},
    }
    return planned(table, RowLengths(length / 2, length / 2, 1.0, "here")).step["update"]


def rollout(sequences: int, length: int) -> float:
    table = {
        "job": "rl",
        "data": {"path": "rows.jsonl", "max_len": 2048},
        "batch": {"rollout_batch_size": sequences, "n_samples_per_prompt": 1},
        "rewards": [{"type": "gsm8k"}],
        "algorithm": {"type": "reinforce_pp"},
        "rollout": {"slots": 16, "max_new_tokens": length},
    }
    return planned(table, RowLengths(PROMPT, length, 1.0, "here")).step["sample"]


@pytest.mark.parametrize(
    ("estimate", "seconds_by_size", "learned"),
    [(update, UPDATES, (16, 128)), (rollout, ROLLOUTS, (64, 32))],
)
def test_once_calibrated_with_one_run_others_are_estimated_within_a_quarter(
    estimate: Any, seconds_by_size: dict[tuple[int, int], float], learned: tuple[int, int]
) -> None:
    factor = seconds_by_size[learned] / estimate(*learned)
    for size, seconds in seconds_by_size.items():
        assert factor * estimate(*size) == pytest.approx(seconds, rel=0.25), size


def score(dropout: float = 0.0, **algorithm: Any) -> float:
    """Seconds before the only update of a step."""
    table = {
        "job": "rl",
        "model": {"init": INIT, "dtype": "float32", "lora": {"rank": 4, "dropout": dropout}},
        "data": {"path": "rows.jsonl", "max_len": 2048},
        "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        "rewards": [{"type": "gsm8k"}],
        "algorithm": {"type": "grpo", **algorithm},
        "rollout": {"max_new_tokens": 64},
    }
    return planned(table, RowLengths(PROMPT, 64, 1.0, "here")).step["score"]


def test_with_dropout_a_plan_counts_the_pass_for_the_policys_logprobs() -> None:
    """training.rl makes it in every step: once, whoever else needs it."""
    assert score() == 0.0
    needed = score(second_moment=0.04)
    assert score(dropout=0.1) == score(dropout=0.1, second_moment=0.04) == needed > 0.0
    assert score(dropout=0.1, old_logprobs="sampled") == needed


def test_a_plan_counts_a_pass_for_entropies_beside_that_for_logprobs() -> None:
    alone = score(top_entropy_fraction=0.2)
    assert alone == score(second_moment=0.04)
    assert score(top_entropy_fraction=0.2, second_moment=0.04) == pytest.approx(2 * alone)
    assert score(dropout=0.1, top_entropy_fraction=0.2) == pytest.approx(2 * alone)


@pytest.mark.parametrize(
    ("kind", "prompt", "copies"),
    [
        pytest.param("qwen3_next", 500, 1, id="shared"),
        pytest.param("qwen3_next", 31, 8, id="too short"),
        pytest.param("minimax", 500, 8, id="cannot"),
        # its layers run token by token as they are counted, for seconds
        pytest.param("mamba", 500, 8, id="cannot by token", marks=pytest.mark.slow),
    ],
)
def test_prompts_of_a_model_with_states_are_counted_as_its_learner_computes_them(
    kind: str, prompt: int, copies: int
) -> None:
    """Once for 8 answers where layers go on from a state and a prompt has 32 tokens and more."""
    of = grpo(kind, prompt)
    assert batch_json(of)["tokens_per_step"] == 4 * (copies * prompt + 8 * 200)
    (note,) = (note for note in Page(of, ()).notes() if "carry a state" in note)
    assert f"computes a prompt {'once' if copies == 1 else '8 times'}. " in note
    assert note.endswith("kernels (flash-linear-attention, mamba-ssm) keep less")


def grpo(kind: str, prompt: int) -> RunPlan:
    """A plan of a small model of the type on one core."""
    shape = any_shape(config_of(kind, 37).to_dict(), kind)
    table = {
        "job": "rl", "run_dir": "run", "steps": 1, "model": {"path": kind},
        "data": {"path": "rows.jsonl", "max_len": 2048}, "rewards": [{"type": "gsm8k"}],
        "algorithm": {"type": "grpo"}, "rollout": {"max_new_tokens": 200},
        "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "micro_train_tokens": 4096},
    }  # fmt: skip
    one_core = Hardware(count=1, device=catalogue({})["CPU-BF16"])
    lengths = RowLengths(prompt, 200, 1.0, "here")
    return make_plan(parse_recipe(table), Facts(lambda _: shape, one_core, lengths))


@pytest.mark.parametrize(("kind", "is_noted"), [("gpt2", True), ("gpt_neox", False)])
def test_a_type_whose_layers_were_not_counted_is_told(kind: str, is_noted: bool) -> None:
    notes = [note for note in Page(grpo(kind, 40), ()).notes() if "is estimated as" in note]
    text = (
        "what layers of a gpt2 model keep for the backward pass is estimated as a dense decoder's"
    )
    assert notes == ([f"{text} of the same sizes"] if is_noted else [])


# Seconds and bytes beside the weights, of one core of an AMD EPYC (Zen 5), December 2026:
# principal_factors of rank 64, from the named matrix of a layer of that width and inner width.
STARTS = {
    ("o_proj", 1024, 4096, "pissa"): (0.774, 63.0e6),
    ("o_proj", 1024, 4096, "pissa_niter_4"): (0.154, None),
    ("up_proj", 1024, 4096, "pissa"): (1.606, 147.3e6),
    ("down_proj", 1024, 4096, "pissa"): (1.585, 147.2e6),
    ("up_proj", 512, 4096, "pissa"): (None, 64.4e6),
    ("down_proj", 1024, 4096, "pissa_niter_4"): (0.472, 55.2e6),
    ("o_proj", 2048, 6144, "pissa"): (7.472, None),
    ("up_proj", 2048, 6144, "pissa"): (11.635, None),
    ("up_proj", 2048, 6144, "pissa_niter_4"): (1.657, None),
    ("up_proj", 2048, 6144, "pissa_niter_16"): (6.361, None),
    ("o_proj", 4096, 11008, "pissa_niter_4"): (2.144, None),
}


@pytest.mark.parametrize(("case", "measured"), STARTS.items(), ids=str)
def test_the_start_of_pissa_is_estimated_within_a_quarter(
    case: tuple[str, int, int, str], measured: tuple[float | None, float | None]
) -> None:
    target, width, inner, init = case
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 1}
    shape = shape_of_model(ModelSettings(init=ModelInit(**{**INIT, **sizes})))
    lora = LoraSettings(rank=64, init=init, targets=(target,))
    seconds, count = measured
    if seconds:
        peak = catalogue({})["CPU-BF16"].float32_flops
        assert start_seconds(shape, lora, peak) == pytest.approx(seconds, rel=0.25)
    if count:
        assert start_scratch(shape, lora) == pytest.approx(count, rel=0.1)


def with_pissa(init: str, hardware: str) -> RunPlan:
    lora = {"rank": 64, "init": init}
    table = {
        "run_dir": "run", "job": "sft", "steps": 1, "data": {"path": "rows.jsonl", "max_len": 64},
        "model": {"path": "Qwen/Qwen3-0.6B", "dtype": "float32", "lora": lora},
    }  # fmt: skip
    hardware_of_case = Hardware(count=1, device=catalogue({})[hardware])
    return make_plan(parse_recipe(table), Facts(shape_of_model, hardware_of_case))


def test_a_plan_tells_what_the_start_of_pissa_takes_and_a_faster_way() -> None:
    fresh, exact, quick = (
        with_pissa(init, "CPU-BF16") for init in ("kaiming", "pissa", "pissa_niter_4")
    )
    assert (fresh.timing.once, [*exact.timing.once]) == ({}, [START])
    assert exact.timing.once[START] > 4 * quick.timing.once[START] > 60
    assert exact.timing.hours is not None
    assert exact.timing.hours > exact.timing.once[START] / 3600
    assert [row for row in Page(exact, ()).time_rows() if row[0] == f"{START}, once"]
    loaded = [plan.memory.at("load") for plan in (exact, quick, fresh)]
    assert loaded == sorted(set(loaded), reverse=True)
    notes = {hardware: " ".join(Page(with_pissa("pissa", hardware), ()).notes())
            for hardware in ("CPU-BF16", "H100")}  # fmt: skip
    assert all('init = "pissa_niter_4" comes near it in' in text for text in notes.values())
    assert "on a GPU it was not measured" in notes["H100"]
    assert with_pissa("pissa", "H100").timing.once == {}  # no number without a measurement
    assert "comes near it" not in " ".join(Page(quick, ()).notes())
    assert "PiSSA" not in " ".join(Page(fresh, ()).notes())

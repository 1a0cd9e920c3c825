"""Time that a plan foresees grows as that of runs does: with tokens, squared lengths, passes."""

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.model_types import config_of
from postgrad.models.known_shapes import any_shape, shape_of_model
from postgrad.plan.batches import batch_json
from postgrad.plan.hardware import Hardware, catalogue
from postgrad.plan.lengths import RowLengths
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, outlook
from postgrad.plan.sizes import Sharing, Sizes
from postgrad.plan.timing import Samples, Timing, _passes
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
    return outlook(recipe, facts).timing


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
    ("foresee", "known", "learned"), [(update, UPDATES, (16, 128)), (rollout, ROLLOUTS, (64, 32))]
)
def test_once_calibrated_with_one_run_others_are_foreseen_within_a_quarter(
    foresee: Any, known: dict[tuple[int, int], float], learned: tuple[int, int]
) -> None:
    factor = known[learned] / foresee(*learned)
    for size, seconds in known.items():
        assert factor * foresee(*size) == pytest.approx(seconds, rel=0.25), size


def test_the_balance_loss_of_a_mixture_costs_a_forward_pass_of_each_update() -> None:
    """Left out, the coefficient is that of the model's config."""
    shape = any_shape(config_of("qwen3_moe", 37).to_dict(), "mixture")
    assert shape.counted is not None
    assert shape.counted.balance == 0.001
    lengths, one_core = (
        RowLengths(500, 500, 1.0, "here"),
        Hardware(count=1, device=catalogue({})["CPU-BF16"]),
    )
    seconds: dict[float | None, float] = {}
    for coefficient in (0.0, 0.5, None):
        model = {"path": "mixture", "router_aux_loss_coef": coefficient}
        table = {
            "job": "sft",
            "run_dir": "run",
            "steps": 1,
            "model": {name: value for name, value in model.items() if value is not None},
            "data": {"path": "rows.jsonl", "max_len": 2048},
            "batch": {"train_batch_size": 64, "micro_train_tokens": 2048},
        }
        facts = Facts(lambda _: shape, one_core, lengths)
        seconds[coefficient] = outlook(parse_recipe(table), facts).timing.step["update"]
    assert seconds[None] == seconds[0.5]
    assert 1.25 < seconds[0.5] / seconds[0.0] < 1.5  # 4 passes for 3, and gathers of 3 for 2


@pytest.mark.parametrize(
    ("kind", "prompt", "copies"),
    [("qwen3_next", 500, 1), ("qwen3_next", 31, 8), ("mamba", 500, 8)],
    ids=["shared", "too short", "cannot"],
)
def test_prompts_of_a_model_with_states_are_counted_as_its_learner_computes_them(
    kind: str, prompt: int, copies: int
) -> None:
    """Once for 8 answers where layers go on from a state and a prompt has 32 tokens and more."""
    shape = any_shape(config_of(kind, 37).to_dict(), kind)
    table = {
        "job": "rl", "run_dir": "run", "steps": 1, "model": {"path": kind},
        "data": {"path": "rows.jsonl", "max_len": 2048}, "rewards": [{"type": "gsm8k"}],
        "algorithm": {"type": "grpo"}, "rollout": {"max_new_tokens": 200},
        "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "micro_train_tokens": 4096},
    }  # fmt: skip
    one_core = Hardware(count=1, device=catalogue({})["CPU-BF16"])
    lengths = RowLengths(prompt, 200, 1.0, "here")
    of = outlook(parse_recipe(table), Facts(lambda _: shape, one_core, lengths))
    assert batch_json(of)["tokens_per_step"] == 4 * (copies * prompt + 8 * 200)
    (note,) = (note for note in Page(of, ()).notes() if "carry a state" in note)
    assert note.endswith(f"computes a prompt {'once' if copies == 1 else '8 times'}")


def test_ranks_that_share_sequences_make_a_micro_batch_together() -> None:
    """16 384 tokens on two replicas in micro-batches of 2 048, of which each of 4 ranks has 512."""
    sharing = Sharing(
        replicas=2, tensor=1, context=4, divided=8, scatters=True, gathers=True
    )  # of a ZeRO-3 run, which gathers all weights in each of these passes
    samples = Samples(tokens=16_384, squares=0.0, learned=0.0)
    costs: Any = SimpleNamespace(sharing=sharing)
    assert _passes(samples, Sizes(512, 2048), costs) == 4

"""The learner on 2 and on 4 ranks gives the weights of one: README.md of tests/invariants."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.halves import in_halves
from helpers.rank_cases import MANY, Case, algorithm, distance, experience, learner, other, train
from helpers.ranks import run_ranks
from postgrad.core.errors import UsageError
from postgrad.core.records import Experience
from postgrad.learner.context import require_heads
from postgrad.learner.update import Update
from postgrad.parallel.ranks import UNDIVIDED, Grid, Ranks
from postgrad.parallel.sharding import whole_tensor

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MIXTURE = "q_proj+experts+router"
TWO = [
    Case("none", updates=MANY),
    Case("none", kind="reward", dtype="bfloat16"),
    Case("zero1", checkpointing=True),
    Case("zero2", tied=False, updates=MANY),
    Case("zero3", kind="sft", checkpointing="offload", updates=MANY),
    Case("zero3", kind="gspo", tied=False, groups=1),
    Case("zero3", kind="reward", checkpointing=True),
    Case("zero2", lora=True, checkpointing=True, updates=MANY),
    Case("zero3", kind="reward", lora=True),
    Case("zero3", lora=True, ranked=True, init="pissa"),
    Case("zero2", lora=True, init="pissa_niter_4", checkpointing=True, dtype="bfloat16"),
    Case("zero3", dtype="bfloat16", updates=MANY),
    Case("zero2", optimizer="muon"),
    Case("zero3", kind="echo"),
    Case("zero2", kind="kto"),
    Case("zero2", kind="weighted"),
    Case("zero3", kind="noisy", lora=True, checkpointing=True),
    Case("zero2", type="qwen3_moe", checkpointing=True),
    Case("zero2", lora=True, tied=False, saved=True),
    Case("zero2", kind="sft", dtype="float16"),
    Case("zero3", kind="sft", lora=True, tied=False, saved=True, dtype="bfloat16"),
    Case("zero2", lora=True, type="qwen3_moe", targets=MIXTURE, checkpointing=True),
    Case("zero3", lora=True, type="gpt_oss", targets=MIXTURE),
    Case("zero2", lora=True, ratio=2.0, updates=2),  # a higher rate lets rounding grow too
    Case("zero3", type="qwen3_5_text", checkpointing=True),  # goes on from the states of prompts
]
FOUR = [
    Case("zero1", groups=1, updates=MANY),
    Case("zero3", kind="reward", groups=2),  # two pairs, four ranks: two have nothing to do
    Case("zero3", lora=True, tied=False),
    Case("none", kind="sft", groups=5),
    Case("none", type="qwen3_moe", groups=1),  # three ranks have nothing to do
]
SHARED = [  # both ranks have a run of each sequence's rows
    Case("none", kind="gspo", tied=False, updates=MANY),
    Case("none", kind="echo"),
    Case("none", kind="kto"),
    Case("none", kind="weighted"),
    Case("none", kind="noisy"),
    Case("zero1", kind="reinforce_pp"),
    Case("zero3", kind="reward", checkpointing=True),
    Case("zero2", lora=True),
    Case("zero1", checkpointing=True, groups=1),
    Case("none", type="qwen3_moe"),
    Case("none", type="gpt_oss"),  # each rank has the sinks of its heads
    Case("zero1", lora=True, type="qwen3_moe", targets=MIXTURE),
]
MATRICES = [  # both ranks have a part of each matrix
    Case("none", type="qwen2", updates=MANY),  # with biases
    Case("none", type="gemma2"),  # with soft-caps, windows and norms after a block
    Case("none", type="llama", kind="gspo", tied=False),
    Case("none", dtype="bfloat16", lora=True),
    Case("none", kind="noisy"),
    Case("none", lora=True, ranked=True),
    Case("none", lora=True, tied=False, saved=True),
    Case("none", lora=True, ratio=2.0, updates=2),
    Case("zero3", optimizer="muon"),
]
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 1e-1}


def trained(size: int, cases: list[Case], folder: Path, grid: Grid = UNDIVIDED) -> Path:
    folder_of_size = folder / str(size)
    folder_of_size.mkdir(parents=True, exist_ok=True)
    run_ranks(size, train, folder_of_size, cases, grid=grid)
    return folder_of_size


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    train(Ranks(), folder, list(dict.fromkeys([*TWO, *FOUR, *SHARED, *MATRICES])))
    torch.use_deterministic_algorithms(before)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(2, TWO, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(4, FOUR, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", params=[2, 4])
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return trained(request.param, SHARED, tmp_path_factory.mktemp("context"), Grid(context=2))


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(2, MATRICES, tmp_path_factory.mktemp("tensor"), Grid(tensor=2))


def compare(case: Case, alone: Path, ranks: Path) -> None:
    file = f"{case.name}.safetensors"
    single, many = load_file(alone / file), load_file(ranks / file)
    limit = TOLERANCE[case.dtype]
    # Weights that round to bfloat16 part by a whole rounding here and there: later outputs follow.
    outputs = "output." if case.dtype == "float32" else "output.0"
    parts = ["model." if not case.lora else "base_model.", "ema.", outputs, "whole."]
    for prefix in [*parts, *({"logprobs"} & single.keys())]:
        assert distance(prefix, single, many) < limit, prefix
    for of in (
        single,
        many,
    ):  # a prompt whose answers are dealt to several ranks is computed on each
        for name in [name for name in of if name.endswith("/computed_tokens")]:
            del of[name]
    assert distance("metric.", single, many) < 10 * limit


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_ranks_give_the_weights_of_one(case: Case, alone: Path, two: Path) -> None:
    compare(case, alone, two)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "grid"),
    [
        ({"checkpointing": True}, UNDIVIDED),
        ({"lora": True, "beside": True}, UNDIVIDED),
        ({"checkpointing": True}, Grid(context=2)),
        ({"lora": True}, Grid(tensor=2)),
    ],
)
def test_two_ranks_with_compiled_layers_give_the_weights_of_one(
    how: dict[str, Any], grid: Grid, tmp_path: Path
) -> None:
    """Compiling takes as long as all other cases together."""
    case = Case("none" if grid.tensor > 1 else "zero3", compiled=True, **how)
    compare(case, trained(1, [case], tmp_path), trained(2, [case], tmp_path, grid))


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_ranks_give_the_weights_of_one(case: Case, alone: Path, four_ranks: Path) -> None:
    compare(case, alone, four_ranks)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_ranks_that_share_sequences_give_the_weights_of_one(
    case: Case, alone: Path, shared: Path
) -> None:
    compare(case, alone, shared)


@pytest.mark.parametrize("case", MATRICES, ids=lambda case: case.name)
def test_ranks_that_share_matrices_give_the_weights_of_one(
    case: Case, alone: Path, matrices: Path
) -> None:
    compare(case, alone, matrices)


def lopsided(case: Case) -> dict[str, Experience]:
    """Updates of two groups that differ in what there is to measure: with two ranks, one has it."""
    drawn = experience(case, 0)
    first = drawn.sequences.group == 0
    assert drawn.replies is not None
    of_first = drawn.replies.like(drawn.replies.values * np.repeat(first, drawn.replies.lengths))
    return {
        "a signal in one group": replace(drawn, has_gradient=first),
        "replies in one group": replace(drawn, replies=of_first),
        "replies where there is no signal": replace(drawn, has_gradient=~first, replies=of_first),
        "no signal": replace(drawn, has_gradient=np.zeros(len(drawn), np.bool_)),
    }


def measured(ranks: Ranks, folder: Path, case: Case) -> None:
    """Writes the metrics of lopsided updates, and those of a single sequence, from every rank."""
    numbers: dict[str, dict[str, float]] = {}
    for name, drawn in lopsided(case).items():
        measured_learner: Any = learner(case, ranks)
        update = Update(drawn, np.arange(len(drawn)))
        numbers[name] = measured_learner.update(update, algorithm(case)).result().metrics
        lone = Update(drawn, np.arange(1))
        numbers[f"{name}, one row"] = (
            measured_learner.update(lone, algorithm(case)).result().metrics
        )
    (folder / f"{ranks.rank}-{ranks.size}.json").write_text(json.dumps(numbers))


def test_a_metric_that_one_rank_alone_has_is_that_of_one_process(tmp_path: Path) -> None:
    """trl#7310: where names differ between ranks, others wait for each other for ever."""
    case = Case("zero3", kind="echo", groups=2)
    measured(Ranks(), tmp_path, case)
    run_ranks(2, measured, tmp_path, case)
    alone, *several = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0-1", "0-2", "1-2")
    )
    assert {len(metrics) for metrics in alone.values()} == {5, 13}  # nothing computed, and all
    for name, metrics in alone.items():
        for of in (metrics, *(metrics_of_rank[name] for metrics_of_rank in several)):
            del of["policy/computed_tokens"]  # a prompt is computed where it has answers
        for metrics_of_rank in several:
            assert metrics_of_rank[name] == pytest.approx(metrics, rel=1e-4, abs=1e-6), name


def moving_reference(ranks: Ranks, folder: Path, stage: str) -> None:
    """Writes where a reference's parts lie, and where while a pass has its weights gathered."""
    case = Case(stage)
    reference = other(case, learner(case, ranks), ranks)
    before = {name: piece.sizes for name, piece in reference.pieces.items()}
    for module in reference.backbone.sharding._modules:
        module.unshard()
    gathered = {name: tuple(p.shape) for name, p in reference.backbone.lm.named_parameters()}
    during = {name: piece.sizes for name, piece in reference.pieces.items()}
    assert gathered != before
    (folder / f"{stage}-{ranks.rank}.json").write_text(json.dumps([before, during]))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_checkpoint_written_during_a_pass_finds_the_parts_of_a_reference(
    stage: str, tmp_path: Path
) -> None:
    run_ranks(2, moving_reference, tmp_path, stage)
    for rank in range(2):
        before, during = json.loads((tmp_path / f"{stage}-{rank}.json").read_text())
        assert during == before
        assert len(before) == 24


def one_gradient(ranks: Ranks, folder: Path, case: Case, halves: bool) -> None:
    """Writes the logprobs of a fresh model, and the gradient of its first update."""
    policy: Any = learner(case, ranks)
    if halves:
        in_halves(policy.backbone.lm)
    logprobs = policy.logprobs(experience(case, 99).sequences).result()
    tensors = {"logprobs": torch.from_numpy(logprobs.values.copy())}
    clip = policy.optimizer._clip

    def kept(limit: float) -> float:
        for name, master in policy.optimizer.master.items():
            part = master.grad.clone()  # which clipping changes
            piece = policy.optimizer.pieces[name]
            tensors[f"gradient.{name}"] = whole_tensor(part, piece).clone()
        return clip(limit)

    policy.optimizer._clip = kept
    drawn = experience(case, 0)
    policy.update(Update(drawn, np.arange(len(drawn))), algorithm(case)).result()
    if ranks.rank == 0:
        save_file(tensors, folder / f"{case.dtype}-{ranks.size}-{halves}.safetensors")


def test_in_bfloat16_ranks_that_share_matrices_round_as_one_does_in_halves(tmp_path: Path) -> None:
    """docs/distributed.md: the distance to one rank is rounding, of which one rank has as much."""
    narrow, wide = Case("none", dtype="bfloat16"), Case("none", dtype="float32")
    one_gradient(Ranks(), tmp_path, wide, False)
    one_gradient(Ranks(), tmp_path, narrow, False)
    one_gradient(Ranks(), tmp_path, narrow, True)
    run_ranks(2, one_gradient, tmp_path, narrow, False, grid=Grid(tensor=2))
    names = ("float32-1-False", "bfloat16-1-False", "bfloat16-1-True", "bfloat16-2-False")
    exact, single, halves, two = (load_file(tmp_path / f"{name}.safetensors") for name in names)
    assert torch.equal(halves["logprobs"], two["logprobs"])
    assert not torch.equal(single["logprobs"], two["logprobs"])
    error = distance("gradient.", exact, single)
    assert distance("gradient.", exact, two) < 2.0 * error
    assert distance("gradient.", halves, two) < 0.5 * error


@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 2, 3), (6, 3, 2), (4, 2, 8)])
def test_heads_that_cannot_be_dealt_are_refused(heads: int, keys: int, size: int) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys)
    with pytest.raises(UsageError, match=f"context_parallel = {size}: {heads} attention heads"):
        require_heads(config, size)
    require_heads(SimpleNamespace(num_attention_heads=8, num_key_value_heads=2), 4)

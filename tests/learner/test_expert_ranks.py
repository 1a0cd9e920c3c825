"""Ranks that share experts give the weights of one: README.md of tests/invariants. One start of
four ranks computes all that is compared here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.model_types import config_of
from helpers.part_cases import save
from helpers.rank_cases import (
    MANY,
    Case,
    algorithm,
    backbone_of,
    distance,
    experience,
    gathered,
    learner,
    model,
    train,
)
from helpers.ranks import run_ranks
from postgrad.checkpoint.parts import Reader
from postgrad.core.errors import UsageError
from postgrad.layout.layout import lay_out
from postgrad.learner.experts import cut_experts
from postgrad.learner.tensor import require_shareable
from postgrad.learner.update import Update
from postgrad.models.attention import ATTENTION_NAME, carries_states
from postgrad.models.states import carry_states
from postgrad.models.supported import experts_of, refused_types
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import local

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PAIRS, ALL = Grid(expert=2), Grid(expert=4)  # of four ranks
MIXTURE = Case("none", type="qwen3_moe", grid=PAIRS)  # with both losses of routers
CASES = [
    MIXTURE._replace(updates=MANY),
    MIXTURE._replace(stage="zero2", grid=ALL, checkpointing=True, optimizer="muon", beside=True),
    MIXTURE._replace(
        stage="zero3", groups=1, checkpointing=True, updates=MANY
    ),  # three ranks have no tokens
    MIXTURE._replace(stage="zero1", grid=Grid(expert=2, groups=2), offload=True),
    # experts with biases, transposed
    MIXTURE._replace(stage="zero3", grid=Grid(expert=4, context=2), type="gpt_oss"),
    MIXTURE._replace(stage="zero2", lora=True, checkpointing=True),
    MIXTURE._replace(stage="zero3", grid=ALL, dtype="bfloat16"),
    MIXTURE._replace(stage="zero3", frozen=True, beside=True),
    MIXTURE._replace(stage="zero2", grid=Grid(), frozen=True),
    MIXTURE._replace(stage="zero1", grid=Grid(), frozen=True, dtype="bfloat16"),
    # matrices of attention are shared too
    MIXTURE._replace(grid=Grid(tensor=2, expert=2), updates=MANY),
    MIXTURE._replace(stage="zero3", grid=Grid(tensor=2, expert=4), checkpointing=True),
    MIXTURE._replace(stage="zero2", grid=Grid(tensor=2, expert=2, groups=2), type="qwen2_moe"),
    MIXTURE._replace(stage="zero1", grid=Grid(tensor=2, context=2, expert=4), optimizer="muon"),
    MIXTURE._replace(stage="zero3", grid=Grid(tensor=2, expert=2), lora=True),
    MIXTURE._replace(stage="zero3", grid=Grid(tensor=2), lora=True, targets="q_proj+experts"),
    MIXTURE._replace(stage="zero3", grid=Grid(tensor=2), groups=1),
    MIXTURE._replace(stage="zero3", type="gpt_oss", optimizer="adamw in 8bit", updates=MANY),
]
# [T, k] of each rank: one has no token, and no token is sent to the experts of the last.
CHOICES = [[[0, 5], [1, 0], [5, 2]], [], [[3, 4]], [[5, 4], [4, 0], [2, 3], [0, 1], [1, 5]]]
EXPERTS, HIDDEN, INNER = 8, 8, 4


# jetmoe has modules of its own; the others have no such layer at this size.
REFUSED = {"beam", "flint", "gemma4_text", "jetmoe", "lfm2_moe"}


def undivided(case: Case) -> Case:
    """The case as one process trains it."""
    return case._replace(grid=None, stage="none", checkpointing=False, offload=False)


def layer() -> Any:
    """A model of one layer of 8 experts, and the module of these."""
    case = MIXTURE._replace(grid=None)
    lm = model(case, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    return lm, lm.model.layers[0].mlp.experts


def numbers(rank: int, *shape: int) -> Tensor:
    """Drawn for one rank's tokens."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def exchanged(ranks: Ranks, folder: Path, kind: str) -> None:
    """Outputs and gradients of a layer of experts over all ranks, written by each."""
    lm, experts = layer()
    lm.config._experts_implementation = kind
    cut_experts(lm, ranks.arranged(ALL))
    assert len(experts.gate_up_proj) == len(experts.down_proj) == EXPERTS // 4
    chosen = torch.tensor(CHOICES[ranks.rank], dtype=torch.int64).view(-1, 2)
    hidden = numbers(ranks.rank, len(chosen), HIDDEN).requires_grad_()
    weights = numbers(10 + ranks.rank, len(chosen), 2).requires_grad_()
    outputs = experts(hidden, chosen, weights)
    (outputs * numbers(20 + ranks.rank, *outputs.shape)).sum().backward()
    tensors = {"outputs": outputs.detach(), "hidden": hidden.grad, "weights": weights.grad}
    tensors |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    save_file(tensors, folder / f"{kind}-{ranks.rank}.safetensors")  # type: ignore[arg-type]


def resumed(ranks: Ranks, folder: Path) -> None:
    """Saves after an update of ranks that share experts in pairs; goes on as ranks that share them
    all, and as ranks that share none. Writes the weights of each after one more update.
    """
    to = folder / "saved"
    for number, (stage, grid) in enumerate((("zero3", PAIRS), ("none", ALL), ("zero1", Grid()))):
        case = MIXTURE._replace(stage=stage, grid=grid)
        policy: Any = learner(case, ranks.arranged(grid))
        if number == 0:
            step(policy, case, 0)
            to.mkdir(exist_ok=True)
            save(policy, ranks, to)
            ranks.gathered(0)  # all have written
            before = gathered(policy)
            if ranks.rank == 0:
                save_file(before, folder / "before.safetensors")
        else:
            policy.load(saved_in(to))
        step(policy, case, 1)
        after = gathered(policy)
        if ranks.rank == 0:
            save_file(after, folder / f"resumed-{number}.safetensors")


def saved_in(folder: Path) -> Reader:
    return Reader(folder, frozenset(path.name for path in folder.iterdir()))


def step(policy: Any, case: Case, number: int) -> None:
    drawn = experience(case, number)
    policy.update(Update(drawn, np.arange(len(drawn))), algorithm(case)).result()


def held(ranks: Ranks) -> None:
    """Each rank has its part of every expert's weight, and no more."""
    for case, parts in ((CASES[0], 2), (CASES[1], 4), (CASES[2], 4), (CASES[5], 2)):
        policy = learner(case, ranks.arranged(case.grid or Grid()))
        all_parameters = {name: local(p) for name, p in policy.backbone.lm.named_parameters()}
        experts = {name: p for name, p in all_parameters.items() if ".experts." in name}
        assert len(experts) == 4  # of two layers
        assert {len(p) for p in experts.values()} == {4 // parts}, case


def by_type(ranks: Ranks, folder: Path) -> None:
    """Every type with experts, on two ranks with tokens of their own, and before it was divided."""
    outcomes: dict[str, str] = {}
    for kind in refused_types()["works"]:
        config = config_of(kind, 64)
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not experts_of(config):
            continue
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.arange(7)[None] + 3 * ranks.rank + 2
        with torch.no_grad():
            expected = lm(ids).logits
            try:
                cut_experts(lm, ranks)
            except UsageError as error:
                outcomes[kind] = str(error)
            else:
                torch.testing.assert_close(lm(ids).logits, expected, rtol=1e-4, atol=1e-5)
                outcomes[kind] = "shares"
    (folder / f"{ranks.rank}.json").write_text(json.dumps(outcomes))


def both_by_type(ranks: Ranks, folder: Path) -> None:
    """Every type with experts whose attention is split over the two ranks that share the experts:
    logprobs, and gradients of the embeddings, to those of one process.
    """
    outcomes: dict[str, Any] = {}
    sequences = experience(MIXTURE, 1).sequences
    layout = lay_out(sequences, np.arange(len(sequences)))
    for kind in refused_types()["works"]:
        config = config_of(kind, 64)
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not experts_of(config):
            continue
        if kind in REFUSED:
            continue
        torch.manual_seed(0)
        lm: Any = AutoModelForCausalLM.from_config(config).eval()
        lm.set_attn_implementation(ATTENTION_NAME)
        carry_states(lm)
        backbone: Any = backbone_of(MIXTURE, lm)
        weight: Any = lm.get_input_embeddings().weight
        try:
            require_shareable(config, ranks.grid, stateful=carries_states(lm))
        except UsageError as error:
            outcomes[kind] = str(error)
            continue
        expected = backbone.logprobs(layout, 1.0)[0]
        expected.sum().backward()
        gradient = weight.grad.clone()
        lm.zero_grad()
        backbone.divide(ranks, "none")
        logprobs = backbone.logprobs(layout, 1.0)[0]
        logprobs.sum().backward()
        ranks.sum_([weight.grad])
        apart = float((weight.grad - gradient).norm() / gradient.norm())
        outcomes[kind] = [float((logprobs - expected).abs().max()), apart]
    (folder / f"{ranks.rank}.json").write_text(json.dumps(outcomes))


def everything(ranks: Ranks, folder: Path) -> None:
    for kind in ("eager", "grouped_mm"):
        exchanged(ranks, folder, kind)
    held(ranks)
    resumed(ranks, folder)
    train(ranks, folder, CASES)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    run_ranks(4, everything, folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    train(Ranks(), folder, list(dict.fromkeys(undivided(case) for case in CASES)))
    torch.use_deterministic_algorithms(before)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_that_share_experts_give_the_weights_of_one(
    case: Case, alone: Path, shared: Path
) -> None:
    single = load_file(alone / f"{undivided(case).name}.safetensors")
    several = load_file(shared / f"{case.name}.safetensors")
    limit = 1e-4 if case.dtype == "float32" else 1e-1
    if "8bit" in case.optimizer:  # another rounding of a moment is the next of 256 numbers
        limit = 1e-3
    weights = "base_model." if case.lora else "model."
    for start in (weights, "ema.", "whole.", "output." if limit < 0.1 else "output.0"):
        assert distance(start, single, several) < limit, start
    if case.frozen:
        gates = {n: t for n, t in several.items() if n.endswith(".gate.weight")}
        started = dict(model(undivided(case)).named_parameters())
        assert gates.keys() == {f"whole.model.layers.{n}.mlp.gate.weight" for n in range(2)}
        assert all(torch.equal(t, started[n[6:]]) for n, t in gates.items())
    metrics = [{n: t for n, t in of.items() if "tokens" not in n} for of in (single, several)]
    assert distance("metric.", *metrics) < 10 * limit


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_an_exchange_has_the_outputs_and_gradients_of_a_loop_over_tokens(
    kind: str, shared: Path
) -> None:
    """In float64, by hand: out = sum_k w_k down_e (silu(gate_e x) * up_e x)."""
    experts = layer()[1].double()
    expected: dict[str, list[Tensor]] = {"outputs": [], "hidden": [], "weights": []}
    loss = torch.zeros((), dtype=torch.float64)
    inputs: list[tuple[Tensor, Tensor]] = []
    for rank, choices in enumerate(CHOICES):
        hidden = numbers(rank, len(choices), HIDDEN).double().requires_grad_()
        weights = numbers(10 + rank, len(choices), 2).double().requires_grad_()
        outputs = torch.zeros(len(choices), HIDDEN, dtype=torch.float64)
        for token, pair in enumerate(choices):
            for k, expert in enumerate(pair):
                gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
                down = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                outputs[token] += weights[token, k] * down
        loss = loss + (outputs * numbers(20 + rank, len(choices), HIDDEN)).sum()
        expected["outputs"].append(outputs.detach())
        inputs.append((hidden, weights))
    loss.backward()
    for hidden, weights in inputs:
        for name, tensor in (("hidden", hidden), ("weights", weights)):
            assert tensor.grad is not None or not len(tensor)
            expected[name].append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    for rank in range(4):
        tensors = load_file(shared / f"{kind}-{rank}.safetensors")
        for name, by_rank in expected.items():
            torch.testing.assert_close(tensors[name].double(), by_rank[rank], rtol=1e-5, atol=1e-6)
        own_rows = slice(2 * rank, 2 * rank + 2)
        for name, parameter in experts.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                tensors[name].double(), parameter.grad[own_rows], rtol=1e-5, atol=1e-6
            )
    assert not load_file(shared / f"{kind}-3.safetensors")["gate_up_proj"].any()


def test_a_checkpoint_has_whole_experts_and_any_other_ranks_go_on_with_it(shared: Path) -> None:
    saved, before = saved_in(shared / "saved"), load_file(shared / "before.safetensors")
    for stem, start in (("policy.weights", ""), ("policy.ema", "ema.")):
        for name, tensor in saved(stem).items():
            assert torch.equal(tensor.clone() + 0, before[f"{start}{name}"]), name
    first, *others = (load_file(shared / f"resumed-{number}.safetensors") for number in range(3))
    assert distance("model.", before, first) > 1e-3
    for other in others:
        assert distance("model.", first, other) < 1e-4
        assert distance("ema.", first, other) < 1e-4


@pytest.mark.long
def test_experts_of_every_type_are_shared_or_it_is_refused(tmp_path: Path) -> None:
    run_ranks(2, by_type, tmp_path, grid=PAIRS)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    refused = {kind: outcome for kind, outcome in first.items() if outcome != "shares"}
    assert refused.keys() == REFUSED
    assert all("has no experts that ranks can share" in message for message in refused.values())
    assert len(first) - len(refused) >= 35


@pytest.mark.long
def test_attention_of_every_type_is_split_beside_experts_or_it_is_refused(tmp_path: Path) -> None:
    run_ranks(2, both_by_type, tmp_path, grid=Grid(tensor=2, expert=2))
    outcomes = json.loads((tmp_path / "0.json").read_text())
    split = {kind: numbers for kind, numbers in outcomes.items() if not isinstance(numbers, str)}
    assert set(split) == {
        "aria_text", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hy_v3",
        "kolibri1", "mellum", "mixtral", "qwen2_moe", "qwen3_moe", "sarvam_moe",
        "solar_open",
    }  # fmt: skip
    for kind, (logprobs, gradient) in split.items():
        assert logprobs < 1e-4, kind
        assert gradient < 1e-4, kind

"""The contract of every causal type of the installed transformers, on small fresh models: what
models/types.toml says works does all of it, and what it refuses is refused for the reason there.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.adapters import moved
from helpers.model_types import MIXTURES, ROUTED_BY_LINEAR, make_model
from helpers.runs import tensors
from helpers.tiny_runs import MODEL, make_recipe, reward_on_path
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout
from postgrad.layout.tree import NO_SHARING
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.models.adapter_targets import target_layers
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import min_shared_of
from postgrad.models.export import export_hf, read_plain
from postgrad.models.fresh import make_fresh
from postgrad.models.known_shapes import find_shape
from postgrad.models.load import load_model
from postgrad.models.rope import max_positions, table_length
from postgrad.models.save import directory_hash
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings, ModelInit, ModelSettings
from postgrad.models.supported import UnsupportedModel, refused_types
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.parallel.ranks import ALONE
from postgrad.plan import held
from postgrad.plan.roles import PlannedRole
from postgrad.rollout.engine import Request
from postgrad.rollout.local.cache import bytes_per_token
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.prompts import layer_shapes, state_bytes
from postgrad.rollout.settings import SamplingSettings
from postgrad.training.start import resume, train

__all__ = ["make_recipe", "reward_on_path"]
Make = Callable[[str], Path]

TABLE = refused_types()
OPTIONS = ("works", "without")
SHARED = 7  # tokens of the prompt that two rows have in common
REASONS = {
    kind: reason for reason in TABLE if reason not in OPTIONS for kind in TABLE[reason]["types"]
}
# Of types whose mixers are the same code as another's, whole runs of that other one are enough:
# their forward, adapters, samples and exports are compared above.
SAME_MIXERS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
    "lfm2_moe", "lfm3", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2",
)  # fmt: skip
# Of the fast suite; "make test-slow" has all of them.
FAST = (
    "gpt2", "gpt_neox", "stablelm", "qwen3_moe", "gemma3n_text", "gpt_oss", "qwen3_next", "mamba2",
)  # fmt: skip
# Whole runs in "make test-slow": of each kind of mixer and cache. "make test-long" has all of them.
RESUMED = (
    "gpt2", "gpt_neox", "gemma3n_text", "gpt_oss", "qwen3_moe", "qwen3_next", "kimi_linear",
    "minimax", "mamba2", "nemotron_h",
)  # fmt: skip
# In "make test-slow" of the tests whose code is that of `postgrad`'s layers rather than of a type:
# critics, adapters, layers that are computed again. "make test-long" has all of them.
OF_EACH_KIND = (
    *RESUMED, "llama", "gemma2", "gemma3_text", "gemma4_text", "mimo_v2_flash", "deepseek_v3",
    "mixtral", "phi3", "stablelm", "cohere2", "mamba", "lfm2", "jamba", "falcon_h1", "zamba2",
    "granitemoehybrid", "olmo2", "opt", "ctrl", "jetmoe", "dbrx", "qwen3_5_text", "deepseek_v2",
)  # fmt: skip
SLOW_MIXTURES = ("mixtral", "gpt_oss", "deepseek_v3", "jamba")  # "make test-long" has all
FAST_REFUSED = ("hy_v4", "rwkv", "falcon", "diffllama", "llama4_text", "bert", "qwen3_5")


slow = pytest.mark.slow


def types(
    kinds: Any, fast: tuple[str, ...], part: str = "", slow_kinds: tuple[str, ...] | None = None
) -> list[Any]:
    """Parameters for the kinds that the installed transformers has, and that have this part.
    slow_kinds: those that are not long; None: all.
    """
    left_out = TABLE["without"][part]["types"] if part else ()
    long = set() if slow_kinds is None else {*kinds} - {*fast, *slow_kinds}
    return [
        pytest.param(kind, marks=() if kind in fast else pytest.mark.long if kind in long else slow)
        for kind in kinds
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in left_out
    ]


every = partial(pytest.mark.parametrize, "kind")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make("phi3"): the directory of a tiny model of that type, made once."""
    folder = tmp_path_factory.mktemp("types")
    init = {**MODEL["init"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    make_fresh(ModelInit.model_validate(init), [], 0, folder / "tokenizer")
    size = len(load_tokenizer(str(folder / "tokenizer")))

    def model(kind: str) -> Path:
        to = folder / "models" / kind
        return to if to.exists() else make_model(kind, folder / "tokenizer", size, to)

    return model


def drawn_rows() -> list[NDArray[np.int64]]:
    """Three rows of token ids, of which the first two have a prompt in common."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 90, size) for size in (14, 15, 17)]
    rows[1][:SHARED] = rows[0][:SHARED]
    return rows


def layouts(backbone: Backbone, rows: list[NDArray[np.int64]]) -> Iterator[Layout]:
    """All rows in one packed forward, with the tokens behind the first as loss entries. The first
    two share their prompt, where the type can.
    """
    if backbone.min_shared < NO_SHARING:
        backbone.min_shared = SHARED
    tokens = Ragged.of(rows, np.int32)
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    sequences = Sequences(tokens, tokens.like(mask), np.array([0, 0, 1]))
    return backbone.micro_batches(sequences, np.arange(3), whole_groups=True)


def learner_of(lm: Any) -> Backbone:
    lm.requires_grad_(True)
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(64))
    backbone.divide(ALONE, "none")
    return backbone


def plain_logprobs(lm: Any, row: NDArray[np.int64]) -> Tensor:
    """[T - 1] by transformers' own forward over this row alone."""
    ids = torch.from_numpy(row)[None]
    logprobs = lm(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


def gradients(lm: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    lm.zero_grad()
    return grads


def assert_close(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert grads.keys() == expected.keys()
    error = sum(float((grads[name] - expected[name]).square().sum()) for name in expected)
    size = sum(float(expected[name].square().sum()) for name in expected)
    assert size > 0
    assert error**0.5 < 1e-4 * size**0.5


def test_every_type_of_transformers_is_classified_once() -> None:
    """A new version's new types fail here: run them through this file, and add them to
    src/postgrad/models/types.toml.
    """
    classified = [*TABLE["works"], *REASONS]
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(classified) == set()
    assert len(classified) == len(TABLE["works"]) + sum(
        len(TABLE[reason]["types"]) for reason in TABLE if reason not in OPTIONS
    )
    for part in TABLE["without"].values():
        assert set(part["types"]) <= set(TABLE["works"])


@every(types(TABLE["works"], FAST))
def test_packed_logprobs_and_gradients_are_those_of_each_sequence_alone(
    kind: str, make: Make
) -> None:
    """Also with a prompt that two of them share."""
    compare_with_alone(kind, make, again=False)


@every(types(TABLE["works"], FAST, slow_kinds=OF_EACH_KIND))
def test_so_they_are_where_activations_are_computed_again(kind: str, make: Make) -> None:
    compare_with_alone(kind, make, again=True)


def compare_with_alone(kind: str, make: Make, *, again: bool) -> None:
    folder, rows = str(make(kind)), drawn_rows()
    if again and kind in TABLE["without"]["checkpointing"]["types"]:
        with pytest.raises(UsageError, match="does not support it for a"):
            load_model(folder, dtype=torch.float32, gradient_checkpointing=True)
        return
    lm: Any = load_model(folder, dtype=torch.float32, gradient_checkpointing=again).lm
    backbone, columns, packed = learner_of(lm), [], []
    for layout in layouts(backbone, rows):
        once = 0 if kind in TABLE["without"]["sharing"]["types"] else SHARED
        assert layout.n_tokens == sum(map(len, rows)) - once
        logprobs, _ = backbone.logprobs(layout, 1.0)
        logprobs.sum().backward()
        packed.append(logprobs.detach())
        columns.append(layout.column)
    grads = gradients(lm)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    alone = [plain_logprobs(plain, row) for row in rows]
    torch.cat(alone).sum().backward()
    order = np.argsort(np.concatenate(columns))
    torch.testing.assert_close(torch.cat(packed)[order], torch.cat(alone), atol=5e-4, rtol=1e-4)
    assert_close(grads, gradients(plain))


@every(types(TABLE["works"], FAST))
@torch.no_grad()
def test_greedy_samples_are_those_of_generate(kind: str, make: Make) -> None:
    folder, prompts = str(make(kind)), [row[:6] for row in drawn_rows()[1:]]
    loaded = load_model(folder, dtype=torch.float32)
    engine = LocalEngine(loaded.lm, loaded.tokenizer, slots=4, cache_tokens=1024)
    greedy = SamplingSettings(temperature=0.0, max_new_tokens=8)
    for ticket, prompt in enumerate(prompts):
        engine.submit(Request(ticket, (0, 1), prompt.astype(np.int32), greedy))
    samples: list[Any] = []
    while len(samples) < 2 * len(prompts):
        samples += engine.completed()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain.eval()
    for ticket, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt)[None]
        out = plain.generate(
            ids, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(ids)
        )
        expected = out[0, len(prompt) :].tolist()
        for sample in samples:
            if sample.ticket == ticket:
                assert sample.token_ids.tolist() == expected


@every(types(TABLE["works"], (*FAST, "gptj", "opt")))
@torch.no_grad()
def test_positions_go_on_behind_those_of_the_config_unless_they_are_a_table(
    kind: str, make: Make
) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(make(kind))
    limit = min(
        max_positions(plain.config) or 128,
        getattr(plain.config, "max_position_embeddings", 128),  # less than scaled positions reach
    )
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 90, (1, limit + 1)))
    plain(input_ids=ids[:, :limit], use_cache=False)
    has_table = kind in TABLE["without"]["longer rows"]["types"]
    with pytest.raises(IndexError) if has_table else nullcontext():
        plain(input_ids=ids, use_cache=False)
    assert table_length(plain.config) == (limit if has_table else None)


@pytest.mark.parametrize("in_files", [False, True], ids=["loaded", "in files"])
@torch.no_grad()
def test_experts_are_grouped_products_with_the_numbers_of_a_loop(
    in_files: bool, make: Make
) -> None:
    """transformers groups them where the device can and loops elsewhere; nothing here undoes it."""
    lm: Any = load_model(str(make("qwen3_moe")), dtype=torch.float32, in_files=in_files).lm
    backbone, (layout,) = learner_of(lm), layouts(learner_of(lm), drawn_rows())
    assert lm.config._experts_implementation == "grouped_mm"
    grouped, _ = backbone.logprobs(layout, 1.0)
    lm.set_experts_implementation("eager")
    looped, _ = backbone.logprobs(layout, 1.0)
    torch.testing.assert_close(grouped, looped, atol=1e-5, rtol=1e-5)


@every(types(TABLE["works"], FAST, "critic", OF_EACH_KIND))
def test_scores_and_their_gradients_are_those_of_each_sequence_alone(kind: str, make: Make) -> None:
    rows = drawn_rows()
    lm: Any = load_score_model(str(make(kind)), dtype=torch.float32, seed=3).lm
    backbone, values, columns = learner_of(lm), [], []
    for layout in layouts(backbone, rows):
        scored = backbone.scores(layout)
        scored.sum().backward()
        values.append(scored.detach())
        columns.append(layout.column)
    grads = gradients(lm)
    lm.set_attn_implementation("eager")
    alone = []
    for row in rows:  # the value of a token comes from the state before it
        ids = torch.from_numpy(row)[None]
        states = lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        alone.append(lm.score(states)[0, :-1, 0])
    torch.cat(alone).sum().backward()
    order = np.argsort(np.concatenate(columns))
    torch.testing.assert_close(torch.cat(values)[order], torch.cat(alone), atol=5e-4, rtol=1e-4)
    assert_close(grads, gradients(lm))


@every(types(TABLE["works"], FAST, "adapter", OF_EACH_KIND))
def test_an_adapter_computes_what_the_exported_merged_model_does(
    kind: str, make: Make, tmp_path: Path
) -> None:
    """Its gradients are those of the merged matrices W + 2 B A: 2 B' dW of A, and 2 dW A' of B."""
    rows, folder = drawn_rows(), str(make(kind))
    lm: Any = load_model(folder, dtype=torch.float32).lm
    adapter = moved(add_adapter(lm, LoraSettings(rank=4, alpha=8), seed=0))
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(64))
    backbone.divide(ALONE, "none")
    (layout,) = layouts(backbone, rows)
    logprobs, _ = backbone.logprobs(layout, 1.0)
    logprobs.sum().backward()
    export_hf(dict(adapter.hub_weights()), folder, tmp_path / "merged", dtype=torch.float32)
    merged = read_plain(str(tmp_path / "merged"), AutoModelForCausalLM, torch.float32)
    alone = torch.cat([plain_logprobs(merged, row) for row in rows])
    order = np.argsort(layout.column)
    torch.testing.assert_close(logprobs.detach()[order], alone.detach(), atol=1e-3, rtol=1e-4)
    alone.sum().backward()
    expected: dict[str, Tensor] = {}
    weights = adapter.parameters()
    for name in target_layers(lm, LoraSettings()):
        a, b = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
        of_matrix = merged.get_submodule(name).weight.grad
        if of_matrix is not None:
            expected[a], expected[b] = (
                2 * weights[b].detach().t() @ of_matrix,
                2 * of_matrix @ weights[a].detach().t(),
            )
    grads = {name: p.grad for name, p in weights.items() if p.grad is not None}
    assert_close(grads, expected)


@every(
    [
        pytest.param(kind, marks=(slow, *([] if kind in SLOW_MIXTURES else [pytest.mark.long])))
        for kind in MIXTURES
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]
)
def test_an_adapter_on_experts_and_routers_computes_what_the_exported_merged_model_does(
    kind: str, make: Make, tmp_path: Path
) -> None:
    rows, folder = drawn_rows(), str(make(kind))
    lm: Any = load_model(folder, dtype=torch.float32).lm
    targets = ("experts",) if kind in ROUTED_BY_LINEAR else ("experts", "router")
    adapter = moved(add_adapter(lm, LoraSettings(rank=4, alpha=8, targets=targets), seed=0))
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(64))
    backbone.divide(ALONE, "none")
    (layout,) = layouts(backbone, rows)
    logprobs, _ = backbone.logprobs(layout, 1.0)
    logprobs.sum().backward()
    assert all(p.grad is not None for p in adapter.parameters().values())
    export_hf(dict(adapter.hub_weights()), folder, tmp_path / "merged", dtype=torch.float32)
    merged, base = (
        torch.cat(
            [plain_logprobs(read_plain(of, AutoModelForCausalLM, torch.float32), r) for r in rows]
        )
        for of in (str(tmp_path / "merged"), folder)
    )
    order = np.argsort(layout.column)
    torch.testing.assert_close(logprobs.detach()[order], merged.detach(), atol=1e-4, rtol=1e-4)
    assert (merged - base).abs().max() > 0.1  # the adapter does something


@every(types(TABLE["works"], FAST))
def test_changed_weights_come_back_from_an_export(kind: str, make: Make, tmp_path: Path) -> None:
    folder = str(make(kind))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in load_model(folder, dtype=torch.float32).lm.named_parameters()
    }
    export_hf(weights, folder, tmp_path / "once", dtype=torch.float32)
    buffers = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    once: Any = load_model(str(tmp_path / "once"), dtype=torch.float32).lm
    read = dict(once.named_parameters())
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    for name, buffer in once.named_buffers():
        assert torch.equal(buffer, buffers[name])
    export_hf(read, str(tmp_path / "once"), tmp_path / "twice", dtype=torch.float32)
    assert directory_hash(tmp_path / "twice") == directory_hash(tmp_path / "once")


@every(types(TABLE["works"], FAST))
def test_a_plan_counts_the_weights_and_the_cache_of_the_model(kind: str, make: Make) -> None:
    folder = str(make(kind))
    shape = find_shape(folder)
    lm: Any = load_model(folder, dtype=torch.float32).lm
    assert shape.parameters() == sum(p.numel() for p in lm.parameters())
    stored = layer_shapes(lm, torch.device("cpu"))
    assert shape.cache_bytes_per_token(4) == bytes_per_token(stored, torch.float32)
    assert shape.state_bytes == state_bytes(lm, torch.device("cpu"))
    assert shape.min_shared == min_shared_of(lm)
    for optimizer in ("adamw", "muon"):
        learner = LearnerSettings(optimizer=optimizer)
        role = PlannedRole("policy", shape, ModelSettings(path=folder), learner)
        kept = MasterOptimizer(lm, learner).state_bytes() - torch.int64.itemsize
        assert held.state_bytes(role) == kept, optimizer


@every(
    [
        pytest.param(kind, marks=(slow, *([] if kind in RESUMED else [pytest.mark.long])))
        for kind in TABLE["works"]
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in SAME_MIXERS
    ]
)
def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits(
    kind: str, make: Make, make_recipe: Any
) -> None:
    critic = kind not in TABLE["without"]["critic"]["types"]
    changes: dict[str, Any] = {
        "model": {
            "path": str(make(kind)),
            "init": None,
            "gradient_checkpointing": kind not in TABLE["without"]["checkpointing"]["types"],
        },
        "algorithm": {"type": "ppo" if critic else "grpo"},
        "sentinels": {"truncation": "off"},
        "eval": {"at_start": False},
    }
    console = Console("quiet")
    straight = make_recipe("rl", "straight", steps=2, **changes)
    train(straight, console)
    begun = make_recipe("rl", "begun", steps=1, **changes)
    train(begun, console)
    resume(Path(begun.run_dir), ["--steps", "2"], [], console)
    expected, weights = tensors(straight.run_dir, 2), tensors(begun.run_dir, 2)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@every(types(REASONS, FAST_REFUSED))
def test_a_refused_type_is_refused_for_the_reason_in_the_table(kind: str, make: Make) -> None:
    folder = str(make(kind))

    def use() -> None:
        loaded = load_model(folder, dtype=torch.float32)
        LocalEngine(loaded.lm, loaded.tokenizer, slots=4, cache_tokens=1024)

    with pytest.raises(UnsupportedModel, match=f"a {kind} model") as refused:
        use()
    assert refused.value.reason == REASONS[kind]
    assert TABLE[REASONS[kind]]["because"] in str(refused.value)


def test_a_layer_that_attends_twice_is_refused_when_the_model_is_loaded(make: Make) -> None:
    """Not first when an engine is built: training and export would come before it."""
    with pytest.raises(UnsupportedModel, match="layer 0 attends 2 times"):
        load_model(str(make("diffllama")), dtype=torch.float32)

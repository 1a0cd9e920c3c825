"""Types beyond the tested list: they compute what transformers computes, or are refused by name."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.hostile_models import edit
from helpers.model_types import config_of, make_model
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models.load import load_model, load_tokenizer
from postgrad.models.supported import experts_of
from postgrad.parallel.ranks import ALONE
from postgrad.rollout.local.engine import LocalEngine

Make = Callable[[str], Path]
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture
def make(fresh: Callable[[str], Path], tmp_path: Path) -> Make:
    """make("phi3"): the directory of a tiny model of that type."""
    size = len(load_tokenizer(str(fresh("llama"))))
    return lambda kind: make_model(kind, fresh("llama"), size, tmp_path / kind)


def documented(heading: str) -> list[str]:
    """The types in a line of docs/models.md."""
    line = re.search(rf"^\| {heading} \| (.+?) \|$", DOCS.read_text("utf-8"), re.M)
    assert line is not None
    return re.findall(r"`([\w-]+)`", line[1])


def gradients(lm: Any) -> torch.Tensor:
    found = [p.grad.flatten() for p in lm.parameters() if p.grad is not None]
    lm.zero_grad()
    return torch.cat(found)


def train_as_transformers(folder: Path) -> None:
    """The gradient of packed logprobs is that of each sequence alone; the engine samples it."""
    loaded = load_model(str(folder), dtype=torch.float32)
    lm: Any = loaded.lm
    LocalEngine(lm, loaded.tokenizer, slots=4, cache_tokens=1024)  # holds its samples to it
    lm.requires_grad_(True)
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(64))
    backbone.divide(ALONE, "none")
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 90, size) for size in (14, 15, 17)]
    tokens = Ragged.of(rows, np.int32)
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    sequences = Sequences(tokens, tokens.like(mask), np.arange(3))
    for layout in backbone.micro_batches(sequences, np.arange(3)):
        backbone.logprobs(layout, 1.0)[0].sum().backward()
    found = gradients(lm)
    lm.set_attn_implementation("eager")
    for row in rows:
        ids = torch.from_numpy(row)[None]
        logprobs = lm(ids, use_cache=False).logits[0].float().log_softmax(-1)
        logprobs[:-1].gather(1, ids[0, 1:, None]).sum().backward()
    wanted = gradients(lm)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_an_untested_type_trains_and_samples_as_transformers(kind: str, make: Make) -> None:
    train_as_transformers(make(kind))


REFUSED = {
    "nemotron": "do not pass the forward's arguments on to their attention",
    "stablelm": "do not pass the forward's arguments on to their attention",
    "phimoe": "do not pass their sliding window of 8 on",
    "llama4_text": "chunked_attention layers",
    "gptj": "attention of its own",
    "falcon": "attention of its own",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_would_compute_something_else_is_refused_by_name(kind: str, make: Make) -> None:
    with pytest.raises(UsageError, match=REFUSED[kind]) as refused:
        load_model(str(make(kind)), dtype=torch.float32)
    assert f"a {kind} model" in str(refused.value)


def test_a_type_whose_samples_would_be_of_another_model_is_refused_by_the_engine(
    make: Make,
) -> None:
    """diffllama attends twice in a layer, which the cache cannot tell apart."""
    loaded = load_model(str(make("diffllama")), dtype=torch.float32)
    with pytest.raises(UsageError, match="a diffllama model, which is not supported because the"):
        LocalEngine(loaded.lm, loaded.tokenizer, slots=4, cache_tokens=1024)


def test_a_packed_forward_that_differs_is_refused_in_bfloat16_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("phi3")
    load_model(str(folder), dtype=torch.bfloat16)

    def scaled(lm: Any, hidden: torch.Tensor) -> torch.Tensor:
        return lm.get_output_embeddings()(hidden).float() * 1.5

    monkeypatch.setattr("postgrad.models.probe.full_logits", scaled)
    with pytest.raises(UsageError, match=r"a phi3 model, .* packed forward differs"):
        load_model(str(folder), dtype=torch.bfloat16)


def test_weights_that_are_no_numbers_are_named(make: Make) -> None:
    from safetensors.torch import load_file, save_file

    folder = make("phi3")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="no finite numbers"):
        load_model(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("key", ["use_bidirectional_attention", "is_causal"])
def test_a_tested_type_that_looks_ahead_is_refused(key: str, make: Make) -> None:
    folder = make("gemma3_text")
    edit("config.json", **{key: key != "is_causal"})(folder)
    with pytest.raises(UsageError, match=f"{key} is .* see those after them"):
        load_model(str(folder), dtype=torch.float32)


def test_a_mixture_of_experts_is_told_of_its_missing_auxiliary_loss(make: Make) -> None:
    from postgrad.training.prepare import tell_of_experts

    events: list[tuple[str, str, dict[str, Any]]] = []
    warnings: list[str] = []
    run: Any = SimpleNamespace(
        logs=SimpleNamespace(event=lambda kind, text, **more: events.append((kind, text, more))),
        console=SimpleNamespace(warn=warnings.append),
    )
    tell_of_experts(run, str(make("mixtral")))
    ((kind, text, more),) = events
    assert (kind, more) == ("no_auxiliary_loss", {"experts": 4})
    assert "a mixtral model with 4 experts a layer: it is trained without an auxiliary" in text
    assert warnings == [text]
    tell_of_experts(run, str(make("phi3")))
    assert len(events) == 1


def test_experts_are_counted_by_every_name_that_configs_have() -> None:
    kinds = ("mixtral", "qwen3_moe", "deepseek_v3", "ernie4_5_moe", "olmoe")
    assert [experts_of(config_of(kind, 90)) for kind in kinds] == [4] * len(kinds)
    assert experts_of(config_of("llama", 90)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", documented("run"))
def test_every_type_that_the_documentation_says_runs_does(kind: str, make: Make) -> None:
    train_as_transformers(make(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", documented("refused"))
def test_every_type_that_the_documentation_says_is_refused_is(kind: str, make: Make) -> None:
    folder = make(kind)

    def sampled() -> None:
        loaded = load_model(str(folder), dtype=torch.float32)
        LocalEngine(loaded.lm, loaded.tokenizer, slots=4, cache_tokens=1024)

    with pytest.raises(UsageError, match=kind):
        sampled()

"""The engines that the contract is run on, each over the same small model."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

import postgrad.models.attention  # noqa: F401  registers our attention
from postgrad.core.errors import RunError
from postgrad.rollout.engine import Engine
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.stats import EngineStats
from postgrad.rollout.vllm import start
from postgrad.rollout.vllm.engine import VLLMEngine

LETTERS = "abcdefghijklmnop"


def small_model(seed: int = 0, vocabulary: int = 2 + len(LETTERS), *, tied: bool = False) -> Any:
    """Two layers over 18 tokens, with weights wide enough to have opinions. tied: embedding and
    head.
    """
    config = Qwen3Config(
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's attention on CPUs takes
        eos_token_id=1,
        pad_token_id=0,
    )
    config._attn_implementation = "postgrad"
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config)
    for name, parameter in lm.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.15)
    return lm


def small_tokenizer() -> Any:
    """<pad>, <eos>, then one token a letter."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *LETTERS])}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def _local(slots: int, cache_tokens: int) -> Engine:
    return LocalEngine(small_model(), small_tokenizer(), slots=slots, cache_tokens=cache_tokens)


# What only the built-in engine promises; the rest of vLLM's side is in tests/rollout/vllm.
LOCAL_ALONE = {
    "test_a_halted_engine_decodes_nothing": "its process decodes by itself",
    "test_the_past_of_an_engine_leaves_no_trace_in_its_bits": "its batches round differently",
    "test_a_request_that_can_never_fit_is_refused_at_once": "it counts tokens, not places",
    "test_weights_that_come_while_samples_are_decoded_are_named_span_by_span": "it does not wait",
    "test_half_of_the_weights_are_refused": "an update that is not whole is its last",
    "test_a_sample_that_was_cut_draws_the_numbers_of_its_own_positions": "it seeds anew at a cut",
    "test_stats_count_prompts_once_and_every_sampled_token": "it tells no decode steps",
}


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """One real vLLM for all tests: it takes half a minute to start."""
    engine = start_vllm(tmp_path_factory.mktemp("vllm"), small_model())
    yield engine
    engine.close()


def start_vllm(folder: Path, lm: Any, **settings: Any) -> VLLMEngine:
    """A real vLLM with `lm`, whose log comes into the folder. settings: of rollout.vllm."""
    path, tokenizer = str(folder / "model"), small_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    lm.save_pretrained(path)
    tokenizer.save_pretrained(path)
    rollout = RolloutSettings.model_validate({"type": "vllm", "vllm": settings})
    model = start.read_model(path, torch.float32, 64)
    sizes = start.sizes_of(path, rollout, torch.float32, sequences=24, max_len=64)
    place = {"device": torch.device("cpu"), "threads": 1, "logs": folder}
    return start.start(path, rollout, model, sizes, **place)


def _vllm(request: pytest.FixtureRequest) -> Callable[[int, int], Engine]:
    name = request.function.__name__
    if name in LOCAL_ALONE:
        pytest.skip(f"of the built-in engine alone: {LOCAL_ALONE[name]}")
    engine = request.getfixturevalue("vllm_engine")

    def anew(slots: int, cache_tokens: int) -> Engine:
        empty(engine)
        engine.stats = EngineStats()
        engine.load_weights(small_model().named_parameters(), 0)
        return engine

    return anew


def empty(engine: Engine) -> None:
    """Takes out what a test left behind. What has diverged is an error, maybe of several."""
    for _ in range(8):
        for take in (engine.cut, engine.completed):
            with suppress(RunError):
                take()


MAKERS = {"local": lambda request: _local, "vllm": _vllm}


@pytest.fixture(params=["local", pytest.param("vllm", marks=pytest.mark.vllm)])
def make_engine(request: pytest.FixtureRequest) -> Callable[[int, int], Engine]:
    """make_engine(slots, cache_tokens)."""
    return MAKERS[request.param](request)


@pytest.fixture
def other_weights() -> Any:
    """Another model's (name, tensor) pairs, for a publish."""
    return list(small_model(seed=1).named_parameters())

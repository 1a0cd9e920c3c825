"""How vLLM's engines are started: states of layers, and positions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from helpers.fake_vllm import fake_vllm
from helpers.image_directories import models
from postgrad.core.errors import UsageError
from postgrad.models.settings import LoraSettings
from postgrad.models.shapes import CountedWeights, ModelShape
from postgrad.rollout.local.budget import EngineSizes
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.vllm import start
from postgrad.rollout.vllm.inputs import engine_arguments
from postgrad.rollout.vllm.model import SampledModel
from postgrad.rollout.vllm.protocol import Start
from postgrad.rollout.vllm.start import BLOCK, StatePages, more_positions, state_pages

__all__ = ["models"]


def shape(layers: int, attending: int, states: int) -> ModelShape:
    """One head of 32: a token takes 128 bytes in a layer that attends, in two bytes a number."""
    counted = CountedWeights(0, 0, 0, 0, 0, (), attending=attending, states=states)
    return ModelShape("hybrid", 10, 64, 64, layers, 1, 1, 32, False, None, counted=counted)


def test_a_page_holds_a_state_and_whole_blocks_of_tokens() -> None:
    # 30 000 numbers in 3 layers: 40 000 bytes each, which is 2.44 blocks of 128 * 128 bytes
    pages = state_pages(shape(4, 1, 30_000), 2)
    assert pages == StatePages(49_152, 384, attending=1, stateful=3, group=1)
    assert pages.row_bytes == 49_152 * 7
    # 800 tokens fill 2 pages; 4 sequences and one more; one page of the only layer of a group
    assert pages.needed(EngineSizes(4, 800)) == 49_152 * (2 + 5 * 7 + 1)


def test_a_page_is_a_block_where_states_are_smaller() -> None:
    assert state_pages(shape(2, 1, 3000), 2).page_bytes == BLOCK * 128
    assert state_pages(shape(2, 1, 3000), 4).page_bytes == BLOCK * 256


@pytest.mark.parametrize(
    ("layers", "attending", "groups"),
    [(8, 2, (2, 6, 2)), (7, 2, (2, 6, 2)), (9, 4, (5, 5, 5)), (3, 2, (2, 1, 1)), (6, 6, (6, 6, 6))],
)
def test_groups_of_layers_are_filled_up(
    layers: int, attending: int, groups: tuple[int, int, int]
) -> None:
    pages = state_pages(shape(layers, attending, 600), 2)
    assert (pages.attending, pages.stateful, pages.group) == groups


def test_layers_that_only_carry_states_have_pages_without_tokens() -> None:
    pages = state_pages(shape(4, 0, 30_000), 2)
    assert pages == StatePages(30_000, 1, attending=0, stateful=4, group=4)
    assert pages.needed(EngineSizes(4, 800)) == 30_000 * (5 * 8 + 4)


def test_an_engine_of_a_model_with_states_gets_the_memory_of_their_pages(
    models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = models("qwen3_5"), RolloutSettings.model_validate({"type": "vllm"})
    pages = state_pages(start._shape(path), 2)
    wanted = {"sequences": 500, "max_len": 48}
    # a quarter is for the cache: 10 rows of 64 places and their states
    token_bytes = start._shape(path).cache_bytes_per_token(2)
    free = 4 * 10 * (64 * token_bytes + pages.row_bytes + 64)
    monkeypatch.setattr(start.psutil, "virtual_memory", lambda: type("M", (), {"available": free}))
    assert start.sizes_of(path, settings, torch.bfloat16, **wanted).slots == 10


def test_delta_rules_in_float32_are_refused_on_a_cpu(
    models: Callable[[str], str], tmp_path: Path
) -> None:
    rollout = RolloutSettings.model_validate(
        {"type": "vllm", "vllm": {"python": fake_vllm(tmp_path)}}
    )
    for kind in ("qwen3_5", "qwen3_5_moe"):
        path = models(kind)
        model = start.read_model(path, torch.float32, 60)
        sizes = start.sizes_of(path, rollout, torch.float32, sequences=4, max_len=60)
        place = {"device": torch.device("cpu"), "threads": 1, "logs": tmp_path}
        with pytest.raises(UsageError, match=rf'rules of {kind}_text in "bfloat16" alone, not'):
            start.start(path, rollout, model, sizes, **place)
        start.start(path, rollout, replace(model, dtype=torch.bfloat16), sizes, **place).close()


def test_an_adapter_beside_experts_is_refused_on_a_cpu(
    models: Callable[[str], str], tmp_path: Path
) -> None:
    rollout = RolloutSettings.model_validate(
        {"type": "vllm", "vllm": {"python": fake_vllm(tmp_path), "lora": "adapter"}}
    )
    place = {"device": torch.device("cpu"), "threads": 1, "logs": tmp_path}
    for kind, refused in (("qwen3_vl", False), ("qwen3_vl_moe", True), ("qwen3_5_moe", True)):
        path = models(kind)
        model = start.read_model(path, torch.bfloat16, 60, LoraSettings(targets=("q_proj",)))
        sizes = start.sizes_of(path, rollout, torch.bfloat16, sequences=4, max_len=60)
        if refused:
            with pytest.raises(UsageError, match=rf"experts of {kind}_text by Triton kernels"):
                start.start(path, rollout, model, sizes, **place)
        else:
            start.start(path, rollout, model, sizes, **place).close()


def test_states_are_shared_by_prompts_in_chunks_alone() -> None:
    plain = Start("a model", "float32", 40, 4, 1, 1, 0.5, True, False, True)
    assert engine_arguments(plain)["enable_prefix_caching"]
    assert not engine_arguments(replace(plain, states=True))["enable_prefix_caching"]
    chunks = engine_arguments(replace(plain, states=True, whole_prompts=False))
    assert chunks["enable_prefix_caching"]
    assert chunks["enable_chunked_prefill"]


def long_model(max_len: int, **settings: Any) -> SampledModel:
    skeleton: Any = SimpleNamespace(config=Qwen3Config(max_position_embeddings=64, **settings))
    return SampledModel(skeleton, None, (1,), torch.float32, max_len)


def test_positions_go_on_behind_those_that_a_model_was_trained_on() -> None:
    assert more_positions("m", long_model(64)) == {}
    assert more_positions("m", long_model(65)) == {"max_position_embeddings": 65}
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    longer = more_positions("m", long_model(65, rope_parameters=linear))
    assert longer == {"max_position_embeddings": 65}


def test_positions_of_yarn_end_with_its_factor() -> None:
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = long_model(128, rope_parameters=yarn)
    assert more_positions("m", model) == {"max_position_embeddings": 128}
    with pytest.raises(UsageError, match=r"vLLM has 128 positions for m, and .* 129 tokens"):
        more_positions("m", replace(model, max_len=129))


def test_text_models_of_a_module_with_images_need_torchvision_too(tmp_path: Path) -> None:
    python = Path(fake_vllm(tmp_path))
    python.write_text(python.read_text().replace('behaviour == "without_vllm"', "2"))
    settings = RolloutSettings.model_validate({"type": "vllm", "vllm": {"python": str(python)}})
    place = {"device": torch.device("cpu"), "threads": 1, "logs": tmp_path}
    config = SimpleNamespace(model_type="qwen3_5_text")
    config.get_text_config = lambda: config
    skeleton: Any = SimpleNamespace(config=config)
    model = SampledModel(skeleton, None, (1,), torch.bfloat16, 40)
    with pytest.raises(UsageError, match="no package torchvision, without which vLLM cannot"):
        start.start("m", settings, model, EngineSizes(4, 800), **place)

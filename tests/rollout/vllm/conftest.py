"""A small model's directory, and engines over processes that only speak like vLLM."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from contracts.conftest import small_model, small_tokenizer
from helpers.fake_vllm import fake_vllm
from postgrad.models.settings import LoraSettings
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.vllm import start
from postgrad.rollout.vllm.engine import VLLMEngine
from postgrad.rollout.vllm.model import SampledModel
from postgrad.rollout.vllm.process import Arrived, ProcessOptions, VLLMProcess
from postgrad.rollout.vllm.protocol import Start

START = Start("a model", "float32", 40, 4, 1 << 20, 1, 0.5, True, False, True)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., VLLMEngine]]:
    """make_engine(behaviour, ..., level=0): over one process for each behaviour."""
    processes: list[VLLMProcess] = []

    def make(
        *behaviours: str,
        level: int = 0,
        adapter: LoraSettings | None = None,
        routed: tuple[int, ...] = (),
    ) -> VLLMEngine:
        inbox: SimpleQueue[Arrived] = SimpleQueue()
        for number, behaviour in enumerate(behaviours or ("well",)):
            log = tmp_path / f"vllm-{number}.log"
            options = ProcessOptions(fake_vllm(tmp_path, behaviour), 1, None, log)
            processes.append(VLLMProcess(number, options, START, inbox))
        sizes = (torch.float32, START.max_len)
        model = SampledModel(small_model(), small_tokenizer(), (1,), *sizes, adapter, routed=routed)
        engine = VLLMEngine(processes, inbox, model, level=level)
        with ExitStack() as ending:
            for process in processes:
                ending.callback(process.close)
            engine.on_close(ending.pop_all())
        return engine

    yield make
    for process in processes:
        process.close()


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    """Of a small model."""
    path, tokenizer = tmp_path / "model", small_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    small_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def start_engine(model_path: str, tmp_path: Path) -> Iterator[Callable[..., VLLMEngine]]:
    """start_engine(behaviour, place={}, **settings of rollout.vllm): as a run starts it. place:
    where, on a CPU unless it says otherwise.
    """
    engines: list[VLLMEngine] = []

    def make(
        behaviour: str = "well",
        place: Mapping[str, Any] = {},
        rollout: Mapping[str, Any] = {},
        **settings: Any,
    ) -> VLLMEngine:
        python = fake_vllm(tmp_path, behaviour)
        recipe = RolloutSettings.model_validate(
            {"type": "vllm", "vllm": {"python": python, **settings}, **rollout}
        )
        dtype = torch.float32
        model = start.read_model(model_path, dtype, 40)
        sizes = start.sizes_of(model_path, recipe, dtype, sequences=8, max_len=40)
        options = {"device": torch.device("cpu"), "threads": 1, "logs": tmp_path, **place}
        engines.append(start.start(model_path, recipe, model, sizes, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()

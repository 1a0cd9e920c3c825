"""What the probe says of a processor, and that it leaves everything as it was."""

import time
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

from postgrad.parallel import device


def measured(*seconds: float) -> Callable[..., list[float]]:
    return lambda works, clock: list(seconds)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.parametrize(("plain", "narrow", "pays"), [(1.9, 1.0, True), (1.3, 1.0, False)])
def test_bfloat16_pays_where_products_are_clearly_faster(
    plain: float, narrow: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_medians", measured(plain, narrow))
    assert device.bfloat16_pays(256, 768, linear) is pays


def test_the_runs_own_product_is_measured_in_both_dtypes() -> None:
    seen: set[torch.dtype] = set()

    def slow_in_float32(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.add(states.dtype)
        for _ in range(1 if states.dtype == torch.bfloat16 else 40):
            out = torch.zeros(512, 1024, dtype=torch.float32).add_(1.0)
        return out

    assert device.bfloat16_pays(256, 768, slow_in_float32)
    assert seen == {torch.float32, torch.bfloat16}


def test_a_narrow_model_computes_in_float32_on_every_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_medians", measured(9.0, 1.0))
    assert not device.bfloat16_pays(128, 4096, linear)


@pytest.mark.parametrize(("several", "wanted"), [(0.5, 4), (0.95, 1), (100.0, 1)])
def test_more_threads_are_taken_only_where_they_are_faster_now(
    several: float, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_medians", measured(1.0, several))
    assert device.useful_threads(4) == wanted


def test_one_core_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_medians", None)
    assert device.useful_threads(1) == 1


def test_one_stalled_round_does_not_decide() -> None:
    now = iter([0.0, 1.0, 1.0, 2.0, 2.0, 102.0] + [float(i // 2 + i % 2) for i in range(100)])
    assert device._medians([lambda: None], lambda: next(now)) == [1.0]


def test_a_probe_leaves_threads_and_generator_and_costs_little() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    began = time.process_time()
    device.bfloat16_pays(4096, 16384, linear)
    device.useful_threads(2)
    assert time.process_time() - began < 2.0  # 0.3 where nothing else runs
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)

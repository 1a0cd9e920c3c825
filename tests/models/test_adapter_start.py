"""Adapters by PiSSA: PEFT's start, the base as it is under it, and files for that base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.adapters import moved
from postgrad.core.errors import UsageError
from postgrad.core.progress import reported_to
from postgrad.models.adapter_files import merged_state, write_adapter
from postgrad.models.adapter_start import principal_factors
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings
from postgrad.models.stored import real

IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])
PISSA = LoraSettings(rank=4, alpha=6, rslora=True, init="pissa", rank_pattern={"down_proj": 7})


@pytest.fixture
def model(fresh: Callable[[str], Path]) -> Callable[..., Any]:
    def read(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
        lm: Any = load_model(str(fresh("qwen3")), dtype=dtype, **more).lm
        lm.set_attn_implementation("eager")
        return lm

    return read


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def of_peft(path: Path, settings: LoraSettings = PISSA) -> Any:
    """PEFT's own PiSSA, whose base becomes the residual."""
    config = peft.LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, use_rslora=settings.rslora,
        rank_pattern=settings.rank_pattern, target_modules="all-linear", init_lora_weights="pissa",
    )  # fmt: skip
    return peft.get_peft_model(plain(path), config)


def losses(lm: Any, parameters: Any, steps: int) -> list[float]:
    """Of a few steps of AdamW on one row."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    every: list[float] = []
    for _ in range(steps):
        loss = lm(IDS, labels=IDS).loss
        every.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return every


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_30"])
def test_the_start_is_the_part_of_the_largest_singular_values(init: str) -> None:
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 6, dtype=torch.float64))[0] for n in (20, 9))
    values = torch.tensor([9.0, 6.0, 4.0, 1.0, 0.5, 0.2], dtype=torch.float64)
    a, b = principal_factors((u * values) @ v.T, 3, 1.5, init, 0, "layer", "model.lora")
    part = (u[:, :3] * values[:3]) @ v[:, :3].T
    torch.testing.assert_close(1.5 * (b @ a).double(), part, rtol=1e-5, atol=1e-5)
    # each factor has the root of the values
    torch.testing.assert_close(b.norm(dim=0), a.norm(dim=1))
    torch.testing.assert_close(a.norm(dim=1).double() ** 2, values[:3] / 1.5, rtol=1e-5, atol=0.0)
    again = principal_factors((u * values) @ v.T, 3, 1.5, init, 0, "layer", "model.lora")
    assert torch.equal(a, again[0])
    assert torch.equal(b, again[1])


@torch.no_grad()
def test_it_begins_as_the_base_with_pefts_a_and_b_and_disabled_it_is_the_base(
    model: Callable[..., Any], fresh: Callable[[str], Path]
) -> None:
    lm = model()
    before = lm(IDS).logits
    adapter = add_adapter(lm, PISSA, seed=0)
    torch.testing.assert_close(lm(IDS).logits, before, rtol=1e-4, atol=1e-5)
    with adapter.disabled():
        assert torch.equal(lm(IDS).logits, before)
    theirs = of_peft(fresh("qwen3"))
    for name, ours in adapter.parameters().items():
        if "lora_A" in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            peer = theirs.base_model.model.get_submodule(layer)
            b = adapter.parameters()[name.replace("lora_A", "lora_B")]
            pair = peer.lora_B["default"].weight @ peer.lora_A["default"].weight
            torch.testing.assert_close(b @ ours, pair, rtol=1e-3, atol=1e-4)
            assert peer.scaling["default"] == lm.get_submodule(layer).scaling["policy"]


@pytest.mark.parametrize("joined", [False, True])
def test_losses_of_the_first_steps_are_pefts(
    joined: bool, model: Callable[..., Any], fresh: Callable[[str], Path]
) -> None:
    adapter = add_adapter(model(), PISSA, seed=0)
    if joined:
        adapter.join_frozen()
    theirs = of_peft(fresh("qwen3"))
    ours = losses(adapter.lm, adapter.parameters().values(), 5)
    wanted = losses(theirs, [p for p in theirs.parameters() if p.requires_grad], 5)
    assert ours == pytest.approx(wanted, rel=1e-3)
    assert ours[-1] < ours[0] - 0.5


@pytest.mark.parametrize("dora", [False, True])
@torch.no_grad()
def test_its_files_change_the_base_as_it_was(
    dora: bool, model: Callable[..., Any], fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    settings, base, to = PISSA.model_copy(update={"dora": dora}), fresh("qwen3"), tmp_path / "it"
    adapter = moved(add_adapter(model(), settings, seed=0))
    ours: Any = adapter.lm(IDS).logits
    write_adapter(adapter.parameters(), settings, str(base), to)
    lm = plain(base)
    assert float((lm(IDS).logits - ours).abs().max()) > 0.05
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(
        peft.PeftModel.from_pretrained(lm, str(to))(IDS).logits, ours, **close
    )
    read: Any = load_model(str(to), dtype=torch.float32).lm
    read.set_attn_implementation("eager")
    torch.testing.assert_close(read(IDS).logits, ours, **close)
    merged = plain(base)
    merged.load_state_dict(dict(adapter.hub_weights()), strict=False)
    torch.testing.assert_close(merged(IDS).logits, ours, **close)
    state = merged_state(str(base), adapter.parameters(), settings)
    for name, tensor in adapter.merged():
        assert torch.equal(real(state[name]), tensor), name


@pytest.mark.parametrize(
    ("dtype", "more"),
    [(torch.bfloat16, {}), (torch.float32, {"quantize": "4bit"})],
    ids=["bfloat16", "4bit"],
)
@torch.no_grad()
def test_files_of_one_on_rounded_weights_have_its_own_start(
    dtype: torch.dtype,
    more: dict[str, Any],
    model: Callable[..., Any],
    fresh: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """The principal part of rounded weights is another one than that of the base's."""
    base = str(fresh("qwen3"))
    adapter = moved(add_adapter(model(dtype, **more), PISSA, seed=0))
    started = adapter.plain_weights()
    write_adapter(adapter.parameters(), PISSA, base, tmp_path / "it", dtype=dtype, **more)
    written = peft.utils.load_peft_weights(str(tmp_path / "it"), device="cpu")
    assert all(torch.equal(written[name], tensor) for name, tensor in started.items())
    state = merged_state(base, adapter.parameters(), PISSA, dtype=dtype, **more)
    for name, tensor in adapter.merged():
        assert torch.equal(real(state[name]).to("cpu"), tensor), name


def test_what_it_began_with_is_no_weight_and_does_not_train(model: Callable[..., Any]) -> None:
    lm = model()
    names = {name for name, _ in lm.named_parameters()}
    adapter = add_adapter(lm, PISSA, seed=0)
    assert {len(p) for n, p in adapter.parameters().items() if "q_proj.lora_A" in n} == {4}
    assert {name for name, _ in adapter.hub_weights()} == names
    start = {n: b.clone() for n, b in lm.named_buffers() if "lora_start" in n}
    assert len(start) == 2 * 7 * 2
    losses(lm, adapter.parameters().values(), 2)
    assert all(torch.equal(b, start[n]) for n, b in lm.named_buffers() if n in start)
    assert not any("lora_start" in name for name in lm.state_dict())


def of(adapter: Adapter) -> list[Tensor]:
    return [p.detach() for p in adapter.parameters().values()]


def test_weights_that_lie_in_files_give_the_same_start(fresh: Callable[[str], Path]) -> None:
    loaded, other = (
        add_adapter(
            load_model(str(fresh("qwen3")), dtype=torch.float32, in_files=in_files).lm,
            PISSA,
            seed=0,
        )
        for in_files in (False, True)
    )
    pairs = zip(of(loaded), of(other), strict=True)
    assert all(torch.equal(a, real(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init": "pissa", "dropout": 0.1}, 'dropout = 0.1 beside init = "pissa" would drop'),
        ({"init": "pissa_niter_0"}, "init = 'pissa_niter_0'"),
        ({"init": "olora"}, "init = 'olora'"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LoraSettings(**values)


@pytest.mark.parametrize(("role", "table"), [("policy", "model"), ("critic", "critic.model")])
def test_a_rank_above_the_sides_of_a_matrix_is_refused(
    role: str, table: str, model: Callable[..., Any]
) -> None:
    settings = LoraSettings(rank=40, init="pissa")
    message = rf'^{table}\.lora\.init = "pissa": model.layers.0.* has no 40 singular'
    with pytest.raises(UsageError, match=message):
        add_adapter(model(), settings, seed=0, name=role)


def test_progress_is_told_for_each_matrix(model: Callable[..., Any]) -> None:
    """A long start would look like a hang to people, and to the watchdog."""
    reports: list[tuple[str, int, int | None]] = []
    with reported_to(lambda *report: reports.append(report)):
        add_adapter(model(), LoraSettings(rank=2), seed=0)
        assert reports == []
        lm = model()
        add_adapter(lm, PISSA, seed=0)
    count = 7 * lm.config.num_hidden_layers
    assert reports == [("matrices for PiSSA", number, count) for number in range(count)]

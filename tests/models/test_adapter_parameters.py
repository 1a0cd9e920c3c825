"""Adapters on experts and routers on disk: PEFT reads ours, and we read PEFT's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.adapters import moved
from helpers.model_types import make_model
from postgrad.core.errors import UsageError
from postgrad.models.adapter_files import export_merged, merged_state, write_adapter
from postgrad.models.adapter_reader import read_adapter
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings
from postgrad.models.tokenizer import load_tokenizer
from postgrad.rollout.vllm.start import read_model

KINDS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
IDS = torch.tensor([[5, 17, 33, 8, 26, 23, 9, 31]])
LAST = ("gpt_oss", ("experts.gate_up_proj", "router"))
BOTH = LoraSettings(rank=3, alpha=6, rslora=True, targets=("q_proj", "experts", "router"))


@pytest.fixture(scope="session")
def mixture(
    fresh: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("mixtures")

    def make(kind: str) -> Path:
        if not (folder / kind).exists():
            tokenizer = fresh("qwen3")
            make_model(kind, tokenizer, len(load_tokenizer(str(tokenizer))), folder / kind)
        return folder / kind

    return make


def trained(base: Path, settings: LoraSettings) -> Adapter:
    lm: Any = load_model(str(base), dtype=torch.float32).lm
    lm.set_attn_implementation("eager")
    return moved(add_adapter(lm, settings, seed=0))


def logits_of(path: Path) -> torch.Tensor:
    lm: Any = load_model(str(path), dtype=torch.float32).lm
    lm.set_attn_implementation("eager")
    return lm(IDS).logits


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        pytest.param(
            kind,
            targets,
            marks=() if kind == "qwen3_moe" or (kind, targets) == LAST else pytest.mark.slow,
        )
        for kind in KINDS
        for targets in (BOTH.targets, ("experts.down_proj",), LAST[1])
    ],
)
@torch.no_grad()
def test_plain_peft_and_a_merge_of_its_files_give_our_logits(
    kind: str, targets: tuple[str, ...], mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    base, settings = mixture(kind), BOTH.model_copy(update={"targets": targets})
    adapter = trained(base, settings)
    ours: Any = adapter.lm(IDS).logits
    write_adapter(adapter.parameters(), settings, str(base), tmp_path / "adapter")
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = plain(IDS).logits
    read: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert (before - ours).abs().max() > 0.05
    torch.testing.assert_close(read(IDS).logits, ours, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits_of(tmp_path / "adapter"), ours, rtol=1e-4, atol=1e-5)
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), ours, rtol=1e-4, atol=1e-5)
    state = merged_state(str(base), adapter.parameters(), settings)
    for name, tensor in adapter.hub_weights():
        torch.testing.assert_close(state[name].to("cpu"), tensor, msg=name)


@pytest.mark.parametrize("layers", [(), (1,)])
@torch.no_grad()
def test_experts_and_routers_with_ranks_of_their_own_are_read_by_peft_and_by_us(
    layers: tuple[int, ...], mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = BOTH.model_copy(update={
        "rank_pattern": {"experts": 2, "layers.1.mlp.experts.down_proj": 4, "q_proj": 5},
        "alpha_pattern": {"router": 9}, "layers_to_transform": layers,
    })  # fmt: skip
    base, to = mixture("qwen3_moe"), tmp_path / "adapter"
    adapter = trained(base, settings)
    ours: Any = adapter.lm(IDS).logits
    write_adapter(adapter.parameters(), settings, str(base), to)  # proved by PEFT
    torch.testing.assert_close(logits_of(to), ours, rtol=1e-4, atol=1e-5)
    experts = "base_model.model.model.layers.1.mlp.experts"
    a = {name: len(p) for name, p in adapter.parameters().items() if "lora_A" in name}
    assert a[f"{experts}.lora_A.weight"] == 2 * a[f"{experts}.base_layer.lora_A.weight"]
    assert (min(int(name.split(".")[4]) for name in a) == 1) == bool(layers)
    changed = json.loads((to / "adapter_config.json").read_text("utf-8"))
    changed["rank_pattern"]["model.layers.1.mlp.experts.down_proj"] = 8
    (to / "adapter_config.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises(UsageError, match=r"another rank than 8; correct its config"):
        load_model(str(to), dtype=torch.float32)


@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["experts.down_proj", "gate.weight"],
        ["gate_up_proj"],
    ],
)
@torch.no_grad()
def test_an_adapter_that_peft_wrote_is_merged_as_peft_applies_it(
    parameters: list[str], mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    base = mixture("qwen3_moe")
    lm: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["v_proj"], target_parameters=parameters,
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(0)
    written: Any = peft.get_peft_model(lm, config)
    theirs = written(IDS).logits
    written.save_pretrained(tmp_path / "peft")
    torch.testing.assert_close(logits_of(tmp_path / "peft"), theirs, rtol=1e-4, atol=1e-5)
    file = read_adapter(tmp_path / "peft")
    adapter = add_adapter(load_model(str(base), dtype=torch.float32).lm, file.settings, seed=0)
    adapter.load(file.weights)  # the same names and shapes
    adapter.lm.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(adapter.lm(IDS).logits, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("damage", ["lost", "foreign", "another width"])
def test_files_that_do_not_fit_the_mixture_are_refused(
    damage: str, mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    base = mixture("qwen3_moe")
    adapter, to = trained(base, BOTH), tmp_path / "adapter"
    write_adapter(adapter.parameters(), BOTH, str(base), to)
    weights = load_file(to / "adapter_model.safetensors")
    start = "base_model.model.model.layers.1.mlp.experts."
    pair = {letter: f"{start}base_layer.lora_{letter}.weight" for letter in "AB"}
    expected = {
        "lost": r"has no weights for model.layers.1.mlp.experts.gate_up_proj, which its config",
        "foreign": r"changes, of target_parameters, model.layers.1.mlp.experts.base_layer.base_la",
        "another width": r"changes model.layers.1.mlp.experts.gate_up_proj by A of shape \(12, 7\)",
    }
    if damage == "another width":
        weights[pair["A"]] = weights[pair["A"]][:, :7].contiguous()
    else:
        taken = {letter: weights.pop(name) for letter, name in pair.items()}
        if damage == "foreign":
            weights |= {pair[letter]: tensor.clone() for letter, tensor in taken.items()}
            weights |= {
                f"{start}base_layer.base_layer.lora_{letter}.weight": tensor
                for letter, tensor in taken.items()
            }
    save_file(weights, to / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=expected[damage]):
        load_model(str(to), dtype=torch.float32)


def test_the_config_names_linear_layers_and_weights_apart(
    mixture: Callable[[str], Path], tmp_path: Path
) -> None:
    base, to = mixture("gpt_oss"), tmp_path / "adapter"
    write_adapter(trained(base, BOTH).parameters(), BOTH, str(base), to)
    config = json.loads((to / "adapter_config.json").read_text("utf-8"))
    assert config["target_modules"] == ["q_proj"]
    assert sorted(config["target_parameters"]) == [
        "mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.router.weight",
    ]  # fmt: skip


def test_vllm_takes_no_adapter_on_experts_or_routers(mixture: Callable[[str], Path]) -> None:
    path = str(mixture("qwen3_moe"))
    with pytest.raises(UsageError, match=r'"adapter" beside .*\(mlp.gate.weight\): .*use "merged"'):
        read_model(path, torch.float32, 64, LoraSettings(targets=("q_proj", "router")))
    assert read_model(path, torch.float32, 64, LoraSettings(targets=("q_proj",))).adapter

"""The directory of an adapter in place of a model's: its base with the adapter merged into it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.hub import A, B, OfflineHub
from postgrad.core.errors import UsageError
from postgrad.models import files
from postgrad.models.adapter_files import export_merged, write_adapter
from postgrad.models.config import load_config
from postgrad.models.export import read_plain
from postgrad.models.files import adapter_base, is_adapter, weights_source
from postgrad.models.fresh import make_fresh
from postgrad.models.known_shapes import find_shape
from postgrad.models.load import load_model
from postgrad.models.save import model_hash
from postgrad.models.score import load_score_model, scale_of
from postgrad.models.settings import LoraSettings, ModelInit, TokenizerInit
from postgrad.models.stored import real
from postgrad.models.tokenizer import load_tokenizer

IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])
WEIGHTS = "adapter_model.safetensors"


def written_by_peft(base: Path, to: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """An adapter as PEFT saves it, with weights that are not zero and no tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        lm: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "mlp.up_proj"]} | more
        lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        model: Any = peft.get_peft_model(lm, lora)
        model.save_pretrained(to)
    if dtype != torch.float32:
        weights = {name: tensor.to(dtype) for name, tensor in load_file(to / WEIGHTS).items()}
        save_file(weights, to / WEIGHTS)
    return to


def changed(adapter: Path, **changes: Any) -> Path:
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(config | changes), "utf-8")
    return adapter


@torch.no_grad()
def merged_by_peft(base: Path, adapter: Path) -> Any:
    """In float64, by PEFT's own merge."""
    lm: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager"
    )
    model: Any = peft.PeftModel.from_pretrained(lm, str(adapter), autocast_adapter_dtype=False)
    return model.double().merge_and_unload().eval()


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "llama"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_those_of_peft_s_own_merge(
    kind: str, stored: torch.dtype, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = written_by_peft(fresh(kind), tmp_path / "adapter", stored)
    wanted = merged_by_peft(fresh(kind), adapter)(IDS).logits
    base: Any = AutoModelForCausalLM.from_pretrained(fresh(kind), dtype=torch.float64)
    assert float((base(IDS).logits - wanted).abs().max()) > 0.01
    lm: Any = load_model(str(adapter), dtype=torch.float32).lm
    lm.set_attn_implementation("eager")
    torch.testing.assert_close(lm(IDS).logits.double(), wanted, atol=2e-5, rtol=1e-5)
    plain = read_plain(str(adapter), AutoModelForCausalLM, torch.float32)
    torch.testing.assert_close(plain(IDS).logits.double(), wanted, atol=2e-5, rtol=1e-5)
    export_merged(adapter, tmp_path / "whole")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    torch.testing.assert_close(again(IDS).logits.double(), wanted, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_in_bfloat16_each_merged_weight_is_rounded_once(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    lm: Any = AutoModelForCausalLM.from_pretrained(fresh("llama"), dtype=torch.bfloat16)
    shutil.copytree(fresh("llama"), base)
    lm.save_pretrained(base)
    adapter = written_by_peft(base, tmp_path / "adapter")
    wanted = merged_by_peft(base, adapter)
    merged: Any = load_model(str(adapter), dtype=torch.bfloat16).lm
    name = "model.layers.1.self_attn.q_proj.weight"
    weight = wanted.get_parameter(name).bfloat16()
    assert (merged.get_parameter(name) != weight).float().mean() < 0.005  # ties of float32 sums
    torch.testing.assert_close(merged.get_parameter(name), weight, rtol=0.01, atol=1e-6)
    assert load_config(str(adapter)).dtype == torch.bfloat16
    export_merged(adapter, tmp_path / "whole")
    kept = load_file(tmp_path / "whole" / "model.safetensors")
    assert kept[name].dtype == torch.bfloat16
    assert torch.equal(kept[name], merged.get_parameter(name))


@torch.no_grad()
def test_a_reward_model_s_adapter_brings_its_head(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    from postgrad.models.adapters import add_adapter

    settings = LoraSettings(rank=2, alpha=4)
    lm: Any = load_score_model(str(fresh("qwen3")), dtype=torch.float32).lm
    trained = add_adapter(lm, settings, seed=0)
    generator = torch.Generator().manual_seed(1)
    trained.load({
        name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in trained.parameters().items()
    })  # fmt: skip
    adapter = tmp_path / "reward"
    write_adapter(trained.parameters(), settings, str(fresh("qwen3")), adapter)
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        fresh("qwen3"), dtype=torch.float64, num_labels=1, attn_implementation="eager"
    )
    model: Any = peft.PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=False)
    wanted = model.double().merge_and_unload().eval()(IDS).logits
    loaded: Any = load_score_model(str(adapter), dtype=torch.float32, fresh_head=False).lm
    loaded.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(IDS).logits.double(), wanted, atol=2e-5, rtol=1e-5)
    export_merged(adapter, tmp_path / "whole")
    merged: Any = load_score_model(str(tmp_path / "whole"), dtype=torch.float32).lm
    merged.set_attn_implementation("eager")
    torch.testing.assert_close(merged(IDS).logits.double(), wanted, atol=2e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="ask it with postgrad serve-reward"):
        load_model(str(adapter), dtype=torch.float32)
    policy = written_by_peft(fresh("qwen3"), tmp_path / "policy")
    assert load_score_model(str(policy), dtype=torch.float32).lm.score.weight.shape == (1, 32)
    with pytest.raises(UsageError, match="it is no reward model"):
        load_score_model(str(policy), dtype=torch.float32, fresh_head=False)


def test_the_scale_of_a_base_s_scores_is_not_that_of_the_adapter_s(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    base = shutil.copytree(fresh("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text("utf-8"))
    text = json.dumps(config | {"reward_mean": 1.0, "reward_std": 2.0})
    (base / "config.json").write_text(text, "utf-8")
    adapter = written_by_peft(base, tmp_path / "adapter")
    assert scale_of(load_config(str(base))) is not None
    assert scale_of(load_config(str(adapter))) is None


@pytest.mark.parametrize(
    "more",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "r": 4},
        {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"mlp.up_proj": 9}},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=["rslora", "dora", "both", "patterns", "modules"],
)
@torch.no_grad()
def test_adapters_of_other_kinds_are_merged_as_peft_merges_them(
    more: dict[str, Any], tmp_path: Path
) -> None:
    init = ModelInit(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.2,
        max_position_embeddings=128, tie_word_embeddings=False,
        tokenizer=TokenizerInit(kind="characters"),
    )  # fmt: skip
    make_fresh(init, [], 0, tmp_path / "base")
    adapter = written_by_peft(tmp_path / "base", tmp_path / "adapter", **more)
    weights = load_file(adapter / WEIGHTS)
    for name, tensor in weights.items():
        if "magnitude" in name or ".lora_" not in name:
            weights[name] = tensor * 1.3
    save_file(weights, adapter / WEIGHTS)
    theirs = dict(merged_by_peft(tmp_path / "base", adapter).named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "base").named_parameters())
    for in_files in (False, True):
        lm = load_model(str(adapter), dtype=torch.float32, in_files=in_files).lm
        for name, parameter in lm.named_parameters():
            numbers = real(parameter).double()
            torch.testing.assert_close(numbers, theirs[name], atol=1e-6, rtol=1e-5)
            adapted = "q_proj" in name or "up_proj" in name
            if adapted or ("modules_to_save" in more and ("embed" in name or "lm_head" in name)):
                assert not torch.allclose(numbers, base[name].double(), atol=1e-3), name


def test_a_tied_matrix_is_not_replaced_alone(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = written_by_peft(fresh("qwen3"), tmp_path / "adapter")
    weights = load_file(adapter / WEIGHTS)
    table = load_file(fresh("qwen3") / "model.safetensors")["model.embed_tokens.weight"]
    weights["base_model.model.model.embed_tokens.weight"] = table + 1
    save_file(weights, adapter / WEIGHTS)
    changed(adapter, modules_to_save=["embed_tokens"])
    with pytest.raises(UsageError, match=r"which .* ties to lm_head\.weight"):
        load_model(str(adapter), dtype=torch.float32)


def test_a_tokenizer_of_its_own_goes_before_the_base_s(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = written_by_peft(fresh("llama"), tmp_path / "adapter")
    tokenizer = load_tokenizer(str(adapter))
    assert tokenizer.chat_template == load_tokenizer(str(fresh("llama"))).chat_template
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(adapter)
    assert load_tokenizer(str(adapter)).chat_template == "{{ messages[0].content }}"


def test_a_relative_base_is_looked_for_here_and_then_beside_the_adapter(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = written_by_peft(fresh("llama"), tmp_path / "runs" / "adapter")
    beside = shutil.copytree(fresh("llama"), tmp_path / "runs" / "base")
    changed(adapter, base_model_name_or_path="../base")
    assert Path(adapter_base(adapter)).resolve() == beside
    here = shutil.copytree(fresh("llama"), tmp_path / "elsewhere" / "base")
    (tmp_path / "elsewhere" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" / "below")
    assert Path(adapter_base(adapter)).resolve() == here
    load_model(str(adapter), dtype=torch.float32)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("/nowhere/base", "base_model_name_or_path is /nowhere/base, and no model is there"),
        ("./nothing", "is ./nothing, and no model is there"),
        ("/dev/null", "and no model is there"),
        ("a\0b", "names no base model"),
        ("x" * 5000, "names no base model"),
        ("", "names no base model"),
        (7, "names no base model"),
        ("org/gone", "is org/gone, which is no directory here, and the hub does not give it"),
        ("https://example.com/x", "and no model is there"),
    ],
)
def test_a_base_that_is_not_there_is_one_message(
    base: Any, message: str, fresh: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    OfflineHub(tmp_path / "cache", monkeypatch)
    files._commit_of_base.cache_clear()
    adapter = written_by_peft(fresh("llama"), tmp_path / "adapter")
    changed(adapter, base_model_name_or_path=base)
    for read in (load_config, load_tokenizer, lambda path: model_hash(Path(path))):
        with pytest.raises(UsageError, match=message) as raised:
            read(str(adapter))
        assert str(adapter) in str(raised.value)
    if base != "org/gone":
        with pytest.raises(UsageError, match=message):
            find_shape(str(adapter))


def test_an_adapter_on_an_adapter_is_refused(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    first = written_by_peft(fresh("llama"), tmp_path / "first")
    second = changed(
        written_by_peft(fresh("llama"), tmp_path / "second"), base_model_name_or_path=str(first)
    )
    changed(first, base_model_name_or_path=str(second))  # round and round
    for read in (load_config, find_shape):
        with pytest.raises(UsageError, match="which is an adapter too: merge that one"):
            read(str(second))
    with pytest.raises(UsageError, match="the run started from the adapter"):
        write_adapter({}, LoraSettings(), str(first), tmp_path / "to")


def test_an_adapter_beside_a_whole_model_is_refused_and_beside_its_config_is_not(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = written_by_peft(fresh("llama"), tmp_path / "adapter")
    shutil.copy(fresh("llama") / "config.json", adapter)  # as axolotl leaves it
    load_model(str(adapter), dtype=torch.float32)
    shutil.copy(fresh("llama") / "model.safetensors", adapter)
    for read in (load_config, find_shape, is_adapter):
        with pytest.raises(UsageError, match=r"is an adapter .* and a model"):
            read(str(adapter))


A0, B0 = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight" for x in "AB")


def cut(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if "layers.1." not in name}


def narrow(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {A0: torch.ones(3, 31)}


def deeper(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    far = {
        name.replace("layers.1.", "layers.7."): tensor.clone() for name, tensor in weights.items()
    }
    return weights | far


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "has no weights for model.layers.1.mlp.up_proj and 1 more"),
        (narrow, r"q_proj by a matrix of shape \(32, 31\), which in .* is of shape \(32, 32\)"),
        (deeper, r"layers.7.mlp.up_proj by .* is no linear layer of its decoder"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    change: Any, message: str, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = written_by_peft(fresh("llama"), tmp_path / "adapter")
    save_file(change(load_file(adapter / WEIGHTS)), adapter / WEIGHTS)
    with pytest.raises(UsageError, match=message):
        load_model(str(adapter), dtype=torch.float32)


def test_the_hash_covers_adapter_and_base(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    base = shutil.copytree(fresh("llama"), tmp_path / "base")
    adapter = written_by_peft(base, tmp_path / "adapter")
    seen = {model_hash(adapter), model_hash(adapter, weights=False)}
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors")
    assert model_hash(adapter, weights=False) in seen
    assert model_hash(adapter) not in seen
    seen.add(model_hash(adapter))
    weights = load_file(adapter / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, adapter / WEIGHTS)
    assert model_hash(adapter, weights=False) in seen
    assert model_hash(adapter) not in seen
    changed(adapter, lora_alpha=50)
    assert model_hash(adapter, weights=False) not in seen


def test_a_base_on_the_hub_is_read_at_one_commit(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = OfflineHub(tmp_path / "cache", monkeypatch)
    hub.model("org/tiny", A, str(fresh("llama")))
    files._commit_of_base.cache_clear()
    adapter = written_by_peft(fresh("llama"), tmp_path / "adapter")
    changed(adapter, base_model_name_or_path="org/tiny")
    assert weights_source(str(adapter)) == f"org/tiny@{A}"
    before = model_hash(adapter)
    local = load_model(str(changed(adapter, base_model_name_or_path=str(fresh("llama")))),
                       dtype=torch.float32)  # fmt: skip
    there = load_model(str(changed(adapter, base_model_name_or_path="org/tiny")),
                       dtype=torch.float32)  # fmt: skip
    pairs = zip(local.lm.parameters(), there.lm.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    hub.model("org/tiny", B, str(fresh("llama")))
    assert weights_source(str(adapter)) == f"org/tiny@{A}"  # of this process
    files._commit_of_base.cache_clear()
    assert weights_source(str(adapter)) == f"org/tiny@{B}"
    assert model_hash(adapter) != before
    assert weights_source(str(changed(adapter, revision=A))) == f"org/tiny@{A}"
    files._commit_of_base.cache_clear()


def test_a_plan_has_the_shape_of_the_base(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = written_by_peft(fresh("gemma2"), tmp_path / "adapter")
    assert find_shape(str(adapter)) == find_shape(str(fresh("gemma2")))
    changed(adapter, base_model_name_or_path="Qwen/Qwen3-0.6B")
    assert find_shape(str(adapter)) == find_shape("Qwen/Qwen3-0.6B")


def test_four_bits_are_refused(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    from postgrad.models.load import Loading, read_weights

    adapter = written_by_peft(fresh("llama"), tmp_path / "adapter")
    config = load_config(str(adapter))
    how = Loading(torch.float32, torch.device("cpu"), "4bit")
    with pytest.raises(UsageError, match="cannot be merged into weights of four bits"):
        read_weights(str(adapter), config, AutoModelForCausalLM, how)

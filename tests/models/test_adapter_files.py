"""Adapters on disk: plain PEFT reads them, and what is not plain LoRA is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from helpers.adapters import moved
from helpers.image_directories import write_model
from helpers.image_models import IMAGE_MODELS, but_for_a_few
from postgrad.core.errors import RunError, UsageError
from postgrad.models import adapter_files
from postgrad.models.adapter_files import merged_state, write_adapter
from postgrad.models.adapter_reader import read_adapter
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.export import export_hf
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.linear import fuse_norms, speed_up
from postgrad.models.load import load_model
from postgrad.models.save import directory_hash
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings, ModelType

SETTINGS = LoraSettings(rank=4, alpha=8, dropout=0.1)
IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])


def trained(base: Path, settings: LoraSettings = SETTINGS, *, score: bool = False) -> Adapter:
    """An adapter that has moved, on a model with transformers' own attention."""
    load = load_score_model if score else load_model
    lm: Any = load(str(base), dtype=torch.float32).lm
    lm.set_attn_implementation("eager")
    return moved(add_adapter(lm, settings, seed=0))


@pytest.fixture(scope="module")
def written(
    fresh: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor | Path]:
    to = tmp_path_factory.mktemp("adapters") / "policy"
    adapter = trained(fresh("qwen3"))
    write_adapter(adapter.parameters(), SETTINGS, str(fresh("qwen3")), to)
    return {"path": to, **{name: p.detach() for name, p in adapter.parameters().items()}}


@pytest.fixture
def copied(written: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """The written adapter with some keys of its config changed, or other weights."""

    def copy(weights: dict[str, Tensor] | None = None, **changes: Any) -> Path:
        to = tmp_path / "copy"
        to.mkdir()
        config = json.loads((written["path"] / "adapter_config.json").read_text("utf-8"))
        (to / "adapter_config.json").write_text(json.dumps(config | changes), "utf-8")
        own_weights = load_file(written["path"] / "adapter_model.safetensors")
        save_file(own_weights if weights is None else weights, to / "adapter_model.safetensors")
        return to

    return copy


def as_ours(base: Any) -> None:
    """The products and norms that the project's own models have: only adapters add otherwise."""
    speed_up(base, torch.device("cpu"))
    fuse_norms(base, torch.device("cpu"))


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_plain_peft_reads_it_onto_its_base_with_the_same_logits(
    kind: str, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = trained(fresh(kind))
    torch.manual_seed(4)
    drawn = torch.rand(1)
    torch.manual_seed(4)
    write_adapter(adapter.parameters(), SETTINGS, str(fresh(kind)), tmp_path / "policy")
    assert torch.rand(1) == drawn
    base: Any = AutoModelForCausalLM.from_pretrained(
        adapter_base(tmp_path / "policy"), dtype=torch.float32, attn_implementation="eager"
    )
    as_ours(base)
    before = base(IDS).logits
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "policy")).eval()
    # our adapters add their products in another order than PEFT's
    torch.testing.assert_close(read(IDS).logits, adapter.lm(IDS).logits)
    assert float((read(IDS).logits - before).abs().max()) > 0.01
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(fresh(kind)).chat_template


@torch.no_grad()
def test_a_score_head_is_saved_whole_beside_the_adapter(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = trained(fresh("llama"), score=True)
    write_adapter(adapter.parameters(), SETTINGS, str(fresh("llama")), tmp_path / "reward")
    config = json.loads((tmp_path / "reward" / "adapter_config.json").read_text("utf-8"))
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        fresh("llama"), dtype=torch.float32, attn_implementation="eager", num_labels=1
    )
    as_ours(base)
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "reward")).eval()
    # our adapters add their products in another order than PEFT's
    torch.testing.assert_close(read(IDS).logits, adapter.lm(IDS).logits)
    back = read_adapter(tmp_path / "reward")
    assert back.scores
    state = merged_state(back.base, back.weights, back.settings)
    assert "lm_head.weight" not in state
    plain: Any = AutoModelForSequenceClassification.from_pretrained(
        fresh("llama"), dtype=torch.float32, attn_implementation="eager", num_labels=1
    )
    assert plain.load_state_dict(state, strict=True).missing_keys == []
    torch.testing.assert_close(plain(IDS).logits, adapter.lm(IDS).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_rslora_adapter_is_scaled_by_the_root_of_its_rank(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = LoraSettings(rank=4, alpha=6, targets=("q_proj",))
    lm: Any = load_model(str(fresh("qwen3")), dtype=torch.float32).lm
    adapter = add_adapter(lm, plain.model_copy(update={"rslora": True}), seed=0)
    generator = torch.Generator().manual_seed(1)
    weights = {
        n: torch.randn(p.shape, generator=generator) for n, p in adapter.parameters().items()
    }
    adapter.load(weights)
    name = "model.layers.0.self_attn.q_proj"
    base = dict(adapter.frozen())[f"{name}.weight"]
    a, b = (weights[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    merged = dict(adapter.merged())[f"{name}.weight"]
    torch.testing.assert_close(merged, base + 6 / 4**0.5 * (b @ a))
    write_adapter(weights, adapter.settings, str(fresh("qwen3")), tmp_path / "adapter")
    back = read_adapter(tmp_path / "adapter")
    assert back.settings.rslora
    assert back.settings.scale_of(name) == 3.0
    read = load_model(str(tmp_path / "adapter"), dtype=torch.float32).lm
    torch.testing.assert_close(read.get_parameter(f"{name}.weight"), merged)


def test_of_a_pattern_the_first_name_that_fits_holds_as_in_peft(
    copied: Callable[..., Path],
) -> None:
    pattern = {"q_proj": 9, "layers.0.self_attn.q_proj": 2, "layers.0.mlp.up_proj": 3, "up_proj": 5}
    settings = read_adapter(copied(alpha_pattern=pattern)).settings
    assert [settings.scale_of(f"model.layers.{n}.self_attn.q_proj") for n in (0, 1)] == [9 / 4] * 2
    assert [settings.scale_of(f"model.layers.{n}.mlp.up_proj") for n in (0, 1)] == [3 / 4, 5 / 4]


def test_what_was_written_is_read_back(
    written: dict[str, Any], fresh: Callable[[str], Path]
) -> None:
    path = written["path"]
    assert is_adapter(path)
    assert is_adapter(str(path))
    assert not is_adapter(fresh("qwen3"))
    back = read_adapter(path)
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(back.settings.targets) == targets
    assert back.settings.model_copy(update={"targets": ()}) == SETTINGS
    assert back.base == adapter_base(path) == str(fresh("qwen3").resolve())
    assert not back.scores
    assert back.weights.keys() == written.keys() - {"path"}
    assert all(torch.equal(tensor, written[name]) for name, tensor in back.weights.items())


def test_the_same_adapter_gives_the_same_bytes(
    written: dict[str, Any], fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    back = read_adapter(written["path"])
    write_adapter(back.weights, back.settings, back.base, tmp_path / "again")
    assert directory_hash(tmp_path / "again") == directory_hash(written["path"])


@torch.no_grad()
def test_peft_s_own_files_are_read(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    """Other settings than ours by default, weights in bfloat16, targets that the model lacks."""
    base: Any = AutoModelForCausalLM.from_pretrained(
        fresh("mistral"), dtype=torch.float32, attn_implementation="eager"
    )
    as_ours(base)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "query", "mlp.up_proj"],
        init_lora_weights=False,
    )
    model: Any = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "theirs")
    expected = model(IDS).logits
    back = read_adapter(tmp_path / "theirs")
    assert back.settings == LoraSettings(rank=3, alpha=5, targets=("mlp.up_proj", "q_proj"))
    lm: Any = load_model(back.base, dtype=torch.float32).lm
    lm.set_attn_implementation("eager")
    add_adapter(lm, back.settings, seed=0).load(back.weights)
    torch.testing.assert_close(lm(IDS).logits, expected)


@torch.no_grad()
def test_a_merged_adapter_is_exported_as_a_plain_model(
    written: dict[str, Any], fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    back = read_adapter(written["path"])
    state = merged_state(back.base, back.weights, back.settings)
    export_hf(state, back.base, tmp_path / "model", dtype=torch.float32)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    expected = trained(fresh("qwen3")).lm(IDS).logits
    torch.testing.assert_close(plain(IDS).logits, expected, atol=3e-5, rtol=1e-5)


def test_weights_of_another_model_are_not_merged(
    written: dict[str, Any], fresh: Callable[[str], Path]
) -> None:
    back = read_adapter(written["path"])
    weights = {name.replace("layers.1.", "layers.7."): t for name, t in back.weights.items()}
    with pytest.raises(RunError, match="of another adapter"):
        merged_state(str(fresh("qwen3")), weights, back.settings)


def test_an_adapter_that_reads_back_differently_leaves_nothing_behind(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file({name: 1.5 * tensor for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(adapter_files, "save_file", wrong)
    weights = trained(fresh("qwen3")).parameters()
    with pytest.raises(RunError, match="gives other logits"):
        write_adapter(weights, SETTINGS, str(fresh("qwen3")), tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_there_is_left_alone(
    written: dict[str, Any], fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("mine", "utf-8")
    back = read_adapter(written["path"])
    with pytest.raises(UsageError, match="already exists"):
        write_adapter(back.weights, back.settings, back.base, tmp_path / "mine")
    assert (tmp_path / "mine" / "mine.txt").read_text("utf-8") == "mine"
    write_adapter(back.weights, back.settings, back.base, tmp_path / "mine", overwrite=True)
    assert is_adapter(tmp_path / "mine")
    assert not (tmp_path / "mine" / "mine.txt").exists()


@pytest.mark.parametrize(("revision", "base"), [("abc", "org/name@abc"), (None, "org/name")])
def test_the_base_of_an_adapter_is_read_at_its_revision(
    revision: str | None, base: str, copied: Callable[..., Path]
) -> None:
    assert adapter_base(copied(base_model_name_or_path="org/name", revision=revision)) == base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA', which is not read here"),
        (
            {"use_dora": True},
            "DoRA has one magnitude for each output of each layer",
        ),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern.q_proj: Input should be greater"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern has the pattern '.*', and only names"),
        ({"alpha_pattern": [1]}, "alpha_pattern is a list of 1, and no table"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"rank_pattern": {"q_proj": 8}}, r"has shape \(4, \d+\), which is not of rank 8"),
        ({"layers_to_transform": [-1]}, "layers_to_transform.0: Input should be greater"),
        ({"layers_to_transform": [{}]}, "layers_to_transform.0: Input should be a valid integer"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern = 'h', which is not"),
        ({"target_parameters": "experts"}, "target_parameters is 'experts'; it has to be a list"),
        ({"modules_to_save": ["lm_head"]}, "no weights of lm_head, which modules_to_save names"),
        ({"modules_to_save": 5}, "modules_to_save is 5; it has to be a list of names"),
        ({"target_modules": ["q_proj", 1]}, "target_modules is .*; it has to be a list of names"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow = 1"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        (
            {"auto_mapping": {"base_model_class": "X", "parent_library": "antigravity"}},
            "auto_mapping = .*antigravity",
        ),
        (
            {"base_model_name_or_path": "org/name", "revision": "a b"},
            "'a b' is no branch, tag or commit",
        ),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"r": 8}, r"has shape \(4, \d+\), which is not of rank 8"),
        ({"lora_alpha": None}, "lora_alpha|alpha: Input should be a valid integer"),
        ({"lora_dropout": 1.5}, "dropout: Input should be less than 1"),
    ],
)
def test_a_config_that_asks_for_more_than_lora_is_refused(
    changes: dict[str, Any], message: str, copied: Callable[..., Path]
) -> None:
    with pytest.raises(UsageError, match=message):
        read_adapter(copied(**changes))


A, B = (f"base_model.model.model.layers.0.mlp.up_proj.lora_{x}.weight" for x in "AB")
GOOD = {A: torch.ones(4, 32), B: torch.ones(48, 4)}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "holds no adapter"),
        ({A: GOOD[A]}, "has no .*lora_B"),
        ({**GOOD, B: torch.ones(48, 5)}, r"has shape \(48, 5\), which is not of rank 4"),
        ({**GOOD, B: torch.ones(4)}, "not of rank 4"),
        ({**GOOD, A: torch.full((4, 32), torch.nan)}, "no finite numbers"),
        ({**GOOD, A: torch.ones(4, 32, dtype=torch.int64)}, "no finite numbers"),
        ({**GOOD, "lm_head.weight": torch.ones(1)}, "lm_head.weight is no weight of plain LoRA"),
    ],
)
def test_weights_that_are_no_plain_lora_are_refused(
    weights: dict[str, Tensor], message: str, copied: Callable[..., Path]
) -> None:
    with pytest.raises(UsageError, match=message):
        read_adapter(copied(weights))


def test_a_pickle_is_not_read(copied: Callable[..., Path]) -> None:
    path = copied()
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"adapter_model\.bin is a pickle, and not read"):
        read_adapter(path)
    (path / "adapter_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot be read"):
        read_adapter(path)
    (path / "adapter_config.json").write_text("[" * 100_000, "utf-8")
    with pytest.raises(UsageError, match="nested more than 64 deep"):
        read_adapter(path)
    (path / "adapter_config.json").write_text("[", "utf-8")
    with pytest.raises(UsageError, match="no adapter at"):
        read_adapter(path)
    with pytest.raises(UsageError, match="no adapter at"):
        adapter_base(path / "nowhere")


@pytest.mark.parametrize("kind", but_for_a_few(IMAGE_MODELS))
def test_plain_peft_puts_no_adapter_on_what_reads_images(kind: str, tmp_path: Path) -> None:
    """Layers of towers have names of the decoder's (q_proj, down_proj)."""
    base = write_model(kind, tmp_path / "model")
    lm = load_model(base, dtype=torch.float32, images=True).lm
    adapter = moved(add_adapter(lm, LoraSettings(rank=2, alpha=4), seed=0))
    write_adapter(adapter.parameters(), adapter.settings, base, tmp_path / "adapter")
    plain: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    read: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    names = {n.replace(".default.", ".") for n, _ in read.named_parameters() if ".lora_" in n}
    assert names == adapter.parameters().keys()
    again = read_adapter(tmp_path / "adapter")
    assert all(torch.equal(tensor, again.weights[n]) for n, tensor in adapter.parameters().items())

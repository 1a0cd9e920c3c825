"""Export: proved by reading it with plain transformers, or not there at all."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from postgrad.core.errors import RunError, UsageError
from postgrad.models import export
from postgrad.models.export import export_hf
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.save import directory_hash
from postgrad.models.settings import ModelInit, ModelType, TokenizerInit


def changed(model: Path) -> dict[str, Tensor]:
    """Weights as a learner has them: float32, tied ones once, moved from where they started."""
    lm = load_model(str(model), dtype=torch.float32).lm
    generator = torch.Generator().manual_seed(0)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in lm.named_parameters()
    }


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_the_exported_model_has_the_given_weights(
    kind: str, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = changed(fresh(kind))
    export_hf(weights, str(fresh(kind)), tmp_path / "model", dtype=torch.float32)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    parameters = dict(read.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(fresh(kind)).chat_template
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert generation.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id


def test_the_template_of_the_training_data_is_written_with_the_model(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    base = str(fresh("qwen3"))
    export_hf(changed(fresh("qwen3")), base, tmp_path / "model", dtype=torch.float32,
              chat_template="tulu")  # fmt: skip
    read = AutoTokenizer.from_pretrained(tmp_path / "model")
    asked = [{"role": "user", "content": "a"}]
    text = read.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\na\n<|assistant|>\n"
    original = AutoTokenizer.from_pretrained(base).chat_template
    export_hf(changed(fresh("qwen3")), base, tmp_path / "begun", dtype=torch.float32,
              chat_template="{{ eos_token }}{% include 'tokenizer' %}")  # fmt: skip
    begun = AutoTokenizer.from_pretrained(tmp_path / "begun")
    assert begun.chat_template == "{{ eos_token }}" + original


def test_bfloat16_is_rounded_from_the_masters(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    weights = changed(fresh("qwen3"))
    export_hf(weights, str(fresh("qwen3")), tmp_path / "model", dtype=torch.bfloat16)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16())


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    """It is written tensor by tensor, which safetensors does not offer."""
    tensors = {
        "b.é": torch.randn(3, 5),
        "a": torch.randn(2, 2, 2).bfloat16(),
        "codes": torch.arange(7, dtype=torch.uint8),
        "none": torch.empty(0, 4),
        "number": torch.tensor(2.5),
        "turned": torch.randn(4, 6).T,
    }
    export._write(tmp_path / "ours", tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_target_that_is_there_is_left_alone(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    weights, base, to = changed(fresh("qwen3")), str(fresh("qwen3")), tmp_path / "model"
    to.mkdir()
    (to / "mine.txt").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match="already exists"):
        export_hf(weights, base, to, dtype=torch.float32)
    assert (to / "mine.txt").read_text("utf-8") == "mine"
    export_hf(weights, base, to, dtype=torch.float32, overwrite=True)
    assert (to / "model.safetensors").exists()


def test_weights_of_another_model_are_refused(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    weights = changed(fresh("qwen3"))
    name = next(iter(weights))
    weights["model.other"] = weights.pop(name)
    with pytest.raises(RunError, match=rf"unknown \['model.other'\], missing \['{name}'"):
        export_hf(weights, str(fresh("qwen3")), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(1,), (16,), (32, 1)])
def test_weights_of_another_shape_are_refused_even_where_they_could_be_stretched(
    shape: tuple[int, ...], fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = changed(fresh("llama")) | {"model.norm.weight": torch.ones(shape)}
    with pytest.raises(RunError, match=r"of another shape \['model.norm.weight'\]"):
        export_hf(weights, str(fresh("llama")), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_tied_weight_is_written_once(
    kind: str, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = changed(fresh(kind))
    assert "lm_head.weight" not in weights
    export_hf(weights, str(fresh(kind)), tmp_path / "model", dtype=torch.float32)
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == weights.keys()
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    export_hf(both, str(fresh(kind)), tmp_path / "both", dtype=torch.float32)
    assert directory_hash(tmp_path / "both") == directory_hash(tmp_path / "model")


def test_a_head_of_its_own_is_written_too(tmp_path: Path) -> None:
    init = ModelInit(
        type="llama",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
        tokenizer=TokenizerInit(kind="characters"),
    )
    make_fresh(init, [], 0, tmp_path / "base")
    weights = changed(tmp_path / "base")
    export_hf(weights, str(tmp_path / "base"), tmp_path / "model", dtype=torch.float32)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], weights["lm_head.weight"])
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced_by_a_model(
    overwrite: bool, fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "model").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match="already exists"):
        export_hf(
            changed(fresh("qwen3")),
            str(fresh("qwen3")),
            tmp_path / "model",
            dtype=torch.float32,
            overwrite=overwrite,
        )
    assert (tmp_path / "model").read_text("utf-8") == "mine"


def test_a_disk_that_fills_up_leaves_what_was_there(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, base, to = changed(fresh("qwen3")), str(fresh("qwen3")), tmp_path / "model"
    export_hf(weights, base, to, dtype=torch.float32)
    before = directory_hash(to)

    def full(self: Any, folder: Path, **_: Any) -> None:
        (folder / "config.json").write_text("{", "utf-8")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(RunError, match=r"cannot be written: .*No space left on device; make room"):
        export_hf(weights, base, to, dtype=torch.float32, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert directory_hash(to) == before


def test_a_tokenizer_that_reads_back_differently_leaves_nothing_behind(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = AutoTokenizer.from_pretrained

    def wrong(path: Any, **kwargs: Any) -> Any:
        tokenizer = plain(path, **kwargs)
        if Path(path).name.endswith(".tmp"):
            tokenizer.add_tokens(["quick"])
        return tokenizer

    monkeypatch.setattr(export.AutoTokenizer, "from_pretrained", wrong)
    with pytest.raises(RunError, match="gives other tokens"):
        export_hf(
            changed(fresh("qwen3")), str(fresh("qwen3")), tmp_path / "model", dtype=torch.float32
        )
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_no_numbers_are_not_exported(
    fresh: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = changed(fresh("qwen3"))
    weights["model.norm.weight"][0] = torch.nan
    with pytest.raises(RunError, match=r"other logits \(by nan\)"):
        export_hf(weights, str(fresh("qwen3")), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_reads_back_differently_leaves_nothing_behind(
    fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a library writes a tied or renamed weight wrongly."""
    plain = AutoModelForCausalLM.from_pretrained

    def wrong(*args: Any, **kwargs: Any) -> Any:
        lm: Any = plain(*args, **kwargs)
        with torch.no_grad():
            lm.get_input_embeddings().weight.mul_(1.01)
        return lm

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", wrong)
    weights = changed_plain(fresh("llama"))
    with pytest.raises(RunError, match="gives other logits"):
        export_hf(weights, str(fresh("llama")), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def changed_plain(model: Path) -> dict[str, Tensor]:
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: p.detach().clone() for name, p in lm.named_parameters()}


class Gathered(Mapping[str, Tensor]):
    """Weights that are made when they are asked for. most: so many were there at once."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self._there: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name].clone()
        self._there.add(tensor)
        self.most = max(self.most, len(self._there))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_weights_are_gathered_one_by_one_and_written_as_transformers_does(
    kind: str, fresh: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fresh("qwen3") if kind == "qwen3" else tmp_path / "base"
    if kind != "qwen3":
        config = AutoConfig.for_model(
            kind, vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, intermediate_size=16,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        AutoTokenizer.from_pretrained(fresh("qwen3")).save_pretrained(base)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    gathered = Gathered({name: p.detach() for name, p in plain.named_parameters()})
    monkeypatch.setattr(export, "SHARD_BYTES", 4000)
    export_hf(gathered, str(base), tmp_path / "model", dtype=torch.float32)
    assert gathered.most <= 2 < len(gathered)
    written: dict[str, Tensor] = {}
    shards = [load_file(file) for file in sorted((tmp_path / "model").glob("model-*.safetensors"))]
    assert len(shards) > 3
    for shard in shards:
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= 4000
        written |= shard
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert kind == "qwen3" or any("experts.3." in name for name in written)
    configs = [(tmp_path / to / "config.json").read_text("utf-8") for to in ("model", "plain")]
    assert configs[0] == configs[1]

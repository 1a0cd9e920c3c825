"""Models that are merged: the numbers, the files, and one message for what cannot be merged."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.models.export import export_hf
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.score import RewardScale, load_score_model
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.observe.console import Console
from postgrad.tools.merge import merge
from postgrad.tools.merge_settings import Parameter, from_mergekit, requested

LAYERS = 3
LONGER = TokenizerInit(kind="characters", phrases=("<x>",))
LINEAR = "merge_method: linear\n"


def init(**more: Any) -> ModelInit:
    sizes: dict[str, Any] = {
        "type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "initializer_range": 0.2, "tokenizer": TokenizerInit(kind="characters"),
    }  # fmt: skip
    return ModelInit(**{**sizes, **more})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, a, b: one architecture, a and b with weights of their own."""
    folder = tmp_path_factory.mktemp("models")
    make_fresh(init(), [], 0, folder / "base")
    for seed, name in enumerate("ab"):
        weights = moved(folder / "base", seed)
        export_hf(weights, str(folder / "base"), folder / name, dtype=torch.float32)
    return folder


def moved(base: Path, seed: int) -> dict[str, Tensor]:
    lm = load_model(str(base), dtype=torch.float32).lm
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in lm.named_parameters()
    }


def weights_of(path: Path) -> dict[str, Tensor]:
    """As plain transformers reads them, in float64."""
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: p.detach().double() for name, p in lm.named_parameters()}


def merged(
    models: Path, to: Path, method: str, names: str = "ab", **more: Any
) -> dict[str, Tensor]:
    if "base" in more:
        more["base"] = str(models / more["base"])
    merge(requested(method, [str(models / name) for name in names], **more), to, Console("quiet"))
    return weights_of(to)


def test_a_linear_merge_is_the_mean_that_float64_gives(models: Path, tmp_path: Path) -> None:
    got = merged(models, tmp_path / "to", "linear", weights=[1.0, 3.0])
    a, b = weights_of(models / "a"), weights_of(models / "b")
    assert got.keys() == a.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, (a[name] + 3 * b[name]) / 4, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
def test_all_changes_of_a_single_model_give_that_model(
    method: str, models: Path, tmp_path: Path
) -> None:
    got = merged(models, tmp_path / "to", method, "a", base="base")
    for name, tensor in weights_of(models / "a").items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-6)


def test_ties_is_what_pefts_function_gives_of_the_changes(models: Path, tmp_path: Path) -> None:
    got = merged(models, tmp_path / "to", "ties", base="base", density=[0.4], scale=0.5)
    base, a, b = (weights_of(models / name) for name in ("base", "a", "b"))
    from peft.utils import merge_utils

    for name, tensor in got.items():
        deltas = [(model[name] - base[name]) for model in (a, b)]
        change = merge_utils.ties(deltas, torch.ones(2, dtype=torch.float64), 0.4)
        torch.testing.assert_close(tensor, base[name] + 0.5 * change, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_dare_drops_the_same_numbers_for_the_same_seed(models: Path, tmp_path: Path) -> None:
    same = [
        merged(models, tmp_path / f"to{n}", "dare_linear", base="base", density=[0.5], seed=seed)
        for n, seed in enumerate((3, 3, 4))
    ]
    assert all(torch.equal(tensor, same[1][name]) for name, tensor in same[0].items())
    assert not any(
        torch.equal(tensor, same[2][name]) for name, tensor in same[0].items() if tensor.ndim > 1
    )


def test_each_layer_has_its_own_t_in_mergekits_format(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "merge.yml"
    file.write_text(
        f"""
slices:
  - sources:
      - model: {models / "a"}
        layer_range: [0, {LAYERS}]
      - model: {models / "b"}
        layer_range: [0, {LAYERS}]
merge_method: slerp
base_model: {models / "a"}
parameters:
  t:
    - filter: self_attn
      value: [0, 1]
    - value: 1
dtype: float32
""",
        "utf-8",
    )
    assert main(["merge", str(file), "--to", str(tmp_path / "to")]) == 0
    got, a, b = (weights_of(path) for path in (tmp_path / "to", models / "a", models / "b"))
    for name, tensor in got.items():
        source = a if ".layers.0.self_attn" in name else b
        if ".layers.1.self_attn" not in name:
            torch.testing.assert_close(tensor, source[name], atol=1e-5, rtol=1e-5)
        else:
            assert (tensor - a[name]).norm() > 0.1 < (tensor - b[name]).norm()


def test_numbers_over_the_layers_lie_on_straight_lines() -> None:
    parameter = Parameter((("mlp", (0.0, 1.0, 0.5)), ("", (0.2,))))
    at = {n: parameter.at(f"model.layers.{n}.mlp.up_proj.weight", 5) for n in range(5)}
    assert at == pytest.approx({0: 0.0, 1: 0.5, 2: 1.0, 3: 0.75, 4: 0.5})
    assert parameter.at("model.layers.3.self_attn.q_proj.weight", 5) == 0.2
    ends = Parameter((("", (0.0, 1.0)),))
    assert (ends.at("model.embed_tokens.weight", 5), ends.at("model.norm.weight", 5)) == (0.0, 1.0)
    with pytest.raises(UsageError, match=r"no value is given for model\.norm"):
        Parameter((("mlp", (1.0,)),)).at("model.norm.weight", 5)


def lora(base: Path, to: Path, seed: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"],
                                 task_type="CAUSAL_LM", init_lora_weights=False)  # fmt: skip
        peft.get_peft_model(lm, config).save_pretrained(str(to))
    return to


def test_adapters_are_added_to_any_base_as_peft_adds_them(models: Path, tmp_path: Path) -> None:
    adapters = [lora(models / "base", tmp_path / f"adapter{n}", n) for n in range(2)]
    words = ["--base", str(models / "b"), "--weights", "1", "0.5", "--to", str(tmp_path / "to")]
    assert main(["merge", "adapter", *map(str, adapters), *words]) == 0
    lm: Any = AutoModelForCausalLM.from_pretrained(models / "b", dtype=torch.float32)
    named = {"first": adapters[0], "second": adapters[1]}
    model: Any = peft.PeftModel.from_pretrained(lm, str(named["first"]), adapter_name="first")
    model.load_adapter(str(named["second"]), adapter_name="second")
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.scale_layer(1.0)
            layer.set_scale("second", 0.5)
    model.base_model.set_adapter(["first", "second"])
    theirs = dict(model.merge_and_unload().named_parameters())
    for name, tensor in weights_of(tmp_path / "to").items():
        torch.testing.assert_close(tensor, theirs[name].double(), atol=1e-6, rtol=1e-6)


def test_adapters_are_merged_like_the_models_that_they_make(models: Path, tmp_path: Path) -> None:
    adapters = [lora(models / "base", tmp_path / f"adapter{n}", n) for n in range(2)]
    merge(requested("linear", list(map(str, adapters))), tmp_path / "to", Console("quiet"))
    wholes = [
        {n: p.detach().double() for n, p in
         load_model(str(adapter), dtype=torch.float32).lm.named_parameters()}
        for adapter in adapters
    ]  # fmt: skip
    for name, tensor in weights_of(tmp_path / "to").items():
        mean = (wholes[0][name] + wholes[1][name]) / 2
        torch.testing.assert_close(tensor, mean, atol=1e-6, rtol=1e-6)


def test_reward_models_are_averaged_with_their_heads(models: Path, tmp_path: Path) -> None:
    paths: list[Path] = []
    for seed, name in enumerate("ab"):
        lm = load_score_model(str(models / name), dtype=torch.float32, seed=seed).lm
        paths.append(tmp_path / name)
        export_hf(dict(lm.named_parameters()), str(models / name), paths[-1], dtype=torch.float32,
                  scale=RewardScale(1.0, 2.0))  # fmt: skip
    merge(requested("linear", list(map(str, paths))), tmp_path / "to", Console("quiet"))
    heads = [
        AutoModelForSequenceClassification.from_pretrained(path).score.weight.double()
        for path in (*paths, tmp_path / "to")
    ]
    torch.testing.assert_close(heads[2], (heads[0] + heads[1]) / 2, atol=1e-6, rtol=1e-6)
    config = json.loads((tmp_path / "to" / "config.json").read_text("utf-8"))
    assert (config["reward_mean"], config["reward_std"]) == (1.0, 2.0)
    both = [str(paths[0]), str(models / "b")]
    with pytest.raises(UsageError, match="is missing in"):
        merge(requested("linear", both), tmp_path / "mixed", Console("quiet"))


def test_the_result_is_written_in_the_dtype_asked_for_with_a_card(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["linear", str(models / "a"), str(models / "b"), "--dtype", "bfloat16", "--json"]
    assert main(["merge", *words, "--to", str(tmp_path / "to")]) == 0
    stored = load_file(tmp_path / "to" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    merged_of = json.loads(capsys.readouterr().out)["merged"]
    card = (tmp_path / "to" / "README.md").read_text("utf-8")
    assert "`linear`, normalize true" in card
    for path, content in merged_of.items():
        assert content.startswith("sha256:")
        assert f"| model | {Path(path).name} | {content} | 1 | 1 |" in card


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_hidden_layers": 2}, r"model\.layers\.2\..* is missing in .*only models of one"),
        ({"intermediate_size": 20}, r"is of shape \(24, 16\) in .* and is of shape \(20, 16\)"),
        (
            {"tokenizer": TokenizerInit(kind="characters", phrases=("<x>",))},
            "has another tokenizer",
        ),
        ({"tie_word_embeddings": False}, "ties lm_head.weight to its embeddings and"),
    ],
)
def test_models_of_another_shape_are_refused(
    more: dict[str, Any], message: str, models: Path, tmp_path: Path
) -> None:
    make_fresh(init(**more), [], 0, tmp_path / "other")
    both = [str(models / "a"), str(tmp_path / "other")]
    with pytest.raises(UsageError, match=message):
        merge(requested("linear", both), tmp_path / "to", Console("quiet"))
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ties", "a", "b"], "ties changes a base model: name it with --base"),
        (["tise", "a", "b"], "did you mean ties?"),
        (["slerp", "a"], "slerp merges exactly two models, and 1 are named"),
        (["linear"], "linear merges at least one model, and 0 are named"),
        (["linear", "a", "b", "--weights", "1"], "--weights has 1 numbers for 2 models"),
        (["linear", "a", "b", "--base", "c"], "linear has no base"),
        (["ties", "a", "--base", "b", "--density", "0"], "a density is 0"),
        (["slerp", "a", "b", "--t", "2"], "t is 2"),
        (["linear", "a", "--dtype", "int8"], "dtype 'int8' is not written"),
        (["linear", "./a", "./b"], "no model at ./a"),
    ],
)
def test_a_wrong_request_is_one_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *words, "--to", str(tmp_path / "to")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: passthrough\nmodels: [{model: a}]", "no way to merge is called"),
        ("merge_method: linear", "models is missing"),
        (LINEAR + "models: [a]", "an entry of models is 'a'"),
        (LINEAR + "models: [{model: a, parameters: {wieght: 1}}]", "did you mean weight"),
        (LINEAR + "models: [{model: a, parameters: {weight: x}}]", "a number or a list"),
        (LINEAR + "slices: [{sources: [{model: a}]}, {sources: []}]", "2 slices"),
        (
            LINEAR + "slices: [{sources: [{model: a, layer_range: [4, 8]}]}]",
            "takes parts of models",
        ),
        (LINEAR + "models: [{model: a}]\ntokenizer_source: union", "tokenizer_source"),
        (LINEAR + "model: [{model: a}]", "did you mean models"),
        ("- 1", "a table of settings is expected"),
    ],
)  # fmt: skip
def test_what_a_file_asks_for_and_is_not_done_is_one_message(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "merge.yml").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=message) as raised:
        from_mergekit(tmp_path / "merge.yml")
    assert "\n" not in str(raised.value)


def test_parameters_of_a_file_are_read_as_mergekit_reads_them(tmp_path: Path) -> None:
    (tmp_path / "merge.yml").write_text(
        """
models:
  - model: org/base
  - model: org/a
    parameters: {weight: 0.3, density: [0.2, 0.8]}
  - model: org/b
merge_method: dare_ties
base_model: org/base
parameters: {weight: 0.5, lambda: 0.9, int8_mask: true}
dtype: bfloat16
""",
        "utf-8",
    )
    asked = from_mergekit(tmp_path / "merge.yml")
    assert (asked.base, asked.models) == ("org/base", ("org/a", "org/b"))
    assert [weight.numbers() for weight in asked.weights] == [[0.3], [0.5]]
    assert [density.numbers() for density in asked.densities] == [[0.2, 0.8], [1.0]]
    assert asked.scale.numbers() == [0.9]
    assert asked.normalize
    assert asked.dtype == "bfloat16"

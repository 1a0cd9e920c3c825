"""New tokens of a model: what the tokenizer reads, and the numbers of their rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.image_directories import write_model
from helpers.model_types import make_model
from helpers.runs import lines
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.tools.add_tokens import add_tokens
from postgrad.training.start import train

QUIET = Console("quiet")


def fresh(to: Path, **more: Any) -> str:
    init = {"tokenizer": {"kind": "characters"}, "hidden_size": 16, "num_hidden_layers": 1, **more}
    make_fresh(ModelInit.model_validate(init), [], 0, to)
    return str(to)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_the_others_and_nothing_else_changes(
    tied: bool, tmp_path: Path
) -> None:
    base, to = fresh(tmp_path / "base", tie_word_embeddings=tied), tmp_path / "to"
    size = len(load_tokenizer(base))
    result = add_tokens(base, ["<tool>", "</tool>"], ["<|mark|>"], to, QUIET)
    ids = {"<tool>": size, "</tool>": size + 1, "<|mark|>": size + 2}
    assert result["tokens"] == ids
    assert result["rows"] == {"before": size, "after": size + 3}
    before, after = weights(Path(base)), weights(to)
    assert before.keys() == after.keys()
    grown = {name for name in after if after[name].shape != before[name].shape}
    assert grown == {"model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))}
    for name, old in before.items():
        assert torch.equal(after[name][: len(old)], old)
    for name in grown:
        mean = before[name].double().mean(0)
        torch.testing.assert_close(
            after[name][size:].double(), mean.expand(3, -1), atol=1e-7, rtol=0
        )
    assert json.loads((to / "config.json").read_text())["vocab_size"] == size + 3


def test_plain_transformers_reads_each_as_one_token(tmp_path: Path) -> None:
    base, to = fresh(tmp_path / "base"), tmp_path / "to"
    size = len(load_tokenizer(base))
    add_tokens(base, ["<tool>"], ["<|mark|>"], to, QUIET)
    tokenizer: Any = AutoTokenizer.from_pretrained(to)
    ids = tokenizer("a<|mark|><tool>b", add_special_tokens=False)["input_ids"]
    assert ids[1:3] == [size + 1, size]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    plain = "no new token"
    old: Any = AutoTokenizer.from_pretrained(base)
    assert tokenizer(plain)["input_ids"] == old(plain)["input_ids"]
    batch = torch.tensor([tokenizer(plain, add_special_tokens=False)["input_ids"]])
    models = [AutoModelForCausalLM.from_pretrained(path).double() for path in (base, to)]
    first, second = (model(batch).logits for model in models)
    torch.testing.assert_close(second[..., :size], first, atol=1e-12, rtol=0)
    # A mean of rows of the head gives the mean of its logits.
    torch.testing.assert_close(second[..., size], first.mean(-1), atol=1e-6, rtol=0)


def test_spare_rows_are_used_before_a_model_grows(tmp_path: Path) -> None:
    tokenizer = Path(fresh(tmp_path / "tokenizer"))
    size = len(load_tokenizer(str(tokenizer)))
    base = make_model("phi", tokenizer, size + 4, tmp_path / "base")  # its head has a bias
    added = add_tokens(str(base), ["<a>", "<b>"], [], tmp_path / "to", QUIET)
    assert added["rows"] == {"before": size + 4, "after": size + 4}
    before, after = weights(base), weights(tmp_path / "to")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        mean = before[name][:size].double().mean(0)
        torch.testing.assert_close(after[name][size].double(), mean, atol=1e-7, rtol=0)
        assert torch.equal(after[name][size + 2 :], before[name][size + 2 :])
    grown = add_tokens(str(base), [f"<{n}>" for n in range(6)], [], tmp_path / "more", QUIET)
    assert grown["rows"] == {"before": size + 4, "after": size + 6}


def test_a_model_that_reads_images_gets_new_tokens(tmp_path: Path) -> None:
    base = write_model("qwen2_5_vl", tmp_path / "base")
    size = len(load_tokenizer(base))
    assert add_tokens(base, ["<a>"], [], tmp_path / "to", QUIET)["tokens"] == {"<a>": size}
    assert (tmp_path / "to" / "preprocessor_config.json").is_file()


def test_a_new_token_is_learned(tmp_path: Path) -> None:
    add_tokens(fresh(tmp_path / "base"), ["<yes>"], [], tmp_path / "to", QUIET)
    rows = [{"question": f"{n}?", "answer": "<yes>"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "job": "sft", "run_dir": str(tmp_path / "run"), "steps": 30,
        "model": {"path": str(tmp_path / "to")}, "data": {"path": str(tmp_path / "rows.jsonl")},
        "batch": {"train_batch_size": 4}, "learner": {"lr": 2e-2, "threads": 1},
        "checkpoint": {"save_hf": True},
    }  # fmt: skip
    train(parse_recipe(recipe), QUIET)
    losses = [line["policy/nll"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] > 3.0
    assert losses[-1] < 0.5  # nats a token: <yes> and the end


@pytest.mark.parametrize(
    ("tokens", "special", "why"),
    [
        ([], [], "no token is named"),
        (["a"], [], "'a' is there already"),
        (["<x>"], ["<x>"], "'<x>' is there already"),
        ([" <x>"], [], "has white space at its ends"),
        ([], [""], "is empty"),
    ],
)
def test_tokens_that_cannot_be_added_are_told(
    tokens: list[str], special: list[str], why: str, tmp_path: Path
) -> None:
    base = fresh(tmp_path / "base")
    with pytest.raises(UsageError, match=why):
        add_tokens(base, tokens, special, tmp_path / "to", QUIET)
    assert not (tmp_path / "to").exists()


def test_a_model_with_further_matrices_of_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = Path(fresh(tmp_path / "tokenizer"))
    size = len(load_tokenizer(str(tokenizer)))
    base = make_model("gemma3n_text", tokenizer, size, tmp_path / "base")
    with pytest.raises(UsageError, match=r"embed_tokens_per_layer.weight; tokens can be added to"):
        add_tokens(str(base), ["<x>"], [], tmp_path / "to", QUIET)


def test_the_command_says_ids_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = fresh(tmp_path / "base")
    size = len(load_tokenizer(base))
    words = ["add-tokens", base, "--token", "<a>", "<b>", "--special", "<|c|>"]
    assert main([*words, "--to", str(tmp_path / "to")]) == 0
    printed = capsys.readouterr().out
    assert f"<|c|>   {size + 2}" in printed
    assert f"({size} rows became {size + 3})" in printed
    assert main([*words, "--to", str(tmp_path / "to")]) == 2
    assert "already exists: choose another directory" in capsys.readouterr().err

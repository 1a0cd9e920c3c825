"""Preferences on episodes in a whole run: a policy plays with tools, its samples become pairs, and
DPO on them is the formula on plain transformers over the policy's own turns alone.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from helpers.tool_runs import grammar_of, model_of
from postgrad.core.array_files import read_arrays
from postgrad.evaluation.pairs import sequences_of
from postgrad.learner.reference import _keys, _sha256
from postgrad.models.save import save_model
from postgrad.observe.console import Console
from postgrad.tools.generate import Extent, generate
from postgrad.tools.selection import RowSelection, select
from postgrad.training.rows import training
from postgrad.training.start import train

TURN = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", re.DOTALL)


@pytest.fixture
def episodes(
    make_recipe: MakeRecipe, console: Console, tmp_path: Path
) -> tuple[str, Any, list[dict[str, Any]]]:
    """(a model, its tokenizer, the rows of all pairs of its episodes with a calculator)."""
    path, tokenizer = model_of("qwen", tmp_path / "model")
    rl = make_recipe(
        "rl",
        model={"path": path, "init": None},
        environment={
            "type": "tools",
            "tools": ["calculator"],
            "max_turns": 3,
            "malformed_reward": -0.5,
        },
        data={"max_len": 1000},
        rollout={"lark": grammar_of("qwen", tokenizer), "max_new_tokens": 80},
        algorithm={"type": "grpo", "correction": "tis", "correction_with_filters": True},
    )
    generated = generate(rl, tmp_path / "to", console, Extent(samples=4, rows=16))
    selection = RowSelection(kind="pairs", pairs="all")
    select(generated.groups(), selection, tmp_path / "episodes.jsonl", generated.name)
    return path, tokenizer, lines(tmp_path / "episodes.jsonl")


def preferences(make_recipe: MakeRecipe, path: str, rows: Path, **more: Any) -> Any:
    """The recipe of a run with all pairs in one update."""
    count = rows.read_text("utf-8").count("\n")
    return make_recipe(
        "preference",
        model={"path": path, "init": None},
        data={"path": str(rows), "max_len": 1000},
        batch={"train_batch_size": count},
        learner={"max_grad_norm": 0.0},
        **{"steps": 1, **more},
    )


def written(tokenizer: Any, ids: np.ndarray[Any, Any], unlike: int) -> list[bool]:
    """Which tokens are the assistant's, from the text. unlike: the first token that the other side
    of the pair does not have: what was written in turns before it is shared.
    """
    text = tokenizer.decode(ids.tolist())
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    assert encoded["input_ids"] == ids.tolist()
    begin = encoded["offset_mapping"][unlike][0]
    spans = [match.span() for match in TURN.finditer(text) if match.end() > begin]
    return [any(a <= x and y <= b for a, b in spans) for x, y in encoded["offset_mapping"]]


def by_turns(lm: Any, ids: np.ndarray[Any, Any], mask: list[bool]) -> torch.Tensor:
    """The sum of the logprobs of the marked tokens, of a plain forward in float64."""
    tokens = torch.tensor(ids.tolist())
    logprobs = torch.log_softmax(lm(tokens[None]).logits[0], -1)[:-1]
    return logprobs.gather(-1, tokens[1:, None])[:, 0][torch.tensor(mask[1:])].sum()


@pytest.mark.slow
def test_dpo_on_episodes_is_the_formula_over_the_policys_own_turns(
    episodes: tuple[str, Any, list[dict[str, Any]]],
    make_recipe: MakeRecipe,
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, tokenizer, rows = episodes
    assert sum(message["role"] == "tool" for row in rows for message in row["chosen"]) > 2
    assert sum(message["role"] == "tool" for row in rows for message in row["rejected"]) > 2
    other = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(1)
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    save_model(other, tokenizer, tmp_path / "other")
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    reference = {"model": {"path": str(tmp_path / "other")}}
    recipe = preferences(make_recipe, path, tmp_path / "episodes.jsonl", reference=reference)
    train(recipe, console)
    pairs = training(recipe, tokenizer).all()
    assert len(pairs) == len(rows)
    load = AutoModelForCausalLM.from_pretrained
    policy, ref = (load(p, dtype=torch.float64).eval() for p in (path, tmp_path / "other"))
    sides: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in pairs:
        both = pair.chosen, pair.rejected
        shortest = min(map(len, both))
        unlike = int(np.flatnonzero(both[0][:shortest] != both[1][:shortest])[0])
        for ids, mask in zip(both, (pair.chosen_mask, pair.rejected_mask), strict=True):
            own = written(tokenizer, ids, unlike)
            assert mask.tolist() == own
            with torch.no_grad():
                kept = by_turns(ref, ids, own)
            sides.append((by_turns(policy, ids, own), kept))
    files = sorted((tmp_path / "cache" / "reference").glob("*.safetensors"))
    kept = np.concatenate([read_arrays(file, _sha256)["logprobs"] for file in files])
    marked = sequences_of(pairs)
    once = np.unique(_keys(marked), return_index=True)[1]  # of equal sequences the first is kept
    marked = marked.take(np.sort(once))
    assert not kept[~marked.loss_mask.values].any()
    expected = [sides[place][1].item() for place in np.sort(once).tolist()]
    assert marked.tokens.like(kept).sums() == pytest.approx(expected, rel=1e-5)
    ratio = torch.stack([own - of_reference for own, of_reference in sides])
    loss = -logsigmoid(recipe.algorithm.beta * (ratio[0::2] - ratio[1::2])).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert line["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert line["samples"] == len(rows)

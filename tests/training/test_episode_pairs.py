"""Preferences on episodes in a whole run: a policy plays with tools, its samples become pairs, and
DPO on them is the formula on plain transformers over the policy's own turns alone.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.chat import chat_tokenizer
from helpers.chat_families import QWEN3
from helpers.model_types import make_model
from helpers.runs import lines
from helpers.tiny_runs import MODEL, MakeRecipe
from helpers.tool_runs import grammar_of, model_of
from postgrad.core.array_files import read_arrays
from postgrad.evaluation.pairs import sequences_of
from postgrad.learner.reference import _keys, _sha256
from postgrad.models.fresh import _config
from postgrad.models.save import save_model
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.tools.export import export
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
    sections = {
        "model": {"path": path, "init": None},
        "data": {"path": str(rows), "max_len": 1000},
        "batch": {"train_batch_size": len(lines(rows))},
        "learner": {"max_grad_norm": 0.0},
    }
    return make_recipe("preference", **{**sections, "steps": 1, **more})


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
            is_own = written(tokenizer, ids, unlike)
            assert mask.tolist() == is_own
            with torch.no_grad():
                kept = by_turns(ref, ids, is_own)
            sides.append((by_turns(policy, ids, is_own), kept))
    files = sorted((tmp_path / "cache" / "reference").glob("*.safetensors"))
    kept = np.concatenate([read_arrays(file, _sha256)["logprobs"] for file in files])
    marked = sequences_of(pairs)
    once = np.unique(_keys(marked), return_index=True)[1]  # of equal sequences the first is kept
    marked = marked.take(np.sort(once))
    assert not kept[~marked.loss_mask.values].any()
    expected = [sides[place][1].item() for place in np.sort(once).tolist()]
    assert marked.tokens.like(kept).sums() == pytest.approx(expected, rel=1e-5)
    ratio = torch.stack([of_policy - of_reference for of_policy, of_reference in sides])
    line = compared_with_the_formula(recipe, policy, ratio)
    assert line["samples"] == len(rows)


def compared_with_the_formula(recipe: Any, policy: Any, ratio: torch.Tensor) -> dict[str, Any]:
    """The metrics of a run's only step, whose loss and gradient are those of DPO. ratio: of each
    side the difference of policy and reference, chosen and rejected in turn.
    """
    loss = -logsigmoid(recipe.algorithm.beta * (ratio[0::2] - ratio[1::2])).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert line["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    return line


def thinking_model(folder: Path, seed: int) -> tuple[str, Any]:
    """A model whose chat template drops the thoughts of earlier turns, and its tokenizer."""
    tokenizer = chat_tokenizer(QWEN3.template, QWEN3.special)
    init = ModelInit.model_validate({**MODEL["init"], "max_position_embeddings": 512})
    torch.manual_seed(seed)
    lm: Any = AutoModelForCausalLM.from_config(_config(init, tokenizer), dtype=torch.float32)
    for weight in lm.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    save_model(lm, tokenizer, folder)
    return str(folder), tokenizer


def thinking_rows(path: Path) -> Path:
    """Games of two and three turns, which part at once or where the environment replies."""
    rows: list[dict[str, Any]] = []
    for number in range(4):
        answers = [f"<think>\n{word}\n</think>\n\n{number}" for word in ("up", "lo", "far")]
        first, second, third = ({"role": "assistant", "content": text} for text in answers)
        lower, higher = ({"role": "user", "content": word} for word in ("lower", "higher"))
        rows.append({
            "prompt": "guess",
            "chosen": [first, lower, second, higher, third][: 5 - number % 2],
            "rejected": [third if number < 2 else first, higher, second],
        })  # fmt: skip
        rows[-1]["chosen"] += [] if rows[-1]["chosen"][-1]["role"] == "assistant" else [first]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def texts_of(tokenizer: Any, row: dict[str, Any], side: str) -> list[tuple[list[int], list[bool]]]:
    """The texts of a side, as Qwen3's template writes each turn: earlier ones have no thoughts."""
    texts: list[tuple[list[int], list[bool]]] = []
    other = row["rejected" if side == "chosen" else "chosen"]
    parted = [a != b for a, b in zip(row[side], other, strict=False)].index(True)
    read = "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
    for number, message in enumerate(row[side]):
        if message["role"] == "user":
            read += f"\n<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
            continue
        written = f"{message['content']}<|im_end|>"
        if number >= parted:
            parts = [tokenizer(text)["input_ids"] for text in (read, written)]
            texts.append(([*parts[0], *parts[1]], [n == 1 for n in (0, 1) for _ in parts[n]]))
        read += written.partition("</think>\n\n")[2]
    return texts


def by_texts(lm: Any, texts: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    return torch.stack([by_turns(lm, np.array(ids), mask) for ids, mask in texts]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("micro", [None, 1])
def test_dpo_where_a_template_drops_thoughts_is_the_formula_over_every_text(
    micro: int | None, make_recipe: MakeRecipe, console: Console, tmp_path: Path
) -> None:
    path, tokenizer = thinking_model(tmp_path / "model", 0)
    other, _ = thinking_model(tmp_path / "other", 1)
    file = thinking_rows(tmp_path / "rows.jsonl")
    recipe = preferences(make_recipe, path, file, reference={"model": {"path": other}})
    batch = recipe.batch.model_copy(update={"micro_train_batch_size": micro})
    recipe = recipe.model_copy(update={"batch": batch} if micro else {})
    train(recipe, console)
    load = AutoModelForCausalLM.from_pretrained
    policy, ref = (load(p, dtype=torch.float64).eval() for p in (path, other))
    ratios: list[torch.Tensor] = []
    for row in lines(file):
        for side in ("chosen", "rejected"):
            texts = texts_of(tokenizer, row, side)
            assert len(texts) >= (1 if side == "rejected" else 2)
            of_policy, of_reference = by_texts(policy, texts), by_texts(ref, texts)
            ratios.append(of_policy - of_reference.detach())
    ratio = torch.stack(ratios)
    compared_with_the_formula(recipe, policy, ratio)


@pytest.mark.slow
def test_a_reward_model_scores_the_last_text_of_each_side(
    make_recipe: MakeRecipe, console: Console, tmp_path: Path
) -> None:
    path, tokenizer = thinking_model(tmp_path / "model", 0)
    file = thinking_rows(tmp_path / "rows.jsonl")
    recipe = make_recipe(
        "reward",
        model={"path": path, "init": None},
        data={"path": str(file), "max_len": 500, "held_out": "none"},
        eval={"path": str(file)},
        batch={"train_batch_size": 4},
        steps=1,
        learner={"lr": 1e-12},
    )
    train(recipe, console)
    to = export(Path(recipe.run_dir), "latest", tmp_path / "reward")
    lm: Any = AutoModelForSequenceClassification.from_pretrained(to, dtype=torch.float64)
    scores = [
        lm.score(lm.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()
        for row in lines(file)
        for side in ("chosen", "rejected")
        for ids, _ in texts_of(tokenizer, row, side)[-1:]
    ]
    ahead = torch.tensor(scores[0::2]) - torch.tensor(scores[1::2])
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    loss = -logsigmoid(ahead).mean()
    assert line["reward_model/loss"] == pytest.approx(loss.item(), rel=1e-4)
    result = lines(Path(recipe.run_dir) / "eval.jsonl")[-1]
    assert result["reward_chosen"] == pytest.approx(np.mean(scores[0::2]), rel=1e-3)
    assert result["reward_rejected"] == pytest.approx(np.mean(scores[1::2]), rel=1e-3)


@pytest.mark.slow
def test_where_a_model_cannot_share_what_texts_begin_with_each_of_them_counts(
    make_recipe: MakeRecipe, console: Console, tmp_path: Path
) -> None:
    """Mamba's states cannot go on behind a shared beginning: every text is computed whole, also
    where it is read for the reference or an evaluation. At the limit of its longest side a pair
    fits; one token less drops its row.
    """
    path, tokenizer = thinking_model(tmp_path / "thinking", 0)
    make_model("mamba", Path(path), len(tokenizer), tmp_path / "model")
    file = thinking_rows(tmp_path / "rows.jsonl")
    row = lines(file)[0]
    sides = [texts_of(tokenizer, row, side) for side in ("chosen", "rejected")]
    longest = max(sum(len(ids) for ids, _ in texts) for texts in sides)
    computed: dict[int, float] = {}
    for limit in (longest, longest - 1):
        recipe = preferences(
            make_recipe,
            str(tmp_path / "model"),
            file,
            run_dir=f"of-{limit}",
            data={"path": str(file), "max_len": limit, "held_out": "none"},
            eval={"path": str(file)},
            batch={"train_batch_size": 1, "micro_train_tokens": 2 * limit},
        )
        train(recipe, console)
        (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
        kept = training(recipe, tokenizer).all()
        assert (0 in {pair.row for pair in kept}) == (limit == longest)
        computed[limit] = line["policy/computed_tokens"]
    assert all(tokens <= 2 * limit for limit, tokens in computed.items())

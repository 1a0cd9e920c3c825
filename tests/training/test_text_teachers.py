"""Whole runs with a teacher of another tokenizer, which grades segments of text."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines, tensors
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

__all__ = ["fake_ranks"]

NO_EVAL = {"every": 0, "at_start": False, "at_end": False}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}-> {% endif %}"
)
MakeTaught = Callable[..., Recipe]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that reads words in pairs of letters, behind a chat template of its own."""
    path = tmp_path_factory.mktemp("pairs") / "model"
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [f"{a}{b}" for a in letters for b in letters] * 2
    phrases = MODEL["init"]["tokenizer"]["phrases"]
    tokenizer = {"vocab_size": 700, "phrases": phrases}
    init = {**MODEL["init"], "initializer_range": 0.5, "tokenizer": tokenizer}
    make_fresh(ModelInit.model_validate(init), texts, 3, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def make_taught(make_recipe: MakeRecipe, models: Callable[[int], str]) -> MakeTaught:
    """make_taught("run", PATH, **changes): a student that learns from a teacher's text grades."""

    def make(run: str, teacher: str | dict[str, Any], **changes: Any) -> Recipe:
        table = {"align": "text", "model": {"path": teacher}}
        sections: dict[str, Any] = {
            "model": {"path": models(1), "init": None},
            "teacher": table if isinstance(teacher, str) else teacher,
            "algorithm": {"type": "on_policy_distillation"},
            "sentinels": {"truncation": "off"},
            "eval": NO_EVAL,
        }
        return make_recipe("rl", run, **{**sections, **changes})

    return make


def logged(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def samples(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "samples.jsonl")


def same_bits(first_recipe: Recipe, second_recipe: Recipe, step: int) -> bool:
    first, second = (tensors(recipe.run_dir, step) for recipe in (first_recipe, second_recipe))
    return all(first[name].equal(second[name]) for name in first)


def logprobs_of(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """In float64, by transformers' own model."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0].double()
    rows = logits.log_softmax(-1)[len(prompt) - 1 :]
    return [float(row[token]) for row, token in zip(rows, answer, strict=False)]


def test_every_token_of_a_segment_has_the_segment_s_difference_of_logprobs(
    make_taught: MakeTaught, models: Callable[[int], str], pairs: str
) -> None:
    """In float64, from the texts of samples.jsonl: tokens of the student are letters, so that the
    teacher's offsets say where segments end.
    """
    recipe = make_taught("run", pairs, steps=1, rollout={"max_new_tokens": 12})
    stream = io.StringIO()
    train(recipe, Console("plain", stream))
    output = " ".join(stream.getvalue().split())
    share = r"teacher has another tokenizer: it grades segments of text, of the first questions'"
    assert re.search(rf"{share} tokens \d+\.\d% alone, \d+\.\d% with others", output)
    theirs, student_tokenizer = load_tokenizer(pairs), load_tokenizer(models(1))
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (pairs, models(1))
    )
    checked, ended, sums = 0, 0, [0.0, 0]
    for sample in samples(recipe):
        (turn,) = sample["turns"]
        ids, end = turn["token_ids"], sample["finish_reason"] == "stop"
        body = ids[:-1] if end else ids
        if any(len(student_tokenizer.decode([token])) != 1 for token in body):
            continue  # a special token or a phrase among letters: no text, or several letters
        asked = theirs.encode(f"user: {sample['question']}<|endoftext|>-> ")
        read = theirs(sample["text"], return_offsets_mapping=True, split_special_tokens=True)
        tokens = read["input_ids"] + (
            [theirs.convert_tokens_to_ids("<|endoftext|>")] if end else []
        )
        ends = [stop for _, stop in read["offset_mapping"]]
        ends += [len(body) + 1] * end
        grades = logprobs_of(teacher, asked, tokens)
        before = logprobs_of(student, sample["prompt_token_ids"], ids)
        wanted = [0.0] * len(ids)
        start = 0
        for grade, stop in zip(grades, ends, strict=True):
            wanted[start:stop] = [grade - sum(before[start:stop])] * (stop - start)
            sums = [sums[0] + grade - sum(before[start:stop]), sums[1] + stop - start]
            start = stop
        np.testing.assert_allclose(sample["advantages"], wanted, atol=2e-5)
        checked, ended = checked + 1, ended + end
    assert checked > 10
    (step,) = logged(recipe)
    assert step["teacher/reverse_kl"] == pytest.approx(-sums[0] / sums[1], rel=0.3)
    shares = [step[f"teacher/{name}_fraction"] for name in ("alone", "segment", "unread")]
    assert all(share > 0 for share in shares[:2])
    assert sum(shares) == pytest.approx(1.0)


def test_with_the_student_s_tokenizer_text_and_tokens_have_the_same_bits(
    make_taught: MakeTaught, models: Callable[[int], str], console: Console
) -> None:
    text, tokens = (
        make_taught(align, {"align": align, "model": {"path": models(2)}}, steps=2)
        for align in ("text", "tokens")
    )
    for recipe in (text, tokens):
        train(recipe, console)
    assert same_bits(text, tokens, 2)
    for text_sample, token_sample in zip(samples(text), samples(tokens), strict=True):
        assert text_sample["advantages"] == token_sample["advantages"]
    assert [step["teacher/alone_fraction"] for step in logged(text)] == [1.0, 1.0]
    assert "teacher/alone_fraction" not in logged(tokens)[0]


@pytest.mark.slow
def test_a_student_comes_nearer_to_a_teacher_of_other_tokens(
    make_taught: MakeTaught, pairs: str, console: Console
) -> None:
    recipe = make_taught("run", pairs, steps=16)
    train(recipe, console)
    for metric, sign in (("teacher/reverse_kl", -1.0), ("teacher/logprob", 1.0)):
        values = [sign * step[metric] for step in logged(recipe)]
        assert np.mean(values[-3:]) > np.mean(values[:3]) + 0.3


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    make_taught: MakeTaught, pairs: str, console: Console, tmp_path: Path
) -> None:
    teacher = str(tmp_path / "teacher")
    shutil.copytree(pairs, teacher)
    uninterrupted, halves = make_taught("whole", teacher), make_taught("halves", teacher, steps=1)
    train(uninterrupted, console)
    train(halves, console)
    train(make_taught("halves", teacher), console)
    assert same_bits(uninterrupted, halves, 3)
    (Path(teacher) / "chat_template.jinja").write_text(TEMPLATE.replace("->", "="))
    with pytest.raises(UsageError, match="teacher"):
        train(make_taught("halves", teacher, steps=4), console)


@pytest.mark.slow
def test_on_a_group_of_one_rank_a_run_has_the_bits_of_this_process(
    make_taught: MakeTaught, pairs: str, console: Console, fake_ranks: list[FakeGroup]
) -> None:
    few = {"steps": 2, "checkpoint": {"save_steps": 1}}
    here = make_taught("here", pairs, **few)
    there = make_taught("there", pairs, cluster={"type": "ray"}, **few)
    train(here, console)
    train(there, console)
    assert len(fake_ranks) == 1
    assert same_bits(here, there, 2)


@pytest.mark.slow
def test_datasets_have_teachers_of_tokens_and_of_text(
    make_taught: MakeTaught,
    models: Callable[[int], str],
    pairs: str,
    console: Console,
    tmp_path: Path,
) -> None:
    sets, teachers = list[Any](), list[Any]()
    for name, path in (("a", models(2)), ("b", pairs)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"question": f"{name}{n}"}) + "\n" for n in range(9)))
        sets.append({"path": str(file), "count": 8})
        align = "text" if path == pairs else "tokens"
        teachers.append({"datasets": [file.name], "align": align, "model": {"path": path}})
    data = {"path": "", "sets": sets, "answer": "", "max_len": 48}
    recipe = make_taught("run", {"model": {}, "sets": teachers}, steps=2, data=data)
    train(recipe, console)
    assert {sample["dataset"] for sample in samples(recipe)} == {"a.jsonl", "b.jsonl"}
    for sample in samples(recipe):
        gaps = sample["advantages"]
        assert any(gaps), sample
    assert 0.5 < logged(recipe)[0]["teacher/alone_fraction"] < 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": {"align": "text", "model": {}, "server": True}}, "which a server does not"),
        ({"data": {"hint": "It is {answer}."}}, "leave data.hint out"),
        ({"environment": {"type": "calculator"}}, "replies between several"),
        ({"rollout": {"source": "replay", "replay_path": "x"}}, "recorded samples have none"),
        ({"rollout": {"stop": ["### Instruction:"]}}, "would grade them down: end answers with"),
        ({"teacher": {"align": "text", "model": {}, "sets": "x"}}, r"names none \(model\.path\)"),
    ],
)
def test_what_text_cannot_do_is_refused(
    changes: dict[str, Any], message: str, make_taught: MakeTaught
) -> None:
    teacher: Any = changes.pop("teacher", "x")
    if isinstance(teacher, dict):
        if teacher.pop("server", False):
            teacher["server"] = {"base_url": "http://127.0.0.1:1/v1"}
        if "sets" in teacher:
            teacher["sets"] = [{"datasets": ["a"], "model": {"path": "x"}}]
    with pytest.raises(UsageError, match=rf"teacher\.align: .*{message}"):
        make_taught("run", teacher, **changes)


def test_sft_names_what_can_learn_from_other_tokens(
    make_recipe: MakeRecipe, models: Callable[[int], str], pairs: str, console: Console
) -> None:
    def taught(**teacher: Any) -> Recipe:
        table = {"model": {"path": pairs}, **teacher}
        model = {"path": models(1), "init": None}
        return make_recipe("sft", model=model, teacher=table, algorithm={"type": "distillation"})

    with pytest.raises(UsageError, match=r"teacher\.align: .*whole distributions over one voc"):
        taught(align="text")
    pattern = r'teacher\.model\.path: .*job = "rl" with "on_policy_distillation" and teacher\.align'
    with pytest.raises(UsageError, match=pattern):
        train(taught(), console)

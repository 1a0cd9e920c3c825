"""Whole runs that the policy, or its reference, grades with the hints of rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines, tensors
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

__all__ = ["fake_ranks"]

Models = Callable[[int], str]
HINT = "it is {answer}"
NO_EVAL = {"every": 0, "at_start": False, "at_end": False}
SHARED: dict[str, Any] = {"steps": 2, "eval": NO_EVAL, "sentinels": {"truncation": "off"}}


@pytest.fixture
def make_graded(make_recipe: MakeRecipe, models: Models) -> MakeRecipe:
    """make_graded("policy", "run", **changes): a run that "policy", "reference" or "teacher" (a
    second copy of the policy's start) grades.
    """

    def make(by: str, run: str, **changes: Any) -> Recipe:
        sections = {
            "model": {"path": models(1), "init": None},
            "algorithm": {"type": "on_policy_distillation", "graded_by": by},
            "data": {"hint": HINT},
            **SHARED,
            **({"teacher": {"model": {"path": models(1)}}} if by == "teacher" else {}),
        }
        return make_recipe("rl", run, **{**sections, **changes})

    return make


def logged(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def samples(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "samples.jsonl")


@pytest.fixture
def plain_logprobs(models: Models) -> Callable[[list[int], list[int]], list[float]]:
    """Of an answer's tokens behind a prompt: a plain forward pass in float64."""
    lm: Any = AutoModelForCausalLM.from_pretrained(models(1), dtype=torch.float64)

    def logprobs(prompt: list[int], answer: list[int]) -> list[float]:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            every = lm(input_ids=ids).logits[0].log_softmax(-1)
        return every[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()

    return logprobs


def test_an_advantage_is_what_the_hint_changes_in_the_policy_s_own_logprob(
    make_graded: MakeRecipe, models: Models, console: Console, plain_logprobs: Any
) -> None:
    """Each sample alone."""
    recipe = make_graded("policy", "run", steps=1)
    train(recipe, console)
    tokenizer = load_tokenizer(models(1))
    written = samples(recipe)
    assert len(written) == 16
    for sample in written:
        text = tokenizer.decode(sample["prompt_token_ids"])
        question = sample["question"]
        hinted = text.replace(question, f"{question}\n\nit is {sample['answer']}")
        assert hinted != text
        read = tokenizer.encode(hinted, add_special_tokens=False)
        answer = [token for turn in sample["turns"] for token in turn["token_ids"]]
        graded = plain_logprobs(read, answer)
        own_logprobs = plain_logprobs(sample["prompt_token_ids"], answer)
        wanted = [a - b for a, b in zip(graded, own_logprobs, strict=True)]
        assert sample["advantages"] == pytest.approx(wanted, abs=2e-5)
        assert any(abs(value) > 1e-3 for value in wanted)


def test_a_right_answer_of_the_group_is_what_the_policy_reads_as_a_hint(
    make_graded: MakeRecipe, models: Models, console: Console, plain_logprobs: Any
) -> None:
    """Each sample alone. Every answer that ended counts as right; a group without another such has
    advantages of 0.
    """
    right: Any = {"correct_at": 0.0, "type": "on_policy_distillation", "graded_by": "policy"}
    data = {"hint": "say {group.answer}!"}
    recipe = make_graded("policy", "run", steps=1, algorithm=right, data=data)
    train(recipe, console)
    tokenizer = load_tokenizer(models(1))
    written, graded = samples(recipe), 0
    for sample in written:
        ended = [
            other["text"]
            for other in written
            if other["ticket"] == sample["ticket"] and other["finish_reason"] == "stop"
            if other["sample"] != sample["sample"] and other["text"]
        ]
        answer = [token for turn in sample["turns"] for token in turn["token_ids"]]
        if not ended:
            assert sample["advantages"] == [0.0] * len(answer)
            continue
        graded += 1
        question, text = sample["question"], tokenizer.decode(sample["prompt_token_ids"])
        hinted = text.replace(question, f"{question}\n\nsay {ended[0]}!")
        theirs = plain_logprobs(tokenizer.encode(hinted, add_special_tokens=False), answer)
        own_logprobs = plain_logprobs(sample["prompt_token_ids"], answer)
        wanted = [a - b for a, b in zip(theirs, own_logprobs, strict=True)]
        assert sample["advantages"] == pytest.approx(wanted, abs=2e-5)
    assert 0 < graded < len(written)
    assert logged(recipe)[0]["teacher/graded_fraction"] == graded / len(written)


@pytest.mark.slow
def test_the_reference_grades_as_a_teacher_of_the_same_weights_does(
    make_graded: MakeRecipe, console: Console
) -> None:
    reference, teacher = make_graded("reference", "reference"), make_graded("teacher", "teacher")
    policy = make_graded("policy", "policy")
    for recipe in (reference, teacher, policy):
        train(recipe, console)
    reference_tensors, teacher_tensors = tensors(reference.run_dir, 2), tensors(teacher.run_dir, 2)
    assert all(reference_tensors[name].equal(teacher_tensors[name]) for name in reference_tensors)
    by_reference, by_policy = logged(reference), logged(policy)
    assert by_reference[0]["teacher/reverse_kl"] == by_policy[0]["teacher/reverse_kl"] != 0.0
    assert by_reference[1]["teacher/reverse_kl"] != by_policy[1]["teacher/reverse_kl"]
    assert "policy/kl" not in by_reference[0]  # its logprobs of the samples are not asked for


@pytest.mark.slow
@pytest.mark.parametrize("following", [{"ema_decay": 0.5}, {"refresh_steps": 1}])
def test_a_reference_that_follows_the_policy_grades_with_what_it_has_become(
    following: dict[str, Any], make_graded: MakeRecipe, console: Console
) -> None:
    still = make_graded("reference", "still")
    moving = make_graded("reference", "moving", reference=following)
    policy = make_graded("policy", "policy")
    for recipe in (still, moving, policy):
        train(recipe, console)
    values = [[step["teacher/logprob"] for step in logged(r)] for r in (still, moving, policy)]
    assert values[0][0] == values[1][0] == values[2][0]
    assert values[1][1] != values[0][1]
    if "refresh_steps" in following:  # the weights behind the step before: the policy's
        assert values[1][1] == pytest.approx(values[2][1], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["policy", "reference"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    by: str, make_graded: MakeRecipe, console: Console
) -> None:
    moves = {"reference": {"ema_decay": 0.5}} if by == "reference" else {}
    uninterrupted = make_graded(by, "whole", steps=3, **moves)
    train(uninterrupted, console)
    train(make_graded(by, "halves", steps=1, **moves), console)
    halves = make_graded(by, "halves", steps=3, **moves)
    train(halves, console)
    full_tensors, resumed_tensors = tensors(uninterrupted.run_dir, 3), tensors(halves.run_dir, 3)
    assert all(full_tensors[name].equal(resumed_tensors[name]) for name in full_tensors)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["policy", "reference"])
def test_on_a_group_of_one_rank_a_run_has_the_bits_of_this_process(
    by: str, make_graded: MakeRecipe, console: Console, fake_ranks: list[FakeGroup]
) -> None:
    here, there = make_graded(by, "here"), make_graded(by, "there", cluster={"type": "ray"})
    train(here, console)
    train(there, console)
    assert len(fake_ranks) == 1
    local_tensors, ranked_tensors = tensors(here.run_dir, 2), tensors(there.run_dir, 2)
    assert all(local_tensors[name].equal(ranked_tensors[name]) for name in local_tensors)


@pytest.mark.slow
def test_with_an_adapter_the_reference_is_the_weights_under_it(
    make_graded: MakeRecipe, models: Models, console: Console
) -> None:
    model = {"path": models(1), "init": None, "lora": {"rank": 4}}
    recipe = make_graded("reference", "run", model=model)
    train(recipe, console)
    values = [step["teacher/reverse_kl"] for step in logged(recipe)]
    assert all(value != 0.0 for value in values)


@pytest.mark.slow
def test_each_of_several_datasets_has_its_hint(
    make_graded: MakeRecipe, models: Models, console: Console
) -> None:
    """At first the reference is the policy: without a hint its grades are the policy's logprobs."""
    sets = list[Any]()
    for name, hint in (("a", "{answer}"), ("b", "")):
        file = Path(models(1)).parent / f"{name}.jsonl"
        rows = [{"question": f"{name}{n}", "answer": str(n)} for n in range(9)]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sets.append({"path": str(file), "count": 8, "hint": hint})
    recipe = make_graded(
        "reference", "run", steps=1, data={"path": "", "sets": sets, "max_len": 48}
    )
    train(recipe, console)
    moved: dict[str, float] = {}
    for sample in samples(recipe):
        most = max(map(abs, sample["advantages"]))
        moved[sample["dataset"]] = max(most, moved.get(sample["dataset"], 0.0))
    assert moved["a.jsonl"] > 1e-3 > 1e-5 > moved["b.jsonl"]


@pytest.mark.parametrize(
    ("by", "changes", "message"),
    [
        ("policy", {"data": {"hint": ""}}, r"data\.hint: the policy would grade its samples"),
        ("policy", {"data": {"hint": "no column"}}, r"data\.hint: it names no column"),
        ("policy", {"algorithm": {"type": "grpo"}}, r"data\.hint: is read by what grades"),
        ("policy", {"eval": {"hint": "{answer}"}}, r"eval.*hint: is of training samples"),
        ("policy", {"teacher": {"model": {"path": "x"}}}, r"teacher: this algorithm asks no"),
        (
            "policy",
            {"rollout": {"source": "replay", "replay_path": "x"}},
            r"data\.hint: is not among recorded samples",
        ),
        ("policy", {"reference": {"ema_decay": 0.9}}, r"reference: nothing reads it"),
        (
            "policy",
            {"data": {"hint": "{group.answer}"}, "batch": {"n_samples_per_prompt": 1}},
            r"n_samples_per_prompt: 1 leaves no other sample whose answer \{group\.answer\}",
        ),
        (
            "policy",
            {"data": {"hint": "{group.answer}"}, "environment": {"type": "guess_number"}},
            r"data\.hint: \{group\.answer\} is an answer of one turn",
        ),
        (
            "policy",
            {"data": {"hint": "{group.answer} {group.answer}"}},
            r"data\.hint.*may stand in it once",
        ),
        (
            "policy",
            {"algorithm": {"type": "on_policy_distillation", "correct_at": 0.5}},
            r"algorithm\.correct_at: says which samples \{group\.answer\} of data\.hint may show",
        ),
    ],
)
def test_what_cannot_be_graded_is_an_error_of_the_recipe(
    by: str, changes: dict[str, Any], message: str, make_graded: MakeRecipe
) -> None:
    with pytest.raises(UsageError, match=message):
        make_graded(by, "run", **changes)


def test_a_hint_of_sft_is_an_error_of_the_recipe(make_recipe: MakeRecipe) -> None:
    with pytest.raises(UsageError, match=r"data\.hint: is read by what grades"):
        make_recipe("sft", data={"hint": HINT})

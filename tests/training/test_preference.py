"""Preferences in the loop: a whole step against plain transformers and the papers' formulas in
float64, its cache of reference logprobs, and resume.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from helpers.jobs import write_pairs
from helpers.runs import assert_same_run, lines, train_until_killed
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences
from postgrad.data.mixture import training_rows
from postgrad.data.overlap import held_out
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.settings import PairSettings
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.export import export
from postgrad.training.pairs import PreferenceJob, mismatched
from postgrad.training.start import resume, train

Models = Callable[[int], str]
ROWS = 6  # of one update, so that every row is in it


def metrics(recipe: Any) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def plain(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def answer_logprobs(lm: Any, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Tensor]:
    """[tokens of the answer] of each row, in a right-padded batch: answers go on to the end."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logprobs = torch.log_softmax(lm(ids, attention_mask=seen).logits, -1)
    token_logprobs = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    spans = zip(token_logprobs, rows, starts, strict=True)
    return [row_logprobs[start - 1 : len(row) - 1] for row_logprobs, row, start in spans]


def sums(of: list[Tensor]) -> Tensor:
    return torch.stack([answer.sum() for answer in of])


def means(of: list[Tensor]) -> Tensor:
    return torch.stack([answer.mean() for answer in of])


def dpo(policy: list[Tensor], ref: list[Tensor]) -> Tensor:
    ratio = sums(policy) - sums(ref)
    return -logsigmoid(0.3 * (ratio[0::2] - ratio[1::2])).mean()


def cdpo(policy: list[Tensor], ref: list[Tensor]) -> Tensor:
    ratio = sums(policy) - sums(ref)
    h = 0.3 * (ratio[0::2] - ratio[1::2])
    nll = -means(policy)[0::2].mean()
    return (-0.9 * logsigmoid(h) - 0.1 * logsigmoid(-h)).mean() + 0.5 * nll


def ipo(policy: list[Tensor], ref: list[Tensor]) -> Tensor:
    ratio = means(policy) - means(ref)
    return ((ratio[0::2] - ratio[1::2] - 1 / (2 * 0.3)) ** 2).mean()


def simpo(policy: list[Tensor], ref: list[Tensor]) -> Tensor:
    mean = means(policy)
    return -logsigmoid(2.0 * (mean[0::2] - mean[1::2]) - 0.5).mean()


def orpo(policy: list[Tensor], ref: list[Tensor]) -> Tensor:
    mean = means(policy)
    odds = mean - torch.log1p(-mean.exp())
    return (-mean[0::2] - 0.2 * logsigmoid(odds[0::2] - odds[1::2])).mean()


LOSSES: dict[str, tuple[dict[str, Any], Callable[[list[Tensor], list[Tensor]], Tensor]]] = {
    "dpo": ({"type": "dpo", "beta": 0.3}, dpo),
    "cdpo with nll": ({"type": "dpo", "beta": 0.3, "label_smoothing": 0.1, "nll_coef": 0.5}, cdpo),
    "ipo": ({"type": "ipo", "beta": 0.3}, ipo),
    "simpo": ({"type": "simpo", "beta": 2.0, "gamma": 0.5}, simpo),
    "orpo": ({"type": "orpo", "odds_coef": 0.2}, orpo),
}


def one_step(make_recipe: Any, models: Models, algorithm: dict[str, Any], **more: Any) -> Any:
    """Policy and reference are two models: their logprobs differ from the first step on."""
    recipe = make_recipe(
        "preference",
        model={"path": models(1), "init": None},
        algorithm=algorithm,
        steps=1,
        batch={"train_batch_size": ROWS},
        learner={"max_grad_norm": 0.0},
        **more,
    )
    write_pairs(Path(recipe.data.path), rows=ROWS)
    return recipe


def check_step(recipe: Any, loss: Tensor, lm: Any) -> None:
    """The logged loss and the norm of its gradient are those of `loss` on `lm`."""
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters() if p.grad is not None]).norm()
    (line,) = metrics(recipe)
    assert line["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert line["samples"] == ROWS


@pytest.mark.parametrize(
    ("name", "micro"),
    [
        pytest.param(name, micro, marks=() if name == "dpo" else pytest.mark.slow)
        for micro in (None, 1, 2)
        for name in LOSSES
    ],
)
def test_a_step_on_pairs_is_the_formula_on_plain_transformers(
    name: str, micro: int | None, make_recipe: Any, console: Console, models: Models
) -> None:
    algorithm, formula = LOSSES[name]
    reference = {"reference": {"model": {"path": models(2)}}}
    recipe = one_step(make_recipe, models, algorithm, **reference)
    if micro:
        batch = recipe.batch.model_copy(update={"micro_train_batch_size": micro})
        recipe = recipe.model_copy(update={"batch": batch})
    train(recipe, console)
    pairs = training_rows(
        load_pairs, recipe.data, load_tokenizer(models(1)), exclude=held_out([], 0)
    ).all()
    rows = [token_ids.tolist() for pair in pairs for token_ids in (pair.chosen, pair.rejected)]
    marks = [mask for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
    starts = [int(np.argmax(mask)) for mask in marks]
    assert all(mask[start:].all() for mask, start in zip(marks, starts, strict=True))
    lm = plain(models(1))
    with torch.no_grad():
        ref = answer_logprobs(plain(models(2)), rows, starts)
    check_step(recipe, formula(answer_logprobs(lm, rows, starts), ref), lm)


@pytest.mark.slow
def test_a_step_of_kto_is_the_formula_on_plain_transformers(
    make_recipe: Any, console: Console, models: Models
) -> None:
    """The reference point from each prompt with the answer of the next sample in ticket order."""
    algorithm = {"type": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    recipe = one_step(make_recipe, models, algorithm, reference={"model": {"path": models(2)}})
    labelled = [
        {"prompt": f"after {n}?", "completion": f"{n + n % 2}", "label": n % 3 == 0}
        for n in range(8, 8 + ROWS)
    ]
    text = "\n".join(json.dumps(row) for row in labelled)
    Path(recipe.data.path).write_text(text, "utf-8")
    train(recipe, console)
    draws = training_rows(
        load_labelled, recipe.data, load_tokenizer(models(1)), exclude=held_out([], 0)
    )
    samples = [draws.draw(ticket, recipe.seed) for ticket in range(ROWS)]
    rows = [sample.token_ids.tolist() for sample in samples]
    starts = [int(np.argmax(sample.loss_mask)) for sample in samples]
    good = torch.tensor([sample.desirable for sample in samples])
    nexts = [*range(1, ROWS), 0]
    crossed = [rows[i][: starts[i]] + rows[j][starts[j] :] for i, j in enumerate(nexts)]
    lm, other = plain(models(1)), plain(models(2))
    with torch.no_grad():
        ref = sums(answer_logprobs(other, rows, starts))
        apart = sums(answer_logprobs(lm, crossed, starts))
        apart = apart - sums(answer_logprobs(other, crossed, starts))
    z = apart.mean().clamp(min=0.0)
    h = sums(answer_logprobs(lm, rows, starts)) - ref
    liked = 1.5 * (1 - torch.sigmoid(0.3 * (h - z)))
    disliked = 0.5 * (1 - torch.sigmoid(0.3 * (z - h)))
    check_step(recipe, torch.where(good, liked, disliked).mean(), lm)
    (line,) = metrics(recipe)
    assert line["policy/z"] == pytest.approx(z.item(), rel=1e-4, abs=1e-5)


def test_mismatched_pairs_are_each_prompt_with_the_next_answer() -> None:
    """Prompts 1 2, 3 and 4 5 6; answers 70 71, 80 and 90; the last takes the first's."""
    rows = [[1, 2, 70, 71], [3, 80], [4, 5, 6, 90]]
    masks = [[0, 0, 1, 1], [0, 1], [0, 0, 0, 1]]
    marked = Ragged.of([np.array(mask, bool) for mask in masks])
    sequences = Sequences(Ragged.of(rows, np.int32), marked, np.zeros(3, np.int64))
    crossed = mismatched(sequences)
    assert [row.tolist() for row in crossed.tokens] == [[1, 2, 80], [3, 90], [4, 5, 6, 70, 71]]
    assert [row.astype(int).tolist() for row in crossed.loss_mask] == [
        [0, 0, 1],
        [0, 1],
        [0, 0, 0, 1, 1],
    ]
    assert len(set(crossed.group.tolist())) == 3  # what shares an opening is another matter


def test_a_mismatched_prompt_keeps_its_images_and_those_of_the_other_answer() -> None:
    """Prompts 1 2 and 3; the second answer, 80 to 83, shows an image in its later turn."""
    first = PlacedImage("aa" * 32, np.array([1]))
    second, later = PlacedImage("bb" * 32, np.array([0])), PlacedImage("cc" * 32, np.array([2, 3]))
    rows, masks = [[1, 2, 70], [3, 80, 81, 82, 83]], [[0, 0, 1], [0, 1, 0, 0, 1]]
    marked = Ragged.of([np.array(mask, bool) for mask in masks])
    images = ((first,), (second, later))
    sequences = Sequences(Ragged.of(rows, np.int32), marked, np.zeros(2, np.int64), images=images)
    crossed = mismatched(sequences)
    assert [row.tolist() for row in crossed.tokens] == [[1, 2, 80, 81, 82, 83], [3, 70]]
    shown = [[(i.digest[:2], i.at.tolist()) for i in each] for each in crossed.images]
    assert shown == [[("aa", [1]), ("cc", [3, 4])], [("bb", [0])]]


def test_one_sample_is_mismatched_with_itself() -> None:
    mask = Ragged.of([[False, True]])
    sequences = Sequences(Ragged.of([[1, 2]], np.int32), mask, np.zeros(1, np.int64))
    assert mismatched(sequences).tokens.row(0).tolist() == [1, 2]


def test_the_policy_that_is_its_own_reference_starts_at_log_two(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("preference", steps=2)
    train(recipe, console)
    first, second = metrics(recipe)
    assert first["policy/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["policy/kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(  # SimPO has no reference whose logprobs could be kept
    ("algorithm", "cache"),
    [("dpo", True), ("dpo", False), ("kto", True), ("kto", False), ("simpo", True)],
)
def test_a_killed_and_resumed_run_gives_the_same_bits(
    algorithm: str,
    cache: bool,
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The reference is the policy's start, though the policy has moved when it goes on."""
    changes: dict[str, Any] = {
        "algorithm": {"type": algorithm},
        "data": {"max_len": 64, "cache": cache},
        "eval": {"path": str(write_pairs(tmp_path / "eval.jsonl", 40, 4)), "every": 1},
        "steps": 7,  # more than an epoch
    }
    uninterrupted = make_recipe("preference", "whole", **_with_path(changes, tmp_path))
    killed = make_recipe("preference", "killed", **_with_path(changes, tmp_path))
    train(uninterrupted, console)
    for step in (2, 5):
        train_until_killed(monkeypatch, PreferenceJob, step, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 7)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["whole", "lora"])
def test_rewards_of_held_out_pairs_after_a_resume_are_measured_from_the_start(
    lora: Any,
    make_recipe: Any,
    models: Models,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """trl#1107: the only evaluation is the last, in another process than the first step's."""
    held = write_pairs(tmp_path / "held.jsonl", 40, 4)
    recipe = make_recipe(
        "preference",
        model={"path": models(1), "init": None, "lora": lora},
        algorithm={"type": "dpo", "beta": 0.3},
        data={"max_len": 64, "cache": False},
        eval={"path": str(held), "at_end": True},
        checkpoint={"save_steps": 1},
    )
    train_until_killed(monkeypatch, PreferenceJob, 2, recipe, console)
    resume(Path(recipe.run_dir), [], [], console)
    trained = export(Path(recipe.run_dir), "latest", tmp_path / "trained")
    pairs = load_pairs(PairSettings(path=str(held)), load_tokenizer(models(1))).all()
    rows = [token_ids.tolist() for pair in pairs for token_ids in (pair.chosen, pair.rejected)]
    starts = [int(np.argmax(m)) for pair in pairs for m in (pair.chosen_mask, pair.rejected_mask)]
    with torch.no_grad():
        policy, ref = (
            sums(answer_logprobs(plain(str(path)), rows, starts)) for path in (trained, models(1))
        )
    rewards = 0.3 * (policy - ref)
    assert rewards.abs().max() > 0.01
    (line,) = lines(Path(recipe.run_dir) / "eval.jsonl")
    assert line["reward_chosen"] == pytest.approx(rewards[0::2].mean().item(), abs=1e-5)
    assert line["reward_rejected"] == pytest.approx(rewards[1::2].mean().item(), abs=1e-5)


def _with_path(changes: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {**changes, "data": {**changes["data"], "path": str(tmp_path / "pairs.jsonl")}}


class Notes(Console):
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    @property
    def counts(self) -> list[str]:
        """What was said of reference logprobs."""
        return [line.partition("(")[0] for line in self.texts if "reference logprobs" in line]


@pytest.mark.slow
def test_reference_logprobs_are_computed_once_for_all_runs(
    make_recipe: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache" / "tokens"))
    console = Notes()
    sections = {"model": {"path": models(1), "init": None}}
    first_recipe = make_recipe("preference", "one", **sections)
    second_recipe = make_recipe("preference", "two", **sections, algorithm={"type": "ipo"})
    another = make_recipe("preference", "another", model={"path": models(2), "init": None})
    same = make_recipe("preference", "same", **sections)
    for recipe in (first_recipe, second_recipe, another, same):
        train(recipe, console)
    computed = [line.split(": ")[1].split(" computed")[0] for line in console.counts]
    kept = [line.split(", ")[1].split(" from")[0] for line in console.counts]
    assert computed == ["60 sequences", "0 sequences", "60 sequences", "0 sequences"]
    assert kept == ["0", "60", "0", "60"]
    assert_same_run(first_recipe, same, 3)


@pytest.mark.slow
def test_a_run_on_single_answers_reads_no_logprobs_of_pairs(
    make_recipe: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO's layouts compute what both answers of a pair begin with once, and round otherwise."""
    sections = {"model": {"path": models(1), "init": None}}
    first, second = (
        make_recipe("preference", run, **sections, algorithm={"type": "kto"})
        for run in ("one", "two")
    )
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "alone"))
    train(first, Console("quiet"))
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "behind_dpo"))
    train(make_recipe("preference", "dpo", **sections), Console("quiet"))
    train(second, Console("quiet"))
    assert_same_run(first, second, 3)


def test_routers_in_another_dtype_are_another_entry(
    make_recipe: Any, make_mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    console, path = Notes(), str(make_mixture())
    for dtype in ("auto", "float32"):
        model = {"path": path, "init": None, "dtype": "bfloat16", "router_dtype": dtype}
        train(make_recipe("preference", dtype, model=model, steps=1), console)
    assert [" 0 from" in line for line in console.counts] == [True, True]


def test_other_rows_are_another_entry(
    make_recipe: Any, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache" / "tokens"))
    console = Notes()
    for run, rows in (("one", 30), ("two", 29)):
        recipe = make_recipe("preference", run, model={"path": models(1), "init": None})
        write_pairs(Path(recipe.data.path), rows=rows)
        train(recipe, console)
    assert [" 0 from" in line for line in console.counts] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["wpo", "aot"])
def test_a_reference_that_follows_by_steps_survives_a_kill(
    algorithm: str, make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "steps": 4,
        "algorithm": {"type": algorithm},
        "reference": {"refresh_steps": 2, "ema_decay": 0.25},
        "checkpoint": {"save_steps": 1},
    }
    uninterrupted, cut = (make_recipe("preference", name, **changes) for name in ("whole", "cut"))
    train(uninterrupted, console)
    train_until_killed(monkeypatch, PreferenceJob, 3, cut, console)
    resume(Path(cut.run_dir), [], [], console)
    assert_same_run(uninterrupted, cut, 4)
    kls = [line["policy/kl"] for line in metrics(uninterrupted)]
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert kls[2] < kls[1]  # the reference has moved towards the policy

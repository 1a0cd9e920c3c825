"""Every row comes once an epoch, also where a run is killed at the end of one and goes on."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from helpers.jobs import write_pairs
from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import JOBS
from postgrad.data.draws import DrawnSet, Order
from postgrad.data.rows import Row
from postgrad.models.rendering import RenderProcess
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.training.pairs import PreferenceJob
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

KINDS = {"sft": SFTJob, "preference": PreferenceJob, "rl": RLJob, "rl ahead": RLJob}
AHEAD = {"max_staleness": 2, "slots": 5, "max_new_tokens": 6}  # a step has 6 samples


def recipe_of(job: str, run_dir: Path, rows: int, **changes: Any) -> Recipe:
    """A recipe with updates of three rows and a checkpoint after each, without evaluation."""
    raw: dict[str, Any] = copy.deepcopy(JOBS[job.removesuffix(" ahead")])
    raw.pop("eval", None)
    if job == "rl ahead":
        raw["rollout"], raw["algorithm"] = AHEAD, {"type": "grpo", "correction": "tis"}
    path = run_dir.parent / "rows.jsonl"
    if job == "preference":
        write_pairs(path, rows=rows)
    else:
        texts = [
            json.dumps({"question": "abcdefgh"[:n], "answer": "b"}) for n in range(1, rows + 1)
        ]
        path.write_text("\n".join(texts))
    data = {"path": str(path), "max_len": 64}
    batch = {"train_batch_size": 3}
    if raw["job"] == "rl":
        batch = {"rollout_batch_size": 3, "n_samples_per_prompt": 2}
    every = {"save_steps": 1, "max_ckpt_num": 9}
    raw |= {"run_dir": str(run_dir), "data": data, "batch": batch, "checkpoint": every}
    return parse_recipe(raw | changes)


def trained_on(run: Recipe, drawn: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (ticket, row) of a run, in order. drawn: those that a job of given rows took."""
    if run.job != "rl":
        return drawn
    samples = lines(Path(run.run_dir) / "samples.jsonl")
    return list(dict.fromkeys((line["ticket"], line["row"]) for line in samples))


@pytest.mark.parametrize(
    ("job", "epochs"),
    [
        ("sft", 2),
        ("rl", 2),
        pytest.param("preference", 2, marks=pytest.mark.slow),
        pytest.param("rl ahead", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("rows", "last"), [(6, 2), (7, 3)], ids=["whole steps", "broken step"])
def test_a_run_killed_at_the_end_of_an_epoch_goes_on_with_the_rows_of_the_next(
    job: str,
    epochs: int,
    rows: int,
    last: int,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """last: the step in which the first epoch ends."""
    original_draw, drawn = DrawnSet[Any].draw, list[tuple[int, int]]()

    def draw(self: DrawnSet[Any], ticket: int, seed: int) -> Any:
        record = original_draw(self, ticket, seed)
        drawn.append((ticket, record.row))
        return record

    monkeypatch.setattr(DrawnSet, "draw", draw)
    never = recipe_of(job, tmp_path / "never", rows, epochs=epochs, steps=None)
    train(never, console)
    wanted = trained_on(never, drawn.copy())
    assert [ticket for ticket, _ in wanted] == list(range(len(wanted)))
    for begin in range(0, epochs * rows, rows):
        assert sorted(row for _, row in wanted[begin : begin + rows]) == list(range(rows))
    killed = recipe_of(job, tmp_path / "killed", rows, epochs=epochs, steps=None)
    train_until_killed(monkeypatch, KINDS[job], last, killed, console)
    drawn.clear()
    resume(Path(killed.run_dir), [], [], console)
    assert trained_on(killed, wanted[: 3 * last] + drawn) == wanted
    assert_same_run(never, killed, -(-epochs * rows // 3))


@pytest.mark.parametrize("job", ["sft", "preference", "rl"])
def test_a_resume_reads_no_more_rows_after_many_steps_than_after_few(
    job: str, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs of two steps against one: rows read, drawn, rendered and tokenised."""
    counts = Counter[str]()

    def counted(owner: Any, name: str, size: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            counts[name] += size(*args)
            return original(*args, **more)

        monkeypatch.setattr(owner, name, call)

    counted(Row, "__init__", lambda *_: 1)
    counted(Order, "place", lambda *_: 1)
    counted(RenderProcess, "texts", lambda _, program, rows: len(rows))
    counted(
        PreTrainedTokenizerBase,
        "__call__",
        lambda _, read: 1 if isinstance(read, str) else len(read),
    )
    reads = list[dict[str, int]]()
    for steps in (2, 6):
        recipe = recipe_of(job, tmp_path / str(steps), 6, steps=steps)
        train(recipe, console)
        counts.clear()
        resume(Path(recipe.run_dir), ["--steps", str(steps + 1)], [], console)
        assert all(counts[name] for name in ("__init__", "place", "texts", "__call__"))
        reads.append(dict(counts))
    assert reads[0] == reads[1]

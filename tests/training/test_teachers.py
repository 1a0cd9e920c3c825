"""Whole runs with a teacher: what it changes, what a checkpoint says of it, and what is refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from helpers.chat_server import Answer, ChatServer, chat_server
from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines, tensors
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.fleet.choices import Choices
from postgrad.fleet.loading import frozen_hash, frozen_policy
from postgrad.fleet.teachers import teacher_numbers
from postgrad.learner.policy import Policy
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

__all__ = ["fake_ranks"]

Models = Callable[[int], str]
GRADED = {"algorithm": {"type": "on_policy_distillation"}, "sentinels": {"truncation": "off"}}
COMPARED = {
    "algorithm": {"type": "distillation", "divergence": "jsd", "beta": 0.3, "nll_coef": 0.5},
    "checkpoint": {"save_steps": 1, "max_ckpt_num": 2},
}
ROUNDING = 1e-5  # nats, in float32
NO_EVAL = {"every": 0, "at_start": False, "at_end": False}
OF_SET = {"datasets": ["rows.jsonl"]}  # one of [[teacher.sets]] that names none
OF_JOB: dict[str, dict[str, Any]] = {"rl": GRADED, "sft": COMPARED}


@pytest.fixture
def make_taught(make_recipe: MakeRecipe, models: Models) -> MakeRecipe:
    """make_taught("rl", "run", teacher, **changes): a student that learns from a teacher, which is
    its path or the table [teacher].
    """

    def make(job: str, run: str, teacher: str | dict[str, Any] = "", **changes: Any) -> Recipe:
        if isinstance(teacher, str):
            teacher = {"model": {"path": teacher or models(2)}}
        return make_recipe(
            job,
            run,
            **{
                "model": {"path": models(1), "init": None},
                "teacher": teacher,
                **OF_JOB[job],
                **changes,
            },
        )

    return make


def logged(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_teacher_like_the_student_leaves_it_as_it_is(
    job: str, make_taught: MakeRecipe, models: Models, console: Console
) -> None:
    algorithm = {"type": OF_JOB[job]["algorithm"]["type"]}
    recipe = make_taught(job, "run", models(1), steps=1, algorithm=algorithm, eval=NO_EVAL)
    train(recipe, console)
    step = logged(recipe)[0]
    if job == "rl":
        assert step["teacher/reverse_kl"] == 0.0
        assert step["policy/skipped_samples"] == step["samples"] > 0
    else:
        assert step["policy/divergence"] == pytest.approx(0.0, abs=1e-6)
        assert step["policy/grad_norm"] == pytest.approx(0.0, abs=1e-5)
        return  # rounding is a gradient too, and Adam scales it
    before = load_file(Path(models(1)) / "model.safetensors")
    after = tensors(recipe.run_dir, 1)
    assert before.keys() <= {name.rpartition("/")[2] for name in after}
    for name, weight in before.items():
        (same,) = (after[key] for key in after if "weights" in key and key.endswith(f"/{name}"))
        assert same.equal(weight.float()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "metric"), [("rl", "teacher/reverse_kl"), ("sft", "policy/divergence")]
)
def test_a_student_comes_nearer_to_its_teacher(
    job: str, metric: str, make_taught: MakeRecipe, console: Console
) -> None:
    algorithm = {"type": OF_JOB[job]["algorithm"]["type"]}
    recipe = make_taught(job, "run", steps=12, algorithm=algorithm)
    train(recipe, console)
    values = [step[metric] for step in logged(recipe)]
    assert sum(values[-3:]) < 0.8 * sum(values[:3])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through_with_the_same_teacher_alone(
    job: str, make_taught: MakeRecipe, models: Models, console: Console, tmp_path: Path
) -> None:
    teacher = str(tmp_path / "teacher")
    shutil.copytree(models(2), teacher)
    uninterrupted, halves = (
        make_taught(job, "whole", teacher),
        make_taught(job, "halves", teacher, steps=1),
    )
    train(uninterrupted, console)
    train(halves, console)
    saved = Path(halves.run_dir) / "checkpoints"
    state = next(saved.glob("*1/state.json"))
    assert json.loads(state.read_text())["choices"]["frozen"]["teacher"] == frozen_hash(teacher)
    train(make_taught(job, "halves", teacher), console)
    full_tensors, resumed_tensors = tensors(uninterrupted.run_dir, 3), tensors(halves.run_dir, 3)
    assert all(full_tensors[name].equal(resumed_tensors[name]) for name in full_tensors)
    shutil.copy(Path(models(1)) / "model.safetensors", teacher)
    with pytest.raises((RunError, UsageError), match="teacher"):
        train(make_taught(job, "halves", teacher, steps=4), console)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["rl", "sft"])
def test_on_a_group_of_one_rank_a_run_has_the_bits_of_this_process(
    job: str, make_taught: MakeRecipe, console: Console, fake_ranks: list[FakeGroup]
) -> None:
    few = {"steps": 2, "eval": NO_EVAL, "checkpoint": {"save_steps": 1}}
    here = make_taught(job, "here", **few)
    there = make_taught(job, "there", cluster={"type": "ray"}, **few)
    train(here, console)
    train(there, console)
    assert len(fake_ranks) == 1
    local_tensors, ranked_tensors = (tensors(recipe.run_dir, 2) for recipe in (here, there))
    assert all(local_tensors[name].equal(ranked_tensors[name]) for name in local_tensors)


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_teacher_with_other_tokens_is_refused_by_name(
    job: str, make_taught: MakeRecipe, console: Console, tmp_path: Path
) -> None:
    init = {**MODEL["init"], "tokenizer": {"kind": "characters", "phrases": ["a phrase "]}}
    other = tmp_path / "other"
    make_fresh(ModelInit.model_validate(init), [], 0, other)
    pattern = r"teacher\.model\.path: .*other has another tokenizer .*postgrad generate"
    with pytest.raises(UsageError, match=pattern):
        train(make_taught(job, "run", str(other)), console)


def test_a_teacher_that_is_missing_or_not_read_is_an_error_of_the_recipe(
    make_recipe: MakeRecipe,
) -> None:
    for job, taught in OF_JOB.items():
        with pytest.raises(UsageError, match=r"teacher\.model\.path: .*give its directory"):
            make_recipe(job, **taught)
        for unread in ({"model": {"path": "somewhere"}}, {"top_k": 1}, {"sets": [OF_SET]}):
            with pytest.raises(UsageError, match=r"teacher: this algorithm asks no teacher"):
                make_recipe(job, teacher=unread)


def grading(model: str, graded: Policy) -> Callable[[str, int], Answer]:
    """What vLLM's server says of prompts: the logprobs of a policy here."""
    tokenizer = load_tokenizer(model)

    def script(asked: str, times: int) -> Answer:
        if asked == "/v1/models":
            listed = [{"id": "first", "root": "a"}, {"id": "taught", "root": "somewhere"}]
            return Answer(raw=json.dumps({"data": listed}).encode())
        ids = json.loads(asked) if asked.startswith("[") else tokenizer.encode(asked)
        row = np.array(ids, np.int32)
        mask = np.arange(len(row)) > 0
        sequences = Sequences(Ragged.of([row]), Ragged.of([mask]), np.zeros(1, np.int64))
        (values,) = graded.logprobs(sequences).result()
        entries = [{str(i): {"logprob": float(v)}} for i, v in zip(ids, values, strict=True)]
        choice = {"text": "x", "prompt_logprobs": [None, *entries[1:]]}
        return Answer(raw=json.dumps({"choices": [choice]}).encode())

    return script


@pytest.fixture
def served(make_taught: MakeRecipe, models: Models) -> Iterator[ChatServer]:
    """A server with the teacher of another seed."""
    recipe = make_taught("rl", "unused")
    choices = Choices("cpu", 1, True, "float32", None, 4096)
    graded = frozen_policy(recipe, recipe.teacher.model, models(2), choices)
    with chat_server(grading(models(2), graded)) as server:
        yield server


@pytest.mark.slow
def test_a_teacher_behind_a_server_grades_as_the_same_model_does_here(
    make_taught: MakeRecipe, console: Console, served: ChatServer
) -> None:
    few = {"steps": 2, "eval": NO_EVAL}
    here = make_taught("rl", "here", **few)
    server = {"server": {"base_url": served.url, "model": "taught"}}
    there = make_taught("rl", "there", **few, teacher={**server, "model": {}})
    for recipe in (here, there):
        train(recipe, console)
    for local_line, served_line in zip(logged(here), logged(there), strict=True):
        for name in ("teacher/reverse_kl", "teacher/logprob", "policy/loss"):
            assert local_line[name] == pytest.approx(served_line[name], abs=1e-5)
    bodies = [body for _, _, body in served.requests if isinstance(body.get("prompt"), list)]
    assert len(bodies) == 2 * 16  # one for each sample
    asked = {"model": "taught", "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    assert bodies[0] == {**asked, "prompt": bodies[0]["prompt"]}
    state = next((Path(there.run_dir) / "checkpoints").glob("*2/state.json"))
    frozen = json.loads(state.read_text())["choices"]["frozen"]
    assert frozen["teacher"] == "server:taught (somewhere)"


@pytest.mark.slow
def test_each_dataset_has_its_teacher(
    make_taught: MakeRecipe, models: Models, console: Console, served: ChatServer
) -> None:
    """Three datasets: that of a teacher like the student has no gradient but rounding, since the
    two compute it in other batches; the others' teachers are here and behind a server, and one
    model.
    """
    rows = [("a", models(1)), ("b", models(2)), ("c", None)]
    sets, teachers = list[Any](), list[Any]()
    for name, path in rows:
        file = Path(models(1)).parent / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"question": f"{name}{n}"}) + "\n" for n in range(9)))
        sets.append({"path": str(file), "count": 8})
        there = {"model": {"path": path}} if path else {"server": {"base_url": served.url}}
        teachers.append({"datasets": [file.name], **there})
    recipe = make_taught(
        "rl", "run", steps=2, eval=NO_EVAL,
        teacher={"model": {}, "sets": teachers},
        data={"path": "", "sets": sets, "answer": "", "max_len": 48},
    )  # fmt: skip
    train(recipe, console)
    moved: dict[str, set[bool]] = {}
    for sample in lines(Path(recipe.run_dir) / "samples.jsonl"):
        differs = max(map(abs, sample["advantages"])) > ROUNDING
        moved.setdefault(sample["dataset"], set()).add(differs)
    assert moved == {"a.jsonl": {False}, "b.jsonl": {True}, "c.jsonl": {True}}


def test_a_dataset_without_a_teacher_is_refused(make_taught: MakeRecipe, models: Models) -> None:
    def named(*datasets: str) -> dict[str, Any]:
        return {"model": {}, "sets": [{"datasets": datasets, "model": {"path": models(2)}}]}

    with pytest.raises(UsageError, match=r"no dataset of \[data\] is called 'x'"):
        teacher_numbers(make_taught("rl", "run", teacher=named("x")))
    data = {"path": "", "sets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
    with pytest.raises(UsageError, match=r"b\.jsonl has no teacher"):
        teacher_numbers(make_taught("rl", "run", data=data, teacher=named("a.jsonl")))


@pytest.mark.parametrize(
    ("job", "changes", "message"),
    [
        ("rl", {"rollout": {"temperature": 0.7}, "server": True}, "a temperature of 1 alone"),
        ("rl", {"top_k": 4}, r'is of job = "sft"'),
        ("rl", {"both": True}, "there are two teachers"),
        ("rl", {"sets": [{"datasets": ["a"]}]}, "a set names its teacher"),
        ("sft", {"server": True}, "compares whole distributions"),
        ("sft", {"sets": [{"datasets": ["a"], "model": {"path": "x"}}]}, r'are of job = "rl"'),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(
    job: str, changes: dict[str, Any], message: str, make_taught: MakeRecipe
) -> None:
    server = {"base_url": "http://127.0.0.1:1/v1"}
    teacher: dict[str, Any] = {"model": {"path": "x"}}
    if changes.pop("server", False):
        teacher = {"model": {}, "server": server}
    if changes.pop("both", False):
        teacher["server"] = server
    rest = {key: changes.pop(key) for key in ("rollout",) if key in changes}
    with pytest.raises(UsageError, match=message):
        make_taught(job, "run", **rest, teacher={**teacher, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward_kl", pytest.param("jsd", marks=pytest.mark.slow)])
def test_with_stored_tokens_the_teacher_reads_the_rows_once(
    kind: str, make_taught: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """All tokens but one are stored: then the divergence is that of whole distributions."""
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    algorithm = {"type": "distillation", "divergence": kind, "temperature": 1.5}
    few = {"steps": 3, "eval": NO_EVAL, "algorithm": algorithm}
    live = make_taught("sft", "live", **few)
    tokens = len(load_tokenizer(str(live.teacher.model.path)))
    most = {"model": {"path": live.teacher.model.path}, "top_k": tokens - 1}
    stored = make_taught("sft", "stored", **few, teacher=most)
    again = make_taught("sft", "again", **few, teacher=most)
    for recipe in (live, stored, again):
        train(recipe, console)
    for live_line, stored_line, kept in zip(*map(logged, (live, stored, again)), strict=True):
        assert live_line["policy/divergence"] == pytest.approx(
            stored_line["policy/divergence"], abs=1e-5
        )
        assert live_line["policy/loss"] == pytest.approx(stored_line["policy/loss"], abs=1e-5)
        assert stored_line["policy/loss"] == kept["policy/loss"]
    stored_tensors, cached_tensors = tensors(stored.run_dir, 3), tensors(again.run_dir, 3)
    assert all(stored_tensors[name].equal(cached_tensors[name]) for name in stored_tensors)
    few_tokens = make_taught("sft", "few", **few, teacher={**most, "top_k": 2})
    train(few_tokens, console)
    for step, full_step in zip(logged(few_tokens)[:1], logged(live), strict=False):
        assert 0 < step["policy/divergence"] < full_step["policy/divergence"]
    too_many = make_taught("sft", "many", **few, teacher={**most, "top_k": tokens})
    with pytest.raises(UsageError, match=rf"top_k = {tokens}: both models have {tokens} tokens"):
        train(too_many, console)

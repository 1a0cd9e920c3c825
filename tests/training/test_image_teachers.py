"""Teachers that read images: what they say of samples and rows with images, and whole runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.chat_server import Answer, chat_server
from helpers.image_directories import models, row, write_model
from helpers.image_models import KINDS, Scene, fresh, looped
from helpers.runs import lines
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import lay_out
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.distilled import LiveDistillation, ReadingTeacher
from postgrad.learner.policy import Policy
from postgrad.learner.settings import LearnerSettings
from postgrad.models.images import ImageTower
from postgrad.models.load import load_model
from postgrad.observe.console import Console
from postgrad.ops.distillation import TeacherDivergence
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.tools.dry_run.dry_run import dry_run
from postgrad.training.sft import SFTJob
from postgrad.training.start import train

__all__ = ["models"]
CPU = torch.device("cpu")
JOBS: dict[str, dict[str, Any]] = {
    "rl": {
        "algorithm": {"type": "on_policy_distillation"},
        "batch": {"rollout_batch_size": 3, "n_samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
        "rewards": [{"type": "tiny_rewards:looks"}],
        "scoring": {"workers": 1},
        "sentinels": {"truncation": "off"},
    },
    "sft": {"algorithm": {"type": "distillation"}, "batch": {"train_batch_size": 4}},
}


def backbone_of(scene: Scene, lm: Any) -> Backbone:
    backbone = Backbone(lm, CPU, MicroBatch())
    backbone.tower = ImageTower(lm, scene.pixels.__getitem__)
    return backbone


def teacher_model(kind: str) -> Any:
    """Another model than `fresh`, its tower too."""
    lm = fresh(kind)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return lm


def transformers_logits(lm: Any, scene: Scene) -> list[torch.Tensor]:
    """float64 [T, V] of each sequence."""
    lm, rows = looped(lm.double()), []
    for number, tokens in enumerate(scene.sequences.tokens):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        named = scene.arguments(ids, scene.sequences.images_of(number))
        named = {n: t.double() if t.is_floating_point() else t for n, t in named.items()}
        if hasattr(lm.model, "rope_deltas"):
            lm.model.rope_deltas = None
        with torch.no_grad():
            rows.append(lm(ids, **named, use_cache=False).logits[0])
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_are_those_of_transformers(kind: str) -> None:
    scene, student, teacher = Scene(kind), fresh(kind), teacher_model(kind)
    learner = LiveDistillation(
        backbone_of(scene, student), LearnerSettings(), 1, backbone_of(scene, teacher)
    )
    sequences = scene.sequences
    layout = lay_out(sequences, np.arange(len(sequences)))
    compared = TeacherDivergence("forward_kl")
    unread: Any = {}  # a live teacher needs no columns
    _, apart = learner.divergences(layout, compared, unread)
    column = learner.backbone.column(
        sequences, lambda layout: learner.divergences(layout, compared, unread)[1]
    )
    eager = [fresh(kind, "eager"), fresh(kind, "eager")]
    eager[1].load_state_dict(teacher.state_dict())
    ours, theirs = (transformers_logits(lm, scene) for lm in eager)
    assert float(apart.detach().mean()) > 0.1  # the models differ
    for number, mask in enumerate(sequences.loss_mask):
        p, q = (logits.log_softmax(-1)[:-1] for logits in (theirs[number], ours[number]))
        expected = (p.exp() * (p - q)).sum(-1).numpy()[mask[1:]]
        np.testing.assert_allclose(column.row(number)[mask], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_the_most_likely_tokens_are_those_of_transformers(kind: str) -> None:
    scene, teacher = Scene(kind), teacher_model(kind)
    vocabulary, top_k = teacher.config.get_text_config().vocab_size, 5
    reads = ReadingTeacher(backbone_of(scene, teacher), vocabulary)
    likeliest = reads.top_logprobs(scene.sequences, top_k, 1.0).result()
    eager = fresh(kind, "eager")
    eager.load_state_dict(teacher.state_dict())
    for number, logits in enumerate(transformers_logits(eager, scene)):
        mask = scene.sequences.loss_mask.row(number)
        best = logits.log_softmax(-1)[:-1].topk(top_k, -1).values.numpy()[mask[1:]]
        row_said = likeliest.row(number)[mask]
        np.testing.assert_allclose(row_said[:, top_k : 2 * top_k], best, rtol=1e-4, atol=2e-5)


@pytest.fixture
def taught(tmp_path: Path, models: Callable[[str], str]) -> Callable[..., list[dict[str, Any]]]:
    """taught("rl", teacher, **changes): trains two steps; its metrics."""
    rows = [{**row(n, "yes", ((16, 16), (24, 16))[: 1 + n % 2]), "answer": "yes"} for n in (1, 2)]
    text = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows += [{"messages": text, "answer": "ho"}, {**row(3, "no"), "answer": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))

    def run(
        job: str, teacher: dict[str, Any], by: Callable[..., Any] = train, **changes: Any
    ) -> list[dict[str, Any]]:
        raw = {
            "job": job,
            "run_dir": str(tmp_path / job),
            "steps": 2,
            "model": {"path": models("qwen2_5_vl"), "dtype": "float32"},
            "data": {
                "path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 200,
                "cache": False,
            },
            "teacher": teacher,
            "learner": {"lr": 1e-2, "threads": 1},
            **JOBS[job],
            **changes,
        }  # fmt: skip
        by(parse_recipe(raw), Console())
        return lines(Path(raw["run_dir"]) / "metrics.jsonl")

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "metric"), [("rl", "teacher/reverse_kl"), ("sft", "policy/divergence")]
)
def test_runs_learn_from_a_teacher_that_sees_their_images(
    job: str,
    metric: str,
    taught: Callable[..., list[dict[str, Any]]],
    models: Callable[[str], str],
    tmp_path: Path,
) -> None:
    same = taught(job, {"model": {"path": models("qwen2_5_vl")}}, run_dir=str(tmp_path / "same"))
    assert same[0][metric] == pytest.approx(0.0, abs=1e-6)
    other = write_model("qwen2_5_vl", tmp_path / "other", wide)
    first, second = taught(job, {"model": {"path": other}})
    assert first[metric] > 1e-3
    assert first["policy/grad_norm"] > 0
    assert np.isfinite(second[metric])


def wide(config: Any) -> None:
    """Weights that tell tokens apart."""
    config.get_text_config().initializer_range = 0.2


@pytest.mark.slow
def test_stored_tokens_of_a_teacher_teach_rows_with_images(
    taught: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    other = write_model("qwen2_5_vl", tmp_path / "other", wide)
    first, second = taught("sft", {"model": {"path": other}, "top_k": 8})
    assert first["policy/divergence"] > 1e-3
    assert second["policy/divergence"] < first["policy/divergence"]


@pytest.mark.slow
def test_a_student_answers_rows_with_images_itself(
    taught: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student's answer takes the place of the row's, behind the same images."""
    learned, answered = list[Any](), SFTJob.with_own_answers

    def noted(self: Any, drawn: Any) -> Any:
        rows, metrics = answered(self, drawn)
        learned.extend(zip(drawn, rows, strict=True))
        return rows, metrics

    monkeypatch.setattr(SFTJob, "with_own_answers", noted)
    other = write_model("qwen2_5_vl", tmp_path / "other", wide)
    metrics = taught(
        "sft",
        {"model": {"path": other}},
        algorithm={"type": "distillation", "on_policy": 1.0, "divergence": "reverse_kl"},
        rollout={"max_new_tokens": 4},
    )
    assert [line["on_policy/samples"] for line in metrics] == [4.0, 4.0]
    assert all(line["sentinel/publish_difference"] < 1e-5 for line in metrics)
    assert {len(row.images) for _, row in learned} == {0, 1, 2}
    for row_given, row_answered in learned:
        begin = int(np.flatnonzero(row_given.loss_mask)[0])
        assert row_answered.token_ids[:begin].tolist() == row_given.token_ids[:begin].tolist()
        assert not row_answered.loss_mask[:begin].any()
        assert [image.digest for image in row_answered.images] == [
            image.digest for image in row_given.images
        ]


SERVER: dict[str, Any] = {"server": {"base_url": "http://localhost:1", "model": "m"}}


def test_a_teacher_behind_a_server_is_not_asked_about_images(
    taught: Callable[..., list[dict[str, Any]]],
) -> None:
    with pytest.raises(UsageError, match=r"teacher\.server: row 0 of rows\.jsonl has an image\. "):
        taught("rl", SERVER)
    one_teacher = {"sets": [{"datasets": ["rows.jsonl"], **SERVER}]}
    with pytest.raises(UsageError, match=r"teacher\.sets\.0\.server: row 0 of rows\.jsonl has"):
        taught("rl", one_teacher)
    with pytest.raises(UsageError, match=r"teacher\.server: row 0 of rows\.jsonl has an image\. "):
        taught("rl", SERVER, by=tried)


def tried(recipe: Recipe, console: Console) -> None:
    """A dry run; raises what it reports of the rows."""
    report = dry_run(recipe, console)
    raise UsageError(str(report.problems))


@pytest.mark.slow
def test_a_teacher_behind_a_server_grades_text_as_the_same_model_does_here(
    taught: Callable[..., list[dict[str, Any]]], models: Callable[[str], str], tmp_path: Path
) -> None:
    other = write_model("qwen3_5", tmp_path / "other", wide)
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": "ho"} for n in range(4)]
    (tmp_path / "text.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    data = {"path": str(tmp_path / "text.jsonl"), "messages": "messages", "max_len": 200}
    here = {"data": data, "model": {"path": models("qwen3_5"), "dtype": "float32"}}
    graded_here = taught("rl", {"model": {"path": other}}, **here)
    graded = load_model(other, dtype=torch.float32, images=True)
    with chat_server(graded_by(graded.lm, graded.tokenizer)) as server:
        there = {**here, "run_dir": str(tmp_path / "there")}
        theirs = taught("rl", {"server": {"base_url": server.url}}, **there)
    for ours, served in zip(graded_here, theirs, strict=True):
        assert ours["teacher/reverse_kl"] == pytest.approx(served["teacher/reverse_kl"], abs=1e-4)
        assert ours["teacher/reverse_kl"] > 1e-3


def graded_by(lm: Any, tokenizer: Any) -> Callable[[str, int], Answer]:
    """What vLLM's server says of prompts: the logprobs of a model here."""
    backbone = Backbone(lm, CPU, MicroBatch())
    role = Policy(backbone, 1.0)

    def script(asked: str, times: int) -> Answer:
        if asked == "/v1/models":
            return Answer(raw=json.dumps({"data": [{"id": "taught"}]}).encode())
        ids = json.loads(asked) if asked.startswith("[") else tokenizer.encode(asked)
        row = np.array(ids, np.int32)
        mask = np.arange(len(row)) > 0
        sequences = Sequences(Ragged.of([row]), Ragged.of([mask]), np.zeros(1, np.int64))
        (values,) = role.logprobs(sequences).result()
        entries = [{str(i): {"logprob": float(v)}} for i, v in zip(ids, values, strict=True)]
        choice = {"text": "x", "prompt_logprobs": [None, *entries[1:]]}
        return Answer(raw=json.dumps({"choices": [choice]}).encode())

    return script


def test_a_teacher_that_reads_text_alone_is_refused(
    taught: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    write_model("qwen2_5_vl", tmp_path / "seen")
    with pytest.raises(UsageError, match=r"\[teacher\.model\] .*seen-text reads text alone"):
        taught("rl", {"model": {"path": str(tmp_path / "seen-text")}})

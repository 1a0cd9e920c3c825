"""The loss of held-out conversations: of SFT runs without rewards, against plain transformers."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import SFT
from postgrad.core.errors import RunError, UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.evaluation.losses import LossEvaluator, read_set
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.tools.checkpoints import checkpoints
from postgrad.tools.evaluate import evaluate
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

TASK = {"min_word_len": 3, "max_word_len": 4}
SETS = [
    {"name": name, "path": "reasoning-gym:spell_backward", "size": size, "seed": seed, "task": TASK}
    for name, size, seed in (("near", 6, 2), ("far", 9, 3))
]
LOSS = {  # of the room's recipe: nothing that scores, nothing that samples
    "rewards": [],
    "eval": {"n_samples": 1, "pass_at": [1], "greedy": False, "max_new_tokens": None},
}


def of_loss(make_recipe: Any, run_dir: str = "run", **changes: Any) -> Any:
    evaluated = {**LOSS["eval"], **changes.pop("eval", {})}
    return make_recipe("sft", run_dir, rewards=[], eval=evaluated, **changes)


def in_float64(path: str, recipe: Any, place: int = 0) -> tuple[float, int]:
    """Nats a loss token of one set by plain transformers, each conversation alone; its tokens."""
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    held = read_set(recipe, place, load_tokenizer(path)).all()
    total, tokens = 0.0, 0
    for row in held:
        ids = torch.tensor(row.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(lm(ids[None]).logits[0], -1)
        each = logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
        total -= float(each[row.loss_mask[1:]].sum())
        tokens += int(row.loss_mask.sum())
    return total / tokens, tokens


def test_a_model_without_a_finite_logprob_is_an_error_of_the_command(
    make_recipe: Any, console: Console, models: Any, tmp_path: Path
) -> None:
    damaged = shutil.copytree(Path(models(0)), tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"] *= math.nan
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    recipe = of_loss(make_recipe, model={"path": models(0), "init": None}, eval={"size": 4})
    with pytest.raises(RunError, match=r"damaged gives no finite logprobs on any of 4 rows: its"):
        evaluate(recipe, str(damaged), console)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [{"micro_train_tokens": 48}, {"micro_train_batch_size": 8}])
def test_the_loss_is_the_token_mean_of_plain_transformers_whatever_the_packing(
    micro: dict[str, int], make_recipe: Any, console: Console, models: Any
) -> None:
    recipe = of_loss(
        make_recipe,
        model={"path": models(0), "init": None},
        batch=micro,
        eval={"sets": SETS},
        checkpoint={"save_hf": True},
    )
    train(recipe, console)
    evaluations = lines(Path(recipe.run_dir) / "eval.jsonl")
    assert [(line["step"], line["set"], line["rows"]) for line in evaluations] == [
        (0, "near", 6), (0, "far", 9), (3, "near", 6), (3, "far", 9),
    ]  # fmt: skip
    trained = str(Path(recipe.run_dir) / "model")
    for line, (path, place) in zip(
        evaluations, [(models(0), 0), (models(0), 1), (trained, 0), (trained, 1)], strict=True
    ):
        wanted, tokens = in_float64(path, recipe, place)
        assert line["loss"] == pytest.approx(wanted, rel=2e-6)
        assert line["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-5)
        assert line["loss_low"] < line["loss"] < line["loss_high"]
        assert (line["loss_tokens"], line["failed"]) == (tokens, 0)
        assert "accuracy" not in line
    assert evaluations[2]["loss"] < evaluations[0]["loss"]
    again = evaluate(recipe, trained, console)
    assert again["loss"] == evaluations[2]["loss"]
    assert [evaluation["loss"] for evaluation in again["sets"]] == [
        evaluations[2]["loss"],
        evaluations[3]["loss"],
    ]
    assert (again["rows"], again["failed"]) == (6, 0)
    against = evaluate(recipe, trained, console, models(0))
    assert against["against"]["loss"] == evaluations[0]["loss"]


@pytest.mark.slow
def test_the_mean_is_over_tokens_and_a_row_without_a_finite_logprob_has_failed(
    make_recipe: Any, models: Any
) -> None:
    """By hand: row i costs i nats a token, and row 2 overflows."""
    recipe = of_loss(make_recipe, model={"path": models(0), "init": None}, eval={"size": 4})
    evaluator = LossEvaluator(recipe, load_tokenizer(models(0)))
    counts: list[float] = []

    def logprobs(sequences: Sequences) -> Ragged:
        counts[:] = sequences.loss_mask.sums().tolist()
        nats = sequences.loss_mask.spread(np.array([0.0, 1.0, np.inf, 3.0], np.float32)).values
        return sequences.tokens.like(np.where(sequences.loss_mask.values, -nats, 0.0))

    (evaluation,) = evaluator(logprobs)
    wanted = (counts[1] + 3 * counts[3]) / (counts[0] + counts[1] + counts[3])
    assert evaluation.metrics["loss"] == pytest.approx(wanted, rel=1e-12)
    assert evaluation.metrics["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-12)
    assert (evaluation.rows, evaluation.failed) == (4, 1)
    assert evaluation.more == {"loss_rows": 3, "loss_tokens": counts[0] + counts[1] + counts[3]}
    low, high = evaluation.intervals["loss"]  # Student's would begin below 0, where no loss is
    assert low == 0.0
    assert high > wanted

    (none,) = evaluator(
        lambda sequences: sequences.tokens.like(np.full(len(sequences.tokens.values), -np.inf))
    )
    assert math.isnan(none.metrics["loss"])
    assert none.failed == 4


@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_of_least_loss_and_survives_a_kill(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "steps": 4,
        "eval": {"every": 1, "at_start": False},
        "checkpoint": {"save_steps": 1, "best_metric": "eval/loss", "best_mode": "min"},
    }
    uninterrupted, killed = (of_loss(make_recipe, name, **changes) for name in ("whole", "killed"))
    train(uninterrupted, console)
    train_until_killed(monkeypatch, SFTJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 4)
    losses = [line["loss"] for line in lines(Path(uninterrupted.run_dir) / "eval.jsonl")]
    best = [
        checkpoint["step"]
        for checkpoint in checkpoints(Path(uninterrupted.run_dir), console)
        if checkpoint["best"]
    ]
    assert best == [1 + losses.index(min(losses))]
    written = json.loads((Path(uninterrupted.run_dir) / "summary.json").read_text("utf-8"))
    assert written["loss_after"] == losses[-1]
    assert written["best"]["metric"] == "eval/loss"


@pytest.mark.slow
def test_with_rewards_both_are_measured_where_the_recipe_asks_for_it(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("sft", eval={"loss": True, "at_start": False})
    train(recipe, console)
    (line,) = lines(Path(recipe.run_dir) / "eval.jsonl")
    alone = of_loss(make_recipe, "alone", eval={"at_start": False})
    train(alone, console)
    (other,) = lines(Path(alone.run_dir) / "eval.jsonl")
    assert line["loss"] == other["loss"]  # nobody samples there, and the weights are the same
    assert {"accuracy", "greedy_accuracy", "pass@2", "perplexity"} <= set(line)
    without = make_recipe("sft", "without", eval={"at_start": False})
    train(without, console)
    assert "loss" not in lines(Path(without.run_dir) / "eval.jsonl")[0]


def test_held_out_conversations_bear_loss_where_those_of_training_do(
    make_recipe: Any, models: Any, tmp_path: Path
) -> None:
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "ghi")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"messages": messages}) + "\n", "utf-8")
    columns = {"path": str(rows), "messages": "messages", "max_len": 64}
    tokens: dict[str, int] = {}
    for marked in ("all", "last"):
        recipe = of_loss(make_recipe, data={**columns, "loss_turns": marked}, eval=columns)
        tokenizer = load_tokenizer(models(0))
        (conversation,) = read_set(recipe, 0, tokenizer).all()
        text = tokenizer.decode(conversation.token_ids[conversation.loss_mask])
        assert ("cd" in text, "ghi" in text) == (marked == "all", True)
        tokens[marked] = int(conversation.loss_mask.sum())
    assert tokens["last"] < tokens["all"]


def test_nothing_is_sampled_for_a_loss(make_recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*evaluations: Any, **more: Any) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr("postgrad.training.auto_sizes.engine", refused)
    monkeypatch.setattr("postgrad.training.sft.scorer_of", refused)
    train(of_loss(make_recipe), Console("quiet"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": {"greedy": True}}, "eval.greedy: is of sampled answers"),
        ({"eval": {"temperature": 0.6}}, "eval.temperature: is of sampled answers"),
        ({"eval": {"top_p": 0.9}}, "eval.top_p: is of sampled answers"),
        ({"eval": {"component": "gsm8k"}}, "eval.component: is of sampled answers"),
        ({"eval": {"by": "level"}}, "for losses give each part a set of its own"),
        ({"eval": {"on_unreadable": "drop"}}, "no [[rewards]] read these"),
        ({"data": {"on_unreadable": "drop"}}, "data.on_unreadable: leaves out rows that no verif"),
        ({"eval": {"max_len": 60}}, "60 tokens are more than data.max_len = 48"),
        ({"checkpoint": {"best_metric": "eval/loss"}}, 'say best_mode = "min"'),
    ],
)
def test_what_a_loss_cannot_do_is_told_before_anything_runs(
    changes: dict[str, Any], message: str, make_recipe: Any
) -> None:
    with pytest.raises(UsageError) as error:
        of_loss(make_recipe, **changes)
    assert message in str(error.value)


def test_a_run_that_learns_from_rewards_has_no_answers_to_take_the_loss_of(
    make_recipe: Any,
) -> None:
    with pytest.raises(UsageError, match=r"eval\.loss: is of SFT jobs"):
        make_recipe("rl", eval={"loss": True})


def test_rows_without_an_answer_are_an_error_that_names_the_row(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    rows = tmp_path / "asked.jsonl"
    rows.write_text('{"question": "sun"}\n', "utf-8")
    recipe = of_loss(make_recipe, eval={"path": str(rows), "prompt": "question"})
    with pytest.raises(UsageError, match=r"asked\.jsonl"):
        train(recipe, console)


def test_a_fraction_of_the_data_is_evaluated_and_ends_a_run_early(
    tmp_path: Path, console: Console
) -> None:
    tables: dict[str, Any] = {
        **{key: SFT[key] for key in ("job", "model", "batch")},
        "run_dir": str(tmp_path / "run"),
        "steps": 6,
        "data": {**SFT["data"], "eval_fraction": 0.2},
        "eval": {"every": 1},
        "learner": {"lr": 1e-30, "threads": 1},  # so that nothing gets better
        "checkpoint": {"best_metric": "eval/loss", "best_mode": "min", "early_stop": 2},
    }
    train(parse_recipe(tables), console)
    run_dir = Path(tables["run_dir"])
    assert [line["step"] for line in lines(run_dir / "eval.jsonl")] == [1, 2, 3]
    trained, held = (line for line in lines(run_dir / "events.jsonl") if line["event"] == "data")
    assert trained["kept"] == held["trained"]
    assert trained["excluded"] == held["kept"] == lines(run_dir / "eval.jsonl")[0]["rows"]

"""A run's checkpoint is talked to as it lies, and answers as its export does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.rollout.settings import SamplingSettings
from postgrad.tools.chat.loaded import ChatModel, load
from postgrad.tools.chat.talker import Talker
from postgrad.tools.export import export
from postgrad.training.start import train


def logprobs(chat_model: ChatModel) -> torch.Tensor:
    """Of the tokens of one text: two models that agree on them have the same weights."""
    ids = chat_model.tokenizer("<|im_start|>user\nhi", add_special_tokens=False)["input_ids"]
    return torch.from_numpy(chat_model.engine.logprobs([ids], 1.0)[0])


SAVING = {"save_steps": 1, "max_ckpt_num": 5}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_answers_as_its_export_does(
    lora: bool, make_recipe: Any, console: Console, tmp_path: Path, models: Callable[[int], str]
) -> None:
    model: dict[str, Any] = {"path": models(0), "init": None}
    if lora:
        model["lora"] = {"rank": 2, "alpha": 4}
    recipe = make_recipe("sft", model=model, checkpoint=SAVING, steps=2)
    train(recipe, console)
    exported_logprobs = {}
    for step in (1, 2):
        to = export(Path(recipe.run_dir), str(step), tmp_path / f"model-{step}")
        exported_logprobs[step] = logprobs(load(str(to), None, "auto", 64))
    assert not torch.equal(exported_logprobs[1], exported_logprobs[2])
    run_dir = recipe.run_dir
    for name, which, step in (
        (run_dir, None, 2),
        (run_dir, "latest", 2),
        (run_dir, "1", 1),
        (f"{run_dir}/checkpoints/step-000001", None, 1),
        (f"{run_dir}/checkpoints/latest", None, 2),
    ):
        chat_model = load(name, which, "auto", 64)
        assert torch.equal(logprobs(chat_model), exported_logprobs[step])
        assert chat_model.about == f"sft run {run_dir}, step {step}, float32"


@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_that_the_run_calls_so(
    make_recipe: Any, console: Console
) -> None:
    best = {**SAVING, "best_metric": "eval/accuracy", "best_mode": "min"}
    recipe = make_recipe("sft", checkpoint=best, steps=2, eval={"every": 1, "at_start": False})
    train(recipe, console)
    named = (Path(recipe.run_dir) / "checkpoints" / "best").read_text("utf-8").strip()
    for name, which in ((recipe.run_dir, "best"), (f"{recipe.run_dir}/checkpoints/best", None)):
        assert f"step {int(named[5:])}," in load(name, which, "auto", 64).about


@pytest.mark.slow
def test_a_run_is_spoken_to_as_it_was_taught(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe(
        "rl", steps=1, data={"system": "spell"}, rollout={"max_new_tokens": 4, "stop": [";"]}
    )
    train(recipe, console)
    chat_model = load(recipe.run_dir, None, "auto", 64)
    talker = Talker(
        chat_model.engine,
        chat_model.tokenizer,
        variables=chat_model.variables,
        system=chat_model.system,
        stop=chat_model.stop,
    )
    request = talker.request("x", SamplingSettings(), 0)
    text = chat_model.tokenizer.decode(request.token_ids)
    assert text.startswith("<|im_start|>system\nspell<|im_end|>")
    assert request.sampling.stop == (";",)


def test_what_cannot_be_talked_to_says_why(
    make_recipe: Any,
    console: Console,
    models: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward = make_recipe("reward", steps=1)
    train(reward, console)
    sft = make_recipe("sft", "other", steps=1)
    train(sft, console)
    run = Path(sft.run_dir)
    monkeypatch.chdir(run.parent)
    for name, which, problem in (
        (reward.run_dir, None, "trains a reward model"),
        (models(0), "best", "no run, which alone has checkpoints"),
        (sft.run_dir, "newest", "latest, best, or the number of a step"),
        (str(run / "checkpoints" / "step-000001" / "state.json"), None, "no model at"),
        (str(run.parent / "nothing"), None, "nothing is no directory"),
        ("./nothing", None, "no such directory"),  # beside runs, but perhaps a model
    ):
        with pytest.raises(UsageError, match=problem):
            load(name, which, "auto", 64)
    other = run / "checkpoints" / "mine"
    other.mkdir()
    with pytest.raises(UsageError, match="is no checkpoint"):
        load(str(other), None, "auto", 64)


def test_a_run_without_a_checkpoint_has_nothing_to_talk_to(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("sft", steps=1)
    train(recipe, console)
    for path in (Path(recipe.run_dir) / "checkpoints").glob("step-*/*"):
        path.unlink()
    for path in (Path(recipe.run_dir) / "checkpoints").glob("step-*"):
        path.rmdir()
    with pytest.raises(UsageError, match="no checkpoint yet"):
        load(recipe.run_dir, None, "auto", 64)

"""model.eos_token: a base model whose own end is not that of its chat template."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from helpers.base_models import END, END_ID, TURN_END, TURN_END_ID, write_base
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.fleet.choices import choose
from postgrad.fleet.engines import EngineWorker
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.vllm.start import read_model
from postgrad.tools.chat.loaded import load
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.tools.generate import Extent, generate
from postgrad.training.start import train

QUIET = Console("quiet")
QUESTION = [{"role": "user", "content": "pine"}]
MakeBase = Callable[..., Recipe]


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write_base(tmp_path / "base")


@pytest.fixture
def recipe(make_recipe: MakeRecipe, base: str) -> MakeBase:
    """recipe(job, model=..., **sections): of a base model that answers with the turn's end."""

    def make(job: str, model: dict[str, Any] | None = None, **changes: Any) -> Recipe:
        table = {"path": base, "init": None, "eos_token": TURN_END, **(model or {})}
        few = {"steps": 1, "learner": {"lr": 1e-6, "threads": 1}}
        return make_recipe(job, model=table, **{**few, **changes})

    return make


def answers(lines: Iterable[str]) -> list[list[int]]:
    return [turn["token_ids"] for line in lines for turn in json.loads(line)["turns"]]


def ends_alike(samples: list[list[int]]) -> bool:
    """Whether every answer is the end of a turn alone."""
    return bool(samples) and all(sample == [TURN_END_ID] for sample in samples)


def ends_of(engine: Any) -> list[int]:
    """The tokens at which the built-in engine stops."""
    return engine._stopper._eos.tolist()


def by_transformers(path: Path) -> list[int]:
    """The answer of plain transformers, with what the directory says alone."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    lm: Any = AutoModelForCausalLM.from_pretrained(path)
    asked: Any = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        out = lm.generate(**asked, max_new_tokens=6, do_sample=False)
    return out[0, asked["input_ids"].shape[1] :].tolist()


def test_samples_evaluations_and_the_exported_model_end_there(recipe: MakeBase, base: str) -> None:
    assert by_transformers(Path(base)) == [TURN_END_ID] * 6  # it runs on
    run = recipe("rl", checkpoint={"save_hf": True})
    train(run, QUIET)
    folder = Path(run.run_dir)
    for name in ("samples", "eval_samples"):
        assert ends_alike(answers((folder / f"{name}.jsonl").read_text().splitlines()))
    assert "answer_end" not in (folder / "events.jsonl").read_text()
    generation = GenerationConfig.from_pretrained(folder / "model")
    assert generation.eos_token_id == [TURN_END_ID, END_ID]
    assert generation.pad_token_id == END_ID
    assert AutoTokenizer.from_pretrained(folder / "model").eos_token == END  # of plain texts
    assert by_transformers(folder / "model") == [TURN_END_ID]
    assert read_model(str(folder / "model"), torch.float32, 48).eos == (END_ID, TURN_END_ID)


@pytest.mark.parametrize("job", ["sft", "preference"])
def test_every_job_of_a_policy_exports_it(recipe: MakeBase, job: str) -> None:
    run = recipe(job, checkpoint={"save_hf": True})
    train(run, QUIET)
    assert by_transformers(Path(run.run_dir) / "model") == [TURN_END_ID]


def test_an_adapter_s_directory_and_its_merged_model_say_so(
    recipe: MakeBase, tmp_path: Path
) -> None:
    run = recipe("sft", {"lora": {"rank": 2, "alpha": 2}})
    train(run, QUIET)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    export(Path(run.run_dir), "latest", adapter, adapter=True)
    export(adapter, "latest", merged)
    for path in (adapter, merged):
        assert GenerationConfig.from_pretrained(path).eos_token_id == [TURN_END_ID, END_ID]
    assert by_transformers(merged) == [TURN_END_ID]


def test_the_base_is_evaluated_and_sampled_with_it(
    recipe: MakeBase, base: str, tmp_path: Path
) -> None:
    evaluate(recipe("rl"), base, QUIET, to=tmp_path / "answers.jsonl")
    assert ends_alike(answers((tmp_path / "answers.jsonl").read_text().splitlines()))
    generated = generate(recipe("rl"), tmp_path / "rows", QUIET, Extent(samples=1, rows=2))
    reasons = {sample["finish_reason"] for (sample,) in generated.groups()}
    assert reasons == {"stop"}


def test_a_conversation_with_a_run_ends_there(recipe: MakeBase) -> None:
    run = recipe("sft")
    train(run, QUIET)
    model = load(run.run_dir, None, "float32", 48)
    assert ends_of(model.engine) == [END_ID, TURN_END_ID]


def test_a_rollout_worker_and_vllm_have_it(recipe: MakeBase, base: str) -> None:
    worker_recipe = recipe("rl")
    choices = choose(worker_recipe, {}, measure=False)
    worker = EngineWorker(json.loads(worker_recipe.model_dump_json()), choices)
    worker.build(base, choices, 4, 48, "")
    assert ends_of(worker._engine) == [END_ID, TURN_END_ID]
    assert read_model(base, torch.float32, 48).eos == (END_ID,)
    assert read_model(base, torch.float32, 48, eos_token=[TURN_END]).eos == (END_ID, TURN_END_ID)


@pytest.mark.parametrize("text", ["<|eot_id|>", "a", ""])
def test_what_is_no_special_token_is_refused(recipe: MakeBase, text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a special token of the tokenizer at .*: give"):
        train(recipe("sft", {"eos_token": [text]}), QUIET)


def test_a_run_does_not_go_on_with_another_one(recipe: MakeBase) -> None:
    train(recipe("sft"), QUIET)
    with pytest.raises(UsageError, match=r"model.eos_token"):
        train(recipe("sft", {"eos_token": []}, steps=2), QUIET)


def test_a_model_that_writes_nothing_has_none(recipe: MakeBase, base: str) -> None:
    with pytest.raises(UsageError, match=r"model.eos_token.*writes no answers"):
        recipe("reward")
    judge = {"path": base, "eos_token": TURN_END}
    with pytest.raises(UsageError, match=r"reward_model.model.eos_token.*writes no answers"):
        recipe("rl", {"eos_token": []}, reward_model={"model": judge})

"""Whole runs in which a policy calls a tool, in the format of each family: exact after a kill."""

from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MakeRecipe
from helpers.tool_runs import GRAMMARS, grammar_of, model_of
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

LIKE_OTHERS = ("mistral_list", "deepseek_plain")
RESULTS = {  # what stands before a result, and in it
    "qwen": "<tool_response>\n",
    "mistral": "[TOOL_RESULTS]",
    "mistral_list": '"call_id": "call0000',
    "deepseek": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>",
    "deepseek_plain": "<｜tool▁output▁begin｜>",
    "gpt_oss": "<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>",
    "kimi": "<|im_system|>calculator<|im_middle|>## Return of functions.calculator:0\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.long) if family in LIKE_OTHERS else family
        for family in GRAMMARS
    ],
)
def test_a_policy_trains_on_calls_of_every_family_and_a_killed_run_has_the_same_bits(
    family: str,
    make_recipe: MakeRecipe,
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, tokenizer = model_of(family, tmp_path / "model")
    changes: dict[str, Any] = {
        "model": {"path": path, "init": None},
        "environment": {"type": "tools", "tools": ["calculator"], "max_turns": 3,
                        "malformed_reward": -0.5},
        "data": {"max_len": 1000},
        "eval": {"max_len": 1000, "max_new_tokens": 80, "size": 2},
        "rollout": {"lark": grammar_of(family, tokenizer), "max_new_tokens": 80,
                    "max_staleness": 1, "slots": 5},
        "algorithm": {"type": "grpo", "correction": "tis", "correction_with_filters": True},
        "steps": 2,
    }  # fmt: skip
    if family == "gpt_oss":  # only what the final channel says is scored
        mark = "<|channel|>final<|message|>"
        scored = {"type": "tiny_rewards:vowels", "special_tokens": True, "after": mark}
        changes["rewards"] = [{**scored, "name": "vowels"}]
    never, killed = (make_recipe("rl", name, **changes) for name in ("never", "killed"))
    train(never, console)
    train_until_killed(monkeypatch, RLJob, 1, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 2)
    metrics = lines(Path(never.run_dir) / "metrics.jsonl")
    assert max(line["environment/calls"] for line in metrics) > 0.0
    events = lines(Path(never.run_dir) / "events.jsonl")
    assert not [event for event in events if event["event"] == "answer_end"]
    samples = lines(Path(never.run_dir) / "samples.jsonl")
    for line in samples if family == "gpt_oss" else ():
        last = tokenizer.decode(line["turns"][-1]["token_ids"])
        assert line["rewards"]["vowels"] == (0.25 if "<|channel|>final<|message|>a" in last else 0)
    replies = [
        (tokenizer.decode(before["token_ids"]), tokenizer.decode(turn["token_ids"]))
        for line in samples
        for before, turn in zip(line["turns"], line["turns"][1:], strict=False)
        if turn["author"] == "environment"
    ]
    assert replies
    for call, reply in replies:
        assert "calculator" in call
        assert RESULTS[family] in reply
        assert ("Error: " in reply) == ('+"' in call or '+ "' in call)

"""The exported directory under lm-evaluation-harness: the same answers, the same accuracies.

The harness is in the dependency group `harness` and not in `dev`: it brings two dozen packages.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings
from postgrad.observe.console import Console
from postgrad.tools.asking import ask
from postgrad.tools.evaluate import evaluate
from postgrad.training.start import train

ROWS = 24
NEW = 6  # tokens of an answer
# No phrase ends in white space: the harness moves white space at a prompt's end over to the choice.
PHRASES = ["Spell this word backward (example: sun -> nus): ", "user", "assistant"]
MODEL = {  # after 90 updates it spells some words, and not others
    "init": {
        "type": "qwen3",
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
        "tokenizer": {"kind": "characters", "phrases": PHRASES},
    }
}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
GENERATE = f"""
output_type: generate_until
doc_to_target: answer
generation_kwargs:
  until: ["<|im_end|>"]
  do_sample: false
  max_gen_toks: {NEW}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def write_rows(to: Path) -> list[dict[str, Any]]:
    """Words to spell backward; to choose from: the word, its end to its front, and the answer."""
    task = {"min_word_len": 3, "max_word_len": 4}
    source = DataSettings(path="reasoning-gym:spell_backward", size=ROWS, seed=2, task=task)
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(read_rows(source)):
        answer = row.values["answer"]
        others = [answer[::-1], answer[1:] + answer[0]]
        gold = number % 3
        choices = [*others[:gold], answer, *others[gold:]]
        question = row.values["question"]
        rows.append({"question": question, "answer": answer, "choices": choices, "gold": gold})
    to.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return rows


def harness(model: str, tasks: Path, to: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """(results by task, samples by task in the order of the rows) of a run without a network."""
    names = sorted(path.stem for path in tasks.glob("*.yaml"))
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu",
        "--model_args", f"pretrained={model},dtype=float32", "--batch_size", "1",
        "--tasks", ",".join(names), "--include_path", str(tasks), "--apply_chat_template",
        "--output_path", str(to), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(to / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = to.rglob("results_*.json")
    samples: dict[str, list[Any]] = {}
    for name in names:
        (path,) = to.rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        samples[name] = sorted(lines, key=lambda line: line["doc_id"])
    return json.loads(written.read_text("utf-8"))["results"], samples


@torch.inference_mode()
def loglikelihoods(model: str, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Of each row's choices after the chat prompt, by plain transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums: list[list[float]] = []
    for row in rows:
        turn = {"role": "user", "content": row["question"]}
        prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sums.append([])
        for choice in row["choices"]:
            end = tokenizer(choice, add_special_tokens=False)["input_ids"]
            logits = lm(torch.tensor([start + end])).logits[0, len(start) - 1 : -1]
            logprobs = torch.log_softmax(logits.double(), -1)
            sums[-1].append(float(logprobs.gather(-1, torch.tensor(end)[:, None]).sum()))
    return sums


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install --group harness",
)
def test_the_harness_gives_an_exported_model_the_accuracies_that_we_do(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = write_rows(path)
    recipe = make_recipe(
        "sft",
        steps=90,
        model=MODEL,
        eval={"path": str(path), "at_start": False, "at_end": False, "max_new_tokens": NEW},
        rewards=[{"type": "exact_match"}],
        batch={"train_batch_size": 64},
        learner={"lr": 3e-3, "max_grad_norm": 0.0},
        data={"size": 3000},
        checkpoint={"save_hf": True},
    )
    model = train(recipe, console)["model"]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, more in (("choice", CHOICE), ("generate", GENERATE)):
        text = TASK.format(name=name, rows=path, more=more)
        (tasks / f"{name}.yaml").write_text(text, "utf-8")
    results, samples = harness(model, tasks, tmp_path / "harness")

    eval_report = evaluate(recipe, model, console)
    greedy = eval_report["sets"][0]["greedy_accuracy"]
    assert results["generate"]["exact_match,none"] == pytest.approx(greedy, abs=1e-12)
    plain = ask(model, recipe, ROWS)
    assert [sample["resps"][0][0] for sample in samples["generate"]] == [
        answer.answer for answer in plain
    ]

    ours = torch.tensor(loglikelihoods(model, rows))
    theirs = torch.tensor(
        [[float(pair[0]) for pair in sample["filtered_resps"]] for sample in samples["choice"]]
    )
    theirs += (ours - theirs).mean(
        1, keepdim=True
    )  # the prompt's newline is the same for all three
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=0)
    right = [
        int(choice_sums.argmax()) == row["gold"]
        for choice_sums, row in zip(ours, rows, strict=True)
    ]
    assert results["choice"]["acc,none"] == pytest.approx(sum(right) / ROWS, abs=1e-12)
    assert [sample["acc"] for sample in samples["choice"]] == right
    assert 0 < greedy < 1  # else any two would agree
    assert any(right)

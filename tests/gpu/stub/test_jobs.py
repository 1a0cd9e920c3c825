"""The first step of every job on CUDA, with the recipes' own settings: deterministic mode is on."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import PIPELINES, ROOT, SINGLE, Stub, brief, without_kernels
from helpers.jobs import JOBS, WORDS, write_recipe
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
COMMAND = str(Path(__file__).parent / "command.py")
BY_SAMPLE = '\n[[rewards]]\ntype = "helpers.by_sample:by_sample"\n[scoring]'
WIDE = {"hidden_size = 16": "hidden_size = 64", "intermediate_size = 32": "intermediate_size = 128"}
FILTERS = ["--rollout.top_k", "8", "--rollout.top_p", "0.9", "--rollout.min_p", "0.01"]
# Matrices of 4096 numbers, the least whose moments are in eight bits.
EIGHT_BITS = ["--model.lora.rank", "64", "--learner.optimizer_state", "8bit"]
WEIGHTED, MIRRORED = "weights of messages, and the loss on roles", "mirrored"
MESSAGES = '\n[data]\npath = "{rows}"\nmax_len = 96\nloss_turns = ["user", "assistant"]\n'
# The folder is that of all cases.
MIRROR = ["--checkpoint.mirror", "file://{folder}/mirror", "--learner.offload", "sampling"]
VARIANTS = {  # job and what is set beside it
    "heads of 8 numbers": ("sft", ["--model.init.hidden_size", "16"]),
    "attention in blocks": ("grpo with kl", ["--model.attention", "sdpa"]),
    "float32": ("grpo with kl", ["--model.dtype", "float32"]),
    "inputs on the host": ("grpo with kl", ["--model.gradient_checkpointing", "offload"]),
    "gradient checkpointing": ("grpo with kl", ["--model.gradient_checkpointing", "true"]),
    "muon": ("sft", ["--learner.optimizer", "muon"]),
    "filters": ("grpo with kl", FILTERS),
    "small micro-batches": ("ppo", ["--batch.micro_train_tokens", "96"]),
    "LoRA+ of 8 bits": ("grpo with lora", [*EIGHT_BITS, "--learner.loraplus_lr_ratio", "16"]),
    WEIGHTED: ("sft", list[str]()),
    MIRRORED: ("grpo with kl", MIRROR),
}
# The job's first reward is the same for all samples, as its samples are on the stub: nothing would
# be left to learn from.
DAPO = "dapo with a reference that follows"
FILTERED = {DAPO: (DAPO, ["--rollout.filter_on", "by_sample"])}
CASES = {name: (name, list[str]()) for name in JOBS} | FILTERED | VARIANTS
# Compute capabilities and GB, and bytes of shared memory that a block may ask for there.
CARDS = [("8.0", "80"), ("8.9", "24"), ("9.0", "24")]
SHARED = {"8.0": 166912, "8.9": 101376, "9.0": 232448}


def command(folder: Path, case: str, *more: str) -> list[str]:
    """A whole run of one step, from the model's loading to the last checkpoint."""
    name, overrides = CASES[case]
    overrides = [each.format(folder=folder.parent) for each in overrides]
    folder.mkdir()
    recipe = write_recipe(name, folder)
    text = recipe.read_text("utf-8")
    if case == WEIGHTED:
        text = text.replace(WORDS, MESSAGES.format(rows=write_messages(folder / "rows.jsonl")))
        text = text.replace('best_metric = "eval/reward"\n', "")
    text = text.replace("\n[scoring]", BY_SAMPLE)
    for narrow, wide in WIDE.items():
        text = text.replace(narrow, wide)
    recipe.write_text(text, "utf-8")
    run = ["--run_dir", str(folder / "run"), "--steps", "1", "--debug"]
    return ["train", str(recipe), *run, *overrides, *more]


def write_messages(path: Path) -> Path:
    """Conversations of which each message counts something else."""
    weights = {"user": 0.5, "assistant": 2.0}
    with path.open("w", encoding="utf-8") as file:
        for number in range(16):
            texts_by_role = {"user": f"after {number}?", "assistant": f"{number + 1}."}
            messages = [
                {"role": role, "content": text, "weight": weights[role]}
                for role, text in texts_by_role.items()
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def dry_run(folder: Path, pipeline: str) -> list[str]:
    """The shipped recipes as they are, of which a dry run takes one small step each."""
    run = ["--run_dir", str(folder / pipeline), "--debug", "--dry-run"]
    return ["train", str(ROOT / "recipes" / pipeline), *run]


def ask(stub: Stub, to: Path, commands: dict[str, list[str]], **environment: str) -> dict[str, Any]:
    to.write_text(json.dumps(commands), "utf-8")
    return stub.ask(COMMAND, str(to), **environment)


@pytest.fixture(scope="module")
def folder(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def reports(stub: Stub, folder: Path) -> dict[str, Any]:
    """What each case asked of the device."""
    commands = {case: command(folder / case, case) for case in CASES}
    # as on another machine, which has nothing of the run
    commands["resumed"] = command(folder / "resumed", MIRRORED, "--steps", "2")
    return ask(stub, folder / "commands.json", commands)


@pytest.mark.parametrize("case", CASES)
def test_a_job_takes_its_first_step(
    reports: dict[str, Any], results: Results, folder: Path, case: str
) -> None:
    of_case = reports[case]
    assert of_case.pop("error") is None, of_case
    results.keep("jobs", without_kernels(of_case), case)
    (line,) = (folder / case / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    computed = [value for key, value in json.loads(line).items() if "computed" in key]
    assert computed
    assert min(computed) > 0
    assert of_case["launches"] > 100
    assert of_case["deterministic"]


def test_a_run_goes_on_from_its_mirror(reports: dict[str, Any], folder: Path) -> None:
    assert reports["resumed"]["error"] is None
    lines = (folder / "resumed" / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_flex_attention_is_compiled(reports: dict[str, Any]) -> None:
    assert reports["sft"]["graphs"] > 0  # the later jobs of the process find it compiled
    assert reports["heads of 8 numbers"]["graphs"] == 0


def test_cublas_is_told_of_its_workspace_before_its_first_handle(reports: dict[str, Any]) -> None:
    assert sum(of_case["handles"] for of_case in reports.values()) > 0
    assert [case for case, of_case in reports.items() if of_case["late_handles"]] == []


@pytest.mark.parametrize(("capability", "memory"), CARDS)
def test_a_job_takes_its_first_step_on_other_cards(
    stub: Stub, results: Results, capability: str, memory: str, tmp_path: Path
) -> None:
    commands = {
        f"{job}, deterministic {how}": command(
            tmp_path / f"{job} {how}", job, "--learner.deterministic", how
        )
        for job in ("sft", "grpo with kl")
        for how in ("true", "false")
    }
    card_reports = ask(stub, tmp_path / "commands", commands, STUB_CAP=capability, STUB_MEM=memory)
    assert [of_case.pop("error") for of_case in card_reports.values()] == [None] * 4
    assert [of_case["deterministic"] for of_case in card_reports.values()] == [True, False] * 2
    kernels = [each for of_case in card_reports.values() for each in of_case["attention"]]
    assert kernels
    assert max(each["shared"] for each in kernels) <= SHARED[capability]
    card = f"{capability}, {memory} GB"
    results.keep("attention", sorted({brief(each) for each in kernels}), card)
    measured = {case: without_kernels(of_case) for case, of_case in card_reports.items()}
    results.keep("other cards", measured, card)


def test_the_shipped_pipelines_take_a_small_step_of_each_recipe(
    stub: Stub, results: Results, tmp_path: Path
) -> None:
    commands = {name: dry_run(tmp_path, name) for name in PIPELINES}
    pipeline_reports = ask(stub, tmp_path / "commands", commands)
    assert {
        name: of_one.pop("error") for name, of_one in pipeline_reports.items()
    } == dict.fromkeys(pipeline_reports)
    for name, of_pipeline in pipeline_reports.items():
        results.keep("pipelines", without_kernels(of_pipeline), name)


@pytest.mark.parametrize("name", SINGLE)
def test_the_shipped_recipes_take_a_small_step(
    stub: Stub, results: Results, name: str, tmp_path: Path
) -> None:
    data = os.environ.get("POSTGRAD_TEST_DATA")
    if not data:
        pytest.skip("POSTGRAD_TEST_DATA names no folder")
    flags = ["--data.path", f"{data}/{SINGLE[name]}", "--data.name", "none"]
    arguments = ["train", str(ROOT / "recipes" / f"{name}.toml"), *flags, "--dry-run", "--debug"]
    recipe_reports = ask(stub, tmp_path / "commands", {name: arguments})
    assert recipe_reports[name].pop("error") is None
    results.keep("recipes", without_kernels(recipe_reports[name]), name)

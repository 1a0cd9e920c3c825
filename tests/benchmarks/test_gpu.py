"""The command of benchmarks/gpu: its limits, its files, its tables, and the work it makes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import (
    goals,
    needs,
    page,
    profiling,
    runner,
    session,
    training_runs,
    workload,
)
from benchmarks.gpu.session import Case, Session, Skipped, Store
from benchmarks.gpu.work import FULL, JOBS, LOADS, SMALL, Job
from postgrad.parallel import device

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path) -> Session:
    """A dry session with a minute left."""
    return Session(tmp_path, tmp_path / "scratch", "cpu", True, time.time() + 60)


def cases_of(here: Session, part: str) -> dict[str, Any]:
    return Store(here.to).part(part)["cases"]


# A part and its file


def test_each_result_is_in_the_file_before_the_next_case_begins(here: Session) -> None:
    seen: list[list[str]] = []

    def look() -> dict[str, Any]:
        seen.append([*cases_of(here, "decode"), Store(here.to).part("decode")["under_way"]])
        return {"number": len(seen)}

    session.serve("decode", [Case("a", 1, look), Case("b", 1, look)], here)
    assert seen == [["a"], ["a", "b"]]
    assert [case["number"] for case in cases_of(here, "decode").values()] == [1, 2]
    assert "under_way" not in Store(here.to).part("decode")


def test_a_case_that_fails_or_is_skipped_says_why_and_the_others_go_on(here: Session) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such kernel")

    def skip() -> dict[str, Any]:
        raise Skipped("vllm is not installed here")

    session.serve(
        "step", [Case("a", 1, fail), Case("b", 1, skip), Case("c", 1, lambda: {"n": 1})], here
    )
    cases = cases_of(here, "step")
    assert cases["a"]["failed"] == "ValueError: no such kernel"
    assert any("no such kernel" in line for line in cases["a"]["traceback"])
    assert cases["b"]["skipped"] == "vllm is not installed here"
    assert cases["c"]["n"] == 1


def test_a_case_that_the_time_does_not_allow_is_skipped(tmp_path: Path) -> None:
    real = Session(tmp_path, tmp_path, "cpu", False, time.time() + 10)
    session.serve("step", [Case("a", 60, lambda: {"n": 1}), Case("b", 1, lambda: {"n": 2})], real)
    cases = cases_of(real, "step")
    assert cases["a"]["skipped"].startswith("it takes up to 60 s and ")
    assert cases["b"]["n"] == 2


def test_a_broken_device_ends_the_process_and_the_next_one_goes_on_behind(here: Session) -> None:
    ran: list[str] = []

    def broken() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def cases() -> Iterator[Case]:
        yield Case("a", 1, broken)
        yield Case("b", 1, lambda: {"n": len(ran)})

    with pytest.raises(SystemExit) as end:
        session.serve("decode", cases(), here)
    assert end.value.code == session.DIED
    assert list(cases_of(here, "decode")) == ["a"]
    session.serve("decode", cases(), here)
    assert list(cases_of(here, "decode")) == ["a", "b"]


# Parts, one after the other


def run_part(
    here: Session, monkeypatch: pytest.MonkeyPatch, *statuses: tuple[str | None, int | None]
) -> str:
    """statuses: of each process of the part, the case that was under way at its end and its exit
    status.
    """
    left = list(statuses)

    def child(_: Session, part: str) -> int | None:
        case, status = left.pop(0)
        if case is not None:
            Store(here.to).begin(part, case)
        return status

    monkeypatch.setattr(runner, "child", child)
    ended = runner.run_part(here, "training", Store(here.to))
    assert left == []
    return ended


def test_a_part_whose_process_is_killed_is_started_again(here: Session, monkeypatch: Any) -> None:
    assert run_part(here, monkeypatch, ("a", -11), ("b", 3), (None, 0)) == "whole"
    cases = cases_of(here, "training")
    assert cases["a"]["failed"] == "its process ended with signal 11: see log.txt"
    assert cases["b"]["failed"] == "its process ended with exit status 3: see log.txt"


def test_a_part_that_gets_nowhere_is_not_started_again(here: Session, monkeypatch: Any) -> None:
    ended = run_part(here, monkeypatch, (None, 1))
    assert ended == "its process ended with exit status 1: see log.txt"


def test_a_part_is_stopped_at_its_limit(here: Session, monkeypatch: Any) -> None:
    assert run_part(here, monkeypatch, ("a", None)) == "stopped at its limit"
    assert cases_of(here, "training")["a"]["failed"] == "it was under way at the part's limit"


def test_a_process_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{script} input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    below = int(process.stdout.readline())
    runner.end(process)
    for _ in range(100):
        state = Path(f"/proc/{below}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("its child is still there")


def test_nine_minutes_are_enough_for_all_shares() -> None:
    assert sum(runner.SECONDS.values()) <= 60 * runner.MINUTES - runner.CLOSING
    assert list(runner.SECONDS) == [part for part in session.PARTS if part != "learning"]


def test_seconds_that_a_part_leaves_go_to_those_behind_it() -> None:
    parts, left = list(session.PARTS), 540.0
    first = runner.limit_of("checks", parts, left, 9.0)
    assert first == 540.0 - sum(runner.SECONDS.values()) + runner.SECONDS["checks"]
    late = runner.limit_of("training", parts, 540.0 - 20.0, 9.0)
    assert late > runner.SECONDS["training"]
    assert runner.limit_of("step", parts, 40.0, 9.0) == 40.0
    assert runner.limit_of("learning", parts, 59.0, 9.0) == 0.0
    assert runner.limit_of("learning", parts, 100.0, 9.0) == 100.0
    assert runner.limit_of("learning", parts, 1000.0, 20.0) == 300.0


def test_parts_get_their_shares_of_other_lengths() -> None:
    assert runner.limit_of("training", ["training", "decode"], 200.0, 4.5) == 200.0 - 105 / 2


# Tables


def results(**cases: Any) -> dict[str, Any]:
    return {"about": {"versions": {"torch": "2.11.0"}, "date": "2026-11-23T00:00:00"},
            "parts": {"training": {"cases": cases, "ended": "whole"}}}  # fmt: skip


def test_nothing_was_run_before_the_first_session() -> None:
    outcomes = goals.outcomes({})
    assert {outcome.shown for outcome in outcomes} == {"not run yet"}
    assert {outcome.verdict for outcome in outcomes} == {"not run"}


def test_a_figure_is_held_to_its_goal() -> None:
    for mfu, verdict in ((0.5, "met"), (0.45, "met"), (0.2, "missed"), (float("nan"), "missed")):
        outcomes = goals.outcomes(results(**{"1.5B 4k": {"mfu": mfu}}))
        (outcome,) = [each for each in outcomes if each.figure.label == "SFT 1.5B 4k: MFU"]
        assert (outcome.figure.goal, outcome.verdict) == (">= 45.0%", verdict)
    (cost,) = [figure for figure in goals.figures() if "deterministic" in figure.label]
    assert (cost.verdict(0.09), cost.verdict(0.11)) == ("met", "missed")


def test_a_check_passes_or_does_not() -> None:
    for result, shown, verdict in (
        ({"passed": True}, "passes", "met"),
        ({"passed": False}, "does not pass", "missed"),
        ({"said": "12 passed"}, "passes", "met"),
        ({"failed": "AssertionError: they differ"}, "failed", "failed"),
        ({"skipped": "they need a GPU"}, "not run yet", "not run"),
    ):
        everything = {"parts": {"checks": {"cases": {"tests/gpu": result}}}}
        (outcome,) = [
            each for each in goals.outcomes(everything) if each.figure.case == "tests/gpu"
        ]
        assert (outcome.shown, outcome.verdict) == (shown, verdict)


def test_the_report_names_what_missed_failed_and_did_not_run() -> None:
    measured = results(
        **{
            "1.5B 4k": {"mfu": 0.2},
            "0.6B 4k": {"mfu": 0.3},
            "1.5B 16k": {"failed": "OutOfMemoryError: 3 bytes"},
            "1.5B 4k checkpointing": {"skipped": "it takes up to 25 s and 3 were left"},
        }
    )
    text = goals.report(measured)
    assert "missed: 1\n  SFT 1.5B 4k: MFU: 20.0%, wanted >= 45.0%" in text
    assert "failed: 1\n  training: 1.5B 16k: OutOfMemoryError: 3 bytes" in text
    assert "  SFT 1.5B 4k checkpointing: MFU: skipped: it takes up to 25 s" in text
    assert "SFT 0.6B 4k: MFU" in text
    assert "torch 2.11.0" in text


def test_goals_are_those_of_the_issue() -> None:
    stated = {figure.label: figure.goal for figure in goals.figures() if figure.goal}
    checks = {label for label in stated if label.startswith("check: ")}
    assert {stated.pop(label) for label in checks} == {"passes"}
    assert stated == {
        "SFT 1.5B 4k: MFU": ">= 45.0%",
        "cost of deterministic mode, SFT 1.5B 4k": "<= 10.0%",
        "decode 1.5B, 256 rows 1k own prompts: of the bandwidth limit": ">= 60%",
        "GRPO 1.5B 16 x 8: times as fast as TRL": ">= 3.00",
        "GRPO 1.5B 64 x 8: times as fast as TRL": ">= 3.00",
        "plan: memory, worst miss": "<= 5.0%",
        "plan: time after --calibrate, worst miss": "<= 15.0%",
    }


def test_the_page_has_the_section_of_the_newest_results() -> None:
    file = ROOT / "benchmarks" / "results" / "gpu.json"
    newest = json.loads(file.read_text("utf-8")) if file.exists() else {}
    assert page.section(newest) in page.PAGE.read_text("utf-8")


def test_a_part_has_the_allocator_that_a_run_on_its_own_would_have(
    here: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses the card before its first run does, which is too late for a run's own choice."""
    assert runner.ALLOCATOR == device.ALLOCATOR
    for name in device.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert runner.environment(here)[device.ALLOCATOR[0]] == f"{device.EXPANDABLE}:True"
    monkeypatch.setenv(device.ALLOCATOR[1], "max_split_size_mb:64")
    assert device.ALLOCATOR[0] not in runner.environment(here)


def test_plans_of_a_gpu_are_held_to_what_its_allocator_reserves() -> None:
    line = {"train_seconds": 2.0, "train_memory_bytes": 5, "train_reserved_bytes": 8}
    watching = SimpleNamespace(lines=[line | {"estimated/train_reserved_bytes": 7}])
    figures = training_runs.of_phase(watching, "train")  # pyright: ignore[reportArgumentType]
    assert figures == {"seconds": 2.0, "estimated_bytes": 7, "bytes": 8}
    watching.lines = [line | {"estimated/train_memory_bytes": 6}]
    figures = training_runs.of_phase(watching, "train")  # pyright: ignore[reportArgumentType]
    assert figures == {"seconds": 2.0, "estimated_bytes": 6, "bytes": 5}


def test_a_session_takes_the_place_of_the_section_before(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Title\n\n{page.section({})}\n## Next\n\ntext\n", "utf-8")
    page.write(results(**{"1.5B 4k": {"mfu": 0.2}}), path)
    text = path.read_text("utf-8")
    assert text.startswith("# Title\n\n## On a GPU\n")
    assert text.endswith("|\n\n## Next\n\ntext\n")
    assert "| SFT 1.5B 4k: MFU | ≥ 45.0% | 20.0% (missed) |" in text
    assert "| GRPO 1.5B 16 x 8: s a step |  | not run yet |" in text
    assert "torch 2.11.0" in text


def test_a_dry_run_is_no_session_of_a_gpu() -> None:
    with pytest.raises(ValueError, match="dry run"):
        page.write({"about": {"small": True}})


def test_names_of_cases_are_their_own() -> None:
    for sizes in (FULL, SMALL):
        names = [load.name(sizes) for load in LOADS]
        assert len({*names}) == len(names)
        assert all(sizes.rows[load.rows] % load.shared == 0 for load in LOADS)
    assert len({job.name for job in JOBS}) == len(JOBS)


def test_what_is_missing_is_named_as_pip_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs.text() == "nothing is missing"  # this project's dependencies bring all
    gone = (needs.Need("some-package", "some_package"), needs.Need("other", "o_ther", True))
    monkeypatch.setattr(needs, "NEEDS", (*needs.NEEDS, *gone))
    assert needs.text() == "some-package\nother (compiled)"


# Arithmetic


def test_busy_time_counts_what_overlaps_once() -> None:
    assert profiling.busy([(0.0, 10.0), (5.0, 12.0), (6.0, 7.0), (20.0, 21.0)]) == 13.0
    assert profiling.busy([]) == 0.0


def event(name: str, start: float, end: float, self_time: float) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, self_cpu_time_total=self_time)


def test_kernels_are_summed_by_name_and_the_device_is_idle_between_them() -> None:
    events = [event("mm", 0, 100, 0), event("add", 200, 250, 0), event("mm", 300, 400, 0)]
    profile = profiling.summed(events, 500e-6, kernels=True)
    assert profile["idle_share"] == pytest.approx(0.5)
    assert [kernel["name"] for kernel in profile["largest"]] == ["mm", "add"]
    assert profile["largest"][0] | {"name": ""} == {
        "name": "", "calls": 2, "seconds": pytest.approx(200e-6), "share": pytest.approx(0.4)
    }  # fmt: skip
    assert profiling.summed([], 1.0, kernels=True)["idle_share"] is None


def test_rows_have_as_many_tokens_as_they_are_to_have(tmp_path: Path) -> None:
    from postgrad.data.conversations import load_conversations
    from postgrad.data.settings import DataSettings

    tokenizer = workload.make_tokenizer(1000)
    assert len(tokenizer) == 1000
    lengths = np.array([24, 40, 128, 33])
    rows = workload.write_conversations(tmp_path / "rows.jsonl", lengths)
    settings = DataSettings(path=str(rows), max_len=128, shuffle=False)
    read = load_conversations(settings, tokenizer).all()
    assert [len(conversation.token_ids) for conversation in read] == lengths.tolist()
    bearing = lengths - workload.asked(lengths) - (workload.TEMPLATE_TOKENS - 1)
    assert [int(conversation.loss_mask.sum()) for conversation in read] == bearing.tolist()
    rows = workload.write_questions(tmp_path / "questions.jsonl", lengths)
    for line, length in zip(rows.read_text("utf-8").splitlines(), lengths, strict=True):
        messages = [{"role": "user", "content": json.loads(line)["question"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert len(ids) == length
    assert tokenizer.decode([999, 300]) == "w999w300"


def test_updates_are_as_large_as_they_are_to_be(here: Session) -> None:
    for pack in FULL.packs.values():
        lengths = workload.pack_lengths(pack, FULL.update_tokens)
        assert (lengths.min(), lengths.max()) == (64, pack)
        assert lengths.sum() == pytest.approx(FULL.update_tokens, rel=0.08)
        assert lengths.tolist() == workload.pack_lengths(pack, FULL.update_tokens).tolist()
    real = Session(here.to, here.scratch, "cuda", False, 0.0)
    asked = workload.question_lengths(real, 64)
    assert (asked.min(), asked.max(), asked.mean()) == (44, 156, 100)


def test_flops_are_those_of_the_model_alone(here: Session) -> None:
    from benchmarks.gpu.training import flops_of

    lengths, shape = np.array([128, 40]), workload.shape_of(here, "1.5B")
    matrices = 2 * (2 * 64 * (64 + 32) + 3 * 64 * 128)  # two layers
    bearing = (128 - 26 - 21) + 1 + (40 - 4 - 21) + 1
    forward = 2 * 168 * matrices + 2 * 2 * (128**2 + 40**2) / 2 * 64 * 2 + 2 * bearing * 64 * 512
    assert shape.layer_matrix_parameters * 2 == matrices
    assert flops_of(here, Job("1.5B", "4k", 1), lengths) == pytest.approx(3 * forward)
    assert flops_of(here, Job("1.5B", "4k", 1, ("LoRA",)), lengths) == pytest.approx(2 * forward)


def test_the_limit_of_decoding_reads_each_byte_once(tmp_path: Path) -> None:
    from benchmarks.gpu.decode import limit_of, prompts_of

    real = Session(tmp_path, tmp_path, "cuda", False, 0.0)
    card: Any = SimpleNamespace(copy_bandwidth=4e12)
    limit = limit_of(real, card, LOADS[0], prompts_of(real, LOADS[0]))
    assert limit["weight_bytes"] == 2 * 1_543_714_304  # Qwen2.5-1.5B
    per_token = 2 * 28 * 2 * 128 * 2
    assert limit["cache_bytes"] == 256 * (1024 - 100 + 4 + 48) * per_token
    read = limit["weight_bytes"] + limit["cache_bytes"]
    assert limit["limit_tokens_per_second"] == pytest.approx(256 * 4e12 / read)
    shared = limit_of(real, card, LOADS[1], prompts_of(real, LOADS[1]))
    assert shared["cache_bytes"] == (32 * (1024 - 100) + 256 * 52) * per_token


# The whole command

OPTIONAL = {"vllm", "2 x 4 trl", "4 x 4 trl"}
NOT_HERE = {
    "flex attention is tree attention", "graphs are eager decoding", "tests/gpu", "weights by ipc",
    "weights by nccl",
}  # fmt: skip
SHUT_OUT = """
import importlib.util, sys

def refused(name):
    return name.partition(".")[0] in {refused!r}

class ShutOut:
    def find_spec(self, name, path=None, target=None):
        if refused(name):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

find_spec = importlib.util.find_spec  # with it libraries ask what is installed
importlib.util.find_spec = lambda name, package=None: (
    None if refused(name) else find_spec(name, package)
)
sys.meta_path.insert(0, ShutOut())
"""
REFUSED = {
    "datasets", "pyarrow", "pandas", "trl", "vllm", "ray", "wandb", "trackio", "tensorboard",
    "math_verify", "latex2sympy2_extended", "starlette", "uvicorn", "prometheus_client",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_a_dry_run_comes_to_its_end_without_what_it_does_not_need(tmp_path: Path) -> None:
    shut_out = tmp_path / "site"
    shut_out.mkdir()
    text = SHUT_OUT.format(refused=REFUSED)
    (shut_out / "sitecustomize.py").write_text(text, "utf-8")
    to = tmp_path / "to"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small",
         "--minutes", "40", "--to", str(to)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{shut_out}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    recorded = Store(to).read()
    assert recorded["about"]["done"]
    assert {name: part["ended"] for name, part in recorded["parts"].items()} == dict.fromkeys(
        session.PARTS, "whole"
    )
    cases = {
        name: case for part in recorded["parts"].values() for name, case in part["cases"].items()
    }
    assert {name: case["failed"] for name, case in cases.items() if "failed" in case} == {}
    skipped = {name for name, case in cases.items() if "skipped" in case}
    assert {name for name in skipped if "graphs off" not in name} == OPTIONAL | NOT_HERE
    assert cases["SFT of the quickstart"]["passed"]
    assert 0 < cases["reward rises in 20 steps"]["last_reward"] < 2
    assert cases["1.5B 4k"]["mfu"] > 0
    assert cases["weights by memory"]["bytes"] == cases["weights by gloo"]["bytes"] == 1 << 20
    assert (to / "hardware.toml").exists()
    assert (to / "calibration.toml").exists()
    assert "failed: 0" in done.stdout

"""Every shipped recipe takes its first step on cards of several kinds, with both versions of torch,
deterministic or not; or its plan refuses it, and it runs out of memory.

All 24 combinations for each recipe would take a day. Each recipe meets every value of every factor,
and every two values of different factors meet on some recipe.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import (
    IMAGES,
    PIPELINES,
    PYTHONS,
    ROOT,
    SEVERAL_DEVICES,
    SINGLE,
    SMALL_CARDS,
    START,
    Started,
    Stub,
    nvidia_smi,
    versions,
    without_kernels,
)
from helpers.pairwise import Row, pairs_of
from helpers.stub_results import Results
from postgrad.observe.console import Console
from postgrad.plan.planner import plan

HERE = Path(__file__).parent
FACTORS = {
    "torch": ("2.11", "2.13"),
    "capability": ("8.0", "8.9", "9.0"),
    "memory": ("24", "80"),  # GB (2^30 bytes)
    "deterministic": ("true", "false"),
}
# Two halves, each with every value; together they have every pair.
HALVES = {
    "A": [
        ("2.11", "8.0", "24", "false"),
        ("2.11", "8.9", "80", "true"),
        ("2.13", "9.0", "24", "true"),
    ],
    "B": [
        ("2.13", "8.0", "80", "true"),
        ("2.13", "8.9", "24", "false"),
        ("2.11", "9.0", "80", "false"),
    ],
}
# A recipe, or a folder whose recipes run one after the other, and the half that it meets.
DESIGN = {
    "quickstart": "A",
    "game": "B",
    "rlhf_tiny": "A",
    "preferences": "B",
    "algorithms": "B",
    "async": "A",
    "distill": "B",
    "self_distill": "B",
    "process_reward": "A",
    "best_of_n": "B",
    "iterative_dpo": "A",
    "gsm8k_sft": "B",
    "gsm8k_grpo": "A",
    "hh_reward": "A",
    "7b/sft": "A",
    "7b/dpo": "B",
    "7b/reward": "A",
    "7b/grpo": "B",
    "7b/dpo_lora": "A",
    "7b/grpo_lora": "B",
    "7b/reward_lora": "A",
    "7b/ppo_lora": "A",
    "24gb/grpo_1.7b": "A",
    "24gb/grpo_8b_qlora": "B",
    "cluster/grpo": "A",
    "start/sft/recipe": "B",
    "start/reward/recipe": "A",
    "start/preference/recipe": "B",
    "start/rl/recipe": "A",
}
ROWS = {half: [dict(zip(FACTORS, row, strict=True)) for row in HALVES[half]] for half in HALVES}
SMALL = {*PIPELINES, *SINGLE, *START}
SHAPED = {name for name in DESIGN if name.startswith("7b/")}
REFUSED = {  # by memory: what cannot be there
    "24": SHAPED | SEVERAL_DEVICES,
    "80": {"7b/sft", "7b/dpo", "7b/reward", "7b/grpo"},
}
CARDS = {"24": ("RTX-4090", "NVIDIA GeForce RTX 4090", 24564)}
CARDS |= {"80": ("H100", "NVIDIA H100 80GB HBM3", 81559)}
# The reward model that this recipe reads is what another recipe exports.
BY_OTHERS = {"7b/ppo_lora": ["--reward_model.model.path", "Qwen/Qwen3-8B"]}
SEVERAL = {"cluster/grpo": 16}  # devices


def path_of(name: str) -> Path:
    folder = ROOT / "recipes"
    return folder / name if name in PIPELINES else folder / f"{name}.toml"


def words(row: Row) -> str:
    return "{capability}, {memory} GB, deterministic {deterministic}".format(**row)


def cases(names: set[str]) -> list[Any]:
    """Each of the recipes with each row that it meets, all of a row together: they share a
    process.
    """
    return [
        pytest.param(name, row, id=f"{name}: {row['torch']}, {words(row)}")
        for half, rows in ROWS.items()
        for row in rows
        for name in DESIGN
        if name in names and DESIGN[name] == half
    ]


@pytest.mark.parametrize("half", HALVES)
def test_each_recipe_meets_every_value(half: str) -> None:
    for factor, values in FACTORS.items():
        assert {row[factor] for row in ROWS[half]} == set(values)


def test_every_two_values_meet_on_some_recipe() -> None:
    rows = [row for half in set(DESIGN.values()) for row in ROWS[half]]
    met = set[Any]().union(*(pairs_of(row) for row in rows))
    wanted = {
        (factor, value, other, beside)
        for number, factor in enumerate(FACTORS)
        for other in list(FACTORS)[number + 1 :]
        for value in FACTORS[factor]
        for beside in FACTORS[other]
    }
    assert met == wanted
    assert len(wanted) == 30


def test_every_shipped_recipe_is_in_the_design() -> None:
    folder = ROOT / "recipes"
    shipped = {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.toml")}
    folders = {path.parts[0] if path.parts[0] in PIPELINES else str(path) for path in shipped}
    assert folders - IMAGES == set(DESIGN)
    assert SMALL | SHAPED | set(SMALL_CARDS) | SEVERAL_DEVICES == set(DESIGN)


@pytest.mark.parametrize("memory", CARDS)
@pytest.mark.parametrize("name", DESIGN)
def test_the_plan_refuses_what_a_card_cannot_hold(name: str, memory: str) -> None:
    report = planned(name, memory)
    assert report["fits"] == (name not in REFUSED[memory])


def planned(name: str, memory: str) -> dict[str, Any]:
    hardware = f"{SEVERAL.get(name, 1)}x{CARDS[memory][0]}"
    return plan(path_of(name), BY_OTHERS.get(name, ()), Console("quiet"), hardware=hardware)


@pytest.fixture(scope="module")
def stub_of(built: Callable[[str], Stub]) -> Callable[[Row], Stub]:
    """The stub for the torch of a row."""

    def stub_for(row: Row) -> Stub:
        for python in PYTHONS:
            if versions(python)["torch"].startswith(row["torch"]):
                return built(python)
        pytest.skip(f"POSTGRAD_STUB_PYTHONS names no torch {row['torch']}")

    return stub_for


def card_of(row: Row) -> dict[str, str]:
    return {"STUB_CAP": row["capability"], "STUB_MEM": row["memory"]}


def selected(request: pytest.FixtureRequest, row: Row, names: set[str]) -> list[str]:
    """Those of the recipes that this session runs with a row, in its order."""
    met = [getattr(item, "callspec", None) for item in request.session.items]
    params = [each.params for each in met if each is not None]
    return [each["name"] for each in params if each.get("row") == row and each["name"] in names]


Start = Callable[[Row, Path], Started]


@pytest.fixture(scope="module")
def told_by_row(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, Row, Start], Any]]:
    """What a recipe asked of the device with a row. The first of a row starts the process."""
    started = dict[tuple[str, ...], Started]()

    def run_row(name: str, row: Row, start: Start) -> Any:
        key = (start.__qualname__, *row.values())
        if key not in started:
            started[key] = start(row, tmp_path_factory.mktemp("row"))
        return started[key].told_of(name)

    yield run_row
    for each in started.values():
        each.end()


def small_step(name: str, row: Row, folder: Path) -> list[str]:
    """The arguments of a dry run, which takes one small step of each recipe."""
    data = os.environ.get("POSTGRAD_TEST_DATA")
    arguments = ["train", str(path_of(name)), "--dry-run", "--debug"]
    arguments += ["--learner.deterministic", row["deterministic"]]
    if name in SINGLE:
        return [*arguments, "--data.path", f"{data}/{SINGLE[name]}", "--data.name", "none"]
    return [*arguments, "--run_dir", str(folder / name.replace("/", "-"))]


@pytest.mark.gpu_stub
@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), cases(SMALL))
def test_a_recipe_of_small_models_takes_a_small_step(
    request: pytest.FixtureRequest,
    name: str,
    row: Row,
    stub_of: Callable[[Row], Stub],
    results_of: Callable[[Stub], Results],
    told_by_row: Callable[[str, Row, Start], Any],
) -> None:
    stub = stub_of(row)
    if name in SINGLE and not os.environ.get("POSTGRAD_TEST_DATA"):
        pytest.skip("POSTGRAD_TEST_DATA names no folder")

    def small_steps(row: Row, folder: Path) -> Started:
        commands = {each: small_step(each, row, folder) for each in selected(request, row, SMALL)}
        (folder / "commands").write_text(json.dumps(commands), "utf-8")
        path = nvidia_smi(folder, *CARDS[row["memory"]][1:])
        script, to = str(HERE / "command.py"), str(folder / "commands")
        return stub.start(folder, script, to, **card_of(row), PATH=path)

    report = told_by_row(name, row, small_steps)
    assert report.pop("error") is None
    assert report["launches"] > 100
    assert report["deterministic"] == (row["deterministic"] == "true")
    results_of(stub).keep("recipes by card", without_kernels(report), f"{name}: {words(row)}")


@pytest.mark.gpu_stub
@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), cases(SHAPED))
def test_a_recipe_of_8b_takes_its_first_step_or_is_refused(
    request: pytest.FixtureRequest,
    name: str,
    row: Row,
    stub_of: Callable[[Row], Stub],
    results_of: Callable[[Stub], Results],
    told_by_row: Callable[[str, Row, Start], Any],
) -> None:
    stub = stub_of(row)

    def first_steps(row: Row, folder: Path) -> Started:
        names = selected(request, row, SHAPED)
        arguments = [str(folder), *names, "--learner.deterministic", row["deterministic"]]
        return stub.start(folder, str(HERE / "shaped.py"), *arguments, **card_of(row))

    report = told_by_row(name, row, first_steps)
    assert report["deterministic"] == (row["deterministic"] == "true")
    error = report.pop("error")
    if name in REFUSED[row["memory"]]:
        assert not planned(name, row["memory"])["fits"]
        assert error is not None
        assert "out of memory in " in error, error
        report["refused"] = error.strip().splitlines()[-1]
    else:
        assert error is None
    results_of(stub).keep("recipes by card", without_kernels(report), f"{name}: {words(row)}")


@pytest.mark.gpu_stub
@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), cases({*SMALL_CARDS, *SEVERAL_DEVICES}))
def test_a_recipe_whose_weights_are_read_takes_two_steps_or_is_refused(
    name: str,
    row: Row,
    stub_of: Callable[[Row], Stub],
    results_of: Callable[[Stub], Results],
    tmp_path: Path,
) -> None:
    """The recipe for several devices runs as one of its ranks."""
    stub, memory = stub_of(row), row["memory"]
    hardware = f"{SEVERAL.get(name, 1)}x{CARDS[memory][0]}"
    arguments = [name, str(tmp_path), hardware, row["deterministic"]]
    script = str(HERE / "small_cards.py")
    report = stub.ask(script, *arguments, **card_of(row))
    run = report["run"]
    if name in REFUSED[memory]:
        assert not planned(name, memory)["fits"]
        assert "out of memory in " in run["error"]
    else:
        assert "error" not in run
        assert run["deterministic"] == (row["deterministic"] == "true")
    results_of(stub).keep("recipes by card", run, f"{name}: {words(row)}")

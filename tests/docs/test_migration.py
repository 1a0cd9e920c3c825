"""The page on migration names options that `postgrad translate` reads, and keys that there are."""

import json
import re

import pytest
from docs.tools.reference import recipe_page

from helpers.pages import ROOT

PAGE = (ROOT / "docs" / "migration.md").read_text("utf-8")
TABLE = PAGE.partition("| here | OpenRLHF |")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE]
TRANSLATE = ROOT / "src" / "postgrad" / "translate"


@pytest.mark.parametrize(("column", "system"), [(1, "openrlhf"), (2, "open_instruct"), (3, "trl")])
def test_the_names_of_other_systems_are_those_that_are_read(column: int, system: str) -> None:
    files = [*TRANSLATE.rglob(f"{system}*.py"), TRANSLATE / "common.py", TRANSLATE / "rules.py"]
    words = set(re.findall(r"\w+", "\n".join(path.read_text("utf-8") for path in files)))
    named = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[column])}
    assert len(named) > 15
    assert named - words == set()


def test_the_names_here_are_keys_of_recipes() -> None:
    keys = set(re.findall(r"(?m)^\| `(\w+)` \|", recipe_page()))
    named = {name for row in ROWS for name in re.findall(r"`(?:\w+\.)*(\w+)(?: = [^`]*)?`", row[0])}
    assert len(named) > 30
    assert named - keys == set()


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    lines = [line for line in PAGE.partition(heading)[2].splitlines() if line.startswith("|")]
    table = lines[2 : next((n for n, line in enumerate(lines) if line.startswith("| there")), None)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def test_terms_of_asynchronous_training_lead_to_keys_of_rollout_and_are_read_by_translate() -> None:
    keys = set(re.findall(r"(?m)^\| `(\w+)` \|", recipe_page()))
    system, read = "", set[str]()
    for system_cell, there, _, here in rows_of("## Samples ahead of the policy"):
        system = system_cell or system
        if system.startswith(("OpenRLHF", "Open-Instruct", "prime-rl", "NeMo RL", "verl", "TRL")):
            read |= set(re.findall(r"`(?:\w+\.)*(\w+)`", there))
        stated = re.findall(r"`(?:\w+\.)*(\w+)(?: = [^`]*)?`", here)
        there_too = set(re.findall(r"`(?:\w+\.)*(\w+)`", there))  # "max_staleness = async_steps"
        assert set(stated) - keys - there_too == set(), here
    sources = "\n".join(path.read_text("utf-8") for path in TRANSLATE.rglob("*.py"))
    assert read == {
        "async_enable",
        "async_queue_size",
        "partial_rollout_enable",
        "async_steps",
        "inflight_updates",
        "max_off_policy_steps",
        "max_async_level",
        "enabled",
        "max_trajectory_age_steps",
        "in_flight_weight_updates",
        "recompute_kv_cache_after_weight_updates",
        "staleness_threshold",
        "partial_rollout",
        "trigger_parameter_sync_step",
        "require_batches",
        "max_staleness",
        "weight_sync_steps",
    }
    assert read <= set(re.findall(r"\w+", sources))


def test_the_counts_of_launch_scripts_are_those_that_were_measured() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "migration.json").read_text("utf-8"))
    lines = PAGE.partition("| system | commit |")[2].partition("\n\n")[0].splitlines()
    names = ["system", "commit", *(cell.strip() for cell in lines[0].split("|")[:-1])]
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[2:]]
    shown = [dict(zip(names, row, strict=True)) for row in cells]
    assert [row["system"] for row in shown] == list(results)
    for row in shown:
        numbers = results[row.pop("system")]
        assert row == {name: str(numbers[name]) for name in row}
        assert numbers["unknown"] == 0

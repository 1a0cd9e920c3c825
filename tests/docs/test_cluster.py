"""docs/cluster.md and recipes/cluster: what they show can be planned and started."""

import json
import os
import re
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.pages import Command, commands
from helpers.placed import PPO, RL
from postgrad.cli.main import main
from postgrad.cluster.settings import (
    ClusterSettings,
    PolicyPlacement,
    RolloutPlacement,
    SidePlacement,
)
from postgrad.fleet.session import wants_of
from postgrad.observe.console import Console
from postgrad.plan.change import digits
from postgrad.plan.planner import plan
from postgrad.recipe.load import load_recipe, parse_recipe

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "recipes" / "cluster"
GRPO = FOLDER / "grpo.toml"
PAGE = (ROOT / "docs" / "cluster.md").read_text("utf-8")
SHIMS = {  # what a job's script calls, each telling what it was called with
    "scontrol": 'printf "one\\ntwo\\n"',
    "hostname": "echo 127.0.0.1 10.0.1.1",
    "sleep": "true",
    "ray": '[ "$1" != get-auth-token ] || exit 0; '
    'echo "ray on $NODE: $*" >> "$TOLD"; exec /bin/sleep 60',
    "postgrad": 'until [ "$(grep -c ^ray "$TOLD")" = 2 ]; do /bin/sleep 0.05; done; '
    'echo "postgrad on $NODE: $*" >> "$TOLD"; '
    'trap "echo saved >> $TOLD; exit 1" TERM; if [ -n "$WAITS" ]; then touch "$WAITS"; '
    "while :; do /bin/sleep 0.05; done; fi; exit $ENDS",
    "srun": 'NODE=others; while [ "${1#--}" != "$1" ]; do '
    'case $1 in --nodelist=*) NODE=${1#*=};; esac; shift; done; export NODE; exec "$@"',
}


def test_the_recipe_for_two_machines_fits_them_and_wants_what_it_says() -> None:
    report = plan(GRPO, [], Console("quiet"), hardware="16xH100-80G")
    assert report["fits"] is True
    policy, rollout = wants_of(load_recipe(GRPO), "cuda")
    assert (policy.processes, policy.gpus, policy.machines) == (16, 1, 2)
    assert (rollout.processes, rollout.gpus, rollout.inside) == (16, 1, "policy")


def test_the_recipe_learns_what_that_of_one_gpu_does() -> None:
    single, many = load_recipe(ROOT / "recipes" / "7b" / "grpo.toml"), load_recipe(GRPO)
    for section in ("model", "data", "rewards", "algorithm", "batch", "rollout"):
        assert getattr(single, section) == getattr(many, section), section
    assert single.learner.lr == many.learner.lr


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.S))
def test_the_tables_of_the_page_are_recipes(block: str) -> None:
    shown: dict[str, Any] = tomllib.loads(block)
    cluster = shown["cluster"]
    if "critic" in cluster:
        placed = parse_recipe({**PPO, **shown}).cluster
        assert placed.homes == {"critic": 2, "reference": 1}
        assert placed.home("reward_model") == "critic"
        return
    if "least" in cluster.get("rollout", {}):
        _, rollout = wants_of(parse_recipe({**RL, **shown}), "cuda")
        assert (rollout.processes, rollout.first) == (8, 2)
        return
    flags = [
        word
        for section, table in shown.items()
        for key, value in table.items()
        if not isinstance(value, dict)
        for word in (f"--{section}.{key}", str(value))
    ]
    policy = [
        word
        for key, value in cluster.get("policy", {}).items()
        for word in (f"--cluster.policy.{key}", str(value))
    ]
    recipe = load_recipe(GRPO, [*flags, *policy, "--cluster.policy.machines", "0"])
    assert recipe.cluster.type == "ray"
    assert recipe.cluster.policy.colocate == cluster["policy"]["colocate"]


LAYOUTS = [
    command
    for command in commands()
    if command.shown
    and command.at.startswith("docs/cluster.md")
    and command.words[:2] == ("postgrad", "plan")
]


PLANNING = (ROOT / "docs" / "planning.md").read_text("utf-8")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


EXAMPLES = cells(PLANNING.partition("| layout | GB at the peak |")[2].partition("\n\n")[0])[2:]


def example_of(report: dict[str, Any]) -> list[str]:
    """The figures of a plan as docs/planning.md shows them."""
    cards, time = report["cards"], report["time"]
    peaks = "; ".join(f"{g['cards']}: {g['peak_bytes'] / 1e9:.1f}" for g in cards)
    seconds = sum(time["step_seconds"].values())
    figures = [digits(value) for value in (seconds, report["hours"], time["device_hours"])]
    return [f"{peaks} of {cards[0]['capacity_bytes'] / 1e9:.1f}", *figures]


def test_every_layout_is_a_worked_example() -> None:
    assert [row[0].split(":")[0] for row in EXAMPLES] == [command.words[4] for command in LAYOUTS]


def require_cards_as_drawn(report: dict[str, Any]) -> None:
    """docs/planning.md draws the cards of the first layout."""
    drawn = PLANNING.partition("cards, GB of 84.9 on each")[2].partition("```")[0]
    policy, engine, total = (re.findall(r"\d+\.\d", line) for line in drawn.splitlines()[4:7])
    for group, figures in zip(report["cards"], (policy, engine), strict=True):
        assert [f"{count / 1e9:.1f}" for count in group["phases"].values()] == figures[:5]
    assert [f"{count / 1e9:.1f}" for count in report["cards_bytes"].values()] == total


@pytest.mark.slow
@pytest.mark.parametrize("shown", LAYOUTS, ids=lambda command: command.words[4])
def test_the_layouts_of_the_page_fit_and_use_every_card(
    shown: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*shown.words[1:], "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is True
    assert report["devices"] == report["hardware"]["count"]
    assert report["hours"] > 0
    assert sum(card["count"] for card in report["cards"]) == report["devices"]
    place = LAYOUTS.index(shown)
    assert example_of(report) == EXAMPLES[place][1:]
    if place == 0:
        require_cards_as_drawn(report)
        assert "790 of the 846 s of a step" in report["summary"][0]  # as docs/cluster.md says
        assert "a step 846 -> 211 s" in report["advice"][0]["effect"]
    overrides = [word for word in shown.words[3:] if word not in ("--search", "--json")]
    for flag in ("--hardware", "--rows"):
        if flag in overrides:
            place = overrides.index(flag)
            del overrides[place : place + 2]
    wants = wants_of(load_recipe(ROOT / shown.words[2], overrides), "cuda")  # a run takes it too
    cards = sum(want.processes * want.gpus for want in wants if want.inside is None)
    assert cards == report["devices"]


def test_the_page_shows_the_layouts_of_which_people_ask() -> None:
    hardware = [command.words[4] for command in LAYOUTS]
    assert hardware == [
        "8xH100", "3xRTX-4090", "6xRTX-4090", "2xA100-40G", "8xA100-80G", "8xA100-80G", "16xH100",
        "64xH100", "64xH100", "16xH100",
    ]  # fmt: skip


def test_the_page_names_every_key_with_its_default() -> None:
    fields = {
        name: field.default
        for name, field in ClusterSettings.model_fields.items()
        if name
        not in ("type", "policy", "rollout", "critic", "reference", "reward_model", "teacher")
    }
    for name, default in fields.items():
        shown = "none" if default is None else f"{default:g}"
        assert f"| `{name}` | {shown} |" in PAGE
    for name in {**PolicyPlacement.model_fields, **RolloutPlacement.model_fields}:
        assert name in PAGE
    for name in SidePlacement.model_fields:
        assert f"| `{name}` | " in PAGE


@pytest.fixture
def port() -> Iterator[int]:
    """At which "Ray" answers: of those that the script may choose, one that is free here."""
    for port in range(20000, 40000):
        try:
            with socket.create_server(("127.0.0.1", port)):
                yield port
                return
        except OSError:
            continue


def slurm(folder: Path, port: int, *, ends: int = 0, waits: str = "") -> subprocess.Popen[str]:
    """The job's script, started as SLURM would on two machines."""
    for name, text in SHIMS.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    more = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "[one-two]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(port + 20000),
        "TOLD": str(folder / "told"),
        "ENDS": str(ends),
        "WAITS": waits,
    }
    return subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sh"), "recipe.toml", "--seed", "3"],
        env={**os.environ, **more}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_the_slurm_job_starts_ray_everywhere_and_ends_as_the_run_does(
    tmp_path: Path, port: int, ends: int
) -> None:
    process = slurm(tmp_path, port, ends=ends)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == ends, stderr
    lines = sorted((tmp_path / "told").read_text().splitlines())
    assert lines == [
        "postgrad on one: train recipe.toml --seed 3 --cluster.type ray --cluster.address "
        f"127.0.0.1:{port}",
        f"ray on one: start --head --block --node-ip-address=127.0.0.1 --port={port} "
        "--include-dashboard=false",
        f"ray on others: start --block --address=127.0.0.1:{port}",
    ]


def test_the_slurm_job_hands_its_last_minutes_to_the_run(tmp_path: Path, port: int) -> None:
    begun = tmp_path / "begun"
    process = slurm(tmp_path, port, waits=str(begun))
    while not begun.exists():
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert "saved" in (tmp_path / "told").read_text().splitlines()


def test_the_kubernetes_manifest_asks_for_the_recipes_machines() -> None:
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    machines = [cluster["headGroupSpec"]["template"]]
    for group in cluster["workerGroupSpecs"]:
        machines += [group["template"]] * group["replicas"]
    gpus = [
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in machines
    ]
    recipe = load_recipe(GRPO)
    assert sum(gpus) == recipe.learner.ranks
    assert len(gpus) == recipe.cluster.policy.machines
    command = job["spec"]["entrypoint"].split()
    assert command[:2] == ["postgrad", "train"]
    flags = command[3:]
    assert load_recipe(FOLDER / command[2], flags).cluster.address == "auto"
    for pod in machines:
        container = pod["spec"]["containers"][0]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert container["workingDir"] == "/shared"

"""How many processes train and how they divide their state, as a launcher says it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from postgrad.core.files import is_file
from postgrad.translate.files import CONFIGS, checked, config_table, plain
from postgrad.translate.shell import VISIBLE

_NODE_LAUNCHER = "mason.py"  # starts a launcher on each of several nodes
_STARTERS = {"accelerate", "torchrun", "deepspeed", "ray"}  # of processes of their own
_READ = (  # of launchers, and what follows from the placement here
    "num_nodes", "num_machines", "nnodes", "nodes", "num_processes", "nproc_per_node", "num_gpus",
    "gpus", "include", "exclude", "hostfile", "config_file", "deepspeed_config_file", "fsdp",
    "multi_gpu", "use_deepspeed", "use_fsdp", "ntasks", "ntasks_per_node", "gpus_per_node", "gres",
    "module", "node_rank", "machine_rank", "master_addr", "master_port", "main_process_ip",
    "main_process_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone",
    "deepspeed_multinode_launcher", "frozen", "all_packages", "extra",  # the last of uv
)  # fmt: skip
_SLURM = {  # what is asked -> how sbatch and srun spell it, before a number
    "nodes": r"-N\s*|--nodes[= ]",
    "tasks": r"-n\s*|--ntasks[= ]",
    "tasks_each": r"--ntasks-per-node[= ]",
    "gpus": r"-G\s*|--gpus[= ]",
    "gpus_each": r"--gpus-per-node[= ]|--gres[= ]gpu:",
}
_SET_BY_SLURM = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "tasks",
    "SLURM_NTASKS_PER_NODE": "tasks_each",
    "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus_each",
    "SLURM_GPUS_ON_NODE": "gpus_each",
}


def flags(words: Sequence[str]) -> dict[str, Any]:
    """Options by name, dashes as underscores. An option has its value, a list where it has several,
    and true where it has none.
    """
    options: dict[str, Any] = {}
    name: str | None = None
    values: list[str] = []

    def close() -> None:
        if name is not None:
            read = [checked(f"--{name}", plain(value)) for value in values]
            options[name] = True if not read else read[0] if len(read) == 1 else read

    for word in words:
        if word == "--" or re.fullmatch(r"-[A-Za-z]", word):  # own options end; -m MODULE
            close()
            name = None
        elif word.startswith("--"):
            close()
            key, equals, value = word[2:].partition("=")
            name, values = key.replace("-", "_"), [value] if equals else []
        elif name is not None:
            values.append(word)
    close()
    return options


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher says of a command's processes."""

    devices: int | None = None  # that train; None where launcher and config do not say
    machines: int | None = None  # over which they are spread; None where that is not said
    stage: int | None = None  # the ZeRO stage in which they divide their state
    unread: tuple[str, ...] = ()  # names of its options that nothing here reads


def launched(
    launcher: Sequence[str], options: Mapping[str, Any], job: Mapping[str, str] | None = None
) -> Launch:
    """What accelerate, torchrun, deepspeed, srun and their configs say. launcher: the words before
    the program. options: the program's. job: Slurm's variables, where a script asks for them.
    """
    launch = flags(launcher)
    nodes = _integer(launch, "num_nodes", "num_machines", "nnodes", "nodes")
    return Launch(
        devices(launcher, options, job or {}),
        nodes,
        zero_stage(launcher, options),
        tuple(name for name in launch if name not in _READ),
    )


def _integer(launch: Mapping[str, Any], *names: str) -> int | None:
    return next((launch[name] for name in names if isinstance(launch.get(name), int)), None)


def devices(
    launcher: Sequence[str], options: Mapping[str, Any], job: Mapping[str, str] | None = None
) -> int | None:
    """How many processes train, from the flags and configs of accelerate, torchrun, deepspeed or
    srun; None where they do not say. launcher: the words before the program. options: the
    program's. job: Slurm's variables.
    """
    launch = flags(launcher)
    nodes = launch.get("num_nodes", launch.get("num_machines", launch.get("nnodes", 1)))
    if any(PurePosixPath(word).name == _NODE_LAUNCHER for word in launcher):
        gpus = launch.get("gpus")
        if isinstance(gpus, int) and isinstance(nodes, int) and gpus:
            return gpus * nodes
    if isinstance(launch.get("include"), str) and "exclude" not in launch:
        return _included(launch["include"])
    for name, each in (("num_processes", 1), ("nproc_per_node", nodes), ("num_gpus", nodes)):
        if isinstance(launch.get(name), int) and isinstance(each, int):
            return launch[name] * each
    config = launch.get("config_file", options.get("accelerate_config"))
    if config:
        return _accelerated(str(config))
    programs = {PurePosixPath(word).name for word in launcher}
    if "srun" in programs and not programs & _STARTERS:
        return _tasks(launcher, job or {})
    on_all_gpus = "deepspeed" in programs and not launch.keys() & {"hostfile", "exclude"}
    if on_all_gpus or "multi_gpu" in launch or launch.get("nproc_per_node") in ("gpu", "auto"):
        count = _visible(launcher)
        return count * nodes if count is not None and isinstance(nodes, int) else None
    return None


def _tasks(launcher: Sequence[str], job: Mapping[str, str]) -> int | None:
    """Processes that srun starts: its own options, else those of the job that it runs in."""
    asked = {**job, **slurm_variables(" ".join(launcher))}
    return int(asked["SLURM_NTASKS"]) if asked.get("SLURM_NTASKS", "").isdigit() else None


def slurm_job(script: str) -> dict[str, str]:
    """The variables that Slurm sets for a script with `#SBATCH` lines."""
    heads = re.findall(r"(?m)^#SBATCH[ \t]+([^#\n]*)", script)
    return slurm_variables(" ".join(heads))


def slurm_variables(asked: str) -> dict[str, str]:
    """The variables that Slurm sets for options of sbatch and srun, those with plain numbers."""
    numbers: dict[str, int] = {}
    for key, spellings in _SLURM.items():
        for match in re.finditer(rf"(?:^|\s)(?:{spellings})(?:[\w:]*:)?(\d+)(?=\s|$)", asked):
            numbers[key] = int(match[1])
    nodes, each = numbers.get("nodes"), numbers.get("tasks_each")
    if nodes and each and "tasks" not in numbers:
        numbers["tasks"] = nodes * each
    if nodes and "gpus_each" not in numbers and "gpus" in numbers:
        numbers["gpus_each"] = numbers["gpus"] // nodes
    return {name: str(numbers[key]) for name, key in _SET_BY_SLURM.items() if key in numbers}


def _included(machines: str) -> int | None:
    """GPUs of DeepSpeed's --include: "localhost:0,1", or "worker-0:0,2-4@worker-1:0"; None where a
    machine is named without its GPUs.
    """
    count = 0
    for machine in machines.split("@"):
        slots = [
            re.fullmatch(r"(\d+)(?:-(\d+))?", slot) for slot in machine.partition(":")[2].split(",")
        ]
        for slot in slots:
            if slot is None:
                return None
            count += int(slot[2] or slot[1]) - int(slot[1]) + 1
    return count


def _visible(launcher: Sequence[str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES=0,1 before a command names; the last assignment counts."""
    count: int | None = None
    for word in launcher:
        name, _, value = word.partition("=")
        if name == VISIBLE:
            count = value.count(",") + 1 if re.fullmatch(r"\d+(,\d+)*", value) else None
    return count


def zero_stage(launcher: Sequence[str], options: Mapping[str, Any]) -> int | None:
    """The ZeRO stage of the launcher's or the trainer's config, from its contents or its name, else
    of accelerate's `--use_deepspeed`; FSDP counts as stage 3. None where nothing tells.
    """
    launch = flags(launcher)
    configs = (
        launch.get("deepspeed_config_file"), launch.get("config_file"), launch.get("fsdp"),
        options.get("accelerate_config"), options.get("deepspeed"), options.get("fsdp"),
    )  # fmt: skip
    for config in map(str, filter(None, configs)):
        path = Path(config)
        if path.suffix in CONFIGS and is_file(path):
            settings = config_table(path)
            inner = settings.get("deepspeed_config", settings.get("zero_optimization"))
            table = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
            stage = table.get("zero_stage", table.get("stage"))
            if isinstance(stage, int):
                return stage
        if (match := re.search(r"(?:stage|zero)[_-]?([0-3])", path.stem)) is not None:
            return int(match[1])
        if re.match(r"fsdp|full_shard", path.stem):
            return 3
    if "--use_deepspeed" in launcher:
        stated = str(launch.get("zero_stage"))
        return int(stated) if re.fullmatch(r"[0-3]", stated) else 2  # accelerate's default
    return None


def _accelerated(config: str) -> int | None:
    """The number of processes in accelerate's config; for a missing file that TRL ships, by its
    name: they have 8.
    """
    path = Path(config)
    if is_file(path):
        count = config_table(path).get("num_processes")
        return count if isinstance(count, int) else None
    shipped = r"(deepspeed_)?zero[123]|fsdp[12]|multi_gpu"
    return 8 if re.fullmatch(shipped, path.stem) else 1 if path.stem == "single_gpu" else None

"""A CUDA build of torch on a machine without a GPU: builds the stub, and runs Python on it.

POSTGRAD_STUB_PYTHONS names the Pythons, one of each environment, with colons between them; see
`make test-gpu-stub`.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "tests" / "gpu" / "stub" / "native"
RUNTIME = re.compile(r"__cuda\w+|cuda[A-Z]\w+|cublas\w+")
DRIVER = re.compile(r"cu[A-Z]\w+")
PYTHONS = [path for path in os.environ.get("POSTGRAD_STUB_PYTHONS", "").split(":") if path]

# Every shipped recipe: those of rows in a file, those of pipelines, those that run at the shapes of
# their models, by the memory of the card in GB (2^30 bytes): recipes of all weights say that they
# need more than a card of 80. Those for a card of 24 GB run at their shapes in test_small_cards.py.
SINGLE = {
    "gsm8k_sft": "gsm8k.jsonl",
    "gsm8k_grpo": "gsm8k.jsonl",
    "hh_reward": "hh-rlhf-harmless.jsonl.gz",
}
PIPELINES = (
    "quickstart",
    "game",
    "rlhf_tiny",
    "preferences",
    "algorithms",
    "async",
    "distill",
    "self_distill",
    "process_reward",
    "best_of_n",
    "iterative_dpo",
)
START = {f"start/{job}/recipe" for job in ("sft", "reward", "preference", "rl")}
# Towers read the sizes of pictures from the device and divide by them: on the stub they are 0.
IMAGES = {"vision_tiny/pipeline", "vision_tiny/rl", "vision_tiny/sft"}
SHAPED = {
    "80": ["0.6B sft", "0.6B grpo", "7b/dpo_lora", "7b/grpo_lora", "7b/reward_lora"],
    "192": ["7b/sft", "7b/dpo", "7b/reward", "7b/grpo", "7b/ppo_lora"],
}
SMALL_CARDS = ("24gb/grpo_8b_qlora", "24gb/grpo_1.7b")
SEVERAL_DEVICES = {"cluster/grpo"}  # 7b/grpo on 16 ranks: NCCL does not start on the stub


@dataclass(frozen=True)
class Stub:
    """The stub's libraries in `folder`, and the Python whose torch takes them for CUDA."""

    python: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables that put a Python on the stub."""
        libraries, caches = str(self.folder), self.folder.parent / "caches"
        return {
            "LD_PRELOAD": str(self.folder / "libstub.so"),
            "LD_LIBRARY_PATH": libraries,
            "TRITON_LIBCUDA_PATH": libraries,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{ROOT / 'tests'}",  # benchmarks too
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs Python with `arguments` on the stub. environment: STUB_CAP and the like."""
        command, variables = [self.python, *arguments], self._variables(environment)
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    def start(self, folder: Path, *arguments: str, **environment: str) -> "Started":
        """As `run`, without waiting for the end. folder: where its messages are kept."""
        messages = folder / "messages.txt"
        with messages.open("w", encoding="utf-8") as to:
            process = subprocess.Popen(
                [self.python, *arguments],
                env=self._variables(environment),
                stdout=subprocess.PIPE,
                stderr=to,
                text=True,
            )
        return Started(process, messages)

    def _variables(self, environment: dict[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != WORKSPACE}
        return inherited | self.environment | environment

    def ask(self, *arguments: str, **environment: str) -> Any:
        """The JSON on the last line that such a Python prints. Its failure is an AssertionError."""
        done = self.run(*arguments, **environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


class Started:
    """A process that prints a line of JSON, {case: ...}, for each of its cases as it ends."""

    def __init__(self, process: subprocess.Popen[str], messages: Path) -> None:
        self._process, self._messages = process, messages
        self._reports: dict[str, Any] = {}

    def told_of(self, case: str) -> Any:
        """Waits for a case. It is an AssertionError that the process ends before."""
        assert self._process.stdout is not None
        while case not in self._reports:
            line = self._process.stdout.readline()
            assert line, self._messages.read_text("utf-8")[-4000:]
            if line.startswith("{"):
                self._reports |= json.loads(line)
        return self._reports[case]

    def end(self) -> None:
        """Kills what is still running."""
        self._process.kill()
        self._process.communicate()


SMI = """#!/bin/sh
case "$*" in
  *driver_version*) echo "{name}, 580.0, {mebibytes} MiB" ;;
  *) echo "{name}, {mebibytes}" ;;
esac
"""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # postgrad has to set it


def build(python: str, to: Path) -> Stub:
    """Compiles the stub for the torch of `python` into the folder `to`."""
    (to / "libraries").mkdir(parents=True, exist_ok=True)
    packages = torch_of(python).parent
    include = next(packages.glob("nvidia/cu*/include/driver_types.h")).parent
    headers = [f"-I{path}" for path in (include, packages / "nvidia/cudnn/include", SOURCES)]
    compiler = ["cc", "-fPIC", "-O1", "-Wall", "-Werror", *headers]
    objects: dict[str, Path] = {}
    for source in SOURCES.glob("*.c"):
        objects[source.stem] = to / f"{source.stem}.o"
        _output(*compiler, "-c", str(source), "-o", str(objects[source.stem]))
    driver = [objects.pop(name) for name in ("driver", "kernels")]
    nvml = objects.pop("nvml")
    runtime = list(objects.values())
    torch = torch_of(python) / "lib"
    asked = _names(RUNTIME, *torch.glob("libtorch*.so"), torch / "libc10_cuda.so", undefined=True)
    triton = (packages / "triton" / "backends" / "nvidia" / "driver.c").read_text("utf-8")
    of_driver = _names(DRIVER, torch / "libcaffe2_nvrtc.so", undefined=True)
    of_driver |= {name for name in DRIVER.findall(triton) if not name.endswith("_t")}
    libraries = {
        "libstub.so": (runtime, asked - _names(RUNTIME, *runtime)),
        "libcuda.so.1": (driver, of_driver - _names(DRIVER, *driver)),
        "libnvidia-ml.so.1": ([nvml], set[str]()),
    }
    for library, (parts, left_out) in libraries.items():
        rest = to / f"rest_of_{library}.c"
        rest.write_text(_rest(left_out), "utf-8")
        library_path = str(to / "libraries" / library)
        _output(*compiler, "-shared", *map(str, parts), str(rest), "-o", library_path)
    (to / "libraries" / "libcuda.so").unlink(missing_ok=True)
    (to / "libraries" / "libcuda.so").symlink_to("libcuda.so.1")
    return Stub(python, to / "libraries")


def _rest(names: set[str]) -> str:
    """C of the functions that the stub leaves out: they say so and succeed."""
    each = (f'long {name}(void) {{ return stub_left_out("{name}"), 0; }}' for name in sorted(names))
    return "\n".join(['#include "stub.h"', *each, ""])


def _names(pattern: re.Pattern[str], *files: Path, undefined: bool = False) -> set[str]:
    """The functions of `files` that they define, or that they leave to other libraries."""
    of_library = ["-D", "--undefined-only"] if undefined else ["--defined-only"]
    listed = _output("nm", "--format=posix", *of_library, *map(str, files))
    names = {line.split()[0].split("@")[0] for line in listed.splitlines() if line[:1] != "/"}
    return {name for name in names if pattern.fullmatch(name)}


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-4000:]}"
    return done.stdout


@cache
def torch_of(python: str) -> Path:
    """The folder of the package torch."""
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(_output(python, "-c", script).strip()) / "torch"


@cache
def versions(python: str) -> dict[str, str]:
    """The versions of what `python` computes with."""
    script = "import json; from importlib.metadata import version as v; print(json.dumps("
    script += "{name: v(name) for name in ('torch', 'transformers', 'triton')}))"
    return json.loads(_output(python, "-c", script))


def nvidia_smi(folder: Path, name: str, mebibytes: int) -> str:
    """The PATH of a process for which nvidia-smi names one card."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(parents=True)
    program.write_text(SMI.format(name=name, mebibytes=mebibytes), "utf-8")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def without_kernels(of_case: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in of_case.items() if name != "attention"}


def brief(kernel: dict[str, Any]) -> str:
    """A kernel's resources in a line, without what tells equal ones apart."""
    name = kernel["name"].rstrip("_0123456789")
    spilled = f", {kernel['local']} bytes of frame" if kernel["local"] else ""
    return f"{name}: {kernel['registers']} registers, {kernel['shared']} bytes shared{spilled}"


if __name__ == "__main__":
    variables = build(sys.argv[1], Path(sys.argv[2]).resolve()).environment
    print(" ".join(f"{name}={value}" for name, value in variables.items()))

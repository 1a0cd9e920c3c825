"""Runs whose machine is lost: killed at any change of an upload, their directory gone. What the
mirror has is intact, and the run that goes on from it ends with the bits of one never stopped.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import HERE, Ended, Fault, Kind, Machine
from helpers.jobs import write_recipe
from postgrad.checkpoint.mirror import Mirror
from postgrad.checkpoint.store import read_checkpoint
from postgrad.core.seeds import uniform
from postgrad.tools.verify_resume import fingerprint

pytestmark = pytest.mark.slow

SECONDS = 600.0  # a machine that is shared
CALL = "import sys; from postgrad.cli.main import main; sys.exit(main())"
BUCKET = "runs"


def words(recipe: Path, run: Path, url: str) -> list[str]:
    words = ["train", str(recipe), "--run_dir", str(run), "--quiet"]
    return [*words, "--checkpoint.mirror", url] if url else words


def newest_intact(url: str, to: Path) -> int:
    """The newest step of a mirror; its checkpoint and all its files are checked. 0: none."""
    mirror = Mirror(url)
    step = max(mirror.steps(), default=0)
    if step:
        mirror.download(step, to / "checkpoint")
        assert read_checkpoint(to / "checkpoint", step).state.log_offsets["metrics.jsonl"] > 0
        table = mirror.table(step)
        for name in table.files:
            mirror.download_file(table, name, to / "files" / name, to / "none")
        shutil.rmtree(to)
    return step


@pytest.mark.parametrize("job", ["grpo of stale samples", "reward model with lora"])
def test_wherever_an_upload_is_killed_another_machine_ends_with_the_same_bits(
    job: str, machine: Machine, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    recipe, run, folder = write_recipe(job, tmp_path), tmp_path / "run", tmp_path / "mirror"
    url = folder.as_uri()

    def train(fault: Fault, mirror: str = url) -> Ended:
        call = "helpers.faults:command"
        return machine.call(call, [words(recipe, run, mirror)], folder, fault)

    assert train(Fault(), "").status == 0
    wanted = fingerprint(run)
    shutil.rmtree(run)
    unharmed = train(Fault())
    assert (unharmed.status, unharmed.message) == (0, "")
    assert fingerprint(run) == wanted
    points, calls = int(request.config.getoption("--fault-points")), len(unharmed.names)
    reached: set[int] = set()
    killed = 0
    for point in range(points):
        number = 1 + int((point + float(uniform(0, job))) * calls / points)
        shutil.rmtree(run)
        shutil.rmtree(folder)
        ended = train(Fault(Kind.KILL, number, number))
        assert ended.status in (-9, 0)  # which uploads there are is a matter of time
        killed += ended.status == -9
        reached.add(newest_intact(url, tmp_path / "looked at"))
        shutil.rmtree(run)  # with its machine
        again = train(Fault())
        assert (again.status, again.message) == (0, ""), number
        assert fingerprint(run) == wanted, number
        assert newest_intact(url, tmp_path / "looked at") == 4
    assert killed >= points // 2
    assert len(reached) > 1


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server that speaks S3, in a process of its own: the environment of its clients."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.getenv("PYTHONPATH")])),
    }
    with (tmp_path / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.1)
        yield environment
    finally:
        server.kill()
        server.wait()


def store_of(environment: dict[str, str]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        key="me",
        secret="secret",
        endpoint_url=environment["FSSPEC_S3_ENDPOINT_URL"],
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def test_a_run_goes_on_from_an_s3_server_after_its_machine_is_lost(
    s3: dict[str, str], tmp_path: Path
) -> None:
    recipe, run, url = write_recipe("grpo with kl", tmp_path), tmp_path / "run", f"s3://{BUCKET}/a"

    def start(mirror: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CALL, *words(recipe, run, mirror), "--steps", "12"],
            env=s3, text=True, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(process: subprocess.Popen[str]) -> tuple[int, str]:
        _, server_stderr = process.communicate(timeout=SECONDS)
        return process.returncode, server_stderr

    assert end(start("")) == (0, "")
    wanted = fingerprint(run)
    shutil.rmtree(run)
    status, stderr = end(start(url))  # a bucket that is not there is not made
    assert status == 1
    assert "does not answer as expected" in stderr
    store = store_of(s3)
    assert not store.exists(BUCKET)
    store.mkdir(BUCKET)
    shutil.rmtree(run)
    process, manifests = start(url), f"{BUCKET}/a/checkpoints/*/manifest.json"
    while process.poll() is None and not store.glob(manifests):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert end(process)[0] == -9
    shutil.rmtree(run)
    assert end(start(url)) == (0, "")
    assert fingerprint(run) == wanted
    assert '"restored"' in (run / "events.jsonl").read_text("utf-8")
    shutil.rmtree(run)
    assert end(start(url)) == (0, "")  # it has ended, and is there again
    assert fingerprint(run) == wanted
    names = [name.rpartition("/")[2] for name in store.ls(f"{BUCKET}/a/checkpoints")]
    assert f"step-{12:06d}" in names
    assert len(names) <= 2  # the newest and the best

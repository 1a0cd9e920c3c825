"""Ray's processes as forks of one that has imported what ranks import: each takes half a CPU second
to start, where an interpreter of its own imports torch and transformers for six. Tests on forks
show what ranks do. How a rank starts is shown by runs that start a Ray of their own:
tests/cluster/test_bad_days.py, tests/cluster/test_two_machines.py.

Ray starts each process through a script, which normally becomes an interpreter with Ray's worker
program. This file is the script in its place: it asks the server for a fork that runs the program.
"""

import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.fork_requests import receive_request, require_one_thread, send_request, take_place

ADDRESS = "POSTGRAD_TEST_FORKS"  # the server's socket, in the environment of Ray
OF_SETUP = ("--language=", "--serialized-runtime-env-context=")  # of Ray's script, not the program
NOTHING = ("=PYTHON", "={}")  # what they say where a process needs no environment of its own
HERE = Path(__file__).resolve()


@contextmanager
def forking() -> Iterator[None]:
    """Inside, a Ray that this process starts forks its processes from one server."""
    import pytest
    from ray._private import ray_constants

    from helpers.ranks import forks

    with (
        tempfile.TemporaryDirectory(prefix="forks-") as folder,
        socket.socket(socket.AF_UNIX) as listening,
        pytest.MonkeyPatch.context() as patch,
    ):
        listening.bind(f"{folder}/socket")
        listening.listen(64)  # who asks before the server has imported everything waits
        server = forks().Process(target=_serve, args=(listening,), daemon=True)
        server.start()
        patch.setenv(ADDRESS, f"{folder}/socket")
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", str(HERE))
        yield
        server.terminate()
        server.join()


def _ask() -> None:
    """For a fork with the arguments, environment, folder and standard streams of this process."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS])
        send_request(server, [sys.argv[1:], dict(os.environ), str(Path.cwd())], [0, 1, 2])
        server.recv(1)  # once it runs


def _serve(listening: socket.socket) -> None:
    """Until it is ended."""
    from postgrad.core.process import die_with_parent

    die_with_parent()
    require_one_thread()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end are forgotten
    while True:
        asked, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _run(asked)
        asked.close()


def _run(asked: socket.socket) -> None:
    """Runs Ray's program to its end, as an interpreter of its own would, with what is asked for."""
    request = receive_request(asked)
    assert request is not None, "who asked for a fork has ended"
    (arguments, environment, folder), streams = request
    take_place(streams, environment, folder)
    os.setsid()  # Ray ends a process with its group
    asked.sendall(b"\n")
    asked.close()
    of_setup = [word for word in arguments if word.startswith(OF_SETUP)]
    assert all(word.endswith(NOTHING) for word in of_setup), (
        f"forks have no environment: {of_setup}"
    )
    program, *_ = sys.argv = [word for word in arguments if word not in of_setup]
    more = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(program).parent), *filter(None, more)]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _ask()

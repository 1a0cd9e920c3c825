"""`postgrad serve-reward DIR`: a reward model behind HTTP until it is told to stop."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.text import how_many
from postgrad.observe.console import Console
from postgrad.tools.pages import own_hosts
from postgrad.tools.serve.wire import ServerLimits

TOKEN = "POSTGRAD_SERVE_TOKEN"


def serve_reward(
    path: Path,
    console: Console,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    dtype: str = "auto",
    limits: ServerLimits | None = None,
    images: Path | None = None,
) -> dict[str, Any]:
    """Serves the reward model of a directory until SIGTERM or SIGINT; returns what was done.

    images: a folder of images that clients may name by their hash, such as that of a run. Raises
    UsageError where the directory, the token or the address is wrong; the address is tried before
    the model is read.
    """
    token = _token(token_file)
    if token is None and not _is_loopback(host):
        raise UsageError(
            f"--host {host}: whoever reaches this machine could use the model; give a token in "
            f"--token-file FILE or the environment variable {TOKEN}, or stay on 127.0.0.1"
        )
    if images is not None and not images.is_dir():
        raise UsageError(f"--images {images}: there is no such directory")
    limits = limits or ServerLimits()
    try:
        from postgrad.tools.serve.server import listen
    except ImportError as error:
        raise UsageError(
            f"serve-reward needs {error.name}, which is not installed: "
            "pip install 'postgrad[serve]'"
        ) from error
    with listen(host, port) as listening:
        return _serve(path, console, listening, token, dtype, limits, images)


def _serve(
    path: Path,
    console: Console,
    listening: socket.socket,
    token: str | None,
    dtype: str,
    limits: ServerLimits,
    images: Path | None,
) -> dict[str, Any]:
    from dataclasses import replace

    from postgrad.tools.serve.app import Pages
    from postgrad.tools.serve.batcher import load_reward_model
    from postgrad.tools.serve.metrics import Metrics, total
    from postgrad.tools.serve.server import Server

    tokens = limits.batch_tokens
    model = load_reward_model(path, dtype, tokens, limits=limits, folder=images)
    longest = min(limits.input_tokens, limits.batch_tokens, model.max_tokens or limits.batch_tokens)
    limits = replace(limits, input_tokens=longest)
    metrics = Metrics()
    name = path.resolve().name
    # whoever has the token is no page of the web, and a proxy may have a name of its own
    hosts = own_hosts(*listening.getsockname()[:2]) if token is None else None
    app = Pages(model, name, limits, metrics).app(token, hosts)
    where = _address(listening)
    secured = "with a token" if token is not None else "without a token"
    server = Server(
        app, limits, metrics, lambda: console.note(f"serving {name} at {where}, {secured}")
    )
    server.run(sockets=[listening])
    done = {
        "requests": total(metrics.requests),
        "sequences": total(metrics.sequences),
        "tokens": total(metrics.tokens),
    }
    counts = (how_many(count, name.removesuffix("s")) for name, count in done.items())
    console.note(f"stopped: {', '.join(counts)}")
    return done


def _token(file: Path | None) -> str | None:
    """The token of a file, else of the environment; None where there is neither."""
    if file is not None:
        try:
            text = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--token-file {file} cannot be read: {error}") from error
        where = f"--token-file {file}"
    elif TOKEN in os.environ:
        text, where = os.environ[TOKEN], f"the environment variable {TOKEN}"
    else:
        return None
    token = text.strip()
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise UsageError(
            f"{where} holds no token: one line of visible ASCII characters is expected"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

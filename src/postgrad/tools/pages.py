"""Pages of runs: `postgrad report` writes one to a file; `postgrad watch` serves one of runs that
are under way, live, for this machine's user alone.

The server listens on 127.0.0.1. Every request needs the token of the address that is printed, and a
Host that is this machine's: a page of the web that resolves its own name to 127.0.0.1 has neither.
Nothing says that another origin may read an answer. The run's files are opened for reading; no
lock is taken, so the run never waits for a look at it.

The server is the standard library's: starlette and uvicorn are an extra, of serve-reward, and a run
has to be watched without them.
"""

import hashlib
import hmac
import json
import secrets
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.files import finite, whole_file
from postgrad.core.process import signals_handled
from postgrad.core.text import how_many
from postgrad.observe.console import Console
from postgrad.observe.report import page
from postgrad.observe.report.run import RunReader, expected_steps
from postgrad.observe.report.selection import Cap
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.compare import differences, value_at
from postgrad.recipe.load import recipe_from_json

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HTTP_PORT = 80  # which a browser leaves out


def own_hosts(address: str, port: int) -> frozenset[str]:
    """Every Host value that names the server bound to `address` and `port`: its address and the
    loopback names, with the port.
    """
    bound = f"[{address}]" if ":" in address else address
    names = [bound.lower(), *LOOPBACK]
    with_port = [f"{name}:{port}" for name in names]
    return frozenset(with_port + (names if port == HTTP_PORT else []))


def is_own(hosts: frozenset[str], requested: list[str]) -> bool:
    """True where a request has exactly one Host header, and it names this server."""
    return len(requested) == 1 and requested[0].strip().lower() in hosts


MOST_RUNS = 12  # colours that can be told apart
NAMED = 3  # runs in a title
EVERYTHING = Cap(float("inf"), float("inf"))
REPORT = "report.html"

HOST = "127.0.0.1"
AT_ONCE = 40  # messages of one answer
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
WAITING = (  # a browser asks again after 2 seconds, and for no icon
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    "<title>no run</title><p>"
)


def report(
    run_dirs: Sequence[Path], to: Path | None, console: Console, cap: Cap | None = None
) -> dict[str, Any]:
    """Writes the HTML page of some runs; returns its path, bytes and number of samples.

    to: the file; None: report.html in the first run's directory. cap: limits the samples on the
    page. Raises UsageError where a directory holds no run, or there are too many.
    """
    require_few(run_dirs)
    readers = [reader(path, number, cap or Cap()) for number, path in enumerate(run_dirs)]
    target = to or run_dirs[0] / REPORT
    if target.is_dir():
        raise UsageError(f"--to {target} is a directory: name a file in it")
    with whole_file(target) as written, written.open("w", encoding="utf-8") as file:
        for part in page.report(readers, contents(run_dirs)):
            file.write(part)
    size = target.stat().st_size
    samples = sum(run_reader.samples for run_reader in readers)
    console.note(
        f"wrote {target}: {size / 2**20:.1f} MiB, "
        f"{how_many(samples, 'sample')}; open it in a browser"
    )
    return {"report": str(target), "bytes": size, "samples": samples}


def require_few(run_dirs: Sequence[Path]) -> None:
    """Raises UsageError where there are more runs than a page shows."""
    if len(run_dirs) > MOST_RUNS:
        raise UsageError(f"{len(run_dirs)} runs: a page shows at most {MOST_RUNS} side by side")


def reader(path: Path, number: int, cap: Cap, expected_steps: int = 0) -> RunReader:
    """Reads a run for a page. Raises UsageError where there is none."""
    RunDirectory.open(path)
    return RunReader(path, number, cap, about, expected_steps=expected_steps)


def contents(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """The head data of a page: title, number of runs, and the keys where their recipes differ."""
    recipes = [RunDirectory(path).recipe() for path in run_dirs]
    names = [path.resolve().name for path in run_dirs]
    return {
        "title": " against ".join(names) if len(names) <= NAMED else f"{len(names)} runs",
        "runs": len(run_dirs),
        "differences": difference_rows(recipes),
    }


def difference_rows(recipes: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """A row [key, value of each run ...] for every recipe key whose values differ."""
    keys = {key: None for other in recipes[1:] for key in differences(recipes[0], other)}
    return [[key, *(value_at(recipe, key) for recipe in recipes)] for key in keys]


def about(recipe: dict[str, Any]) -> dict[str, Any]:
    """The batch numbers of a recipe as rows. Where another version wrote a recipe that this one
    cannot read, no rows and the reason under "batch_problem".
    """
    try:
        return {"batch": [list(row) for row in recipe_from_json(recipe).geometry().rows()]}
    except PostgradError as error:
        return {"batch": [], "batch_problem": f"the recipe is not one of this version: {error}"}


def watch(run_dirs: Sequence[Path], console: Console, port: int = 0) -> dict[str, Any]:
    """Serves the page of one run or several until SIGINT or SIGTERM. Raises UsageError where there
    is no run, there are too many, or the port cannot be bound.
    """
    require_few(run_dirs)
    try:
        feed = Feed(*run_dirs)
    except UsageError as error:
        if all(map(RunDirectory.holds_run, run_dirs)):
            raise
        raise UsageError(f"{error}. A run that has not begun cannot be watched yet") from error
    server = WatchServer(feed, port)
    with _until_signal(server):
        names = " and ".join(map(str, run_dirs))
        console.note(f"the page of {names} is at {server.address}  (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
    console.note("stopped; a run that is under way continues")
    return {"address": server.address}


class Feed:
    """The messages of runs so far, and the new ones each time that a page asks.

    A page says how many messages it has. Where a run was written anew the generation changes, and
    pages begin anew.
    """

    def __init__(self, *run_dirs: Path, cap: Cap | None = None) -> None:
        self._run_dirs = run_dirs
        self._readers: list[RunReader] = []
        for number, path in enumerate(run_dirs):
            steps = expected_steps(RunDirectory.open(path).recipe())
            self._readers.append(reader(path, number, cap or Cap(), steps))
        self._messages: list[tuple[int, str]] = []  # number of the run, JSON
        self._lock = threading.Lock()
        self.generation = secrets.token_hex(4)

    def page(self) -> str:
        """The page as HTML, without messages. Raises as `messages`."""
        self._require_runs()
        return page.live(self._readers, contents(self._run_dirs))

    def messages(self, generation: str, start: int) -> str:
        """JSON of the messages from number `start` on; of another generation from the first. With
        the seconds for which each run has written nothing.

        Raises UsageError or FileNotFoundError while a directory holds no run: it is being removed,
        or its next run has not begun.
        """
        with self._lock:
            self._require_runs()
            for number, run in enumerate(self._readers):
                self._poll(number, run)
            if generation != self.generation or not 0 <= start <= len(self._messages):
                start = 0
            texts = [text for _, text in self._messages[start : start + AT_ONCE]]
            end = start + len(texts)
            more = json.dumps(end < len(self._messages))
            unwritten = json.dumps([int(run.unwritten_seconds) for run in self._readers])
            cursor = f'"generation":"{self.generation}","next":{end},"more":{more}'
            cursor += f',"unwritten":{unwritten}'
            return f'{{{cursor},"messages":[{",".join(texts)}]}}'

    def body(self, run: int, number: int) -> str:
        """JSON of one sample's tokens. Raises ValueError where there is no such run."""
        if not 0 <= run < len(self._readers):
            raise ValueError(f"there is no run {run}")
        with self._lock:
            return json.dumps(finite(self._readers[run].bodies([number])), allow_nan=False)

    def _require_runs(self) -> None:
        for path in self._run_dirs:
            RunDirectory.open(path)

    def _poll(self, number: int, run: RunReader) -> None:
        for message in run.poll():
            if message["kind"] == "reset":  # messages of the other runs stay
                self._messages = [sent for sent in self._messages if sent[0] != number]
                self.generation = secrets.token_hex(4)
            else:
                self._messages.append((number, json.dumps(finite(message), allow_nan=False)))


class WatchServer(ThreadingHTTPServer):
    """The pages /, /messages and /bodies of a feed behind a token."""

    daemon_threads = True

    def __init__(self, feed: Feed, port: int) -> None:
        if not 0 <= port < 1 << 16:
            raise UsageError(f"--port {port}: a number from 0 to 65535 is expected")
        self.feed = feed
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {HOST}:{port}: {error.strerror or error}; take another --port"
            ) from error

    @property
    def address(self) -> str:
        """The URL that a person opens, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def has_token(self, token: str) -> bool:
        """Whether `token` is the server's; digests are compared in constant time."""
        return hmac.compare_digest(_digest(token), _digest(self.token))

    def is_ours(self, hosts: list[str]) -> bool:
        """Whether a request's Host headers name this machine's loopback and port."""
        return is_own(own_hosts(HOST, self.server_port), hosts)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stays silent: a browser that goes away in the middle of an answer is no error."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET; everything else is refused."""

    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answers with one of the three pages, or refuses."""
        server = cast(WatchServer, self.server)
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        scheme, _, credentials = self.headers.get("Authorization", "").partition(" ")
        token = credentials if scheme == "Bearer" else query.get("token", "")
        if not server.is_ours(self.headers.get_all("Host", [])):
            self._answer(HTTPStatus.FORBIDDEN, "this is not the address of the page")
        elif not server.has_token(token):
            self._answer(HTTPStatus.FORBIDDEN, "open the address that postgrad watch has printed")
        else:
            self._page(server.feed, url.path, query)

    def _page(self, feed: Feed, path: str, query: dict[str, str]) -> None:
        try:
            if path == "/":
                self._answer(HTTPStatus.OK, feed.page(), "text/html")
            elif path == "/messages":
                start = int(query.get("next", "0"))
                messages = feed.messages(query.get("generation", ""), start)
                self._answer(HTTPStatus.OK, messages, "application/json")
            elif path == "/bodies":
                body = feed.body(int(query.get("run", "0")), int(query.get("id", "-1")))
                self._answer(HTTPStatus.OK, body, "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "there is no such page")
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, str(error))
        except (UsageError, FileNotFoundError) as error:  # no run, until the next one begins
            text = f"{error}; the next run is shown here as soon as it begins"
            if path == "/":
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, WAITING + escape(text), "text/html")
            else:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, text)

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        data = text.encode(errors="replace")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Stays silent: a line for each request would hide the address in the terminal."""

    def version_string(self) -> str:
        """Of the Server header, without versions of Python and its library."""
        return "postgrad"


@contextmanager
def _until_signal(server: WatchServer) -> Generator[None]:
    """Inside, SIGINT and SIGTERM end the server's loop; at the end the server is closed."""

    def stop(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown).start()  # it waits for the loop, which is here

    try:
        with signals_handled((signal.SIGINT, signal.SIGTERM), stop):
            yield
    finally:
        server.server_close()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()

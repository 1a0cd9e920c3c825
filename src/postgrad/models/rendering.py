"""Renders chat templates in a child process: templates are programs that come with a model.

A template that loops, builds a string of a gigabyte or recurses without end is stopped there by the
system (render_child.py), and is an error of its row here. The texts are those of transformers'
apply_chat_template; but a template that joins a call's arguments to text gets their JSON, and
raises nothing.
"""

import atexit
import itertools
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import psutil

from postgrad.core.errors import RunError
from postgrad.core.media import MARK
from postgrad.core.process import import_path
from postgrad.models import render_child
from postgrad.models.named_templates import chat_template_of

Wanted = tuple[int, bool]  # (n, generation): the first n messages, with the start of an answer?
# Messages, and the texts that are asked of them. The functions that a conversation may call are the
# key "tools" of its first message; the template gets them as its variable.
RenderRequest = tuple[Sequence[Mapping[str, Any]], Sequence[Wanted]]
BATCH_ROWS = 256
BATCH_CHARACTERS = 2**20
LOOK_SECONDS = 0.2  # between two looks at the child's memory, while a reply is waited for
SYSTEM_LIMITS_MEMORY = sys.platform != "darwin"  # macOS refuses RLIMIT_AS
TAKEN = {  # parameters of apply_chat_template itself, which no variable of a template may be named
    *("conversation", "messages", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
NO_TEMPLATE = (
    'the tokenizer has no chat template: name one (data.chat_template = "chatml"), put '
    "chat_template.jinja into its folder, or take the instruction-tuned model of the family"
)
INHERITED = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # nothing secret
NO_IMAGES = (
    "it has an image, and this model reads text alone: docs/models.md names the types that read "
    'images; data.images = "" leaves a column of images out'
)
_HEAD = struct.Struct(">cQ")


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What rendering one row may take."""

    seconds: float = 10.0  # CPU time
    memory: int = 2**30  # bytes
    characters: int = 4_000_000  # of one text, beyond four times those of the row


LIMITS = RenderLimits()


class Unrenderable(Exception):
    """A chat template gives no text for a row; the message says why."""


def _refused(why: str) -> Unrenderable:
    return Unrenderable(f"the chat template refuses it: {why}")


class _ChildEnded(Exception):
    """The child ended while a row was rendered; the message says why."""


class RenderProcess:
    """One child for all templates of this process; it is restarted after it has ended."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ready = select.poll()
        self._buffer = bytearray()
        self._numbers: dict[tuple[str, str], int] = {}  # of the programs that the child has

    def texts(
        self, program: tuple[str, str], rows: Sequence[RenderRequest]
    ) -> list[list[str] | Unrenderable]:
        """The texts of each row, up to the first that has none.

        program: a template and its variables as JSON. Raises RunError where no process starts.
        """
        with self._lock:
            complete = False
            try:
                answers = self._answers(program, rows)
                complete = True
            finally:
                if not complete:  # the rest of a reply may still be in the pipe
                    self.stop()
            return answers

    def stop(self) -> None:
        """Ends the child, if there is one."""
        child, self._child = self._child, None
        self._numbers.clear()
        self._buffer.clear()
        if child is not None and self._owner == os.getpid():
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
            child.kill()
            child.wait()

    def _answers(
        self, program: tuple[str, str], rows: Sequence[RenderRequest]
    ) -> list[list[str] | Unrenderable]:
        child = self._running()
        frame: dict[str, Any] = {"rows": rows}
        if program not in self._numbers:
            self._numbers[program] = len(self._numbers)
            frame |= {"template": program[0], "variables": program[1]}
        frame["program"] = self._numbers[program]
        try:
            written = orjson.dumps(frame)
        except orjson.JSONEncodeError as error:  # a string with half a surrogate pair
            del self._numbers[program]
            return self._one_by_one(program, rows, error)
        answers: list[list[str] | Unrenderable] = []
        try:
            _write(child, len(written).to_bytes(8, "big") + written)
            for _, wanted in rows:
                answers.append(self._row(child, len(wanted)))
                if isinstance(answers[-1], Unrenderable):
                    break
        except _ChildEnded as error:
            self.stop()
            answers.append(_refused(str(error)))
        return answers

    def _one_by_one(
        self, program: tuple[str, str], rows: Sequence[RenderRequest], error: Exception
    ) -> list[list[str] | Unrenderable]:
        """The answers to rows of which one cannot be sent: up to that row, which is refused."""
        if len(rows) < 2:
            return [_refused(f"a message is not text: {error}")]
        answers: list[list[str] | Unrenderable] = []
        for row in rows:
            answers += self._answers(program, [row])
            if isinstance(answers[-1], Unrenderable):
                break
        return answers

    def _row(self, child: subprocess.Popen[bytes], count: int) -> list[str] | Unrenderable:
        texts: list[str] = []
        for _ in range(count):
            kind, length = _HEAD.unpack(self._read(child, _HEAD.size))
            text = self._read(child, length).decode()
            if kind == b"E":
                return _refused(text)
            texts.append(text)
        return texts

    def _read(self, child: subprocess.Popen[bytes], count: int) -> bytes:
        assert child.stdout is not None
        descriptor = child.stdout.fileno()
        while len(self._buffer) < count:
            self._wait(child)
            piece = os.read(descriptor, 2**20)
            if not piece:
                raise _ChildEnded(self._why(child.wait()))
            self._buffer += piece
        content = bytes(self._buffer[:count])
        del self._buffer[:count]
        return content

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        """Waits for something to read, and kills a child that holds too much memory: not every
        system has a limit for it.
        """
        while not self._ready.poll(LOOK_SECONDS * 1000):
            try:
                held = psutil.Process(child.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
            if held > self._limits.memory:
                child.kill()
                raise _ChildEnded(self._too_much)

    @property
    def _too_much(self) -> str:
        return f"it needs more memory than it may have ({self._limits.memory >> 20} MiB)"

    def _why(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"it is not done after {self._limits.seconds:g} seconds of processor time"
        if code < 0:
            return f"it ended the process that renders it ({signal.Signals(-code).name})"
        return f"it ended the process that renders it (exit code {code})"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return self._child
        self.stop()
        limits = self._limits
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-s", "-S", render_child.__file__),
                str(limits.memory if SYSTEM_LIMITS_MEMORY else 0),
                *(str(limits.seconds), str(limits.characters)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C goes to this process only
            bufsize=0,
        )
        assert child.stdout is not None
        self._child, self._owner = child, os.getpid()
        self._ready = select.poll()
        self._ready.register(child.stdout, select.POLLIN)
        try:
            self._read(child, 1)
        except _ChildEnded as error:
            assert child.stderr is not None
            stderr = child.stderr.read().decode(errors="replace").strip()
            raise RunError(
                f"the process that renders chat templates did not start: {error}\n{stderr}"
            ) from error
        return child


def _environment() -> dict[str, str]:
    """The child's environment: where its modules are, and nothing secret."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return kept | import_path()


def _write(child: subprocess.Popen[bytes], frame: bytes) -> None:
    assert child.stdin is not None
    view = memoryview(frame)
    try:
        while view:
            view = view[child.stdin.write(view) or 0 :]
    except BrokenPipeError as error:
        code = child.wait()
        raise _ChildEnded(f"the process that renders it was ended from outside ({code})") from error


_process: RenderProcess | None = None


def process() -> RenderProcess:
    """The RenderProcess of this process, under LIMITS; started when it is first used."""
    global _process
    if _process is None:
        _process = RenderProcess(LIMITS)
        atexit.register(_process.stop)
    return _process


def program_of(
    tokenizer: Any, variables: Mapping[str, Any], *, tools: bool = False
) -> tuple[str, str]:
    """The template to render, and its variables as JSON.

    variables: those of the recipe; "chat_template" among them replaces the tokenizer's. tools: for
    conversations with tools, for which some tokenizers have a template of its own. Raises
    Unrenderable where there is no template or a variable is not a JSON value.
    """
    named = dict(variables)
    if tokenizer.chat_template is None and not named.get("chat_template"):
        raise Unrenderable(NO_TEMPLATE)
    try:
        called = [{}] if tools else named.get("tools")  # read for its presence only
        template = chat_template_of(tokenizer, named.pop("chat_template", None), called)
    except ValueError as error:
        raise Unrenderable(str(error)) from error
    for name in TAKEN.intersection(named):
        raise Unrenderable(f"{name!r} is no variable of a chat template (chat_template_kwargs)")
    try:
        return template, json.dumps({**tokenizer.special_tokens_map, **named})
    except (TypeError, ValueError, RecursionError) as error:
        raise Unrenderable(f"its variables have to be JSON values: {error}") from error


def rendered(
    tokenizer: Any,
    rows: Iterable[RenderRequest],
    variables: Mapping[str, Any],
    *,
    parts: bool = False,
) -> Iterator[list[str] | Unrenderable]:
    """The texts of each row in order, as transformers' apply_chat_template gives them. Ends after
    the first row that has none. Rows are sent in batches. parts: contents are lists of parts, as
    the templates of models that read images take them; others refuse images.
    """
    for batch in _batches(rows):
        for (tools, images), run in itertools.groupby(batch, _kind):
            if images and not parts:
                yield Unrenderable(NO_IMAGES)
                return
            try:
                program = program_of(tokenizer, variables, tools=tools)
            except Unrenderable as error:
                yield error
                return
            asked = list(run)
            if parts:
                asked = [([in_parts(m) for m in messages], wanted) for messages, wanted in asked]
            answers = process().texts(program, asked)
            yield from answers
            if isinstance(answers[-1], Unrenderable):
                return


def in_parts(message: Mapping[str, Any], folder: str | None = None) -> dict[str, Any]:
    """A message whose content is a list of parts: its text, cut where images stand. folder: that of
    the images, which are named as files then.
    """
    texts = message["content"].split(MARK) if "images" in message else [message["content"]]
    content: list[Mapping[str, Any]] = []
    for number, text in enumerate(texts):
        if number:
            file = {} if folder is None else {"image": f"{folder}/{message['images'][number - 1]}"}
            content += [{"type": "image", **file}]
        content += [{"type": "text", "text": text}] if text or len(texts) == 1 else []
    return {key: value for key, value in message.items() if key != "images"} | {"content": content}


def _kind(row: RenderRequest) -> tuple[bool, bool]:
    """Whether a conversation may call functions, and whether it has images."""
    messages, _ = row
    return "tools" in (messages[0] if messages else ()), any("images" in m for m in messages)


def _batches(rows: Iterable[RenderRequest]) -> Iterator[list[RenderRequest]]:
    batch: list[RenderRequest] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(message["content"]) for message in row[0]) * len(row[1])
        if len(batch) == BATCH_ROWS or size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

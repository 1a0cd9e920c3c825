"""`postgrad chat`: a conversation in the terminal, or with lines of standard input."""

import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.media import IMAGES, image_store, images_kept_in, size_of
from postgrad.core.process import signals_handled
from postgrad.data.images import content_of
from postgrad.observe.console import Console
from postgrad.observe.samples import AnswerDisplay
from postgrad.rollout.settings import SamplingSettings
from postgrad.tools.chat.loaded import ChatModel, load
from postgrad.tools.chat.talker import Talker

COMMANDS = {
    "/image FILE": "show an image with the next message; without FILE: none of those that wait",
    "/reset": "start the conversation over",
    "/seed N": "draw other answers",
    "/temperature T": "0 always takes the most likely token",
    "/top_p P": "draw of the fewest tokens that have this probability together; 1: of all",
    "/top_k K": "draw of the K likeliest tokens; 0: of all",
    "/min_p P": "draw of tokens with at least this share of the likeliest one's; 0: of all",
    "/help": "these lines",
    "/quit": "end; so does Ctrl-D",
}
SAMPLING = {  # commands that set a number, and what they accept
    "/temperature": "a number from 0 on",
    "/top_p": "a number above 0 and at most 1",
    "/top_k": "a whole number from 0 on",
    "/min_p": "a number from 0 on, and below 1",
}
PROMPT = "> "


@dataclass(slots=True)
class Session:
    """A conversation with one model, or with several that hear the same questions."""

    names: Sequence[str]  # of the models, all different
    talkers: Sequence[Talker]  # in the order of `names`
    sampling: SamplingSettings
    seed: int  # of what is drawn next
    waiting: dict[str, str] = field(default_factory=dict[str, str])  # images for the next message
    # for --json: {"seed": 0, "question": "...", "images": ["cat.png"], "answers": {NAME: {"text":
    # "...", "ended": true}}}
    turns: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def answer(self, text: str, shown: AnswerDisplay) -> None:
        """Shows every model's answer to `text` and keeps the turn. Raises UsageError, before any of
        them answers, where one cannot.
        """
        images = [*self.waiting.values()]
        requests = [
            talker.request(text, self.sampling, self.seed, images) for talker in self.talkers
        ]
        pieces = [
            talker.answer(text, request, images)
            for talker, request in zip(self.talkers, requests, strict=True)
        ]
        shown.show(self.names, pieces)
        answers = {
            name: {"text": talker.messages[-1]["content"], "ended": talker.has_ended}
            for name, talker in zip(self.names, self.talkers, strict=True)
        }
        self.turns.append(
            {"seed": self.seed, "question": text, "images": [*self.waiting], "answers": answers}
        )
        self.waiting = {}

    def attach(self, file: str) -> str:
        """Shows the image in `file` with the next message; returns what to say of it. Raises
        UsageError where there is none, and where one of the models cannot read it.
        """
        try:
            at_home = file.startswith("~")
            content = content_of(str(Path(file).expanduser()) if at_home else file, Path.cwd())
            digest = image_store().add(content)
        except ValueError as error:
            raise UsageError(f"/image {file}: {error}") from error
        counts: list[int] = []
        for name, talker in zip(self.names, self.talkers, strict=True):
            try:
                counts.append(talker.tokens_of(digest))
            except UsageError as error:
                raise UsageError(f"/image {file}: {name}: {error}") from error
        self.waiting[file] = digest
        width, height = size_of(content)
        tokens = " and ".join(map(str, counts))
        return f"[{file}: {width} x {height} pixels, {tokens} tokens, with the next message]"

    def cut_short(self) -> list[str]:
        """Names of the models whose last answer did not end by itself."""
        pairs = zip(self.names, self.talkers, strict=True)
        return [name for name, talker in pairs if not talker.has_ended]

    @contextmanager
    def cut_by_signal(self) -> Generator[None]:
        """Inside, Ctrl-C ends the answers and not the conversation."""

        def cut(number: int, frame: FrameType | None) -> None:
            for talker in self.talkers:
                talker.cut()

        with signals_handled((signal.SIGINT,), cut):
            yield


def chat(
    models: Sequence[str],
    console: Console,
    *,
    checkpoint: str | None = None,
    dtype: str = "auto",
    system: str | None = None,
    sampling: SamplingSettings,
    seed: int = 0,
    max_len: int = 4096,
    as_json: bool = False,
) -> dict[str, Any]:
    """Talks until the person ends it, or standard input does; returns the conversation.

    models: one or two directories, hub ids or runs. system: in place of the run's system prompt.
    Raises UsageError where there is nothing to talk to, and, reading standard input, for what
    cannot be answered.
    """
    loaded: list[ChatModel] = []
    for name in models:
        with console.phase(f"load {name}"):
            loaded.append(load(name, checkpoint, dtype, max_len))
    talkers = [model.talker(system) for model in loaded]
    session = Session(_distinct(models), talkers, sampling, seed)
    shown = AnswerDisplay(sys.stderr if as_json else sys.stdout)
    with TemporaryDirectory(prefix="postgrad-") as folder, images_kept_in(Path(folder) / IMAGES):
        if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
            for model in loaded:
                console.note(model.about)
            console.note("say something; /help lists commands")
            _talk_with_person(session, shown, console)
        else:
            _talk_with_lines(session, shown, console, sys.stdin.buffer)
    return {"models": [model.about for model in loaded], "turns": session.turns}


def _talk_with_person(session: Session, shown: AnswerDisplay, console: Console) -> None:
    with suppress(ImportError):
        import_module("readline")  # input() edits lines with it, where it is there
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            console.note("")
            return
        try:
            if _is_command(line):
                if not _run_command(line, session, console):
                    return
            elif line.strip():
                with session.cut_by_signal():
                    session.answer(line, shown)
                for name in session.cut_short():
                    console.note(f"({name} was cut short)")
        except UsageError as error:
            console.error(str(error))


def _talk_with_lines(
    session: Session, shown: AnswerDisplay, console: Console, lines: Iterable[bytes]
) -> None:
    for line in _texts(lines):
        if _is_command(line):
            if not _run_command(line, session, console):
                return
        elif line.strip():
            session.answer(line, shown)


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    """Lines as text, without their ends. Raises UsageError where one is not UTF-8."""
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"line {number} of standard input is not UTF-8: {error}") from error


def _is_command(line: str) -> bool:
    """Whether a line begins with a slash. With a space before it the model gets the line."""
    return line.startswith("/")


def _run_command(line: str, session: Session, console: Console) -> bool:
    """Runs a line that is a command; False where it ends the conversation."""
    name, _, value = line.strip().partition(" ")
    if name == "/quit":
        return False
    if name == "/reset":
        session.waiting = {}
        for talker in session.talkers:
            talker.reset()
    elif name == "/image":
        _image(session, value.strip().strip("'\""), console)
    elif name == "/seed":
        session.seed = _seed(value)
    elif name in SAMPLING:
        session.sampling = _sampling(session.sampling, name, value)
    elif name == "/help":
        console.table("", ("", ""), list(COMMANDS.items()))
    else:
        raise UsageError(
            f"{name} is no command; known: {', '.join(COMMANDS)}. A space before the slash says "
            "the line to the model"
        )
    return True


def _image(session: Session, file: str, console: Console) -> None:
    """Attaches an image; without the name of a file, drops those that wait."""
    if not file:
        session.waiting = {}
        return
    note = session.attach(file)
    if sys.stdin.isatty():
        console.note(note)


def _seed(text: str) -> int:
    if not text.strip().isdigit():
        raise UsageError(f"/seed {text}: a whole number from 0 on is expected")
    return int(text)


def _sampling(before: SamplingSettings, name: str, text: str) -> SamplingSettings:
    """The settings with that of a command, such as "/top_p 0.9"."""
    key = name.removeprefix("/")
    try:
        settings = {**before.model_dump(), key: int(text) if key == "top_k" else float(text)}
        return SamplingSettings.model_validate(settings)
    except ValueError as error:
        raise UsageError(f"{name} {text}: {SAMPLING[name]} is expected") from error


def _distinct(names: Sequence[str]) -> list[str]:
    """The names as the command line gives them; where two are equal each gets its number."""
    same = len(set(names)) < len(names)
    return [f"{name} ({number})" if same else name for number, name in enumerate(names, 1)]

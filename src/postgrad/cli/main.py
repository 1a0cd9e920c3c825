"""Picks the command, runs it, turns errors into one line and an exit code."""

import argparse
import atexit
import io
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from postgrad._version import __version__
from postgrad.cli import models, plan, runs, start, train
from postgrad.cli.command import CommandFunction, CommandOutcome, Commands, tell
from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.files import finite
from postgrad.core.untrusted import path_problem, shown

READER_GONE = 141  # what a shell says of a process that SIGPIPE ended: 128 + 13
# Seconds after a command's end until people hear of threads that its process waits for, and from
# then on until it ends without them.
THREADS_TOLD, THREADS_WAIT = 5.0, 60.0
BEGIN = (
    "Begin with `postgrad train quickstart`, or with `postgrad new DIR`, which writes a recipe for "
    "your own rows. `postgrad COMMAND --help` explains a command."
)
FAMILIES = (start, train, models, runs, plan)  # in this order in the help


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 the run failed, 2 something is wrong, 141
    where whoever read its output has gone, such as `head`.

    arguments: None for those of this process, which is to end with the command: no thread that
    others' code has left keeps it for long.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
    output = sys.stdout
    if output is sys.__stdout__ and isinstance(output, io.TextIOWrapper):
        lines, through = output.line_buffering, output.write_through
        sys.stdout = _Output(output.buffer, output.encoding, output.errors, None, lines, through)
    try:
        try:
            code = _run(arguments)
            if arguments is None:
                _end_soon(code)
            return code
        finally:  # also after --help, which ends by SystemExit
            sys.stdout.end() if isinstance(sys.stdout, _Output) else sys.stdout.flush()
    except OSError as error:
        gone = isinstance(error, BrokenPipeError)
        for stream in (sys.stdout, sys.stderr):
            if gone or stream is sys.stdout:
                _silence(stream)
        if not gone:
            tell(f"standard output: {error.strerror}; the command ended, its output is not whole")
        return READER_GONE if gone else 1


class _Output(io.TextIOWrapper):
    """Standard output that remembers its first error. Consoles and argparse go on after one, and an
    output without a buffer tells of it only once.
    """

    failure: OSError | None = None

    def write(self, text: str, /) -> int:
        """Writes `text`; returns its length. Raises OSError, and remembers it."""
        try:
            return super().write(text)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def end(self) -> None:
        """Flushes; raises the first error of a write or of that."""
        self.flush()
        if self.failure is not None:
            raise self.failure


def _end_soon(code: int) -> None:
    """Ends the process where threads that are no daemons, such as one that an environment has left,
    would keep it from ending: GPUs and places in queues would stay taken.
    """
    threading.Thread(target=_ended_without_threads, args=(code,), daemon=True).start()


def _ended_without_threads(code: int) -> None:
    time.sleep(THREADS_TOLD)
    if left := _left_threads():
        tell(f"the command has ended; its process waits {THREADS_WAIT:.0f} s for {left}")
        time.sleep(THREADS_WAIT)
    if left and (left := _left_threads()):
        tell(f"the process ends without {left}: make it a daemon, or let it end with the run")
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # sys.exit ends only a thread
        os._exit(code)


def _left_threads() -> str:
    """The threads for which Python waits before it ends, with the line of each; "" for none."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    texts: list[str] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.daemon or thread is threading.main_thread() or frame is None:
            continue
        place = _in_own_code(traceback.extract_stack(frame))
        texts.append(f"the thread {thread.name!r}" + (f" ({place})" if place else ""))
    return " and ".join(texts)


def _silence(stream: TextIO) -> None:
    """Sends to nowhere what the stream still holds: Python would try to write it at the end."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _reader_gone() -> bool:
    """True where standard output or standard error is a pipe that nobody reads any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a stream in memory has no descriptor
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the console is ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    commands = all_commands()
    try:
        commands.refuse_unknown(sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        return _fail(error, False, error.exit_code)
    args, rest = commands.parser.parse_known_args(arguments)
    command: CommandFunction | None = getattr(args, "run", None)
    if command is None:
        commands.parser.print_help()
        return 2
    try:
        _require_paths(args, rest)
        if rest and not args.takes_overrides:
            raise UsageError(
                f"{args.command} has no argument {rest[0]!r}: see postgrad {args.command} -h"
            )
        result = command(args, rest)
    except PostgradError as error:
        return _fail(error, args.debug, error.exit_code)
    except KeyboardInterrupt as error:
        return _fail(error, args.debug, 1, "interrupted")
    except OSError as error:  # a disk, a network: nobody's mistake here
        gone = isinstance(error, BrokenPipeError) and _reader_gone()
        if gone or error is getattr(sys.stdout, "failure", None):
            raise
        return _fail(error, args.debug, 1, f"{error}; fix that and start the command again")
    except Exception as error:  # noqa: BLE001  # people see one line for every other error too
        hint = "; run again with --debug to see where, and please report it"
        if (place := _in_own_code(traceback.extract_tb(error.__traceback__))) is not None:
            hint = f" ({place}); run again with --debug to see how it came there"
        return _fail(error, args.debug, 1, f"{type(error).__name__}: {error}{hint}")
    outcome = result if isinstance(result, CommandOutcome) else CommandOutcome(result, 0)
    if args.json:
        print(json.dumps(finite(outcome.result), ensure_ascii=False))
    return outcome.exit_code


def _require_paths(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raises UsageError where an argument is a path that no file can have, or one of `rest` is no
    text: Python keeps bytes that it cannot decode as halves of surrogate pairs.
    """
    for name, value in vars(args).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and (problem := path_problem(str(path))):
                raise UsageError(f"{name} {shown(str(path))}: {problem}")
    for word in rest:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            encoding = sys.getfilesystemencoding()
            raise UsageError(
                f"{shown(word)} is no text in {encoding}, the locale's encoding: set LC_ALL=C.UTF-8"
            )


def _in_own_code(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """File and line of the last call in code that is neither ours nor installed, such as an
    algorithm of the user's; None where there is none.
    """
    installed = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")
    others = [frame for frame in frames if not frame.filename.startswith(installed)]
    return f"{others[-1].filename}:{others[-1].lineno}" if others else None


def _fail(error: BaseException, debug: bool, code: int, text: str | None = None) -> int:
    if debug:
        traceback.print_exception(error)
    tell(text or str(error))
    return code


def all_commands() -> Commands:
    """The parser of `postgrad` with all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="postgrad",
        description="Post-training of language models: SFT, reward models, preferences, RL.",
        epilog=BEGIN,
    )
    parser.add_argument("--version", action="version", version=f"postgrad {__version__}")
    commands = Commands(parser)
    for family in FAMILIES:
        family.add(commands)
    return commands

"""A run whose learner and engine are two processes on one card: `handover.py FOLDER SIZE [WORD]`.

This process is the loop and the only rank, a second one is the rollout worker, and what Ray would
carry goes through a pipe. With `keep` nobody gives memory back, with `sampling` the learner leaves
the card while the engine samples. Prints, as JSON, what each process had allocated and reserved
after it gave back, or the error that ended the run.
"""

import json
import multiprocessing
import pickle
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from postgrad.core.errors import RunError
from postgrad.fleet import members
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.ranked import RankedFleet
from postgrad.fleet.worker import RankWorker
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.training.start import train

LENGTH = 4096
Account = list[tuple[str, int, int]]  # of turns: whose, bytes allocated, bytes reserved

# Of a model and its run: an update and the engine's cache need about half of 24 GB each. The second
# has the shapes of Qwen3-0.6B.
SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden": 512, "layers": 8, "heads": 8, "prompts": 8, "places": 800_000, "steps": 5},
    "0.6B": {"hidden": 1024, "layers": 28, "heads": 16, "prompts": 1, "places": 90_000, "steps": 2},
}


def recipe(folder: Path, size: str) -> Any:
    """A step of long prompts with two samples each."""
    sizes = SIZES[size]
    rows = folder / "rows.jsonl"
    row = {"question": "spell " * (LENGTH // 6 - 8), "answer": "s"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(sizes["prompts"])), "utf-8")
    model = {
        "type": "qwen3",
        "hidden_size": sizes["hidden"],
        "intermediate_size": 3 * sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": 8,
        "max_position_embeddings": LENGTH,
        "tokenizer": {"kind": "characters"},
    }
    return parse_recipe(
        {
            "job": "rl",
            "run_dir": str(folder / "run"),
            "steps": sizes["steps"],
            "model": {"init": model, "attention": "sdpa"},
            "data": {"path": str(rows), "max_len": LENGTH},
            "rewards": [{"type": "helpers.by_sample:by_sample"}],
            "scoring": {"workers": 1},
            "algorithm": {"type": "grpo"},
            "learner": {"offload": "sampling" if "sampling" in sys.argv else False},
            "batch": {
                "rollout_batch_size": sizes["prompts"],
                "n_samples_per_prompt": 2,
                "micro_train_tokens": sizes["prompts"] * LENGTH,
            },
            "rollout": {
                "max_new_tokens": 4,
                "slots": 32,
                "cache_tokens": sizes["places"],
                "transport": "memory",
            },  # the stub has no IPC
            "checkpoint": {"save_steps": sizes["steps"]},
            "cluster": {"type": "ray", "policy": {"colocate": "rollout"}},
        }
    )


class OnlyRank:
    """`fleet.ranked.RankCalls` of one rank, in this process."""

    places = (("127.0.0.1", 0),)

    def __init__(self, recipe: Any, choices: Any, turns: Account) -> None:
        self._worker = RankWorker(recipe.dump(), choices)
        self._turns = turns

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        handle: Future[Any] = Future()
        try:
            handle.set_result(getattr(self._worker, method)(*arguments))
        except Exception as error:  # noqa: BLE001  the handle raises it
            handle.set_exception(error)
        if method == "free_memory":
            self._turns.append(_now("learner"))
        return handle

    aside = call


class PipedWorker:
    """`cluster.workers.Workers` of one process without Ray."""

    size, places = 1, (("here", 0),)

    def __init__(self, title: str, worker: str, arguments: Any, *more: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        started = context.Process(target=_serve, args=(theirs, pickle.dumps(arguments)))
        started.start()
        theirs.close()
        self._process = started
        self._asked: dict[int, Future[Any]] = {}
        Thread(target=self._read, daemon=True).start()

    def _send(self, entry: str, method: str, *arguments: Any) -> Future[Any]:
        handle: Future[Any] = Future()
        number = len(self._asked)
        self._asked[number] = handle
        self._pipe.send_bytes(pickle.dumps((number, entry, method, arguments)))
        return handle

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self._send("call", method, *arguments)

    def aside(self, method: str, *arguments: Any) -> Future[Any]:
        return self._send("aside", method, *arguments)

    def description(self) -> str:
        return "one rollout worker behind a pipe"

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _read(self) -> None:
        while True:
            try:
                number, value, error = pickle.loads(self._pipe.recv_bytes())  # noqa: S301
            except (EOFError, OSError):
                return
            if error is None:
                self._asked[number].set_result(value)
            else:
                self._asked[number].set_exception(RunError(error))


class Accounted(EngineWorker):
    """A rollout worker that tells what it has after it went to sleep."""

    account: Account

    def sleep(self) -> None:
        super().sleep()
        self.account.append(_now("engine"))

    def accounts(self) -> Account:
        return self.account


def _serve(pipe: Any, arguments: bytes) -> None:
    """The rollout worker's process."""
    if "keep" in sys.argv:
        _keep()
    worker = Accounted(*pickle.loads(arguments))  # noqa: S301
    worker.account = []
    calls: SimpleQueue[Any] = SimpleQueue()

    def answer(number: int, method: str, method_arguments: Any) -> None:
        value, error = None, None
        try:
            value = getattr(worker, method)(*method_arguments)
        except Exception as failed:  # noqa: BLE001  the caller raises it
            error = f"{type(failed).__name__}: {failed}"
        pipe.send_bytes(pickle.dumps((number, value, error)))

    def in_turn() -> None:
        while True:
            answer(*calls.get())

    Thread(target=in_turn, daemon=True).start()
    while True:
        try:
            number, entry, method, call_arguments = pickle.loads(pipe.recv_bytes())  # noqa: S301
        except EOFError:
            return
        if entry == "call":
            calls.put((number, method, call_arguments))
        else:
            answer(number, method, call_arguments)


def _now(process: str) -> tuple[str, int, int]:
    return process, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class NoPlaces:
    """Nothing is reserved at Ray."""

    def wait_for(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def _keep() -> None:
    torch.cuda.empty_cache = lambda: None


def main(folder: Path, size: str) -> dict[str, Any]:
    turns: Account = []

    def start(context: Any, stack: ExitStack, *more: Any, session: Any = None) -> RankedFleet:
        group = OnlyRank(context.recipe, context.choices, turns)
        session.reservation = NoPlaces()
        return RankedFleet(context, group, session, *more)

    class Worker(PipedWorker):
        def close(self) -> None:
            turns.extend(self.call("accounts").result(60.0))
            super().close()

    changed: Any = RankedFleet
    changed.start = start
    changed = members
    changed.Workers = Worker
    try:
        train(recipe(folder, size), Console("quiet"))
    except RunError as error:
        return {"error": str(error), "turns": turns}
    return {"error": None, "turns": turns, "learner_peak": torch.cuda.max_memory_reserved()}


if __name__ == "__main__":
    if "keep" in sys.argv:
        _keep()
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))

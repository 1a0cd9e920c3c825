"""A start over many rows: CPU seconds, wall seconds and memory before the first step.

    python -m benchmarks.large_data DATA --rows 100000 --rounds 3 --to large_data.json

DATA is a folder with gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz. Their rows are repeated, each with
a number of its own, as conversations (SFT), questions (RL) and pairs, in JSON lines and in Parquet,
for a fresh BPE tokenizer of 4 096 tokens. `--problems 10` makes rows long: ten problems in an
answer (SFT), or in another column (RL). Each start is a process of its own: "first" fills an empty
token cache, "cached" reads it. CPU seconds are of all its processes together; those of the main
thread are Python that no second core shares. Memory is what the process holds beyond what it held
before: at most while rows are read ("peak", child processes included), and afterwards ("held").
"anon" is the anonymous part of it in this process alone (RssAnon of proc(5), read fifty times a
second): what the kernel cannot drop. The digest covers all tokens, masks, accounts and notes: two
versions of the code that read the same rows have the same one.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.speed.report import machine, write_result
from benchmarks.speed.worker import cpu_seconds, forget_peak, peak_bytes

KINDS = ("sft", "rl", "pairs")
FORMS = ("jsonl", "parquet")
MAX_LEN = 1024


def written(folder: Path, sources: Path, options: argparse.Namespace) -> None:
    """The datasets of all kinds and forms that are asked for, and the tokenizer."""
    with (sources / "gsm8k.jsonl").open(encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    with gzip.open(sources / "hh-rlhf-harmless.jsonl.gz", "rt", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    numbers, more = range(options.rows), options.problems - 1
    rows = {
        "sft": (_conversation(problems, n, more) for n in numbers),
        "rl": (_question(problems, n, more) for n in numbers),
        "pairs": map(_pair, itertools.cycle(pairs), numbers),
    }
    for kind in options.kinds:
        _write(folder / kind, rows[kind], options.forms)
    from postgrad.models.fresh import make_fresh
    from postgrad.models.settings import ModelInit, TokenizerInit

    init = ModelInit(
        type="qwen2",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        tokenizer=TokenizerInit(kind="bpe", vocab_size=4096),
    )
    texts = [row[key] for row in problems for key in ("question", "answer")]
    make_fresh(init, texts, 0, folder / "model")


def _following(problems: list[dict[str, str]], number: int, more: int) -> list[str]:
    """So many problems behind that of a row, with their answers."""
    others = (problems[(number + n) % len(problems)] for n in range(1, more + 1))
    return [f"{other['question']}\n{other['answer']}" for other in others]


def _conversation(problems: list[dict[str, str]], number: int, more: int) -> dict[str, Any]:
    row = problems[number % len(problems)]
    question = f"Problem {number}. {row['question']}"
    answer = "\n\n".join([row["answer"], *_following(problems, number, more)])
    messages = [("user", question), ("assistant", answer)]
    return {
        "id": f"problem-{number}",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "source": "gsm8k",
    }


def _question(problems: list[dict[str, str]], number: int, more: int) -> dict[str, Any]:
    row = problems[number % len(problems)]
    question = f"Problem {number}. {row['question']}"
    others = {"alike": _following(problems, number, more)} if more else {}
    return {"question": question, "answer": row["answer"], "level": number % 5, **others}


def _pair(row: dict[str, str], number: int) -> dict[str, Any]:
    marked = {name: text.replace("Human:", f"Human: ({number})", 1) for name, text in row.items()}
    return {**marked, "source": "hh"}


def _write(path: Path, rows: Iterable[dict[str, Any]], forms: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: Any = None
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        rows = iter(rows)
        while some := list(itertools.islice(rows, 20_000)):  # a row group of Parquet
            for row in some:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if "parquet" not in forms:
                continue
            group: Any = pa.Table.from_pylist(some)  # pyright: ignore[reportUnknownMemberType]
            table = table or pq.ParquetWriter(path.with_suffix(".parquet"), group.schema)
            table.write_table(group)
    if table is not None:
        table.close()


class AnonymousMemory:
    """Anonymous memory of this process in RAM, and the most of it since `begin` (Linux)."""

    def __init__(self) -> None:
        self.most = self._began = 0
        self._status = Path("/proc/self/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        """Counts what comes from here on."""
        self._began = self.bytes()
        self._thread.start()

    def end(self) -> dict[str, float]:
        """What is held beyond what there was at `begin`, now and at most, in MiB."""
        held = self.bytes()
        self._over.set()
        self._thread.join()
        self.most = max(self.most, held)
        numbers = {"anon_held_mib": held, "anon_peak_mib": self.most}
        return {name: (number - self._began) / 2**20 for name, number in numbers.items()}

    def bytes(self) -> int:
        """RssAnon of now."""
        lines = self._status.read_text("utf-8").splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self.bytes())


def one_start(kind: str, path: str, model: str, max_len: int) -> dict[str, Any]:
    """Reads the rows as a job does before its first step, in this process."""
    from postgrad.data import mixture
    from postgrad.data.conversations import load_conversations
    from postgrad.data.mixture import training_rows
    from postgrad.data.overlap import HeldOut
    from postgrad.data.pairs import load_pairs
    from postgrad.data.settings import MixSettings, PairMixSettings
    from postgrad.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    shared: dict[str, Any] = {"path": path, "max_len": max_len}
    process, anonymous = psutil.Process(), AnonymousMemory()
    cpu, wall, held = cpu_seconds(), time.perf_counter(), process.memory_info().rss
    main_thread = time.thread_time()
    forget_peak()
    anonymous.begin()
    draws: Any
    if kind == "sft":
        data = MixSettings(**shared, messages="messages")
        draws = mixture.training_rows(load_conversations, data, tokenizer, exclude=HeldOut())
    elif kind == "rl":
        data = MixSettings(**shared)
        draws = mixture.training_prompts(data, tokenizer, max_new_tokens=256, exclude=HeldOut())
    else:
        draws = training_rows(load_pairs, PairMixSettings(**shared), tokenizer, exclude=HeldOut())
    draws.draw(0, 0)
    figures: dict[str, Any] = {
        "cpu_seconds": cpu_seconds() - cpu,
        "main_thread_seconds": time.thread_time() - main_thread,
        "wall_seconds": time.perf_counter() - wall,
        "held_mib": (process.memory_info().rss - held) / 2**20,
        "peak_mib": (peak_bytes() - held) / 2**20,
        **anonymous.end(),
        "rows": len(draws),
    }
    return figures | {"digest": digest_of(draws)}


def digest_of(draws: Any) -> str:
    """A SHA-256 of every record in order and of the accounts, but for notes about the cache."""
    digest = hashlib.sha256()
    for account in draws.accounts:
        account_json = account.to_json()
        account_json["notes"] = [
            note for note in account_json.get("notes", ()) if "cache" not in note
        ]
        digest.update(json.dumps([account_json, account.lines()[:1]], sort_keys=True).encode())
    for record in draws.all():
        digest.update(repr(_plain(record)).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return sorted((name, _plain(getattr(value, name))) for name in value.__dataclass_fields__)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return list(value) if isinstance(value, tuple) else value


def measured(command: list[str], cache: Path) -> dict[str, Any]:
    """The result of a start in a process of its own."""
    environment = {**os.environ, "POSTGRAD_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def medians(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of several starts, their digest, and whether they all had it."""
    numbers = [name for name, value in starts[0].items() if isinstance(value, int | float)]
    medians_by_name = {name: statistics.median(start[name] for start in starts) for name in numbers}
    (digest,) = {start["digest"] for start in starts}
    return {**{name: round(value, 2) for name, value in medians_by_name.items()}, "digest": digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with gsm8k.jsonl and hh-rlhf-harmless")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--problems", type=int, default=1, help="of GSM8K in each row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--keep", type=Path, help="make the datasets here, and use those there")
    parser.add_argument("--before", type=Path, help="the result of another version, to show beside")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, path = options.one
        max_len = MAX_LEN * options.problems
        print(json.dumps(one_start(kind, path, str(options.data / "model"), max_len)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "model").exists():
            folder.mkdir(exist_ok=True, parents=True)
            written(folder, options.data, options)
        results: dict[str, Any] = {}
        for kind, form in itertools.product(options.kinds, options.forms):
            path = folder / f"{kind}.{form}"
            command = [sys.executable, "-m", "benchmarks.large_data", str(folder)]
            command += ["--one", kind, str(path), "--problems", str(options.problems)]
            first: list[dict[str, Any]] = []
            cached: list[dict[str, Any]] = []
            for _ in range(options.rounds):
                with tempfile.TemporaryDirectory() as cache:
                    first.append(measured(command, Path(cache)))
                    cached.append(measured(command, Path(cache)))
            size = path.stat().st_size / 2**20
            results[f"{kind} {form}"] = {
                "file_mib": round(size, 1),
                "first": medians(first),
                "cached": medians(cached),
            }
            print(kind, form, json.dumps(results[f"{kind} {form}"]), file=sys.stderr)
    used = ["--rows", options.rows, "--problems", options.problems, "--rounds", options.rounds]
    used += ["--kinds", *options.kinds]
    used += ["--forms", *options.forms]
    command = shlex.join(["python", "-m", "benchmarks.large_data", "DATA", *map(str, used)])
    result = {"command": command, "machine": machine(), "rows": options.rows, **results}
    if options.before:
        result["before"] = json.loads(options.before.read_text("utf-8"))
    write_result(result, options.to)


if __name__ == "__main__":
    main()

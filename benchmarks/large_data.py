"""A start over many rows: CPU seconds, wall seconds and memory before the first step.

    python -m benchmarks.large_data DATA --rows 100000 --rounds 3 --to large_data.json

DATA is a folder with gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz. Their rows are repeated, each with
a number of its own, as conversations (SFT), questions (RL) and pairs, in JSON lines and in Parquet,
for a fresh BPE tokenizer of 4 096 tokens. Each start is a process of its own: "first" fills an
empty token cache, "cached" reads it. CPU seconds are of all its processes together; those of the
main thread are Python that no second core shares. Memory is what the process holds beyond what it
held before: at most while rows are read ("peak", child processes included), and afterwards
("held"). The digest covers all tokens, masks, accounts and notes: two versions of the code that
read the same rows have the same one.
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
import time
from collections.abc import Iterator
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


def written(folder: Path, sources: Path, rows: int) -> None:
    """The datasets of all kinds in both forms, and the tokenizer."""
    with (sources / "gsm8k.jsonl").open(encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    with gzip.open(sources / "hh-rlhf-harmless.jsonl.gz", "rt", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    _write(folder / "sft", map(_conversation, itertools.cycle(problems), range(rows)))
    _write(folder / "rl", map(_question, itertools.cycle(problems), range(rows)))
    _write(folder / "pairs", map(_pair, itertools.cycle(pairs), range(rows)))
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


def _conversation(row: dict[str, str], number: int) -> dict[str, Any]:
    question, answer = f"Problem {number}. {row['question']}", row["answer"]
    messages = [("user", question), ("assistant", answer)]
    return {
        "id": f"problem-{number}",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "source": "gsm8k",
    }


def _question(row: dict[str, str], number: int) -> dict[str, Any]:
    question = f"Problem {number}. {row['question']}"
    return {"question": question, "answer": row["answer"], "level": number % 5}


def _pair(row: dict[str, str], number: int) -> dict[str, Any]:
    marked = {name: text.replace("Human:", f"Human: ({number})", 1) for name, text in row.items()}
    return {**marked, "source": "hh"}


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kept: list[dict[str, Any]] = []
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            kept.append(row)
    pq.write_table(pa.Table.from_pylist(kept), path.with_suffix(".parquet"))  # pyright: ignore[reportUnknownMemberType]


def one_start(kind: str, path: str, model: str, digest: bool) -> dict[str, Any]:
    """Reads the rows as a job does before its first step, in this process."""
    from postgrad.data import mixture
    from postgrad.data.conversations import load_conversations
    from postgrad.data.mixture import training_rows
    from postgrad.data.overlap import HeldOut
    from postgrad.data.pairs import load_pairs
    from postgrad.data.settings import MixSettings, PairMixSettings
    from postgrad.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    shared: dict[str, Any] = {"path": path, "max_len": MAX_LEN}
    process = psutil.Process()
    cpu, wall, held = cpu_seconds(), time.perf_counter(), process.memory_info().rss
    main_thread = time.thread_time()
    forget_peak()
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
    found: dict[str, Any] = {
        "cpu_seconds": cpu_seconds() - cpu,
        "main_thread_seconds": time.thread_time() - main_thread,
        "wall_seconds": time.perf_counter() - wall,
        "held_mib": (process.memory_info().rss - held) / 2**20,
        "peak_mib": (peak_bytes() - held) / 2**20,
        "rows": len(draws),
    }
    return found | ({"digest": digest_of(draws)} if digest else {})


def digest_of(draws: Any) -> str:
    """A SHA-256 of every record in order and of the accounts, but for notes about the cache."""
    digest = hashlib.sha256()
    for account in draws.accounts:
        told = account.to_json()
        told["notes"] = [note for note in told.get("notes", ()) if "cache" not in note]
        digest.update(json.dumps([told, account.lines()[:1]], sort_keys=True).encode())
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
    found = {name: statistics.median(start[name] for start in starts) for name in numbers}
    (digest,) = {start["digest"] for start in starts}
    return {**{name: round(value, 2) for name, value in found.items()}, "digest": digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with gsm8k.jsonl and hh-rlhf-harmless")
    parser.add_argument("--rows", type=int, default=100_000)
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
        print(json.dumps(one_start(kind, path, str(options.data / "model"), digest=True)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        if not (folder / "model").exists():
            folder.mkdir(exist_ok=True, parents=True)
            written(folder, options.data, options.rows)
        results: dict[str, Any] = {}
        for kind, form in itertools.product(options.kinds, options.forms):
            path = folder / f"{kind}.{form}"
            command = [sys.executable, "-m", "benchmarks.large_data", str(folder)]
            command += ["--one", kind, str(path)]
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
    used = ["--rows", options.rows, "--rounds", options.rounds, "--kinds", *options.kinds]
    used += ["--forms", *options.forms]
    command = shlex.join(["python", "-m", "benchmarks.large_data", "DATA", *map(str, used)])
    result = {"command": command, "machine": machine(), "rows": options.rows, **results}
    if options.before:
        result["before"] = json.loads(options.before.read_text("utf-8"))
    write_result(result, options.to)


if __name__ == "__main__":
    main()

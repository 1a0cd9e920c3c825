"""Part "decode": tokens a second of the built-in engine, beside what the card's memory allows.

The limit: a step reads every weight once, the cache of each prompt once for all of its samples, and
the cache of each answer; a card copies as many bytes a second as card.py measures. Time is taken
between the end of one row, which has few tokens, and the end of all others, which have
`sizes.decoded` more: prompts are computed before that, and nothing starts or ends in between.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.card import Card, measure
from benchmarks.gpu.profiling import Profile
from benchmarks.gpu.session import Case, Result, Session, Skipped, release
from benchmarks.gpu.work import LOADS, Load
from benchmarks.gpu.workload import model_of, shape_of, sizes_of, token_ids
from postgrad.models.load import load_model
from postgrad.parallel.device import Placement, apply, compute_dtype
from postgrad.rollout.engine import Completion, Request, generate
from postgrad.rollout.local.budget import places_for
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

MODEL = "1.5B"
FIRST = 4  # tokens of the row that ends first
SAME_LOGPROBS = 1e-6  # nats: the kernels are the same
PROFILED = 8  # decode steps that are recorded


class Models:
    """The model of a session, loaded when it is first asked for."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @cached_property
    def loaded(self) -> Any:
        """With our attention, in the session's dtype, under the settings of a run."""
        threads = 1 if self._session.device == "cpu" else torch.get_num_threads()
        device = apply(Placement(self._session.device, threads, True))
        dtype = compute_dtype(self._session.dtype, device)
        return load_model(str(model_of(self._session, MODEL)), dtype=dtype, device=device)

    @cached_property
    def card(self) -> Card:
        """Measured in this process."""
        return measure(self._session)


def cases(session: Session) -> Iterator[Case]:
    """The loads; then the first of them without graphs, profiled, and by peers."""
    models, sizes = Models(session), sizes_of(session)
    first = LOADS[0]
    yield Case("card", 10, lambda: asdict(models.card))
    for load in LOADS:
        yield Case(load.name(sizes), load.seconds, lambda load=load: timed(session, models, load))
        if load is first:
            name = load.name(sizes)
            yield Case(f"{name} graphs off", 20, lambda: without_graphs(session, models, first))
            yield Case(f"{name} transformers", 30, lambda: by_transformers(session, models, first))
            yield Case(f"{name} profile", 20, lambda: profile_of(session, models, first))
    yield Case("vllm", 90, lambda: by_vllm(session))


def prompts_of(session: Session, load: Load) -> list[NDArray[np.int32]]:
    """The prompts of a load: each as long as leaves room for the answers in the context."""
    sizes = sizes_of(session)
    length = sizes.contexts[load.context] - sizes.decoded - FIRST
    vocabulary = shape_of(session, MODEL).vocab_size
    count = sizes.rows[load.rows] // load.shared
    return [token_ids(vocabulary, length, row).astype(np.int32) for row in range(count)]


def engine_of(session: Session, models: Models, load: Load) -> LocalEngine:
    """An engine with room for the load."""
    sizes = sizes_of(session)
    rows = sizes.rows[load.rows]
    places = places_for(sizes.contexts[load.context])
    model = models.loaded
    return LocalEngine(model.lm, model.tokenizer, slots=rows, cache_tokens=rows * places)


def decoded(
    session: Session,
    engine: LocalEngine,
    prompts: list[NDArray[np.int32]],
    shared: int,
    new: int,
    between: Callable[[], object] = lambda: None,
) -> tuple[float, int]:
    """Seconds in which all rows but the first one got `new` more tokens, and these tokens. between:
    called before that time begins.
    """
    few, many = SamplingSettings(max_new_tokens=FIRST), SamplingSettings(max_new_tokens=FIRST + new)
    engine.submit(Request(0, (0,), prompts[0], few))
    for ticket, ids in enumerate(prompts):
        samples = tuple(range(1 if ticket == 0 else 0, shared))
        if samples:
            engine.submit(Request(ticket, samples, ids, many))
    open_rows = len(prompts) * shared
    done = engine.completed()
    while not any(completion.ticket == 0 and completion.sample == 0 for completion in done):
        done += engine.completed()
    session.synchronize()
    between()
    began, tokens = time.perf_counter(), 0
    open_rows -= len(done)
    while open_rows:
        ended = engine.completed()
        open_rows -= len(ended)
        tokens += sum(len(completion.token_ids) - FIRST for completion in ended)
    session.synchronize()
    return time.perf_counter() - began, tokens


def timed(session: Session, models: Models, load: Load) -> Result:
    """Decodes the load once to warm up and once by the clock."""
    sizes, prompts = sizes_of(session), prompts_of(session, load)
    engine = engine_of(session, models, load)
    decoded(session, engine, prompts, load.shared, PROFILED)
    before, began = engine.stats.prompt_tokens, time.perf_counter()
    seconds, tokens = decoded(session, engine, prompts, load.shared, sizes.decoded)
    total_seconds = time.perf_counter() - began
    limit = limit_of(session, models.card, load, prompts)
    measurement = {
        "rows": sizes.rows[load.rows], "tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds / sizes.decoded,
        "before_seconds": total_seconds - seconds,
        "prompt_tokens": engine.stats.prompt_tokens - before,
        **limit,
        "share_of_limit": tokens / seconds / limit["limit_tokens_per_second"],
    }  # fmt: skip
    if session.device == "cuda":
        measurement["peak_bytes"] = torch.cuda.max_memory_allocated()
    engine.sleep()
    return measurement


def limit_of(session: Session, card: Card, load: Load, prompts: list[NDArray[np.int32]]) -> Result:
    """Bytes of a step halfway, and the tokens a second that the card's memory allows."""
    sizes, shape = sizes_of(session), shape_of(session, MODEL)
    width = 2 if session.dtype == "bfloat16" else 4
    rows = sizes.rows[load.rows]
    cached = sum(map(len, prompts)) + rows * (FIRST + sizes.decoded / 2)
    weights = shape.parameters() * width
    cache = cached * shape.cache_bytes_per_token(width)
    return {
        "weight_bytes": weights,
        "cache_bytes": cache,
        "limit_tokens_per_second": rows * card.copy_bandwidth / (weights + cache),
    }


@contextmanager
def eager() -> Generator[None]:
    """Inside, the engine captures no CUDA graphs. Raises Skipped where it has none."""
    name = "postgrad.rollout.local.step"
    if importlib.util.find_spec(name) is None:
        raise Skipped("the engine has no CUDA graphs")
    module: Any = importlib.import_module(name)

    def run(self: Any, shape: Any) -> None:
        module.step(self._decoder, self._cache, self._buffers, shape)

    with patch.object(module.Stepper, "_run", run):
        yield


def without_graphs(session: Session, models: Models, load: Load) -> Result:
    """The load, its steps run operation by operation."""
    with eager():
        return timed(session, models, load)


def same_without_graphs(session: Session) -> Result:
    """The same requests with and without graphs: what is sampled, and how far logprobs differ."""
    models, load = Models(session), LOADS[1]
    prompts = prompts_of(session, load)[:4]
    sampling = SamplingSettings(max_new_tokens=sizes_of(session).decoded)
    requests = [Request(n, tuple(range(4)), ids, sampling) for n, ids in enumerate(prompts)]

    def sampled() -> list[Completion]:
        engine = engine_of(session, models, load)
        return sorted(generate(engine, requests), key=lambda done: (done.ticket, done.sample))

    with_graphs = sampled()
    with eager():
        without = sampled()
    pairs = list(zip(with_graphs, without, strict=True))
    equal = all(
        np.array_equal(graphed.token_ids, ungraphed.token_ids) for graphed, ungraphed in pairs
    )
    worst = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs) if equal else None
    return {
        "tokens": sum(len(completion.token_ids) for completion in without),
        "logprobs_differ": worst,
        "passed": equal and worst is not None and worst < SAME_LOGPROBS,
    }


def profile_of(session: Session, models: Models, load: Load) -> Result:
    """PROFILED decode steps, kernel by kernel."""
    engine, prompts = engine_of(session, models, load), prompts_of(session, load)
    decoded(session, engine, prompts, load.shared, PROFILED)
    profile = Profile(session)
    decoded(session, engine, prompts, load.shared, PROFILED, between=profile.start)
    profile.stop()
    engine.sleep()
    return profile.result


def by_transformers(session: Session, models: Models, load: Load) -> Result:
    """transformers' generate on the same prompts, its own attention, without deterministic mode."""
    from benchmarks.gpu.peers import generated

    ours = models.card  # measured before anything else is on the card
    prompts = prompts_of(session, load)
    release()
    torch.use_deterministic_algorithms(False)
    try:
        new = sizes_of(session).decoded // 3  # its steps are slow
        seconds, tokens = generated(session, model_of(session, MODEL), prompts, FIRST, new)
    finally:
        torch.use_deterministic_algorithms(True)
    limit = limit_of(session, ours, load, prompts)
    speed = tokens / seconds
    share = speed / limit["limit_tokens_per_second"]
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": speed,
            "share_of_limit": share}  # fmt: skip


def by_vllm(session: Session) -> Result:
    """The rollouts of a GRPO step beside vLLM, whole, prompts included."""
    from benchmarks.gpu.peers import against, require

    require("vllm")
    return against(session, "rollout", "vllm", MODEL, rounds=2)

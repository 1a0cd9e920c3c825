"""Part "step": GRPO steps of GSM8K's shape, phase by phase, and beside TRL where that is here."""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.peers import against, require
from benchmarks.gpu.session import Case, Result, Session
from benchmarks.gpu.training_runs import grpo, run_recipe
from benchmarks.gpu.transports import sent
from benchmarks.gpu.work import WAYS, step_name, way_name
from benchmarks.gpu.workload import model_of, question_lengths, sizes_of, write_questions

MODEL = "1.5B"
STEPS = (5, 3)  # of the smaller and of the larger step; --calibrate wants four at least


def run_name(prompts: int, samples: int) -> str:
    """Of its run directory."""
    return f"grpo-{prompts}x{samples}"


def cases(session: Session) -> Iterator[Case]:
    """Both steps, the ways of weights to an engine, then beside TRL."""
    sizes = sizes_of(session)
    few, many = sizes.prompts
    n = sizes.samples
    yield Case(step_name(few, n), 60, lambda: stepped(session, few, STEPS[0]))
    yield Case(step_name(many, n), 65, lambda: stepped(session, many, STEPS[1]))
    for way in WAYS:
        yield Case(way_name(way), 10, lambda way=way: sent(session, way))
    for prompts in (few, many):
        name = f"{step_name(prompts, n)} trl"
        yield Case(name, 150, lambda prompts=prompts: beside_trl(session, prompts))


def stepped(session: Session, prompts: int, steps: int) -> Result:
    """Steps of `prompts` prompts, from sampling to publishing."""
    sizes = sizes_of(session)
    rows = session.scratch / f"questions-{prompts}.jsonl"
    lengths = question_lengths(session, prompts)
    write_questions(rows, lengths)
    recipe = grpo(
        session, model_of(session, MODEL, ends=True), rows, prompts=prompts,
        samples=sizes.samples, longest=int(lengths.max()), new=sizes.new_tokens,
    )  # fmt: skip
    lines: list[Any] = []
    run_figures = run_recipe(
        session, run_name(prompts, sizes.samples), recipe, steps=steps, lines=lines
    )
    tokens = [line["response_tokens"] for line in lines]
    return {
        **run_figures,
        "samples": prompts * sizes.samples,
        "response_tokens": tokens,
        "mean_response": sum(tokens) / len(tokens) / (prompts * sizes.samples),
        "truncated": [line["truncated_fraction"] for line in lines],
        "sampled_per_second": lines[-1].get("response_tokens_per_second"),
        "publish_seconds": run_figures["phases"].get("publish", {}).get("seconds"),
    }


def beside_trl(session: Session, prompts: int) -> Result:
    """A step of benchmarks.speed's grpo, in which every sample has all tokens, by both sides."""
    require("trl")
    micro_batch = min(16, prompts * sizes_of(session).samples)  # a dry run's whole step has 8
    return against(
        session, "grpo", "trl", MODEL, rounds=1, prompts=prompts, micro_batch=micro_batch
    )

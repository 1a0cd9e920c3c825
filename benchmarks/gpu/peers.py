"""Peers on the same work: transformers' generate here, TRL and vLLM by benchmarks.speed."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from benchmarks.gpu.session import Result, Session, Skipped
from benchmarks.gpu.workload import (
    make_tokenizer,
    model_of,
    question_lengths,
    shape_of,
    sizes_of,
    write_questions,
)
from benchmarks.speed.harness import Contestant, Refused, compete
from benchmarks.speed.report import report
from benchmarks.speed.side import Options
from benchmarks.speed.workload import SEED, WORKS, lengths, prompt_ids


def require(package: str) -> None:
    """Raises Skipped where the package is not here."""
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed here")


class Clock(StoppingCriteria):
    """Notes when the rows have `first` new tokens; stops nothing. Raises RuntimeError beyond
    `first + new`: generate reads on the device whether rows have ended, and on one that computes
    nothing they never do.
    """

    def __init__(self, session: Session, width: int, first: int, new: int) -> None:
        self.began = 0.0
        self._session = session
        self._at = width + first
        self._last = self._at + new

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if input_ids.shape[1] > self._last:
            raise RuntimeError("generate goes on beyond max_new_tokens")
        if input_ids.shape[1] == self._at:
            self._session.synchronize()
            self.began = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def generated(
    session: Session, model: Path, prompts: list[NDArray[np.int32]], first: int, new: int
) -> tuple[float, int]:
    """Seconds in which generate writes `new` tokens to each row behind the `first` ones, and these
    tokens. prompts: of one length.
    """
    dtype = getattr(torch, session.dtype)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    lm = lm.to(session.device).eval()
    lm.generation_config = GenerationConfig(
        max_new_tokens=first + new, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1
    )
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(session.device)
    mask = torch.ones_like(ids)
    clock = Clock(session, ids.shape[1], first, new)
    lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=first, stopping_criteria=[clock])
    out = lm.generate(input_ids=ids, attention_mask=mask, stopping_criteria=[clock])
    session.synchronize()
    seconds = time.perf_counter() - clock.began
    assert out.shape[1] == ids.shape[1] + first + new
    return seconds, len(prompts) * new


def against(
    session: Session, work: str, peer: str, model: str, *, rounds: int, **extra: Any
) -> Result:
    """postgrad and the peer in turns at `work` of benchmarks.speed, in the session's dtype. extra:
    of Options. Raises Refused where a side fails or does other work.
    """
    folder = folder_of(session, model)
    sides = WORKS[work].sides
    options = Options(session.dtype, torch.get_num_threads(), WORKS[work].extra | extra)
    both = [
        Contestant(side, f"benchmarks.speed.{sides}.{side}", sys.executable, options)
        for side in ("postgrad", peer)
    ]
    try:
        side_results = compete(both, folder, rounds=rounds, equal=WORKS[work].equal)
    except Refused as refused:
        raise RuntimeError(f"refused: {refused}") from refused
    return report(side_results, "postgrad", peer)


def folder_of(session: Session, model: str) -> Path:
    """The folder of benchmarks.speed.workload with this session's model, prompts and lengths."""
    folder = session.scratch / f"work-{model}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    part.mkdir()
    (part / "model").symlink_to(model_of(session, model))
    sizes, vocabulary = sizes_of(session), shape_of(session, model).vocab_size
    prompts = sizes.prompts[-1]
    asked = question_lengths(session, prompts)
    write_questions(part / "questions.jsonl", asked)
    rows = (part / "questions.jsonl").read_text("utf-8").splitlines()
    tokenizer = make_tokenizer(vocabulary)
    work = {
        "seed": SEED,
        "samples": sizes.samples,
        "new_tokens": sizes.new_tokens,
        "prompts": [prompt_ids(tokenizer, json.loads(row)["question"]) for row in rows],
        "lengths": lengths(prompts, sizes.samples, sizes.new_tokens),
    }
    assert [len(ids) for ids in work["prompts"]] == asked.tolist()
    (part / "work.json").write_text(json.dumps(work), "utf-8")
    part.rename(folder)
    return folder

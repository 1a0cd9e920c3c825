"""vLLM, in one process: a request a sample, since each has a length of its own.

Prompts that samples share are computed once: vLLM keeps their blocks (its prefix cache is on). The
cache is emptied before each round, as new weights would empty it in a run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.side import Options, Round, read_work

CACHE_GIB = "2"  # of keys and values on a CPU; its own choice is a share of the machine


def prepare(folder: Path, options: Options) -> Round:
    """All samples of all prompts; extra["eager"] false lets vLLM compile the model."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CACHE_GIB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else another process does the work
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm: Any = LLM(
        str(folder / "model"),
        dtype=options.precision,
        max_model_len=1024,
        enforce_eager=options.extra.get("eager", True),
        seed=0,
    )
    torch.set_num_threads(options.threads)
    work = read_work(folder)
    prompts: list[Any] = []
    params: list[Any] = []
    for ids, lengths in zip(work["prompts"], work["lengths"], strict=True):
        for length in lengths:
            prompts.append(TokensPrompt(prompt_token_ids=ids))
            params.append(
                SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0)
            )

    def one_round() -> Mapping[str, int]:
        llm.reset_prefix_cache()
        done = llm.generate(prompts, params, use_tqdm=False)
        sampled = sum(len(sample.token_ids) for request in done for sample in request.outputs)
        return {"samples": len(done), "sampled_tokens": sampled}

    return one_round

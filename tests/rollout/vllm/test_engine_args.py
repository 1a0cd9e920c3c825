"""Arguments of vLLM's engine that a recipe adds, on a real vLLM."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from contracts.conftest import small_model, small_tokenizer, start_vllm
from postgrad.core.errors import RunError
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.vllm.process import interpreter
from postgrad.rollout.vllm.settings import (
    OWN_ARGUMENTS,
    SET_ARGUMENTS,
    UNTRUSTED_ARGUMENTS,
)

pytestmark = pytest.mark.vllm


def test_a_cache_in_eight_bits_moves_logprobs_by_its_rounding_alone(tmp_path: Path) -> None:
    engine = start_vllm(tmp_path, small_model(), engine_args={"kv_cache_dtype": "fp8_e5m2"})
    prompt = small_tokenizer()("abcdefgh", return_tensors="np").input_ids[0]
    settings = SamplingSettings(max_new_tokens=16)
    (done,) = generate(engine, [Request(0, (0,), prompt, settings, 0, 0)])
    engine.close()
    lm = small_model()
    lm.set_attn_implementation("eager")
    ids = torch.tensor([[*prompt.tolist(), *done.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = lm(ids).logits[0].log_softmax(-1)
    exact = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]
    distance = (torch.from_numpy(done.logprobs) - exact).abs().max().item()
    assert 1e-4 < distance < 0.2


def test_an_argument_that_vllm_lacks_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no argument 'kv_cache_type'; did you mean 'kv_cache_dty"):
        start_vllm(tmp_path, small_model(), engine_args={"kv_cache_type": "fp8"})


def test_every_argument_that_recipes_must_not_add_is_one_of_vllms() -> None:
    program = (
        "import dataclasses, json, vllm; "
        "print(json.dumps([f.name for f in dataclasses.fields(vllm.EngineArgs)]))"
    )
    command = [interpreter(None), "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    known = json.loads(printed.splitlines()[-1])
    assert {*OWN_ARGUMENTS, *SET_ARGUMENTS, *UNTRUSTED_ARGUMENTS} <= {*known}

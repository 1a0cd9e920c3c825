"""Arguments of vLLM's engine that a recipe adds, on a real vLLM."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

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


def exact_logprobs(prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> NDArray[np.float32]:
    """Of the answer's tokens by plain transformers."""
    lm = small_model()
    lm.set_attn_implementation("eager")
    ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
    with torch.no_grad():
        logprobs = lm(ids).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_a_cache_in_eight_bits_moves_logprobs_by_its_rounding_alone(tmp_path: Path) -> None:
    engine = start_vllm(tmp_path, small_model(), engine_args={"kv_cache_dtype": "fp8_e5m2"})
    prompt = small_tokenizer()("abcdefgh", return_tensors="np").input_ids[0]
    settings = SamplingSettings(max_new_tokens=16)
    (done,) = generate(engine, [Request(0, (0,), prompt, settings, 0, 0)])
    engine.close()
    distance = np.abs(done.logprobs - exact_logprobs(prompt, done.token_ids)).max()
    assert 1e-4 < distance < 0.2


@pytest.mark.parametrize("positions", [64, 40])
def test_sequences_may_be_as_long_as_the_positions_of_a_model_and_rotary_ones_go_on_behind_them(
    positions: int, tmp_path: Path
) -> None:
    lm = small_model()
    lm.config.max_position_embeddings = positions
    engine = start_vllm(tmp_path, lm)  # data.max_len = 64
    longest = small_tokenizer()("abcdefgh" * 8, return_tensors="np").input_ids[0]
    prompt = longest[:56]
    (done,) = generate(engine, [Request(0, (0,), prompt, SamplingSettings(max_new_tokens=8), 0, 0)])
    (scored,) = engine.logprobs([longest], 1.0)
    engine.close()
    assert len(longest) == 64
    assert np.abs(done.logprobs - exact_logprobs(prompt, done.token_ids)).max() < 1e-4
    assert np.abs(scored[56:] - exact_logprobs(prompt, longest[56:])).max() < 1e-4


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
    vllm_arguments = json.loads(printed.splitlines()[-1])
    assert {*OWN_ARGUMENTS, *SET_ARGUMENTS, *UNTRUSTED_ARGUMENTS} <= {*vllm_arguments}

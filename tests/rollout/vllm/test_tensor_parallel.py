"""A model that two workers of one vLLM share, on CPUs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from contracts.conftest import small_model, small_tokenizer, start_vllm
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm

# vLLM deals the head's rows out in blocks of 64: the second worker has 36 of these, and 28 of none.
VOCABULARY = 100


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """With a head that is tied to the embedding."""
    lm = small_model(0, VOCABULARY, tied=True)
    vllm_engine = start_vllm(tmp_path_factory.mktemp("parallel"), lm, tensor_parallel=2)
    yield vllm_engine
    vllm_engine.close()


def requests(**sampling: float) -> list[Request]:
    settings = SamplingSettings.model_validate({"max_new_tokens": 20, **sampling})
    draw = np.random.default_rng(0).integers
    prompts = [draw(2, VOCABULARY, 5 + ticket).astype(np.int32) for ticket in range(6)]
    return [Request(t, (0, 1), prompt, settings, 0, 0) for t, prompt in enumerate(prompts)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_answers_are_those_of_the_built_in_engine_after_every_publish(
    engine: VLLMEngine, seed: int
) -> None:
    lm = small_model(seed, VOCABULARY, tied=True)
    engine.load_weights(lm.named_parameters(), seed)
    local = LocalEngine(lm, small_tokenizer(), slots=8, cache_tokens=8 * 64)
    ours, theirs = (generate(each, requests(temperature=0.0)) for each in (local, engine))
    greedy_tokens = [completion.token_ids.tolist() for completion in theirs]
    assert greedy_tokens == [completion.token_ids.tolist() for completion in ours]
    written = {token for few in greedy_tokens for token in few}
    assert min(written) < 64 < max(written)
    assert {completion.versions[0][0] for completion in theirs} == {seed}
    for our_completion, their_completion in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(their_completion.logprobs, our_completion.logprobs, atol=1e-4)


def test_what_is_drawn_has_the_logprobs_that_the_built_in_engine_gives_it(
    engine: VLLMEngine,
) -> None:
    lm = small_model(3, VOCABULARY, tied=True)
    engine.load_weights(lm.named_parameters(), 3)
    local = LocalEngine(lm, small_tokenizer(), slots=8, cache_tokens=8 * 64)
    asked = requests(temperature=0.7)
    done = generate(engine, asked)
    sequences = [
        np.concatenate([asked[completion.ticket].token_ids, completion.token_ids])
        for completion in done
    ]
    for scored in (engine.logprobs(sequences, 0.7), local.logprobs(sequences, 0.7)):
        for completion, row in zip(done, scored, strict=True):
            np.testing.assert_allclose(
                row[-len(completion.token_ids) :], completion.logprobs, atol=1e-4
            )


def test_its_workers_end_with_it(engine: VLLMEngine) -> None:
    """The last of these tests: it ends the engine."""
    (process,) = engine._processes
    leader, folder = psutil.Process(process.pid), Path(process._folder.name)
    workers = leader.children(recursive=True)
    assert len(workers) >= 2
    (meeting,) = folder.glob("vllm_dist_*")
    assert not list(Path("/dev/shm").glob(f"{meeting.name}*"))  # already: no name, no trace
    engine.close()
    assert not folder.exists()
    for vllm_process in (leader, *workers):
        assert not vllm_process.is_running() or vllm_process.status() == psutil.STATUS_ZOMBIE

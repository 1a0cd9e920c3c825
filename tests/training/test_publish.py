"""A publish that fails in silence stops the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.core.process import done
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Prompt, Sequences
from postgrad.observe.console import Console
from postgrad.rollout.local.engine import LocalEngine
from postgrad.training.publish import Publisher
from postgrad.training.run import Run
from postgrad.training.start import resume, train


def test_an_engine_that_keeps_its_old_weights_is_found_after_the_first_update(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's reload keeps a tied output head; also at a small learning rate."""
    monkeypatch.setattr(LocalEngine, "load_weights", lambda self, weights, version: None)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make_recipe("rl", learner={"lr": 1e-3}), console)


def test_an_engine_that_loses_one_weight_is_found(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_load = LocalEngine.load_weights

    def partly(self: Any, weights: Any, version: int) -> None:
        kept = dict(self._lm.named_parameters())
        name = "model.embed_tokens.weight"
        original_load(self, [(n, kept[n].clone() if n == name else w) for n, w in weights], version)

    monkeypatch.setattr(LocalEngine, "load_weights", partly)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make_recipe("rl"), console)


def test_an_evaluation_during_sft_is_of_the_policys_weights_or_none(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "load_weights", lambda self, weights, version: None)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        train(make_recipe("sft", eval={"every": 1}), console)


def test_vllm_without_its_environment_is_refused_before_anything_is_written(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTGRAD_VLLM_PYTHON", raising=False)
    recipe = make_recipe("rl", rollout={"type": "vllm"})
    with pytest.raises(UsageError, match="POSTGRAD_VLLM_PYTHON"):
        train(recipe, console)
    assert not Path(recipe.run_dir).exists()


def test_a_resume_with_vllm_without_its_environment_leaves_the_recipe_as_it_was(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTGRAD_VLLM_PYTHON", raising=False)
    recipe = make_recipe("rl", steps=1)
    train(recipe, console)
    written = (run_dir := Path(recipe.run_dir)) / "recipe.json"
    before, changed = written.read_bytes(), ["--rollout.type", "vllm", "--steps", "2"]
    with pytest.raises(UsageError, match="POSTGRAD_VLLM_PYTHON"):
        resume(run_dir, changed, ["rollout.type"], console)
    again = make_recipe("rl", steps=2, rollout={"type": "vllm"})
    with pytest.raises(UsageError, match="POSTGRAD_VLLM_PYTHON"):
        train(again, console, allow_change=["rollout.type"])
    assert written.read_bytes() == before


PROMPT = Prompt(0, np.arange(4, dtype=np.int32), "?", None, "rows", 0)


class Written:
    """A policy and an engine that write down what they are asked, in one list."""

    updates, temperature = 3, 0.2

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.temperatures = set[float | None]()

    def free_memory(self, keep: str = "all") -> None:
        kept = {"all": "", "weights": " and keeps weights", "nothing": " and keeps nothing"}
        self.asked.append(f"the learner gives back{kept[keep]}")

    def hub_weights(self) -> Any:
        self.asked.append("weights are gathered")
        yield "a", None

    def load_weights(self, weights: Any, version: int) -> None:
        self.asked.append("the engine wakes for weights")
        assert [name for name, _ in weights] == ["a"]
        self.asked.append("the engine wakes for its cache")

    def logprobs(self, sequences: Any, temperature: float | None = None) -> Any:
        self.temperatures.add(temperature)
        if isinstance(sequences, list):
            self.asked.append("the engine scores")
            return [np.zeros(len(token_ids), np.float32) for token_ids in sequences]
        self.asked.append("the learner scores")
        values = [np.zeros(len(tokens), np.float32) for tokens in sequences.tokens]
        return done(Ragged.of(values, np.float32))


def test_the_learner_gives_back_before_each_time_that_the_engine_takes() -> None:
    both: Any = Written()
    publish = Publisher(both, both, [PROMPT], both.free_memory)
    assert both.asked == ["the engine scores"]
    both.asked.clear()
    publish(3)
    assert both.asked == [
        "the learner scores",
        "the learner gives back and keeps weights",
        "the engine wakes for weights",
        "weights are gathered",
        "the learner gives back and keeps nothing",
        "the engine wakes for its cache",
        "the engine scores",
        "the learner gives back and keeps nothing",
    ]


def test_weights_are_compared_at_temperature_one_which_multiplies_no_rounding() -> None:
    both: Any = Written()
    Publisher(both, both, [PROMPT], both.free_memory)(3)
    assert both.temperatures == {1.0}


@pytest.mark.slow
def test_a_run_that_samples_at_a_low_temperature_is_not_stopped(
    make_recipe: Any, console: Console
) -> None:
    """Logits that rounding moves by 1e-7 are logprobs that it moves by 0.1 there."""
    train(make_recipe("rl", rollout={"temperature": 1e-6}), console)


def test_a_probe_of_a_sample_with_images_begins_at_an_image_and_has_the_last_one() -> None:
    seen: list[Any] = []

    class Shown(Written):
        def logprobs(self, sequences: Any, temperature: Any = None, images: Any = ()) -> Any:
            if isinstance(sequences, list):
                seen.append((sequences, images))
            return super().logprobs(sequences, temperature)

    both: Any = Shown()
    ids = np.arange(400, dtype=np.int32)
    early, late = np.arange(5, 9), np.arange(240, 300)  # 400 - 128 lies within the second
    images = (PlacedImage("a", early), PlacedImage("b", late))
    Publisher(both, both, [replace(PROMPT, token_ids=ids, images=images), PROMPT], both.free_memory)
    (first, plain), (shown, none) = seen[0]
    assert (first[0], first[-1]) == (240, 399)
    assert plain.tolist() == [0, 1, 2, 3]
    assert [image.digest for image in shown] == ["b"]
    assert shown[0].at.tolist() == list(range(60))
    assert none == ()
    only_early = replace(PROMPT, token_ids=ids, images=images[:1])
    Publisher(both, both, [only_early], both.free_memory)
    assert seen[1][0][0][0] == 5  # longer, so that the tower is probed


def test_a_step_without_samples_is_probed_as_a_run_that_resumes_at_it_is() -> None:
    """With prompts: samples of steps before are in no checkpoint."""
    seen: list[list[int]] = []

    class Noting(Written):
        def logprobs(self, sequences: Any, temperature: float | None = None) -> Any:
            if not isinstance(sequences, list):
                seen.extend(tokens.tolist() for tokens in sequences.tokens)
            return super().logprobs(sequences, temperature)

    def samples(*tokens: list[int]) -> Sequences:
        mask = [np.arange(len(token_ids)) > 0 for token_ids in tokens]
        group = np.arange(len(tokens), dtype=np.int64)
        return Sequences(Ragged.of(tokens, np.int32), Ragged.of(mask, np.bool_), group)

    both: Any = Noting()
    publish = Publisher(both, both, [PROMPT], both.free_memory)
    for step in (samples([7, 8]), samples()):
        publish.probe_with(step)
        publish(1)
    assert seen == [[7, 8], [0, 1, 2, 3]]
    assert both.asked.count("the engine scores") == 5  # what it had before is scored with each too


@pytest.mark.slow
def test_learner_and_engine_take_turns_with_the_memory_of_a_run(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sleeps while sizes are tried and while the policy learns; the fleet has given back
    before every publish.
    """
    turns: list[str] = []

    def noted(kind: type, name: str, turn: str) -> None:
        method = getattr(kind, name)

        def call(self: Any, *arguments: Any) -> Any:
            turns.append(turn)
            return method(self, *arguments)

        monkeypatch.setattr(kind, name, call)

    noted(Run, "free_memory", "fleet")
    noted(LocalEngine, "sleep", "sleeps")
    noted(LocalEngine, "load_weights", "loads")
    train(make_recipe("rl"), console)
    start = ["fleet", "sleeps"]  # before the engine is built; before sizes are tried
    published = ["fleet", "loads", "fleet", "fleet"]
    trained, saved = ["sleeps", "fleet"], ["fleet"]  # an update's memory is not theirs that follow
    assert turns == [*start, *published, *[*trained, *published, *saved] * 3]

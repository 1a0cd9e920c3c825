"""benchmarks/peer_objectives, with a peer that is written here."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.peer_objectives.__main__ import main
from benchmarks.peer_objectives.comparing import Case, Known, compared, difference
from benchmarks.peer_objectives.loading import Checkout, statements
from benchmarks.peer_objectives.ours import Outcome, outcome
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn

WORDS = (
    "grpo", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a.b",
    "--num_generations", "4", "--max_completion_length", str(LONGEST),
)  # fmt: skip


def grpo(samples: Samples, added: float = 1e-4, clip: float = 0.2) -> Outcome:
    """GRPO's loss over all tokens and its gradient, in NumPy."""
    total = sum(row.sum() for row in samples.mask)
    loss, gradients = 0.0, []
    for i, mask in enumerate(samples.mask):
        group = samples.rewards[samples.group == samples.group[i]]
        advantage = (samples.rewards[i] - group.mean()) / (group.std(ddof=1) + added)
        ratio = np.exp(samples.logprobs[i] - samples.old[i])
        clipped = np.clip(ratio, 1 - clip, 1 + clip) * advantage < ratio * advantage
        each = np.minimum(np.clip(ratio, 1 - clip, 1 + clip) * advantage, ratio * advantage)
        loss -= (each * mask).sum() / total
        gradients.append(-advantage * ratio * (mask & ~clipped) / total)
    zeros = [np.zeros(len(row)) for row in samples.mask]
    return Outcome(loss, {"logprobs": gradients, "entropy": zeros, "values": zeros})


def case(peer: Callable[[Samples], Outcome], known_difference: Known | None = None) -> Case:
    return Case("grpo", WORDS, peer, drawn, known_difference)


def test_a_peer_that_computes_the_same_is_equal() -> None:
    row = compared("trl", case(grpo), draws=3)
    assert row.verdict == "equal"
    assert row.ours == pytest.approx(grpo(drawn(0)).loss, rel=1e-5)
    assert row.settings["std_eps"] == 1e-4


def test_a_teacher_grades_every_sample_of_a_draw() -> None:
    """Its gradient is that of the rise of each token's logprob from old to the teacher's."""
    samples = drawn(0)
    table = {"type": "on_policy_distillation"}
    total = sum(row.sum() for row in samples.mask)
    gradients = outcome(table, samples).gradients["logprobs"]
    for i, mask in enumerate(samples.mask):
        advantage = (samples.ref[i] - samples.old[i]) * mask
        ratio = np.exp(samples.logprobs[i] - samples.old[i])
        clipped = np.clip(ratio, 0.8, 1.2) * advantage < ratio * advantage
        wanted = -advantage * ratio * (mask & ~clipped) / total
        np.testing.assert_allclose(gradients[i], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("added", "clip"), [(1e-3, 0.2), (1e-4, 0.21)])
def test_a_small_difference_is_seen(added: float, clip: float) -> None:
    row = compared("trl", case(lambda samples: grpo(samples, added, clip)), draws=3)
    assert row.verdict == "differs"
    assert row.gradient > 1e-4


@pytest.mark.parametrize(
    ("known_difference", "verdict"),
    [
        (Known("halved"), "known"),
        (Known("halved", note="added to the deviation"), "told"),  # a comment on std_eps
        (Known("halved", note="halved here"), "differs"),  # which the recipe does not say
        (Known("halved", within=0.4), "differs"),
        (Known("halved", within=0.6), "known"),
    ],
)
def test_a_difference_needs_a_reason_that_holds(known_difference: Known, verdict: str) -> None:
    def half(samples: Samples) -> Outcome:
        theirs = grpo(samples)
        gradients = [row / 2 for row in theirs.gradients["logprobs"]]
        return replace(theirs, gradients={**theirs.gradients, "logprobs": gradients})

    row = compared("trl", case(half, known_difference), draws=1)
    assert row.gradient == pytest.approx(0.5, rel=1e-4)
    assert (row.verdict, known_difference.why in row.why) == (verdict, True)


def test_a_loss_that_is_no_number_differs() -> None:
    row = compared("trl", case(lambda samples: replace(grpo(samples), loss=np.nan)), draws=1)
    assert row.verdict == "differs"


def test_differences_are_relative_to_the_largest_entry() -> None:
    zeros = [np.zeros(1), np.zeros(2)]

    def outcome(loss: float, *entries: float) -> Outcome:
        rows = [np.array(entries[:1]), np.array(entries[1:])]
        return Outcome(loss, {"logprobs": rows, "values": zeros})

    assert difference(outcome(2.0, 4.0, 0.0, 1.0), outcome(1.0, 4.0, 0.0, 0.0)) == (0.5, 0.25)
    # a loss near 0 is one of a difference of terms, whose size the gradient has: 0.1 * 5
    loss, _ = difference(outcome(0.0, 4.0, 0.0, 1.0), outcome(0.1, 4.0, 0.0, 1.0))
    assert loss == pytest.approx(0.2)


def test_samples_have_what_losses_stumble_over() -> None:
    samples = drawn(0)
    lengths = [len(row) for row in samples.mask]
    assert min(lengths) == 1
    assert samples.cut.any()
    assert any(not row.all() for row in samples.mask)  # an environment's tokens
    assert len(set(samples.rewards[samples.group == 1])) == 1
    moves = np.concatenate(samples.logprobs) - np.concatenate(samples.old)
    assert moves.max() > 1.5
    assert moves.min() < -1.5


def test_the_command_fails_where_a_case_differs_and_keeps_others_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case(grpo), replace(case(lambda samples: grpo(samples, 0.5)), name="half added")]
    peer = SimpleNamespace(cases=lambda checkout: cases[: len(list(checkout.iterdir()))])
    monkeypatch.setitem(sys.modules, "benchmarks.peer_objectives.trl", peer)
    monkeypatch.setattr("benchmarks.peer_objectives.__main__.KINDS", ())  # which read a checkout
    checkout, results = tmp_path / "trl", tmp_path / "results.json"
    checkout.mkdir()
    results.write_text('{"verl": {}}', "utf-8")
    (checkout / "one").touch()
    words = ["trl", str(checkout), "--draws", "2", "--to", str(results), "--commit", "abc"]
    assert main(words) == 0
    (checkout / "two").touch()
    assert main(words) == 1
    assert "differs: nothing explains it [half added]" in capsys.readouterr().out
    written = json.loads(results.read_text("utf-8"))
    assert written["verl"] == {}
    entry = written["trl"]
    assert entry["commit"] == "abc"
    assert str(tmp_path) not in entry["command"]
    assert entry["verdicts"] == {"equal": 1, "differs": 1}
    assert [entry_case["objective"] for entry_case in entry["cases"]] == ["grpo", "half added"]


def test_an_error_names_its_case() -> None:
    with pytest.raises(KeyError) as caught:
        compared("trl", case(lambda _: {}["gone"]), draws=1)
    assert caught.value.__notes__ == ["in the case 'grpo' of trl"]


def test_one_file_of_a_package_is_read_without_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    package = tmp_path / "a_peer_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('needs a cluster')", "utf-8")
    (package / "loss.py").write_text(
        "import no_such_cluster.actors as actors\n"
        "from a_peer_of_tests.engine import Engine, wrapped\n"
        "class Worker(Engine): pass\n"
        "@wrapped\n"
        "def loss(x: 'Engine | None') -> float:\n"
        "    return 2 * x\n",
        "utf-8",
    )
    files = Checkout(package, ["no_such_cluster", "a_peer_of_tests.engine"])
    assert files.module("a_peer_of_tests.loss").loss(3) == 6


def test_statements_of_a_long_method_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "trainer.py"
    path.write_text("def train(self):\n    start()\n    a = b + 1\n    c = 2 * a\n    stop()\n")
    space = {"b": 3}
    statements(path, "a = b", 2)(space)
    assert space["c"] == 8
    with pytest.raises(LookupError, match="no statement that begins with 'd ='"):
        statements(path, "d =")

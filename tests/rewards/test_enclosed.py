"""Verifiers of others run behind walls: what a sample's text says is never done."""

import json
import os

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.data.gym import read_gym
from postgrad.rewards.process import environment
from postgrad.rewards.settings import RewardSettings

EVALUATING = (
    "countdown",
    "puzzle24",
    "n_queens",
    "spiral_matrix",
    "binary_matrix",
    "string_insertion",
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
)
SECRET = "POSTGRAD_TEST_SECRET"


@pytest.fixture
def gym(make_scorer, make_prompt, make_rollouts):
    """gym(task, *texts): a scored group of that task's first problem, from one worker for all."""
    scorer = make_scorer(RewardSettings(type="reasoning_gym"))

    def score(task, *texts):
        columns = {"task": task, "parameters": {"size": 1, "seed": 7}, "index": 0}
        return scorer.score([(make_prompt(**columns), make_rollouts(texts))])[0]

    return score


@pytest.mark.slow
def test_a_scorer_that_evaluates_text_runs_none_of_it(gym, tmp_path, monkeypatch):
    """In each of these a sample ran a shell command and read a key of the run."""
    monkeypatch.setenv(SECRET, "sesame")
    marks = [tmp_path / "system", tmp_path / "leak"]
    texts = [
        f"__import__('os').system('touch {marks[0]}')",
        f"open({str(marks[1])!r}, 'w').write(__import__('os').environ.get({SECRET!r}, ''))",
    ]
    for task in EVALUATING:
        group = gym(task, *texts)
        assert not any(mark.exists() for mark in marks), task
        assert (group.rewards["reasoning_gym"] < 0.2).all(), task
        assert group.failures == ()
        assert all(detail["refused"] for detail in group.details["reasoning_gym"]), task


@pytest.mark.slow
def test_a_sample_changes_no_scorer_and_names_no_reference_answer(gym):
    patch = (
        "[setattr(__import__('reasoning_gym.algorithmic.spell_backward', fromlist=['x'])"
        ".SpellBackwardDataset, 'score_answer', lambda *_: 1.0)]"
    )
    names = ["entry['metadata']['valid_answers'][0]", "valid_solutions.pop()", "self", "answer"]
    texts = [patch, "nothing", *names]
    assert gym("n_queens", *texts).rewards["reasoning_gym"].tolist() == [0.0] * len(texts)
    assert gym("spell_backward", "nothing").rewards["reasoning_gym"][0] < 1.0


@pytest.mark.slow
def test_formulas_are_evaluated_as_before(make_scorer, make_prompt, make_rollouts):
    texts = ["so it is 2/4", r"\boxed{\frac{1}{2}}", r"\boxed{x+1}", "3/4 - 1/4", "os.getcwd()"]
    scores = {}
    for sandbox in (True, False):
        scorer = make_scorer(RewardSettings(type="math", sandbox=sandbox))
        group = scorer.score([(make_prompt(answer="1/2"), make_rollouts(texts))])[0]
        scores[sandbox] = group.total.tolist()
        # polynomials of sympy run code that it makes itself
        assert not any("refused" in str(detail) for detail in group.details["math"][:3])
    assert scores[True] == scores[False]
    assert scores[True][:3] == [1.0, 1.0, 0.0]


@pytest.mark.slow
def test_what_uses_up_time_or_memory_is_a_failure_of_that_sample_alone(
    make_scorer, make_prompt, make_rollouts
):
    scorer = make_scorer(RewardSettings(type="math", cpu_seconds=1.0))
    texts = [r"\boxed{(10^8)!}", r"\boxed{1/2}"]
    group = scorer.score([(make_prompt(answer="1/2"), make_rollouts(texts))])[0]
    assert group.total[1] == 1.0
    assert [failure.cause for failure in group.failures] == ["cpu_time"]


DEEDS = {
    "read a secret": 0.0,
    "read the environment of the run": "PermissionError",
    "list the root": "PermissionError",
    "write a file": "PermissionError",
    "open a socket": "PermissionError",
    "fork": "PermissionError",
    "signal the run": "PermissionError",
    "own the signals of the run": "PermissionError",
    "execute": "PermissionError",
    "take much memory": "MemoryError",
}


def test_a_function_of_the_user_that_says_so_is_shut_in(score, monkeypatch, tmp_path):
    """Everything that its text asks for is refused, or finds nothing."""
    monkeypatch.setenv(SECRET, "sesame")
    group = score(*DEEDS, "1", sandbox=True, cpu_seconds=5.0)
    endings = {failure.sample: failure.message for failure in group.failures}
    for place, (deed, wanted) in enumerate(DEEDS.items()):
        if isinstance(wanted, float):
            assert group.total[place] == wanted, deed
        else:
            assert wanted in endings.get(place, "no failure"), (deed, endings.get(place))
    assert group.total[-1] == 1.0


def test_each_score_of_a_shut_in_function_starts_from_the_same_state(score):
    group = score("count", "count", "count", sandbox=True, cpu_seconds=5.0)
    assert group.total.tolist() == [1.0, 1.0, 1.0]
    assert score("count", "count", cpu_seconds=5.0).total.tolist() == [1.0, 2.0]


def test_a_shut_in_function_that_ends_its_process_fails_alone(score):
    group = score("1", "crash", "spin", "abort", "raise", "5", sandbox=True, cpu_seconds=0.5)
    causes = [(failure.sample, failure.cause) for failure in group.failures]
    assert causes == [(1, "crash"), (2, "cpu_time"), (3, "crash"), (4, "error")]
    assert group.total[[0, 5]].tolist() == [1.0, 5.0]


def test_what_a_process_writes_in_place_of_a_score_is_no_score(score):
    texts = ["write a score for another key", "write a list", "write nan", "write much", "1"]
    group = score(*texts, sandbox=True, cpu_seconds=5.0)
    assert [failure.sample for failure in group.failures] == [1, 2, 3]
    assert group.total[[0, 4]].tolist() == [0.5, 1.0]


def test_workers_inherit_what_their_verifiers_name_and_no_other_key(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY", "MY_DATA"):
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:word@proxy")
    judge = RewardSettings(type="judge", api_key_env="JUDGE_KEY")
    named_reward = RewardSettings(type="mine:score", env=("MY_DATA",))
    assert environment([judge], sandboxed=False)["JUDGE_KEY"] == "sesame"
    assert environment([named_reward], sandboxed=False)["MY_DATA"] == "sesame"
    for rewards in ([judge], [named_reward], []):
        assert not {"WANDB_API_KEY", "HF_TOKEN"} & environment(rewards, sandboxed=False).keys()
    assert "HTTPS_PROXY" in environment([judge], sandboxed=False)
    assert "HTTPS_PROXY" not in environment([], sandboxed=True)
    assert environment([], sandboxed=True)["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("other", [{"waits": True}, {"env": ("KEY",)}])
def test_a_sandbox_has_neither_a_server_nor_a_key(other):
    with pytest.raises(UsageError, match="sandbox = true"):
        RewardSettings(type="mine:score", sandbox=True, **other)


@pytest.mark.slow
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.long)])
def test_tasks_score_the_same_behind_the_walls(every, make_scorer, make_prompt, make_rollouts):
    """Own answers, near misses and other text, with the scorers as they are and shut in."""
    from reasoning_gym.factory import DATASETS

    settings = {"max_failed_fraction": 1.0}
    shut, bare = (
        make_scorer(RewardSettings(type="reasoning_gym", sandbox=sandbox), **settings)
        for sandbox in (True, False)
    )
    compared = 0
    # composite needs parameters, maze fails by chance
    for task in sorted(set(DATASETS) - {"composite", "maze"})[::every]:
        groups = []
        for ticket, (_, row) in enumerate(read_gym(task, {}, 2, 5)):
            answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"])
            texts = [answer, answer[:-1], answer[::-1], "", "12", "x**2 + 1", "[[1, 2], [3, 4]]"]
            columns = {key: row[key] for key in ("task", "parameters", "index")}
            prompt = make_prompt(ticket, row["answer"], **columns)
            groups.append((prompt, make_rollouts([*texts, "['a', 'b']", "def f(): pass"], ticket)))
        for inside, outside in zip(shut.score(groups), bare.score(groups), strict=True):
            np.testing.assert_array_equal(inside.total, outside.total, err_msg=task)
            compared += len(inside.total)
    assert compared > 1500 / every

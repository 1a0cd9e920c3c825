import json

import pytest

from postgrad.rewards.reasoning_gym import ReasoningGym
from postgrad.rewards.verifier import PromptView, RolloutView


def problem(task, index=1, **parameters):
    import reasoning_gym  # half a second: not at collection

    parameters = {"seed": 5, "size": 3, **parameters}
    entry = json.loads(
        json.dumps(reasoning_gym.create_dataset(task, **parameters)[index], default=str)
    )
    metadata = {"task": task, "parameters": parameters, "index": index}
    return PromptView(entry["question"], entry["answer"], metadata)


def reward(prompt, text, **settings):
    return ReasoningGym(**settings).score(prompt, RolloutView(text)).value


def test_the_score_is_the_tasks_own_with_partial_credit():
    prompt = problem("spell_backward", min_word_len=5, max_word_len=5)
    right = prompt.answer
    assert reward(prompt, right) == 1.0
    assert reward(prompt, f" {right}\n") == 1.0
    assert reward(prompt, right[:3] + "__") == pytest.approx(3 / 5)
    assert reward(prompt, "") == 0.0


def test_scorers_that_need_tuples_give_the_right_answer_full_marks():
    prompt = problem("rearc")
    assert reward(prompt, prompt.answer) == 1.0


def test_a_score_notes_the_answer_that_was_read():
    prompt = problem("spell_backward")
    scores = [
        ReasoningGym(answer_tag="answer").score(prompt, RolloutView(text))
        for text in (f"it is <answer> {prompt.answer} </answer>", "it is", "<answer>no</answer>")
    ]
    assert [score.detail["answer"] for score in scores] == [prompt.answer, None, "no"]


def test_a_tag_says_where_the_answer_stands():
    prompt = problem("spell_backward")
    text = f"<answer>no</answer> then <answer> {prompt.answer} </answer> end"
    assert reward(prompt, text, answer_tag="answer") == 1.0
    assert reward(prompt, prompt.answer, answer_tag="answer") == 0.0
    assert reward(prompt, f"<answer>{prompt.answer}", answer_tag="answer") == 0.0


def test_check_names_rows_that_reasoning_gym_did_not_make():
    prompt = problem("spell_backward")
    assert ReasoningGym().check(prompt) is None
    assert "has no 'parameters'" in (ReasoningGym().check(PromptView("?", "x")) or "")
    other = PromptView(prompt.question, "other", prompt.metadata)
    assert "installed version" in (ReasoningGym().check(other) or "")

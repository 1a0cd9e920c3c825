import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.format import Format
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView


def judged(text, **settings):
    score = Format(**settings).score(PromptView("?", None), RolloutView(text))
    return score.value, (score.detail or {}).get("fault")


@pytest.mark.parametrize(
    "text",
    [
        "<think>2 < 3</think><answer>4</answer>",
        "\n<think>\na\n</think>\n\n<answer></answer> ",
    ],
)
def test_think_then_answer_is_the_structure(text):
    assert judged(text) == (1.0, None)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no <think>"),
        ("<think>a<answer>4</answer>", "no </think>"),
        ("<think>a</think><answer>4", "no </answer>"),
        ("<think>a</think></think><answer>4</answer>", "</think> occurs 2 times"),
        ("<think>a</think><answer>4</answer><answer>5</answer>", "<answer> occurs 2 times"),
        ("<answer>4</answer><think>a</think>", "text before <think>"),
        ("<think>a<answer></think>4</answer>", "<answer> comes too early"),
        ("Well: <think>a</think><answer>4</answer>", "text before <think>"),
        ("<think>a</think>So: <answer>4</answer>", "text before <answer>"),
        ("<think>a</think><answer>4</answer>.", "text after </answer>"),
        ("<Think>a</Think><answer>4</answer>", "no <think>"),
    ],
)
def test_each_tag_stands_once_and_in_order_with_nothing_outside(text, fault):
    assert judged(text) == (0.0, fault)


def test_text_outside_may_be_allowed():
    text = "So <think>a</think> is <answer>4</answer>."
    assert judged(text, outside=True) == (1.0, None)
    assert judged("<answer>4</answer>.", outside=True) == (0.0, "no <think>")
    turned = "<answer>4</answer><think>a</think>"
    assert judged(turned, outside=True) == (0.0, "<answer> comes too early")
    turned = "</think>a<think><answer>4</answer>"
    assert judged(turned, outside=True) == (0.0, "</think> comes too early")


def test_a_prompt_may_have_opened_the_first_tag():
    assert judged("a</think><answer>4</answer>", opened=True) == (1.0, None)
    double = "<think>a</think><answer>4</answer>"
    assert judged(double, opened=True) == (0.0, "<think> occurs 2 times")


def test_tags_have_names_of_ones_own():
    assert judged("<plan>x</plan><do>y</do><check>z</check>", tags=("plan", "do", "check"))[0] == 1
    assert judged("<plan>x</plan>", tags=("plan",))[0] == 1


def test_a_pattern_is_matched_by_the_whole_sample():
    assert judged("a\nb", pattern="a.b") == (1.0, None)
    assert judged("a\nb!", pattern="a.b") == (0.0, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "a", "tags": ("b",)}, "pattern replaces tags"),
        ({"tags": ()}, "at least 1"),
        ({"tags": ("<a>",)}, "named without"),
        ({"tags": ("a", "a")}, "twice"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        Format(**settings)


@pytest.mark.parametrize("kind", ["format", "regex"])
def test_a_pattern_that_backtracks_without_end_is_a_recorded_failure(
    make_scorer, make_prompt, make_rollouts, kind
):
    endless = RewardSettings(type=kind, pattern="(a+)+b", cpu_seconds=0.2)
    scorer = make_scorer(endless)
    (group,) = scorer.score([(make_prompt(), make_rollouts(["aab", "a" * 64, "c"]))])
    assert group.rewards[kind][[0, 2]].tolist() == [1.0, 0.0]
    assert [(f.sample, f.cause) for f in group.failures] == [(1, "cpu_time")]
    assert group.kept.tolist() == [True, False, True]

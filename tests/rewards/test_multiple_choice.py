import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.multiple_choice import MultipleChoice, named
from postgrad.rewards.verifier import PromptView, RolloutView

ANIMALS = {"A": "cat", "B": "dog", "C": "A dog", "D": "the big dog"}
NUMBERS = {"A": "5", "B": "5.5", "C": "-5", "D": "12"}
LETTERS = dict.fromkeys("ABCDEFGHIJ", "")


def score(text, answer="B", choices=("cat", "dog", "bird"), **settings):
    prompt = PromptView("?", answer, {"choices": list(choices)})
    return MultipleChoice(**settings).score(prompt, RolloutView(text))


@pytest.mark.parametrize(
    "text",
    [
        "B",
        " (B)\n",
        "b.",
        "**B**",
        "B. dog",
        "(B) Dog!",
        "B) because it barks",
        "dog",
        '"Dog."',
        "The answer is B",
        "the answer is (B).",
        "The answer is b.",
        "So the correct answer is: **B. dog**.",
        "The answer to the question is option B, because it barks.",
        "Answer: B",
        "**Answer:** (B) dog",
        "Answer:\n\nB",
        "The best choice is B; it barks.",
        "The answer is dog.",
        "The answer is dog, as it barks.",
        "The answer is therefore (B).",
        "The correct answer is most likely **B**.",
        "The answer is clearly option B, because it barks.",
        "The best option is thus dog.",
        "The answer cannot be A, since it barks.\n\nB",
        "The answer can't possibly be A.\n\nThe answer is B.",
        "The right choice should never be C.\nB",
        "The answer can only be B",
        r"It barks: \boxed{B}",
        r"It barks: $\boxed{\text{(B) dog}}$.",
        r"\boxed{\text{dog}}",
        "<think>A cat?</think> <answer> B </answer>",
        "It does not purr.\nIt barks.\n\nB. dog",
        "B\n\nIt barks, and the others do not.",
        r"The answer is A. No: \boxed{B}",
        "The answer is not A. The answer is B.",
        "<think>The answer is A. Or no: the answer is C.</think>The answer is B.",
    ],
)
def test_b_is_read(text):
    assert named(text, {"A": "cat", "B": "dog", "C": "bird"}) == {"B"}
    assert score(text).value == 1.0
    assert score(text, "A").value == 0.0


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("It is small: <answer>x < 3</answer>", "A"),
        ("<answer>B. x > 3</answer>", "B"),
        ("<ANSWER>a < b < c</ANSWER>", "C"),
        ("<answer>x <answer>x < 3</answer></answer>", "A"),
        ("Say <answer> and <answer>C</answer> or so.", "C"),
        ("<answer>x < 3", None),
    ],
)
def test_an_option_between_tags_may_have_a_sign_that_opens_tags(text, label):
    scored = score(text, label or "A", ("x < 3", "x > 3", "a < b < c"))
    assert (scored.value, scored.detail) == (float(label is not None), {"answer": label})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It barks.",
        "A bird is no dog",
        "The answer is not B",
        "The answer is a matter of taste.",
        "The answer is unclear.",
        "I like B-flat.",
        r"\boxed{7}",
        "Let us see.\nA. it purrs\nB. it barks",
        "The answer is Dogma",
        "The answer cannot be B",
        "The answer is therefore not B",
        "The answer is likely",
    ],
)
def test_nothing_is_read_where_no_option_is_named(text):
    scored = score(text)
    assert (scored.value, scored.detail) == (0.0, {"answer": None})


@pytest.mark.parametrize(
    ("text", "several"),
    [
        ("The answer is A or B", ["A", "B"]),
        ("The answer is (A), (B) and C", ["A", "B", "C"]),
        ("Answer: B/C", ["B", "C"]),
        ("The answer is A. No, the answer is B.", ["A", "B"]),
        ("The answer is B. cat", ["A", "B"]),
        (r"\boxed{A} and \boxed{B}", ["A", "B"]),
        ("A. cat\nB. dog\nC. bird", ["A", "C"]),
    ],
)
def test_a_sample_that_names_several_options_scores_0_and_says_so(text, several):
    for answer in "ABC":
        scored = score(text, answer)
        assert (scored.value, scored.detail) == (0.0, {"answer": None, "ambiguous": several})


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("The answer is A dog.", "C"),
        ("The answer is A dog because it barks", "C"),
        ("The answer is dog", "B"),
        ("The answer is the big dog", "D"),
        ("Answer: A, the cat", "A"),
        ("a dog", "C"),
    ],
)
def test_the_longest_text_of_an_option_is_the_one_that_is_named(text, label):
    assert named(text, ANIMALS) == {label}


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("The answer is 5", {"A"}),
        ("The answer is 5.5 metres", {"B"}),
        ("The answer is 5.2", set()),
        ("The answer is -5.", {"C"}),
        ("The answer is 12 apples", {"D"}),
        ("The answer is 120", set()),
    ],
)
def test_a_number_is_no_part_of_another_one(text, labels):
    assert named(text, NUMBERS) == labels


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("The answer is [0, 1]", {"A"}),
        (r"\boxed{(0, 1)}", {"B"}),
        (r"$\boxed{\left[0, 1\right)}$", {"C"}),
        ("(B) (0, 1)", {"B"}),
        ("(B) [0, 1]", {"A", "B"}),
        ("The answer is .5", {"D"}),
        ("The answer is 5", {"E"}),
        ("The answer is 5!", {"F"}),
        ("The answer is 5%", set()),
        ("...", set()),
    ],
)
def test_brackets_and_signs_of_a_text_are_part_of_it(text, labels):
    options = {"A": "[0, 1]", "B": "(0, 1)", "C": "[0, 1)", "D": ".5", "E": "5", "F": "5!", "G": ""}
    assert named(text, options) == labels


def test_a_letter_that_is_a_word_is_read_where_it_is_no_word():
    assert named("The answer is I", LETTERS) == {"I"}
    assert named("The answer is I think B", LETTERS) == set()
    assert named("The answer is A because it fits", LETTERS) == {"A"}
    assert named("The answer is a long story", LETTERS) == set()


FORMS = [
    ["cat", "dog"],
    {"A": "cat", "B": "dog", "C": None},
    {"label": ["A", "B"], "text": ["cat", "dog"]},
    json.dumps(["cat", "dog"]),
    json.dumps({"A": "cat", "B": "dog"}),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_options_are_read_in_every_form(form):
    prompt = PromptView("?", "B", {"choices": form})
    assert MultipleChoice().check(prompt) is None
    for text in ("B", "dog"):
        assert MultipleChoice().score(prompt, RolloutView(text)).value == 1.0


def test_labels_may_be_numbers():
    prompt = PromptView("?", "2", {"options": {"label": ["1", "2"], "text": ["cat", "dog"]}})
    verifier = MultipleChoice(options="options")
    assert verifier.score(prompt, RolloutView("The answer is 2.")).value == 1.0
    assert verifier.score(prompt, RolloutView("The answer is (1)")).value == 0.0


def test_the_reference_is_a_label_a_text_or_an_index_from_0_as_the_recipe_says():
    assert score("B", "(b)").value == 1.0
    assert score("B", "Dog", answer_is="text").value == 1.0
    assert score("B", "1", answer_is="index").value == 1.0
    assert score("C", "2", ["1", "2", "3"], answer_is="index").value == 1.0
    assert score("B", "2", ["1", "2", "3"], answer_is="text").value == 1.0


def test_rows_without_options_have_letters_only():
    verifier = MultipleChoice(options="")
    prompt = PromptView("?", "Q", {})
    assert verifier.check(prompt) is None
    assert verifier.score(prompt, RolloutView("The answer is Q")).value == 1.0
    assert verifier.check(PromptView("?", "7", {})) is not None


def test_check_names_what_is_wrong():
    def reason(answer, metadata, **settings):
        return MultipleChoice(**settings).check(PromptView("?", answer, metadata))

    animals = {"choices": ["cat", "dog"]}
    assert reason("B", animals) is None
    assert reason(None, animals) == "there is no reference answer"
    assert reason("C", animals) == (
        "the reference answer 'C' is the label of none of the options A, B; "
        "`answer_is` says what it is: label, text or index"
    )
    assert "is the index of none" in reason("2", animals, answer_is="index")
    assert "is the text of 2 of" in reason("x", {"choices": ["x", "X"]}, answer_is="text")
    message = reason("B", {"choice": ["cat", "dog"]})
    assert message.startswith("no column 'choices'; the nearest is 'choice'; name it with")
    for wrong in (["cat"], "cat, dog", 7, [["cat"], ["dog"]], {"A": "x", "a": "y"}):
        assert "texts of at least two options are wanted" in reason("A", {"choices": wrong})
    with pytest.raises(ValueError, match="is the label of none"):
        score("B", "Z")


@given(st.text(alphabet="ABab .,:()\\boxed{}\nansweris<>/", max_size=60), st.sampled_from("ABC"))
def test_any_text_gives_1_to_at_most_one_option(text, answer):
    assert sum(score(text, label).value for label in "ABC") in (0.0, 1.0)
    assert score(text, answer).value in (0.0, 1.0)


@given(st.sampled_from("ABC"), st.sampled_from(["The answer is ({})", "{}", r"\boxed{{{}}}"]))
def test_the_answer_is_read_whatever_comes_before_it(label, form):
    written = form.format(label)
    assert score(f"First I look.\nThen I see.\n{written}", label).value == 1.0


@pytest.mark.parametrize(
    "repeated", ["\\boxed{", "<answer>", "answer is ", "answer", "(", " ", "{}", "B or ", "A, "]
)
def test_long_runs_of_one_thing_take_no_quadratic_time(repeated):
    assert score(repeated * 20_000).value == 0.0


def test_a_long_list_of_labels_in_one_place_takes_no_quadratic_time():
    boxed = rf"\boxed{{{'B, ' * 300_000}}}"  # cut at each label it would be 10^11 bytes
    assert score(boxed).value == 1.0
    assert score(r"\boxed{A or B, B and B}").value == 0.0


def test_neither_numpy_nor_torch_is_imported_for_it():
    code = (
        "import sys, postgrad.rewards.multiple_choice\nprint({'numpy', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_list_of_one_text_is_that_text():
    assert score("The answer is B", '["B"]').value == 1.0

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.text import composed, fixed, how_many, in_lines, nearest, size_text


@given(st.text(max_size=29), st.sampled_from(["NFC", "NFKC"]))
def test_text_with_short_runs_of_marks_is_composed_as_unicode_says(text, form):
    assert composed(text, form) == unicodedata.normalize(form, text)


def test_of_a_run_of_marks_the_first_30_stay():
    assert composed("e\u0301") == "é"
    assert composed("e" + "\u0323" * 40 + "x") == "ẹ" + "\u0323" * 29 + "x"


@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73\u0f75", "\u0344\u0323"])
def test_a_long_run_of_marks_takes_no_quadratic_time(marks):
    first = composed("a" + marks * 15, "NFKC")
    assert composed("a" + marks * 100_000, "NFKC") == first
    assert composed(("a" + marks * 15) * 1_000, "NFKC") == first * 1_000


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (0.25, "{:.4f}", "0.2500"),
        (0.00005, "{:.4f}", "0.0001"),
        (0.00003, "{:.4f}", "3e-05"),
        (-0.000032, "{:.4f}", "-3.2e-05"),
        (-1e-9, "{:.4f}", "0"),
        (0.0, "{:.4f}", "0"),
        (0.0004, "{:.1%}", "0.0%"),
        (-1e-9, "{:.0%}", "0%"),
        (0.4, "{:,.0f} tok/s", "0.4"),
    ],
)
def test_a_number_that_is_not_zero_is_not_shown_as_zeros(value, form, shown):
    assert fixed(value, form) == shown


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 60))
def test_lines_are_cut_at_words_and_no_word_is_lost(text, width):
    folded = in_lines(text, width)
    assert folded.split() == text.split()
    longest = max([20, width, *map(len, text.split())])
    indent = max(len(line) - len(line.lstrip(" ")) for line in text.split("\n"))
    assert all(len(line) <= longest + indent for line in folded.split("\n") if line.strip())


def test_one_thing_is_told_in_the_singular():
    phrases = [how_many(count, "row") for count in (0, 1, 2, 1.0, 40_960)]
    assert phrases == ["0 rows", "1 row", "2 rows", "1 row", "40,960 rows"]


def test_a_size_is_told_in_the_unit_that_fits_it():
    sizes = [106, 955_400, 1_678_080, 2**30, 98_288_824_320]
    assert [size_text(size) for size in sizes] == [
        "106 bytes", "0.9 MiB", "1.6 MiB", "1.0 GiB", "91.5 GiB"
    ]  # fmt: skip


def test_the_nearest_name_is_found_whatever_its_capitals():
    names = ("grpo", "dr_grpo", "ppo", "lr", "rl")
    assert nearest("GRPO", names) == "grpo"
    assert nearest("Dr_GRPO", names) == "dr_grpo"
    assert nearest("RL", names) == "rl"
    assert nearest("ppo", ("PPO", "grpo")) == "PPO"
    assert nearest("xyzzy", names) is None

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.ifeval.length import sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n ", []),
        ("***", []),
        ("No mark at the end", ["No mark at the end"]),
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("all small. so is this.", ["all small.", "so is this."]),
        ("A title\n\nOne\nsentence. Two.", ["A title\n\nOne\nsentence.", "Two."]),
        ("Dr. J. Smith met Mrs. Jones.", ["Dr. J. Smith met Mrs. Jones."]),
        ("Read e.g. Plato. Then rest.", ["Read e.g. Plato.", "Then rest."]),
        ("Cats, dogs, etc. are pets.", ["Cats, dogs, etc. are pets."]),
        ("Cats, dogs, etc. All are pets.", ["Cats, dogs, etc.", "All are pets."]),
        ("At 5 p.m. we left. It rained.", ["At 5 p.m. we left.", "It rained."]),
        ("It costs 3.50 at example.com. Yes.", ["It costs 3.50 at example.com.", "Yes."]),
        ("See No. 5 now. I said no. It is.", ["See No. 5 now.", "I said no.", "It is."]),
        ("It was I. Then he came.", ["It was I.", "Then he came."]),
        ("Well... maybe. Well... Maybe.", ["Well... maybe.", "Well...", "Maybe."]),
        ("1. Wash it.\n2. Dry it.", ["1. Wash it.", "2. Dry it."]),
        ("It was 1999. Then 2000.", ["It was 1999.", "Then 2000."]),
        ("I.", ["I."]),
        ('He said "Go." She went.', ['He said "Go."', "She went."]),
        ("(It is.) **It was.** So!", ["(It is.)", "**It was.**", "So!"]),
        ("Really?! Yes!!! 🎉 ***", ["Really?!", "Yes!!! 🎉 ***"]),
        ("... So it begins.", ["... So it begins."]),
        ("这是一。这是二！", ["这是一。", "这是二！"]),
        ("यह एक है। यह दो है।", ["यह एक है।", "यह दो है।"]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, expected):
    assert sentences(text) == expected


@given(st.text(alphabet="aA1.?!…。 \n\"'*)é", max_size=60))
def test_nothing_is_lost_and_every_sentence_has_a_letter_or_digit(text):
    parts = sentences(text)
    assert all(
        any(map(str.isalnum, sentence)) and sentence == sentence.strip() for sentence in parts
    )
    if parts:
        assert "".join("".join(parts).split()) == "".join(text.split())


@given(st.lists(st.sampled_from(["We go.", "Why not?", "Dr. No came!", "It is 3.5."]), max_size=8))
def test_sentences_that_are_joined_are_found_again(written):
    assert sentences(" ".join(written)) == written
    assert sentences("\n\n".join(written)) == written

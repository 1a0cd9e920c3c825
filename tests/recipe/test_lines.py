"""The line of every key, whatever way TOML has of writing it."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.recipe.lines import KeyPath, key_lines, line_of

TEXT = """# a comment
job = "rl"

model.path = "x"           # 4
[data]                     # 5
"quoted key" = 1           # 6
text = '''
[not.a.table]
job = 3
'''
list = [                   # 11
  1,
  { a = 1 },
]
after = 2                  # 15
[[rewards]]                # 16
type = "a"
[rewards.own]              # 18
deep.er = 1                # 19
[[rewards]]                # 20
type = "b"
[model.init.tokenizer]     # 22
kind = "bpe"
"""


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (("job",), 2),
        (("model", "path"), 4),
        (("data",), 5),
        (("data", "quoted key"), 6),
        (("data", "text"), 7),
        (("data", "list", 1, "a"), 11),
        (("data", "after"), 15),
        (("rewards", 0), 16),
        (("rewards", 0, "own"), 18),
        (("rewards", 0, "own", "deep", "er"), 19),
        (("rewards", 1), 20),
        (("rewards", 1, "type"), 21),
        (("model", "init", "tokenizer", "kind"), 23),
    ],
)
def test_every_key_has_its_line(place: KeyPath, line: int) -> None:
    assert key_lines(TEXT)[place] == line


def test_a_key_that_is_not_there_has_the_line_of_the_table_around_it() -> None:
    lines = key_lines(TEXT)
    assert line_of(lines, ("rewards", 1, "weight")) == 20
    assert line_of(lines, ("data", "prompt")) == 5
    assert line_of(lines, ("learner", "lr")) is None


def test_a_table_without_a_line_of_its_own_begins_with_what_is_in_it() -> None:
    lines = key_lines(TEXT)
    assert line_of(lines, ("rewards",)) == 16
    assert line_of(lines, ("rewards", 7)) == 16
    assert line_of(lines, ("model", "revision")) == 4


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_a_character_that_ends_lines_elsewhere_ends_none_in_toml(character: str) -> None:
    text = f"# a{character}b\njob = 'x{character}y'\nsteps = 1\n"
    assert key_lines(text) == {("job",): 2, ("steps",): 3}


NAMES = st.lists(st.text("abcdefgh_-", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
VALUES = ["1", '"a = 1"', "[1,\n2]", "'''\n[x]\n'''", "{ z = 1 } # c", "true"]


@given(tables=NAMES, keys=NAMES, blanks=st.lists(st.booleans(), min_size=36), data=st.data())
def test_lines_are_those_on_which_keys_were_written(
    tables: list[str], keys: list[str], blanks: list[bool], data: st.DataObject
) -> None:
    text, wanted = "", {}
    for table in tables:
        text += f"[{table}]\n"
        for key, blank in zip(keys, blanks, strict=False):
            text += "\n# comment\n" if blank else ""
            wanted[table, key] = text.count("\n") + 1
            text += f"{key} = {data.draw(st.sampled_from(VALUES))}\n"
    tomllib.loads(text)
    lines = key_lines(text)
    assert {place: lines[place] for place in wanted} == wanted

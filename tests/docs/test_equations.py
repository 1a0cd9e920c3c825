"""Equations of the pages are drawn, and name settings that there are."""

import re
from xml.etree import ElementTree

import pytest
from docs.tools.equations import equation

from helpers.pages import Block, blocks
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class

EQUATIONS = [block for block in blocks() if block.language == "math"]
SPACE = "{http://www.w3.org/1998/Math/MathML}"


@pytest.mark.parametrize("block", EQUATIONS, ids=str)
def test_an_equation_becomes_markup_with_a_row_for_each_line(block: Block) -> None:
    math = ElementTree.fromstring(equation(block.text, "math", "equation"))
    rows = list(math.iter(f"{SPACE}mtr"))
    assert len(rows) == block.text.count(r"\\") + 1
    assert all("".join(row.itertext()).strip() for row in rows)
    assert "\\" not in "".join(math.itertext())  # no command of LaTeX is left


def test_names_with_an_underscore_in_equations_are_settings() -> None:
    fields = {name for kind in ALGORITHMS for name in algorithm_class(kind).model_fields}
    values = {"log_sigmoid", "log_exp"}  # of the reward model's loss
    text = "\n".join(block.text for block in EQUATIONS).replace(r"\_", "_")
    named = set(re.findall(r"\\text\{(\w+_\w+)\}", text))
    assert len(named) > 10
    assert named <= fields | values

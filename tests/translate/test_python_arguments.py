"""Command lines of Python programs: argparse, dataclasses, and classes of other packages."""

from typing import Any

import pytest

from postgrad.translate.python_arguments import CommandLine
from postgrad.translate.python_program import followed
from postgrad.translate.python_values import Built
from translate.test_python_program import shown

ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("-m", "--model-name", required=True)
group = parser.add_argument_group("rows")
group.add_argument("--rows", dest="limit", default=10)
parser.add_argument("--fast", action="store_true")
parser.add_argument("--whole")
parser.add_argument("path")
parser.set_defaults(whole=7)
other = argparse.ArgumentParser()
other.add_argument("--lr", default=0)
CALL
use([args.lr, args.model_name, args.limit, args.fast, args.whole, args.path])
"""
CLASSES = """
from dataclasses import dataclass, field
from transformers import HfArgumentParser
from trl import SFTConfig, TrlParser
@dataclass
class Script:
    model: str = "m"
    rows: int = field(default=5, metadata={"help": "how many"})
@dataclass
class Config(SFTConfig):
    learning_rate: float = 2e-6
CALL
use([script.model, script.rows, config.learning_rate, config.max_length])
"""


def used(program: str, **words: Any) -> tuple[Any, CommandLine, Built]:
    line = CommandLine(words, {"Config": {"eval_strategy": "no"}})
    (*_, last) = followed(program, "a.py", line.answer)
    return shown(last.args[0]), line, last


@pytest.mark.parametrize("call", ["args = parser.parse_args()",
                                  "args, rest = parser.parse_known_args()"])  # fmt: skip
def test_options_of_argparse_have_their_defaults_and_the_words_behind(call: str) -> None:
    program = ARGPARSE.replace("CALL", call)
    assert used(program)[0] == [1e-5, "unread", 10, False, 7, "unread"]
    values, line, _ = used(program, lr=2e-5, model_name="m", fast=True, beta=1)
    assert values == [2e-5, "m", 10, True, 7, "unread"]
    assert line.rest == {"beta": 1}  # which the program does not take


@pytest.mark.parametrize(
    "call",
    [
        "script, config = HfArgumentParser((Script, SFTConfig)).parse_args_into_dataclasses()",
        "parser = TrlParser([Script, SFTConfig])\nscript, config = parser.parse_args_and_config()",
        "script, config = HfArgumentParser(dataclass_types=[Script, SFTConfig]).parse_args()",
    ],
)
def test_classes_of_the_program_take_their_words_and_others_the_rest(call: str) -> None:
    values, line, last = used(CLASSES.replace("CALL", call), model="x", learning_rate=3e-6)
    assert values == ["x", 5, 3e-6, "unread"]
    assert line.rest == {"learning_rate": 3e-6}
    assert line.line is not None
    assert line.says(last)
    assert not line.says([1, "a", Built("f", (), {}, 1, "f()", 99)])


def test_a_class_made_from_another_package_s_has_both_defaults() -> None:
    call = "script, config = HfArgumentParser((Script, Config)).parse_args_into_dataclasses()"
    values, line, _ = used(CLASSES.replace("CALL", call), rows=1)
    assert values == ["m", 1, 2e-6, "unread"]
    assert line.line is not None


def test_one_class_alone_is_an_object_of_it() -> None:
    call = "import tyro\nscript = tyro.cli(Script)\nconfig = SFTConfig(learning_rate=1)"
    values, line, _ = used(CLASSES.replace("CALL", call), model="x")
    assert values == ["x", 5, 1, "unread"]
    assert line.line is None

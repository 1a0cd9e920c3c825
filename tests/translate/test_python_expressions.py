"""Expressions of Python programs that their text decides, and those that it does not."""

from typing import Any

import pytest

from postgrad.translate.python_program import followed
from translate.test_python_program import result


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("1e-5", 1e-5),
        ("64 // 4 * 2 + 1 - 2 ** 3 % 5", 30),
        ("-(3 + 0.5) / 2", -1.75),
        ("1_000", 1000),
        ("'a' + 'b' * 2", "abb"),
        ("[1] + [2] * 2", [1, 2, 2]),
        ("(1, [2, (3,)])", [1, [2, [3]]]),
        ("[*[1, 2], 3]", [1, 2, 3]),
        ("{'a': 1, **{'b': 2, 'a': 3}}", {"a": 3, "b": 2}),
        ("{'a': 1} | {'b': 2}", {"a": 1, "b": 2}),
        ("{1: 2}", "unread"),
        ("f'{1}-{\"a\"!r}-{0.5:.1e}-{7:03d}'", "1-'a'-5.0e-01-007"),
        ("f'{x}'", "unread"),
        ("f'a{1:{2}}'", "a 1"),
        ("'org/name-7B'.split('/')[-1].lower().removesuffix('-7b')", "name"),
        ("'-'.join(['a', 'b']).replace('-', '_')", "a_b"),
        ("'{} {}'.format(1, 2)", "unread"),
        ("'abc'[1:]", "bc"),
        ("[1, 2, 3][-1]", 3),
        ("[1][5]", "unread"),
        ("{'a': 1}['b']", "unread"),
        ("{'a': 1}.get('b', 4)", 4),
        ("list({'a': 1}.items())", [["a", 1]]),
        ("1 < 2 and 'yes' or 'no'", "yes"),
        ("None or 0 or 'x'", "x"),
        ("asked() or 'x'", "unread"),
        ("not []", True),
        ("1 if 'a' in ['a', 'b'] else 2", 1),
        ("1 if asked() else 2", "unread"),
        ("1 if asked() else 1", 1),
        ("1 < 2 < 3", "unread"),
        ("None is None", True),
        ("AutoModel.from_pretrained('m') is not None", True),
        ("asked() is None", "unread"),
        ("x is y", "unread"),
        ("len([1, 2]) + int('3') + max(1, 2) + round(2.6) + abs(-1)", 11),
        ("min(1, 2.5)", 1),
        ("str(5) + str(None)", "5None"),
        ("int('a')", "unread"),
        ("dict([('a', 1)])", "unread"),
        ("dict({'a': 1}, b=2)", {"a": 1, "b": 2}),
        ("[n * 2 for n in [1, 2]]", [2, 4]),
        ("[n for n in [1, 2] if n > 1]", "unread"),
        ("{n: n for n in [1]}", "unread"),
        ("1 / 0", "unread"),
        ("10 ** 400", "unread"),
        ("1e400", 1e400),
        ("b'a'", "unread"),
        ("1j", "unread"),
        ("(y := 3)", 3),
        ("getattr(torch, 'bfloat16').x", "unread"),
        ("print", "unread"),
    ],
)
def test_an_expression_has_the_value_of_a_run_or_none(expression: str, wanted: Any) -> None:
    value_read = result(f"show({expression})")
    assert value_read == wanted
    assert type(value_read) is type(wanted)


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("import os\nshow(os.path.join('a', 'b/', 'c'))", "a/b/c"),
        ("from pathlib import Path\nshow(str(Path('a') / 'b'))", "a/b"),
        (
            "from pathlib import Path\nshow(Path(__file__).resolve().parent / 'x.jinja')",
            "./x.jinja",
        ),
        ("from pathlib import Path\nshow(Path('a/b.json').stem)", "b"),
        ("import os\nshow(os.path.dirname('a/b/c'))", "a/b"),
    ],
)
def test_paths_are_texts(program: str, wanted: str) -> None:
    assert result(program) == wanted


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("from m import a as b\nshow(b.c(1))", "m.a.c"),
        ("import a.b\nshow(a.b.c())", "a.b.c"),
        ("import a.b as d\nshow(d.c())", "a.b.c"),
        ("from . import own\nshow(own.f())", "own.f"),
        ("show(unset())", "unset"),
    ],
)
def test_a_call_has_the_name_of_what_is_imported(program: str, wanted: str) -> None:
    (*_, last) = followed(program, "a.py", lambda *_: None)
    assert last.args[0].name == wanted


def test_a_part_of_a_call_says_of_which_call_it_is() -> None:
    program = (
        "model, tokenizer = load('m')\nrows = load('d')['train'].map(f).filter(g)\nuse(model, rows)"
    )
    (*_, use) = followed(program, "a.py", lambda *_: None)
    model, rows = use.args
    assert (model.name, model.args, model.base.name) == ("[]", (0,), "load")
    assert (rows.name, rows.base.name, rows.line) == (".filter", ".map", 2)

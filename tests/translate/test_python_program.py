"""Programs that are followed by their text: what names stand for, and that nothing runs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.translate.python_program import followed
from postgrad.translate.python_values import is_literal


def shown(value: Any) -> Any:
    """A value, and "unread" for what a run alone would give."""
    if isinstance(value, list):
        return [shown(inner) for inner in value]
    if isinstance(value, dict):
        return {key: shown(inner) for key, inner in value.items()}
    return value if is_literal(value) else "unread"


def result(program: str, environment: dict[str, str] | None = None) -> Any:
    """What the last call of `show` in a program is given."""
    calls = followed(program, "a.py", lambda *_: None, environment)
    (*_, last) = (call for call in calls if call.name == "show")
    return shown(last.args[0])


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("x = 2\nif x > 1:\n    y = 'a'\nelse:\n    y = 'b'\nshow(y)", "a"),
        ("if asked():\n    y = 'a'\nelse:\n    y = 'b'\nshow(y)", "unread"),
        ("y = 'a'\nif asked():\n    y = 'b'\nshow(y)", "unread"),
        ("if asked():\n    y = 'a'\nelse:\n    y = 'a'\nshow(y)", "a"),
        ("y = 'a'\nif asked():\n    y = 'b'\n    raise ValueError\nshow(y)", "a"),
        ("d = {'a': 1, 'b': 2}\nif asked():\n    d['a'] = 3\nshow(d)", {"a": "unread", "b": 2}),
        ("x, (y, z) = 1, [2, 3]\nshow([x, y, z])", [1, 2, 3]),
        ("x = y = 5\nx += 2\nshow([x, y])", [7, 5]),
        ("x = 0\nfor n in [1, 2, 3]:\n    x += n\nshow(x)", 6),
        ("x = 0\nfor n in rows:\n    x += 1\nshow(x)", "unread"),
        ("x = 0\nwhile asked():\n    x += 1\nshow(x)", "unread"),
        ("x = 0\nfor n in [1, 2]:\n    if n > 1:\n        break\n    x = n\nshow(x)", "unread"),
        ("x = 1\nfor n in []:\n    x = 2\nelse:\n    x = 3\nshow(x)", 3),
        ("try:\n    x = 1\nexcept OSError:\n    x = 2\nfinally:\n    y = 4\nshow([x, y])", [1, 4]),
        ("with open('f') as file:\n    x = file.read()\n    y = 1\nshow(y)", 1),
        ("match mode:\n    case 'a':\n        x = 1\n    case _:\n        pass\nshow(x)", "unread"),
        ("d = dict(a=1)\nd.update({'b': 2}, c=3)\nx = d.pop('a')\nshow([d, x])",
         [{"b": 2, "c": 3}, 1]),
        ("d = {'a': 1}\nd.update(read())\nshow(d)", "unread"),
        ("d = {'a': 1, 'b': 2}\ndel d['a']\nshow(d)", {"b": 2}),
        ("x = []\nx.append(1)\nx.extend([2, 3])\nx.insert(0, 0)\nshow(x)", [0, 1, 2, 3]),
        ("x = [3, 1]\nx.sort(key=lambda n: n)\nshow(x)", "unread"),
        ("x = [1]\nx[0] = 2\nshow(x)", "unread"),
        ("x = 1\ndef f():\n    global x\n    x = 2\nf()\nshow(x)", 2),
        # an object has several names, and a function changes that of its caller
        ("x = {'a': 1}\ny = x\ny['a'] = 2\nshow([x, y])", [{"a": 2}, {"a": 2}]),
        ("x = [1]\ny = x\nx = [2]\ny.append(3)\nshow([x, y])", [[2], [1, 3]]),
        ("def f(d):\n    d['a'] = 2\nx = {'a': 1}\nf(x)\nshow(x)", {"a": 2}),
        ("def g(d):\n    d.pop('a')\ndef f(d):\n    g(d)\nx = {'a': 1}\nf(x)\nshow(x)", {}),
        ("def f(d):\n    d['a'] = 2\ndef main():\n    x = {'a': 1}\n    f(x)\n    show(x)\nmain()",
         "unread"),
        ("def g(d):\n    d.pop('a')\ndef f(d):\n    g(d)\ndef main():\n    x = {'a': 1}\n    f(x)\n"
         "    show(x)\nmain()", "unread"),
        ("def f(d):\n    d = {'a': 2}\nx = {'a': 1}\nf(x)\nshow(x)", {"a": 1}),
        ("def f(d):\n    e = d\n    e.append(2)\nx = [1]\nf(x)\nshow(x)", [1, 2]),
        ("x = {'a': 1}\ndef f():\n    if asked():\n        x['a'] = 2\nf()\nshow(x)",
         {"a": "unread"}),
        ("import os\nif asked():\n    os.environ['N'] = 'b'\nshow(os.environ.get('N', 'a'))",
         "unread"),
    ],
)  # fmt: skip
def test_statements_give_names_what_a_run_would_or_nothing(program: str, wanted: Any) -> None:
    assert result(program) == wanted


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("def f(a, b=2, *rest, c=3, **more):\n    return [a, b, rest, c, more]\n"
         "show(f(1, 5, 6, d=7))", [1, 5, [6], 3, {"d": 7}]),
        ("def f(n):\n    if n > 1:\n        return 'a'\n    return 'b'\nshow([f(1), f(2)])",
         ["b", "a"]),
        ("def f():\n    if asked():\n        return 'a'\n    return 'b'\nshow(f())", "unread"),
        ("def f():\n    if asked():\n        return 'a'\nshow(f())", "unread"),
        ("def f():\n    raise ValueError\nshow(f())", "unread"),
        ("def f(n):\n    return f(n + 1)\nshow(f(1))", "unread"),
        ("def f(x):\n    def inner():\n        return x\n    return inner\ng = f(4)\nshow(g())", 4),
        ("f = lambda n, m=2: n * m\nshow(f(3))", 6),
        ("def main():\n    show(1)\nif __name__ == '__main__':\n    main()", 1),
        ("def main(lr=1e-5):\n    show(lr)\nlaunch(main)", 1e-5),  # nothing here calls it
        ("async def f():\n    return 1\nasync def main():\n    show(await f())\nmain()", 1),
        ("class A:\n    lr = 1\n    name: str = 'a'\nshow([A.lr, A().name, A(name='b').name])",
         [1, "a", "b"]),
        ("class A:\n    lr = 1\nA.lr = 2\nshow(A.lr)", 2),
        ("class A:\n    a: int = 1\nclass B(A):\n    b: int = field(default=2)\n"
         "show([B().a, B(5).a, B(b=3).b])", [1, 5, 3]),
        ("class A:\n    a: list = field(default_factory=lambda: [1])\n    b: list = "
         "field(default_factory=list)\n    c: int = field()\nshow([A().a, A().b, A().c])",
         [[1], [], "unread"]),
    ],
)  # fmt: skip
def test_functions_and_classes_of_the_program_are_followed(program: str, wanted: Any) -> None:
    assert result(program) == wanted


def test_objects_keep_the_attributes_that_are_set_on_them() -> None:
    program = """
args = Config(a=1)
args.b = 2
setattr(args, "c", 3)
same = args
same.d = 4
def more(config):
    config.e = 5
more(args)
if asked():
    args.a = 6
use(args)
args.f = 7
"""
    calls = followed(program, "a.py", lambda *_: None)
    (use,) = (call for call in calls if call.name == "use")
    assert shown(dict(use.args[0].kwargs)) == {"a": "unread", "b": 2, "c": 3, "d": 4, "e": 5}


PIPELINE = """
class Base:
    name = "m"
    def __init__(self, rows, lr=1):
        self.rows, self.lr = rows, lr
        self.args = Config(lr=lr)
    @staticmethod
    def twice(n):
        return n * 2
    @classmethod
    def default(cls):
        return cls("d")
class Mine(Base):
    name = "n"
    def train(self, epochs):
        self.args.epochs = self.twice(epochs)
        use(self.name, self.rows, self.lr, self.args, self.unset, Base.twice(4))
"""


def test_methods_of_the_program_s_objects_are_followed() -> None:
    calls = followed(PIPELINE + "p = Mine('r', lr=3)\np.train(2)", "a.py", lambda *_: None)
    (use,) = (call for call in calls if call.name == "use")
    name, rows, lr, args, unset, eight = use.args
    assert (name, rows, lr, shown(unset), eight) == ("n", "r", 3, "unread", 8)
    assert dict(args.kwargs) == {"lr": 3, "epochs": 4}
    calls = followed(PIPELINE + "Mine.default().train(1)", "a.py", lambda *_: None)
    (use,) = (call for call in calls if call.name == "use")
    assert use.args[1] == "d"


def test_an_attribute_by_an_unknown_name_leaves_none_of_them_certain() -> None:
    program = "args = Config(a=1)\nfor k, v in load().items():\n    setattr(args, k, v)\nuse(args)"
    (use,) = (c for c in followed(program, "a.py", lambda *_: None) if c.name == "use")
    assert shown(dict(use.args[0].kwargs)) == {"a": 1, "**": "unread"}


def test_copies_are_objects_of_their_own() -> None:
    program = (
        "import copy\nfrom dataclasses import replace\na = Config(x=1)\nb = copy.deepcopy(a)\n"
        "b.x = 2\nc = replace(a, y=3)\nuse(a, b, c)"
    )
    (use,) = (c for c in followed(program, "a.py", lambda *_: None) if c.name == "use")
    assert [dict(arg.kwargs) for arg in use.args] == [{"x": 1}, {"x": 2}, {"x": 1, "y": 3}]


def test_calls_of_both_branches_are_found_in_order() -> None:
    program = "if asked():\n    a()\nelse:\n    b()\nfor n in [1, 2]:\n    c(n)\nd()"
    names = [call.name for call in followed(program, "a.py", lambda *_: None)]
    assert names == ["asked", "a", "b", "c", "c", "d"]


def test_variables_of_the_environment_have_their_defaults_or_what_is_set_before() -> None:
    program = (
        "import os\nos.environ['C'] = '3'\nshow([os.environ.get('A', '1'), os.getenv('B'), "
        "os.environ['C'], os.environ['D']])"
    )
    assert result(program) == ["1", None, "3", "unread"]
    assert result(program, {"A": "x", "D": "y"}) == ["x", None, "3", "y"]


RUNS = """
import os, pathlib
pathlib.Path({path!r}).write_text("ran")
def touch(*args, **kwargs):
    open({path!r}, "w").close()
    return 1
class Meta(type):
    open({path!r}, "w")
class A(metaclass=Meta):
    x = touch()
@touch
def f(a=touch()): ...
x = [touch() for _ in range(3)] + [os.system("touch {path}")]
y = f"{{touch()}}" + eval("touch()") + __import__("os").system("touch {path}")
exec("open({path!r}, 'w')")
z = (lambda: open({path!r}, "w"))()
import postgrad_no_such_module
from trl import SFTTrainer
SFTTrainer(model="m", train_dataset=touch(A.x, z)).train()
"""


def test_nothing_of_a_program_is_run_or_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ran"
    for name in ("eval", "exec", "__import__"):
        monkeypatch.setattr(f"builtins.{name}", _forbidden)
    before = set(sys.modules)
    calls = followed(RUNS.format(path=str(path)), "a.py", lambda *_: None)
    assert "trl.SFTTrainer" in [call.name for call in calls]
    assert not path.exists()
    assert set(sys.modules) == before


def _forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("the program ran")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("x = 1\ny = = 2", "line 2 is not Python"),
        ("def f(:\n", "line 1 is not Python"),
        ("x = 1\0", "not Python"),
        ("x = " + "-" * 100_000 + "1", "nested too deeply"),
        ("x = a" + ".b" * 60_000, "nested too deeply"),
        ("x = a" + "()" * 60_000, "nested too deeply"),
        ("(" * 10_000, "too many nested parentheses"),
        ("x = " + "9" * 5000, "is not Python"),
        ("x = f()\n" + "x = x.map(f)\n" * 20_000, "goes on for too long"),
        ("".join(f"if q:\n  v{n} = f()\n" for n in range(9000)), "goes on for too long"),
        ("for a in [1] * 900:\n for b in [1] * 900:\n  x = [a, b]\n", "goes on for too long"),
    ],
)
def test_a_program_that_cannot_be_read_or_would_not_end_is_told(program: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        followed(program, "a.py", lambda *_: None)


@pytest.mark.parametrize(
    "program",
    [
        "x = ['a']\n" + "x = [x, x]\n" * 40 + "show(x)",
        "x = 'aaaa'\n" + "x = x + x\n" * 40 + "show(x)",
        "x = 'a' * 2000\ny = x.replace('a', x)\nshow(y)",
        "show(9 ** 9 ** 9)",
        "show(2 ** 62 * 2 ** 62)",
        "show('a' * 10 ** 9)",
        "show([0] * 10 ** 9)",
        "show(f'{1:>1000000000}')",
        "show('{:>1000000000}'.format(1))",
        "show('%1000000000d' % 1)",
        "show(','.join(['a' * 2000] * 900))",
        "".join(f"def f{n}():\n  return [f{n + 1}(), f{n + 1}()]\n" for n in range(30))
        + "show(f0())",
        "def f(a):\n    return f([a, a])\nshow(f(1))",
    ],
)  # fmt: skip
def test_a_value_that_no_person_writes_stays_unread(program: str) -> None:
    assert "unread" in str(result(program))

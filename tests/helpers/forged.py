"""Wrong programs that want a test of assertions to pass: name -> (tests, program), each scored 0.

They raise what ends a loop, answer by hand, change what is not theirs, return what compares as
equal to everything, or end. QUICK are those of every `make test`.
"""

_IN_MAP = "for got, wanted in zip(map(f, [2, 3]), [4, 9]):\n    assert got == wanted"
_ALL = "assert all(map(lambda g, w: g == w, map(f, [2, 3]), [4, 9]))"
_CAUGHT = "try:\n    f(2)\nexcept Exception:\n    pass"
_BARE = "try:\n    f(2)\nexcept:\n    pass"
_EQUAL = "assert f(2) == 4"
_ANY = (
    "class E:\n def __getattr__(s, n): return lambda *a: True\n"
    + "".join(
        f" def __{name}__(s, *o): return {value}\n"
        for name, value in {
            "eq": True, "ne": True, "lt": True, "gt": True, "le": True, "ge": True, "bool": True,
            "hash": "hash(4)", "add": 4, "radd": 4, "sub": 0, "rsub": 0, "abs": 0, "int": 4,
            "float": 4.0, "index": 4, "str": "'4'", "repr": "'4'", "format": "'4'",
            "contains": True, "len": 0, "call": "s", "instancecheck": True,
        }.items()
    )
    + "def f(x): return E()"
)  # fmt: skip


def _writes(*lines: str, first: str = "") -> str:
    """A program that answers a call with raw lines."""
    text = "".join(line + "\n" for line in lines).encode()
    return f"import os\n{first}\ndef f(x):\n os.write(6, {text!r})\n os._exit(0)"


FORGED: dict[str, tuple[str, str]] = {
    "StopIteration in a map": (_IN_MAP, "def f(x): raise StopIteration"),
    "StopIteration under all": (_ALL, "def f(x): raise StopIteration"),
    "a StopIteration of its own": (
        _IN_MAP, "class S(StopIteration): pass\ndef f(x): raise S"),
    "StopAsyncIteration": (_IN_MAP, "def f(x): raise StopAsyncIteration"),
    "next of nothing": (_IN_MAP, "def f(x): return next(iter(()))"),
    "a raw stop": (_IN_MAP, _writes('{"stop": true}')),
    "a raw stop as an error": (_IN_MAP, _writes('{"error": ["StopIteration"], "message": ""}')),
    "a raw stop with a value": (_IN_MAP, _writes('{"stop": true, "value": 4, "after": [2]}')),
    "a stop before it is asked": (
        _IN_MAP, "import os\nos.write(6, b'{\"stop\": true}\\n' * 9)\ndef f(x): return 9"),
    "a stop after the names": (
        _IN_MAP,
        "import os\nos.write(6, b'{\"names\": {\"f\": {\"remote\": 0}}, \"modules\": []}\\n"
        "{\"stop\": true}\\n')\ndef f(x): return 9"),
    "two answers to one question": (
        _IN_MAP, _writes('{"value": 4, "after": [2]}', '{"stop": true}')),
    **{f"{name} in a map": (_IN_MAP, f"def f(x): raise {name}")
       for name in ("GeneratorExit", "KeyboardInterrupt", "SystemExit", "BaseException")},
    **{f"an exception called {name}": (
        _IN_MAP, f"E = type({name!r}, (Exception,), {{}})\ndef f(x): raise E")
       for name in ("StopIteration", "SystemExit", "AssertionError", "Lost", "object")},
    "an error without names": (_IN_MAP, _writes('{"error": 3, "message": []}')),
    "an exception without words": (
        _IN_MAP, "class E(Exception):\n def __str__(s): raise StopIteration\n"
        "def f(x): raise E"),
    "ends where exceptions are caught": (_CAUGHT, "import os\ndef f(x): os._exit(0)"),
    "ends where everything is caught": (_BARE, "import os\ndef f(x): os._exit(0)"),
    "no answer where everything is caught": (_BARE, _writes("[]")),
    "deaf where everything is caught": (
        f"{_BARE}\nf(3)", "import os\ndef f(x): os.close(5); return 1"),
    "dumb": (_EQUAL, "import os\ndef f(x): os.close(6); return 4"),
    "no room for an answer": (_CAUGHT, "def f(x): return 'x' * (1 << 17)"),
    **{f"raw {value}"[:60]: (_CAUGHT, _writes(f'{{"value": {value}, "after": [2]}}'))
       for value in (
           '{"fraction": "1/0"}', '{"decimal": "x"}', '{"set": [[1]]}', '{"dict": [[[1], 1]]}',
           '{"dict": 1}', '{"bytes": "zz"}', '{"remote": "x"}', '{"remote": null}', '{"what": 1}',
           '{"a": 1, "b": 2}', '{"integer": "0xg"}', '{"integer": 7}', "[" * 3000,
           "[" * 3000 + "]" * 3000, "1" * 5000, "nan", '"\\ud800')},
    **{f"arguments changed to {after}": (_CAUGHT, _writes(f'{{"value": 4, "after": {after}}}'))
       for after in ("[]", "[2, 3]", "null", '{"tuple": [2]}', "7", '{"dict": []}')},
    "no value at all": (_CAUGHT, _writes("{}")),
    "the expected list emptied": (
        "given, wanted = [2, 3], [4, 9]\ngot = f(given)\nassert got == wanted and len(got) == 2",
        "def f(x):\n x.clear()\n return []"),
    "math as a class": (
        "assert math.isclose(f(2), 4)",
        "class math: isclose = staticmethod(lambda *a: True)\ndef f(x): return 9"),
    "math as an object": (
        "assert math.isclose(f(2), 4)",
        "class M:\n def isclose(s, *a): return True\nmath = M()\ndef f(x): return 9"),
    "math as another module": (
        "assert math.isclose(f(2), 4)", "import cmath as math\ndef f(x): return 9"),
    "math with another isclose": (
        "assert math.isclose(f(2), 4)", "import math\nmath.isclose = bool\ndef f(x): return 9"),
    "names of Python": (
        "assert abs(f(2) - 4) < 1 and isinstance(f(2), int) and all([f(2) == 4])",
        "abs = lambda x: 0\nisinstance = all = lambda *a: True\ndef f(x): return 9"),
    "a length that is no number": (
        "assert len(f(2)) == 4", "class L:\n def __len__(s): return 10**30\ndef f(x): return L()"),
    **{f"anything in {test}": (test, _ANY) for test in (
        _EQUAL, "assert 4 == f(2)", "assert f(2) != 9", "assert not (f(2) != 4)", "assert f(2)",
        "assert not f(2)", "assert f(2) in [4]", "assert f(2) in {4}", "assert 4 in [f(2)]",
        "assert {f(2): 1}[4]", "assert f(2) - 4 == 0", "assert abs(f(2) - 4) < 1",
        "assert sum([f(2)]) == 4", "assert max([f(2), 4]) == 4", "assert int(f(2)) == 4",
        "assert float(f(2)) == 4", "assert str(f(2)) == '4'", "assert f'{f(2)}' == '4'",
        "assert sorted([3, 2], key=f) == [2, 3]", "assert [1, 2, 3, 4, 5][f(2)] == 5",
        "assert isinstance(f(2), int)", "assert set(map(f, [2])) == {4}",
        "assert any(f(x) == 4 for x in [2])", "assert round(f(2)) == 4",
        "import math\nassert math.isclose(f(2), 4)", "assert f(2) <= 4 <= f(2)",
        "assert hash(f(2)) == hash(4)", "assert list(filter(f, [4])) == [4]")},
    **{f"{value} for a number": ("assert abs(f(2) - 4) < 1e-6", f"def f(x): return {value}")
       for value in ("float('nan')", "float('inf')", "10**400", "complex('nan')", "'4'", "None",
                     "True", "NotImplemented", "...", "10**5000", "b'4'", "[4]", "{4}")},
}  # fmt: skip

QUICK = (
    "StopIteration in a map", "a raw stop", "a raw stop as an error", "two answers to one question",
    "ends where everything is caught", "math as an object", "arguments changed to [2, 3]",
    "anything in assert f(2) in [4]",
)  # fmt: skip

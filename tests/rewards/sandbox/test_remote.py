"""What the answers of a program in another process can do to the tests that call it."""

import io
import json
import os
import sys
import threading

import pytest

from postgrad.rewards.sandbox import guest, remote
from postgrad.rewards.sandbox.remote import Client, Lost, RemoteError, RemoteObject

HELLO = {"names": {"f": {"remote": 0}}, "modules": []}


def client_of(*replies, line_bytes=8192):
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in replies]
    return Client(io.BytesIO(), io.BytesIO(b"".join(lines)), line_bytes)


def f_of(*replies, **settings):
    """The program's function f, and the client, where the program answers so."""
    client = client_of(HELLO, *replies, **settings)
    return client.names()["f"], client


@pytest.fixture
def program():
    """program(source): the names of a program that is served by a thread of this process."""
    threads = []

    def serve(source):
        module = guest.load("program", source)
        (asked, ask), (reply, replied) = os.pipe(), os.pipe()
        asks, replies = os.fdopen(asked, "rb"), os.fdopen(replied, "wb", 0)
        thread = threading.Thread(target=remote.ProgramServer(module).serve, args=(asks, replies))
        thread.start()
        writer = os.fdopen(ask, "wb", 0)
        threads.append((thread, writer, asks, replies))
        return Client(writer, os.fdopen(reply, "rb"), 1 << 20).names()

    yield serve
    sys.modules.pop("program", None)
    for thread, writer, *pipes in threads:
        writer.close()
        thread.join()
        for pipe in pipes:
            pipe.close()


@pytest.mark.parametrize(
    "reply",
    [
        {"error": ["StopIteration", "Exception", "BaseException", "object"], "message": "x"},
        {"error": ["Mine", "StopIteration"], "message": "x"},
        {"error": ["StopAsyncIteration"], "message": "x"},
    ],
)
def test_what_would_end_a_loop_arrives_as_runtime_error(reply):
    f, _ = f_of(reply, reply)
    with pytest.raises(RuntimeError, match="the program raised"):
        f(2)
    with pytest.raises(RuntimeError):
        list(map(f, [2]))


def test_a_call_that_is_answered_with_a_stop_loses_the_program():
    f, client = f_of({"stop": True}, {"value": 4, "after": [2]})
    with pytest.raises(Lost, match="neither a value nor an error"):
        list(map(f, [2]))
    with pytest.raises(Lost):  # for good
        f(2)
    assert client.lost == "an answer has neither a value nor an error"


@pytest.mark.parametrize("deed", [len, iter, lambda f: f.attribute, lambda f: f[0]])
def test_only_next_can_stop(deed):
    f, _ = f_of({"stop": True})
    with pytest.raises(Lost):
        deed(f)
    f, _ = f_of({"stop": True})
    with pytest.raises(StopIteration):
        next(f)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"", "the program ended"),
        (b"7\n", "no object"),
        (b"[" * 3000 + b"\n", "no JSON"),
        (b'{"value": ' + b"1" * 5000 + b', "after": [2]}\n', "no JSON"),
        (b"x" * 8192, "too long"),
        ({"value": 4}, "other arguments"),
        ({"value": 4, "after": []}, "other arguments"),
        ({"value": 4, "after": [2, 3]}, "other arguments"),
        ({"value": {"fraction": "1/0"}, "after": [2]}, "holds no value"),
        ({"value": {"set": [[1]]}, "after": [2]}, "holds no value"),
        ({"value": {"dict": [[1]]}, "after": [2]}, "holds no value"),
        ({"value": {"remote": "x"}, "after": [2]}, "holds no value"),
        ({"value": {"decimal": "x"}, "after": [2]}, "holds no value"),
        ({"value": {"integer": 7}, "after": [2]}, "holds no value"),
        ({"value": {"what": 7}, "after": [2]}, "holds no value"),
    ],
)
def test_an_answer_that_is_none_is_the_end_whatever_a_test_catches(reply, why):
    f, client = f_of(reply)
    try:
        with pytest.raises(Lost, match=why):
            f(2)
    except Exception:  # noqa: BLE001
        pytest.fail("an `except Exception` of a test would have caught it")
    assert client.lost is not None


def test_an_iterator_is_an_object_of_the_program_and_a_length_a_number():
    f, _ = f_of({"value": [4, 9]})
    with pytest.raises(Lost, match="an iterator"):
        list(f)
    for length in (True, "3", 3.0, [3]):
        f, _ = f_of({"value": length})
        with pytest.raises(Lost, match="a length"):
            len(f)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["ValueError", "Exception"], ValueError),
        (["Mine", "KeyError", "LookupError", "Exception"], KeyError),
        (["UnicodeDecodeError", "UnicodeError", "ValueError", "Exception"], UnicodeError),
        (["SystemExit", "BaseException"], RemoteError),
        (["KeyboardInterrupt"], RemoteError),
        (["GeneratorExit"], RemoteError),
        (["open", "__import__", "Exception", "object"], RemoteError),
        ([], RemoteError),
        (7, RemoteError),
    ],
)
def test_an_exception_is_the_nearest_built_in_kind_and_never_one_that_ends_the_process(names, kind):
    f, client = f_of({"error": names, "message": "why"})
    with pytest.raises(Exception, match="why") as caught:
        f(2)
    assert type(caught.value) is kind
    assert client.lost is None


def test_the_name_of_a_module_of_python_can_be_called_and_nothing_else():
    client = client_of({"names": {"math": {"remote": 0}, "g": {"remote": 1}}, "modules": []},
                       {"value": 1, "after": []})  # fmt: skip
    names = client.names()
    assert names["math"]() == 1
    assert not isinstance(names["math"], RemoteObject)
    with pytest.raises(AttributeError):
        names["math"].isclose  # noqa: B018
    assert isinstance(names["g"], RemoteObject)


def test_names_of_python_and_modules_that_are_none_are_not_taken():
    hello = {
        "names": {"abs": 1, "_x": 2, "a b": 3, "check": 4, "AssertionError": 5},
        "modules": ["math", "os.path", "numpy", "abs", "_thread", ["json"], 7],
    }
    names = client_of(hello).names()
    assert set(names) == {"check", "math"}
    assert names["math"] is __import__("math")


def test_lists_are_changed_in_place_only_where_the_program_changed_them(program):
    names = program("def grow(x, y): x.append(1.0)\ndef same(x): return len(x)")
    inner = [0]
    x, y = [inner], (inner,)
    assert names["same"](x) == 1
    assert x[0] is inner
    names["grow"](x, y)
    assert x == [[0], 1.0]
    numbers = [1]
    program("def f(x): x[0] = True")["f"](numbers)
    assert numbers[0] is True


def test_integers_of_more_digits_than_python_writes_come_and_go(program):
    names = program("def double(n): return n * 2")
    assert names["double"](10**6000) == 2 * 10**6000
    assert names["double"](-(10**6000)) == -2 * 10**6000


def test_a_long_table_of_the_program_is_its_own_and_no_failure(program):
    names = program(
        "table = list(range(200_000))\nloop = [1]\nloop.append(loop)\nnested = [['x' * 900] * 99]\n"
        "short = [1, 2]\ndef f(x): return table[x]"
    )
    assert set(names) == {"short", "f"}
    assert names["f"](7) == 7


def test_generators_and_objects_are_iterated_to_their_end(program):
    names = program(
        "class Three:\n def __iter__(s): return iter([1, 2, 3])\n def __len__(s): return 3\n"
        "def three(): yield from [1, 2, 3]\ndef bad():\n yield 1\n raise StopIteration"
    )
    assert list(names["three"]()) == [1, 2, 3]
    three = names["Three"]()
    assert (list(three), len(three), list(three)) == ([1, 2, 3], 3, [1, 2, 3])
    with pytest.raises(RuntimeError):
        list(names["bad"]())

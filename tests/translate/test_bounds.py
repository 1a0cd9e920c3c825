"""Scripts and configs of others that would never end, or fill the memory: one message, exit 2."""

import itertools
import random
from pathlib import Path

import pytest

from helpers.hostile_recipes import BYTES
from helpers.hostile_runs import DEEP, RAW, VALUES, at_most
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.translate.files import parse_yaml
from postgrad.translate.shell import commands
from postgrad.translate.translate import SYSTEMS

CASES = Path(__file__).parent / "cases"
LETTERS = "abcdefghij"


def bomb(inner: str) -> str:
    """Ten lines, each nine times the one before: 3 486 784 401 values."""
    lines = ["a: &a {x: 1}"]
    for before, name in itertools.pairwise(LETTERS):
        lines.append(f"{name}: &{name} {inner.format(', '.join([f'*{before}'] * 9))}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb("[{}]"), "stand for more than 100000 values"),
        (bomb("{{<<: [{}]}}"), "stand for more than 100000 values"),
        ("a: &a [*a]", "contains itself"),
        ("[" * 1000 + "]" * 1000, "nested more than"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("a: 2001-99-99", "cannot be read"),
        ("a: [", "not YAML"),
        ("!!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_yaml_that_no_person_writes_is_refused(text: str, message: str) -> None:
    with at_most(20), pytest.raises(ValueError, match=message):
        parse_yaml(text)


def test_yaml_with_names_and_dates_is_what_a_person_means() -> None:
    text = "base: &base {lr: 1}\na: {<<: *base, day: 2001-01-02}\nb: [*base, *base]"
    assert parse_yaml(text) == {
        "base": {"lr": 1},
        "a": {"lr": 1, "day": "2001-01-02"},
        "b": [{"lr": 1}, {"lr": 1}],
    }
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A='$A$A'\nrun $A", "refers to itself"),
        ("A=xxxx\n" + "".join(f"A=$A$A$A$A{n}\n" for n in range(12)) + "run $A", "too much|over"),
        ("x '" + "a\n" * 20_000, "ends within a quote"),
        ("for a in " + " " * 100_000, "a line of over"),
        ("$(" * 5000, "ends within"),
    ],
)
def test_a_script_that_would_not_end_is_refused(text: str, message: str) -> None:
    with at_most(30), pytest.raises(UsageError, match=message):
        commands(text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", DEEP.encode(), "nested more than"),
        ("a.json", b'{"lr": ' + b"9" * 5000 + b"}", "thousands of digits"),
        ("a.json", b'{"lr": ' + b"9" * 400 + b"}", "lr = a whole number of more than"),
        ("a.yaml", b"\xff", "not UTF-8"),
        ("a.yaml", b"lr: .inf", "lr = inf: that is no number"),
        ("a.yaml", b"x" * 2**19, "more than 262144 bytes"),
        ("a.sh", b"\xff", "not UTF-8"),
    ],
)
def test_a_config_beyond_bounds_is_told(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["translate", "trl", "sft", str(path)]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "report it" not in stderr


def _mutated(drawn: random.Random, path: Path) -> bytes:
    """A script or config with a few words or bytes changed."""
    words = path.read_text("utf-8").split(" ")
    for _ in range(drawn.randint(1, 3)):
        value = str(drawn.choice((*VALUES, *RAW[:6], "$A", "$(x)", "--", "'", '"', "*a", "&a")))
        words[drawn.randrange(len(words))] = value[:6000]
    content = " ".join(words).encode(errors="surrogatepass")
    if drawn.random() < 0.1:
        at = drawn.randrange(len(content))
        content = content[:at] + drawn.choice(BYTES) + content[at:]
    return content


@pytest.mark.slow
def test_no_mutated_script_or_config_breaks_translate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = (".sh", ".yaml", ".py")
    sources = [path for path in sorted(CASES.iterdir()) if path.suffix in kinds]
    sources += sorted((CASES / "configs").iterdir())
    wrong: list[str] = []
    for number in range(600):
        drawn = random.Random(number)
        source = drawn.choice(sources)
        path = tmp_path / source.name
        path.write_bytes(_mutated(drawn, source))
        system = next(name for name in SYSTEMS if source.name.startswith(name))
        try:
            with at_most(20):
                code = main(["translate", system, str(path)])
        except Exception as error:  # noqa: BLE001  # that is what is looked for
            wrong.append(f"{number}, {source.name}: {type(error).__name__}: {error}"[:300])
            continue
        stderr = capsys.readouterr().err
        if code not in (0, 2) or "report it" in stderr:
            wrong.append(f"{number}, {source.name}: {code} {stderr}"[:300])
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])

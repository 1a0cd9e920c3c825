"""Recipes beyond what a person writes: one message with the line and key, and exit code 2."""

import os
from pathlib import Path

import pytest

from postgrad.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = (RECIPES / "gsm8k_sft.toml").read_text("utf-8")
DEEP = "[" * 1000 + "]" * 1000


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("postgrad: ")
    assert "report it" not in stderr
    return stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"seed = {'9' * 5000}", "thousands of digits (at line 1)"),
        (f"seed = {2**64}", f":1: seed = {2**64}: a whole number has at most 64 bits"),
        (f"task = {DEEP}", "deep in each other"),
        (".".join("a" * 300) + " = 1", "deep in each other"),
        ("seed = inf", ":1: seed = "),
        ("seed = nan", ":1: seed = "),
        ("seed = 1979-05-27", ":1: seed = datetime.date(1979, 5, 27): a date is no value"),
        ("seed = 07:32:00", ":1: seed = datetime.time(7, 32): a date is no value"),
        ('run_dir = "a\\u0000b"', ":1: run_dir = 'a\\x00b': it has a NUL character"),
        (f'run_dir = "{"a" * 300}"', ":1: run_dir = 'aaaa"),
        (f'run_dir = "{"a/" * 3000}"', "longer than a path may be"),
    ],
)
@pytest.mark.parametrize("command", ["config", "plan", "train"])
def test_a_value_beyond_bounds_is_named(
    command: str, line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    key = line.partition(" = ")[0]
    rest = [line for line in RECIPE.splitlines() if not line.startswith(f"{key} =")]
    path.write_text("\n".join([line, *rest]), "utf-8")
    assert message in refused(capsys, command, str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "9" * 5000], "thousands of digits"),
        (["--seed", DEEP], "deep in each other"),
        (["--" + ".".join("a" * 300), "1"], "a dotted key such as"),
        (["--" + "9" * 5000, "1"], "a dotted key such as"),
        (["--seed", "inf"], "--seed inf: seed = "),
        (["--seed", "1979-05-27"], "a date is no value"),
        (["--run_dir", "a" * 300], "longer than a path may be"),
        (["--model.path", "a/" * 3000], "longer than a path may be"),
    ],
)
def test_an_override_beyond_bounds_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = refused(capsys, "config", str(RECIPES / "gsm8k_sft.toml"), *words)
    assert message in stderr
    assert len(stderr) < 2000


@pytest.mark.parametrize("name", ["recipe.toml", "pipeline/pipeline.toml"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "a directory"),
        (lambda path: os.mkfifo(path), "is a pipe, where a file is expected"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, where a file is expected"),
        (lambda path: path.symlink_to(path.name), "symbolic links"),
        (lambda path: path.write_bytes(b"seed = 1\nrun_dir = '\xff'\n"), "line 2 is not UTF-8"),
        (lambda path: path.write_bytes(b"x" * 2**21), "more than 1048576 bytes"),
        (lambda path: path.write_bytes(b"\x00"), "is not TOML"),
    ],
)
def test_what_is_no_recipe_file_is_told(
    name: str, make: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    assert callable(make)
    make(path)
    asked = path if name == "recipe.toml" else path.parent
    stderr = refused(capsys, "config", str(asked))
    assert message in stderr or "folder without pipeline.toml" in stderr


def test_a_mark_at_the_beginning_of_a_recipe_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As editors of Windows write one."""
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())
    assert main(["config", str(path)]) == 0
    assert main(["config", str(RECIPES / "gsm8k_sft.toml")]) == 0
    stdout = capsys.readouterr().out
    half = len(stdout) // 2
    assert stdout[:half] == stdout[half:]


@pytest.mark.parametrize("word", ["a" * 300 + ".toml", "a\0b.toml", "a/" * 3000])
@pytest.mark.parametrize("command", ["config", "plan", "train", "resume", "report", "checkpoints"])
def test_a_path_on_the_command_line_that_no_file_can_have_is_told(
    command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = refused(capsys, command, word)
    assert "longer than a path may be" in stderr or "NUL" in stderr


def test_a_list_of_ten_thousand_lines_is_no_long_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of keys are found statement by statement, and each line reads a statement again."""
    path = tmp_path / "recipe.toml"
    path.write_text("x = [\n" + "1,\n" * 10_000 + "]\n" + RECIPE, "utf-8")
    assert "unknown key 'x'" in refused(capsys, "config", str(path))


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "tokenizer.vocab_size"])
def test_a_fresh_model_has_no_more_than_a_loaded_one_may_have(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """A plan of 2^31 layers took minutes."""
    words = ["plan", str(RECIPES / "quickstart" / "sft.toml"), f"--model.init.{key}", str(2**31)]
    assert f"model.init.{key} = {2**31}" in refused(capsys, *words)

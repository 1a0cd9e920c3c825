"""Files with a prompt that a source names: which of them are read."""

from pathlib import Path

import pytest

from postgrad.translate.files import MOST_PROMPT, prompt_text


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a config in examples/configs, and files beside and around it."""
    top = tmp_path / "checkout"
    (top / "examples" / "configs").mkdir(parents=True)
    (top / "examples" / "prompts").mkdir()
    (top / "pyproject.toml").write_text("", "utf-8")
    (top / "examples" / "prompts" / "cot.txt").write_text("Think: {}", "utf-8")
    (top / "examples" / "configs" / "own.md").write_text("Mine", "utf-8")
    (tmp_path / "secret.txt").write_text("secret", "utf-8")
    return top


def test_a_prompt_is_found_from_the_folder_of_its_config_up_to_the_top_of_the_checkout(
    checkout: Path,
) -> None:
    folder = checkout / "examples" / "configs"
    assert prompt_text("examples/prompts/cot.txt", folder) == "Think: {}"
    assert prompt_text("prompts/cot.txt", folder) == "Think: {}"
    assert prompt_text("own.md", folder) == "Mine"
    assert prompt_text("absent.txt", folder) is None


def test_nothing_outside_of_the_checkout_is_read(checkout: Path) -> None:
    folder = checkout / "examples" / "configs"
    (folder / "link.txt").symlink_to(checkout.parent / "secret.txt")
    (folder / "inner.txt").symlink_to(folder / "own.md")
    names = ("secret.txt", "../../../secret.txt", str(checkout.parent / "secret.txt"), "link.txt")
    assert [prompt_text(name, folder) for name in names] == [None] * 4
    assert prompt_text("inner.txt", folder) == "Mine"


def test_without_a_mark_of_a_top_only_the_own_folder_is_read(checkout: Path) -> None:
    (checkout / "pyproject.toml").unlink()
    folder = checkout / "examples" / "configs"
    assert prompt_text("prompts/cot.txt", folder) is None
    assert prompt_text("own.md", folder) == "Mine"


def test_what_is_no_prompt_by_its_name_or_contents_is_not_read(checkout: Path) -> None:
    contents = {"key.pem": b"x", ".env": b"x", "long.txt": b"x" * (MOST_PROMPT + 1),
                "binary.txt": b"\xff\xfe\x00"}  # fmt: skip
    for name, content in contents.items():
        (checkout / name).write_bytes(content)
    (checkout / "folder.txt").mkdir()
    names = [*contents, "folder.txt"]
    assert [prompt_text(name, checkout) for name in names] == [None] * 5
    (checkout / "whole.txt").write_bytes(b"x" * MOST_PROMPT)
    assert prompt_text("whole.txt", checkout) == "x" * MOST_PROMPT

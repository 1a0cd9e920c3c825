"""The files, modules and rooms that README and the pages name are those of the code."""

import re
from collections.abc import Iterator

from helpers.pages import PAGES, ROOT
from postgrad.core.text import nearest

SOURCE = ROOT / "src" / "postgrad"
FILES = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.py)`")
MODULES = re.compile(r"\bpostgrad((?:\.[a-z_]\w*)+)")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b|^my_")  # NAME.py, my_pkg/my_file.py: what a reader adds


def named(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Each match of the pattern with its page and line."""
    for page in PAGES:
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            for match in pattern.finditer(line):
                yield f"{page.relative_to(ROOT)}:{number}", match[1]


def test_every_python_file_that_a_page_names_exists() -> None:
    modules = [str(path.relative_to(ROOT)) for path in SOURCE.rglob("*.py")]
    missing = [
        f"{at}: {name} (nearest: {nearest(name, modules)})"
        for at, name in named(FILES)
        if not PLACEHOLDER.search(name)
        if not any((folder / name).is_file() for folder in (ROOT, SOURCE))
    ]
    assert missing == []


def test_every_file_that_a_page_names_without_its_folder_is_in_the_folder_of_the_page() -> None:
    missing: list[str] = []
    for page in PAGES:
        text = page.read_text("utf-8")
        folder = re.search(r"The code is in\s+`(src/[^`]*)`", text)
        if folder is None:
            continue
        missing += [
            f"{page.relative_to(ROOT)}: {name}"
            for name in re.findall(r"`([\w-]+\.py)`", text)
            if not (ROOT / folder[1] / name).is_file() and not PLACEHOLDER.search(name)
        ]
    assert missing == []


def test_every_module_that_a_page_names_exists() -> None:
    missing: list[str] = []
    for at, name in named(MODULES):
        place = SOURCE.joinpath(*name[1:].split("."))
        if not place.is_dir() and not place.with_suffix(".py").is_file():
            missing.append(f"{at}: postgrad{name}")
    assert missing == []


def test_the_rooms_in_the_docs_are_those_of_the_code_in_the_order_of_their_imports() -> None:
    house = (ROOT / "tests" / "test_house.py").read_text("utf-8")
    listed = re.search(r"(?s)^ROOMS = \((.*?)\)", house, re.MULTILINE)
    assert listed is not None
    rooms = re.findall(r'"(\w+)"', listed[1])
    assert set(rooms) == {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.partition("## The rooms")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)/` \|", table) == rooms
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"(?m)^      (\w+)/ ", readme) == rooms
    picture = (ROOT / "docs" / "images" / "rooms.svg").read_text("utf-8")
    drawn = set(re.findall(r"\b(\w+)/", " ".join(re.findall(r">([^<]*)</text>", picture))))
    assert drawn == set(rooms)

"""The page as a file: nothing in it runs but its one program."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.made_run import made_run, unpacked
from postgrad.observe.report.page import EXPORT, IMPORT, MODULES, STYLES, asset, live, report
from postgrad.observe.report.run import RunReader
from postgrad.observe.report.selection import Cap

ASSETS = Path(__file__).parents[3] / "src" / "postgrad" / "observe" / "report" / "assets"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--\u2028\ud800"
MORE = {"title": HOSTILE, "runs": 1, "differences": []}


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles, as browsers see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append("")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.inside[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside.append("")  # what comes now belongs to no element
        self.elements.append((f"/{tag}", {}))

    def texts(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        pairs = zip(self.elements, self.inside, strict=True)
        return [(attributes, text) for (name, attributes), text in pairs if name == tag]


@pytest.fixture
def page(tmp_path: Path) -> str:
    run = made_run(tmp_path / "<b>run", steps=2, text=lambda *_: HOSTILE)
    return "".join(report([RunReader(run, 0, Cap())], MORE))


def test_text_of_a_model_adds_no_element(page: str) -> None:
    elements = [name for name, _ in Reader(page).elements if not name.startswith("/")]
    assert elements.count("script") == 5  # contents, runs, rows, bodies, the program
    assert set(elements) == {
        "html", "head", "meta", "link", "title", "style", "body", "noscript", "script",
    }  # fmt: skip
    assert not set("\u2028\ud800") & set(page)


def test_the_policy_lets_just_the_one_program_and_the_one_style_in(page: str) -> None:
    reader = Reader(page)
    policy = next(
        attributes["content"]
        for name, attributes in reader.elements
        if name == "meta" and "http-equiv" in attributes
    )
    assert policy is not None
    ((_, program),) = [
        script for script in reader.texts("script") if script[0].get("type") == "module"
    ]
    ((_, style),) = reader.texts("style")
    assert f"script-src '{hash_of(program)}';" in policy
    assert f"style-src '{hash_of(style)}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def hash_of(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_samples_come_back_equal_from_the_file(page: str) -> None:
    blocks = {
        attributes["id"]: text
        for attributes, text in Reader(page).texts("script")
        if "id" in attributes
    }
    contents = json.loads(blocks["contents"])
    assert contents["title"] == HOSTILE
    rows = [
        row
        for name in contents["rows"]
        for message in unpacked(blocks[name])
        for group in message["groups"]
        for row in group["samples"]
    ]
    assert {row["text"] for row in rows} == {HOSTILE}
    ((name, run, start, end),) = contents["bodies"]
    assert (run, start, end) == (0, 0, len(rows)) == (0, 0, 16)
    assert set(unpacked(blocks[name])["bodies"]) == {str(number) for number in range(16)}


def test_nothing_of_the_page_is_fetched(page: str) -> None:
    rest = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""https?://|["'(]//[a-z]""", rest)  # packed data may have "//" by chance
    for name, attributes in Reader(page).elements:
        assert not attributes.get("src")
        assert name != "link" or attributes["href"] == "data:,"


def test_the_live_page_has_no_data_yet(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=1)
    blocks = Reader(live([RunReader(run, 0, Cap())], MORE)).texts("script")
    (contents,) = [text for attributes, text in blocks if attributes.get("id") == "contents"]
    assert json.loads(contents)["live"] is True
    assert len(blocks) == 2


def test_modules_import_from_earlier_ones_only_and_what_those_export() -> None:
    exported: dict[str, set[str]] = {}
    for name in MODULES:
        text = asset(name)
        for names, other in IMPORT.findall(text):
            assert other in exported, f"{name} imports {other}, which comes later"
            wanted = {
                name_imported.strip()
                for name_imported in names.strip("{}").split(",")
                if name_imported.strip()
            }
            assert wanted <= exported[other], f"{name}: {wanted - exported[other]} of {other}"
            for imported in wanted:
                assert re.search(rf"\b{imported}\b", IMPORT.sub("", text)), (
                    f"{name}: {imported} is not used"
                )
        assert "import " not in IMPORT.sub("", text)
        exported[name] = {export[2] for export in EXPORT.finditer(text)}
        assert "\nexport " not in EXPORT.sub("", text)


def test_every_asset_is_on_the_page_and_small() -> None:
    assert {asset_path.name for asset_path in ASSETS.iterdir()} == {*MODULES, *STYLES}
    large = [
        asset_path.name
        for asset_path in ASSETS.iterdir()
        if asset_path.read_text("utf-8").count("\n") >= 300
    ]
    assert large == []


@pytest.mark.parametrize("name", MODULES)
def test_text_never_becomes_markup_or_program(name: str) -> None:
    ways = (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
        "srcdoc", "DOMParser", "createContextualFragment", "javascript:", 'setAttribute("on',
    )  # fmt: skip
    assert [way for way in ways if way in asset(name)] == []

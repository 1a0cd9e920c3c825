"""Pages as readers see them: every table is a table, and no row of one is cut."""

import re
from html.parser import HTMLParser

import markdown
import pytest
from docs.tools.equations import SUPERFENCES, equation
from docs.tools.reference import pages

from helpers.pages import PAGES, ROOT

FENCES = {"custom_fences": [{"name": "math", "class": "equation", "format": equation}]}
CODE = re.compile(r"(`+).*?\1")
RULER = re.compile(r"\|\s*:?-{3}")  # of a table that is none


class Shown(HTMLParser):
    """The text that is not code, and the number of cells in each row of each table."""

    def __init__(self) -> None:
        super().__init__()
        self.prose: list[str] = []
        self.tables: list[list[int]] = []
        self._code = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._code += tag in ("code", "pre", "math")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append(0)
        elif tag in ("td", "th"):
            self.tables[-1][-1] += 1

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "math")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.prose.append(data)


def shown(text: str) -> Shown:
    reader = Shown()
    html = markdown.markdown(
        text,
        extensions=["attr_list", "tables", "pymdownx.highlight", SUPERFENCES],
        extension_configs={SUPERFENCES: FENCES},
    )
    reader.feed(html)
    return reader


def cells(row: str) -> int:
    """Of a row as it is written, without the pipes of code and the escaped ones."""
    return CODE.sub("", row).replace(r"\|", "").strip().strip("|").count("|") + 1


def written_rows(text: str) -> list[int]:
    """The cells of every row of every table as written, rulers left out."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```$", "", text)
    rows = [line for line in prose.splitlines() if line.lstrip().startswith("|")]
    return [cells(row) for row in rows if not re.fullmatch(r"[\s|:]*-[\s|:-]*", row)]


WRITTEN = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in PAGES}

GENERATED = ("reference/recipe.md", "reference/commands.md")  # a second to make: not at collection


def test_every_generated_page_is_looked_at() -> None:
    assert set(GENERATED) == set(pages())


@pytest.mark.parametrize("page", [*WRITTEN, *GENERATED])
def test_a_page_has_no_raw_pipes_and_no_cut_rows(page: str) -> None:
    text = WRITTEN[page] if page in WRITTEN else pages()[page]
    reader = shown(text)
    assert not RULER.search("\n".join(reader.prose))
    if page in WRITTEN:  # a generated page may have a row that looks like a ruler
        assert [row for table in reader.tables for row in table] == written_rows(text)
    assert all(set(table) == {table[0]} for table in reader.tables)


def test_a_table_behind_a_line_of_text_and_a_row_with_a_pipe_too_many_are_seen() -> None:
    assert RULER.search("\n".join(shown("- text\n| a | b |\n|---|---|\n").prose))
    assert written_rows("| a | b |\n|---|---|\n| `x|y` | 1 | lost |\n") == [2, 3]
    assert shown("| a | b |\n|---|---|\n| `x|y` | 1 | lost |\n").tables == [[2, 2]]

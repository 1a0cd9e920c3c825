"""The table of model types in docs/models.md, from src/postgrad/models/types.toml.

`python -m docs.tools.model_types` writes it anew; a test compares the two.
"""

from pathlib import Path

from postgrad.models.supported import refused_types

PAGE = Path(__file__).parents[1] / "models.md"
BEGIN, END = "<!-- types: docs/tools/model_types.py -->\n", "<!-- end of types -->"


def table() -> str:
    """One row for the types that work, and one for each reason of a refusal, with counts."""
    outcomes = refused_types()
    works = outcomes["works"]
    rows = ["| outcome | types |", "|---|---|", f"| **works** ({len(works)}) | {_names(works)} |"]
    for part, without in outcomes["without"].items():
        rows.append(f"| works, no {part}: {without['because']} | {_names(without['types'])} |")
    for reason, refused in outcomes.items():
        if reason not in ("works", "without") and (types := refused["types"]):
            rows.append(f"| refused ({len(types)}): {refused['because']} | {_names(types)} |")
    return "\n".join(rows) + "\n"


def _names(types: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in types)


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")

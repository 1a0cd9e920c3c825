"""The table of model types is that of types.toml."""

from docs.tools.model_types import PAGE, table, written


def test_the_page_of_models_has_the_table_of_types() -> None:
    """`python -m docs.tools.model_types` writes it anew."""
    page = PAGE.read_text("utf-8")
    assert written(page) == page
    assert table() in page

"""Rows of datasets on the hub, fetched and cached by `datasets`."""

from collections.abc import Iterator
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.data.files import Values, holds_bytes, plain


def read_hub(path: str, name: str | None, split: str) -> Iterator[tuple[str, Values]]:
    """(place, values) of each row of one split; columns of images and sounds are left out.

    Raises UsageError when the hub has no such dataset, configuration or split, or cannot be
    reached.
    """
    # these imports take a second and only hub datasets need them
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        table: Any = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise UsageError(
            f"dataset {path!r} (data.name {name!r}, data.split {split!r}): {error}; "
            "a file or folder on this machine works too: --data.path FILE"
        ) from error
    media = [field.name for field in table.features.arrow_schema if holds_bytes(field.type)]
    for row, values in enumerate(table.remove_columns(media)):
        yield f"{path} {split} row {row}", {key: plain(value) for key, value in values.items()}

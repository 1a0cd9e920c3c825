"""Hub datasets, read by `datasets` itself from a folder of the same layout."""

import shutil
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pytest

from helpers.hub import A, B, OfflineHub
from postgrad.core.errors import UsageError
from postgrad.data.hub import cached_datasets, dataset_commit, read_hub
from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three rows with texts, a picture, a list of pictures and bytes."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    picture = {"bytes": b"\x89PNG", "path": None}
    features = datasets.Features(
        question=datasets.Value("string"),
        answer=datasets.Value("string"),
        when=datasets.Value("date32"),
        picture=datasets.Image(decode=False),
        pictures=datasets.List(datasets.Image(decode=False)),
        raw=datasets.Value("binary"),
    )
    columns: dict[str, list[Any]] = {
        "question": ["a", "b", "c"],
        "answer": ["1", "2", "3"],
        "when": [None] * 3,
        "picture": [picture] * 3,
        "pictures": [[picture]] * 3,
        "raw": [b"x"] * 3,
    }
    to = tmp_path / "set"
    (to / "data").mkdir(parents=True)
    table = datasets.Dataset.from_dict(columns, features=features)
    table.to_parquet(to / "data" / "train-00000-of-00001.parquet")
    return to


def test_rows_come_in_order_without_their_pictures_and_bytes(folder: Path) -> None:
    rows = list(read_hub(str(folder), None, "train"))
    assert [place for place, _ in rows] == [f"{folder} train row {i}" for i in range(3)]
    assert rows[1][1] == {"question": "b", "answer": "2", "when": None}


def test_our_own_reader_gives_the_same_rows(folder: Path) -> None:
    ours = [row.values for row in list(read_rows(DataSettings(path=str(folder))))]
    assert ours == [values for _, values in read_hub(str(folder), None, "train")]


def test_a_split_or_configuration_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.split 'tset'\): Unknown split.*\['train'\]"):
        list(read_hub(str(folder), None, "tset"))
    with pytest.raises(UsageError, match=r"data\.name 'main'.*'main' not found. Available: "):
        list(read_hub(str(folder), "main", "train"))


def test_a_hub_that_cannot_be_reached_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str, *_: Any, **__: Any) -> None:
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UsageError, match=r"^dataset 'some/set' .* works too: --data\.path FILE$"):
        list(read_rows(DataSettings(path="some/set")))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfflineHub:
    hub = OfflineHub(tmp_path, monkeypatch)
    hub.dataset("some/rows", B, [{"question": "new", "answer": "2"}], when=1)
    hub.dataset("some/rows", A, [{"question": "old", "answer": "1"}], when=2)
    return hub


@pytest.mark.parametrize(("commit", "question"), [(A, "old"), (B, "new")])
def test_a_commit_gives_its_own_rows_and_not_the_newest_of_the_cache(
    hub: OfflineHub, commit: str, question: str
) -> None:
    rows = list(read_rows(DataSettings(path="some/rows", revision=commit)))
    assert [row.values["question"] for row in rows] == [question]
    assert cached_datasets("some/rows") == [A, B]


def test_a_commit_that_is_nowhere_is_refused_by_name(hub: OfflineHub) -> None:
    with pytest.raises(UsageError, match=rf"data\.revision 'c+'\).* has commit {A} of it, not c+"):
        list(read_rows(DataSettings(path="some/rows", revision="c" * 40)))


def test_rows_that_were_prepared_name_their_commit_where_the_hub_s_cache_is_gone(
    hub: OfflineHub,
) -> None:
    assert dataset_commit("some/rows", None) == A  # which main is
    shutil.rmtree(hub.models)
    assert dataset_commit("some/rows", None) == A  # the newest
    assert dataset_commit("some/rows", B) == B
    for path, revision in (("some/rows", "v1"), ("some/other", None), ("some/rows", "c" * 40)):
        with pytest.raises(UsageError, match="no dataset some/"):
            dataset_commit(path, revision)

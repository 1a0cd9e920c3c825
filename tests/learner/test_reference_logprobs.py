"""Logprobs of a frozen reference: computed once, kept on disk, never believed when damaged."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner import reference
from postgrad.learner.reference import ReferenceLogprobs

NAME = {"model": "a hash", "versions": ["2"]}


def sequences(rows: Sequence[Sequence[int]], first: int = 1) -> Sequences:
    """first: where loss begins."""
    masks = [np.arange(len(row)) >= first for row in rows]
    group = np.arange(len(rows)) // 2
    return Sequences(Ragged.of(rows, np.int32), Ragged.of(masks, np.bool_), group)


ROWS = [[1, 2, 3], [1, 2, 4, 5], [7, 8], [7, 9, 9]]


class Model:
    """Says something of tokens and masks; counts what it was asked."""

    def __init__(self, scale: float = -0.1) -> None:
        self.scale = scale
        self.asked = 0

    def __call__(self, part: Sequences) -> Ragged:
        self.asked += len(part)
        values = self.scale * part.tokens.values * part.loss_mask.values
        return part.tokens.like(values.astype(np.float32))


def prepared(
    folder: Path | None, model: Any, name: Any = NAME, wanted: Sequences | None = None
) -> tuple[ReferenceLogprobs, tuple[int, int]]:
    logprobs_store = ReferenceLogprobs()
    return logprobs_store, logprobs_store.prepare([wanted or sequences(ROWS)], model, folder, name)


def test_what_is_read_from_the_cache_has_the_bits_that_were_computed(tmp_path: Path) -> None:
    first, counts = prepared(tmp_path, Model())
    assert counts == (4, 0)
    second, counts = prepared(tmp_path, Model(scale=-9.0))  # would say something else
    assert counts == (0, 4)
    computed, cached = (each.of(sequences(ROWS)) for each in (first, second))
    assert computed.values.tobytes() == cached.values.tobytes()
    assert computed.values.dtype == np.float32
    np.testing.assert_allclose(computed.row(1), [0.0, -0.2, -0.4, -0.5])


def test_the_same_sequences_in_other_groups_are_another_entry(tmp_path: Path) -> None:
    pairs = sequences(ROWS)
    apart = replace(pairs, group=np.arange(len(ROWS)))
    counts = [prepared(tmp_path, Model(), wanted=each)[1] for each in (pairs, apart, pairs, apart)]
    assert counts == [(4, 0), (4, 0), (0, 4), (0, 4)]


def test_any_selection_in_any_order_is_known_afterwards(tmp_path: Path) -> None:
    logprobs_store, _ = prepared(tmp_path, Model())
    picked = logprobs_store.of(sequences([ROWS[3], ROWS[0]]))
    np.testing.assert_allclose(picked.values, [0.0, -0.9, -0.9, 0.0, -0.2, -0.3], rtol=1e-6)


def test_a_sequence_is_computed_once_however_often_it_is_wanted() -> None:
    model, logprobs_store = Model(), ReferenceLogprobs()
    doubled = sequences([*ROWS, ROWS[0], ROWS[0]])
    assert logprobs_store.prepare([doubled, sequences(ROWS)], model, None, NAME) == (4, 0)
    assert model.asked == 4


@pytest.mark.parametrize(
    "change",
    [
        {"name": {**NAME, "model": "another hash"}},
        {"name": {**NAME, "versions": ["3"]}},
        {"wanted": sequences([*ROWS[:3], [7, 9, 8]])},  # another row, or another template
        {"wanted": sequences(ROWS, first=2)},  # the same tokens, other loss tokens
        {"wanted": sequences(ROWS[:2])},
    ],
    ids=["model", "versions", "tokens", "masks", "fewer"],
)
def test_another_model_data_or_mask_is_another_entry(
    change: dict[str, Any], tmp_path: Path
) -> None:
    prepared(tmp_path, Model())
    model = Model()
    _, (computed, read) = prepared(tmp_path, model, **change)
    assert (computed, read) == (model.asked, 0)
    assert computed > 0
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("where", [0, 8, 40, -20, -1])
@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "text"])
def test_a_damaged_file_is_computed_anew_and_put_right(
    where: int, how: str, tmp_path: Path
) -> None:
    wanted, _ = prepared(tmp_path, Model())
    (file,) = tmp_path.glob("*.safetensors")
    good = file.read_bytes()
    place = where % len(good)
    flipped = good[:place] + bytes([good[place] ^ 0x21]) + good[place + 1 :]
    damaged = {"flipped": flipped, "cut": good[:place], "empty": b"", "text": b"not this file"}
    file.write_bytes(damaged[how])
    logprobs_store, (computed, _) = prepared(tmp_path, Model())
    np.testing.assert_array_equal(
        logprobs_store.of(sequences(ROWS)).values, wanted.of(sequences(ROWS)).values
    )
    if computed:
        assert file.read_bytes() == good
        assert prepared(tmp_path, Model())[1] == (0, 4)
    else:  # a byte that says nothing, such as a blank of the header
        assert how == "flipped"


def test_a_run_that_is_killed_finds_the_parts_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "PART", 2)

    class Killed(Exception):
        pass

    class Dying(Model):
        def __call__(self, part: Sequences) -> Ragged:
            if self.asked >= 2:
                raise Killed
            return super().__call__(part)

    with pytest.raises(Killed):
        prepared(tmp_path, Dying())
    logprobs_store, counts = prepared(tmp_path, Model())
    assert counts == (2, 2)
    undisturbed, _ = prepared(None, Model())
    np.testing.assert_array_equal(
        logprobs_store.of(sequences(ROWS)).values, undisturbed.of(sequences(ROWS)).values
    )


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    with pytest.raises(OSError, match="file"):
        prepared(tmp_path / "file" / "below", Model())


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    assert prepared(None, Model())[1] == (4, 0)
    assert prepared(None, Model())[1] == (4, 0)
    assert not list(tmp_path.iterdir())

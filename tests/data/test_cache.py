"""The cache of tokens: the same bits with it and without, and never another dataset's."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.files import cache_folder
from postgrad.data import cache as caching
from postgrad.data.cache import TokenCache
from postgrad.data.conversations import load_conversations
from postgrad.data.mixture import training_rows
from postgrad.data.overlap import HeldOut
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, MixSettings, PairSettings
from postgrad.models.fresh import TEMPLATE

WriteRows = Callable[..., str]
ROWS = [{"question": "x" * (i % 7), "answer": str(i), "level": i} for i in range(30)]


@pytest.fixture(autouse=True)
def _cache_small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "SMALLEST", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def path(write_rows: WriteRows) -> str:
    return write_rows(ROWS)


class Reader:
    """Loads both kinds of sets with one folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def conversations(self, tokenizer: Any, **settings: Any) -> Any:
        cache = TokenCache(tokenizer, self.folder) if self.folder else None
        return load_conversations(DataSettings(**settings), tokenizer, cache=cache)

    def prompts(self, tokenizer: Any, **settings: Any) -> Any:
        cache = TokenCache(tokenizer, self.folder) if self.folder else None
        return load_prompts(DataSettings(**settings), tokenizer, max_prompt_tokens=32, cache=cache)


def was_read(loaded: Any) -> bool:
    return "tokens from the cache (data.cache)" in loaded.account.notes


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_len": 27},
        {"max_len": 27, "on_too_long": "truncate", "max_lost_fraction": 1.0},
        {"filter": "helpers.row_functions:short", "map": "helpers.row_functions:shouts"},
        {"template": "{level}: {question}", "chat_template": TEMPLATE.replace("user", "USER")},
    ],
    ids=["plain", "dropped", "cut", "functions", "templates"],
)
def test_what_comes_from_the_cache_is_bit_for_bit_what_is_made_anew(
    settings: dict[str, Any], path: str, folder: Path, tokenizer: Any
) -> None:
    for kind in ("conversations", "prompts"):
        plain, first, again = (
            getattr(Reader(where), kind)(tokenizer, path=path, **settings)
            for where in (None, folder, folder)
        )
        assert not was_read(first)
        assert was_read(again)
        for other in (first, again):
            assert other.account.fates == plain.account.fates
            for fresh, cached in zip(plain.all(), other.all(), strict=True):
                assert fresh.token_ids.dtype == cached.token_ids.dtype == np.int32
                assert np.array_equal(fresh.token_ids, cached.token_ids)
                if kind == "conversations":
                    assert fresh.loss_mask.dtype == cached.loss_mask.dtype == np.bool_
                    assert np.array_equal(fresh.loss_mask, cached.loss_mask)
                else:
                    assert (fresh.question, fresh.answer) == (cached.question, cached.answer)
                    assert (fresh.row, fresh.metadata) == (cached.row, cached.metadata)


def test_hints_that_show_an_answer_come_from_the_cache(
    path: str, folder: Path, tokenizer: Any
) -> None:
    """Their rows are kept in halves, before the place of the answer and behind it."""
    hint = {"hint": "so: {group.answer}!"}
    plain, _, again = (
        Reader(where).prompts(tokenizer, path=path, **hint) for where in (None, folder, folder)
    )
    assert again.account.notes == ("tokens from the cache (data.cache)",) * 2
    for fresh, cached in zip(plain.all(), again.all(), strict=True):
        assert np.array_equal(fresh.hinted.token_ids, cached.hinted.token_ids)
        assert fresh.hinted.answer_at == cached.hinted.answer_at


def test_weights_of_messages_are_the_same_from_the_cache_and_decide_the_entry(
    folder: Path, write_rows: WriteRows, tokenizer: Any
) -> None:
    def rows(weight: float) -> str:
        answers = [weight if n % 3 else 1 for n in range(len(ROWS))]
        return write_rows([
            {"messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"], "weight": w},
            ]}
            for row, w in zip(ROWS, answers, strict=True)
        ])  # fmt: skip

    reader = Reader(folder)
    once = reader.conversations(tokenizer, path=rows(0.5), messages="messages")
    again = reader.conversations(tokenizer, path=rows(0.5), messages="messages")
    assert (was_read(once), was_read(again)) == (False, True)
    for fresh, cached in zip(once.all(), again.all(), strict=True):
        assert np.array_equal(fresh.loss_weights, cached.loss_weights)
        expected = 0.5 if fresh.row % 3 else 1.0
        assert fresh.loss_weights.tolist() == (fresh.loss_mask * expected).tolist()
    assert not was_read(reader.conversations(tokenizer, path=rows(0.25), messages="messages"))


def test_whatever_decides_the_tokens_makes_another_entry(
    path: str, folder: Path, write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer()
    reader = Reader(folder)
    reader.conversations(tokenizer, path=path)
    other = write_rows([*ROWS[:-1], {"question": "x", "answer": "?"}], "other.jsonl")
    for settings in (
        {"path": other},
        {"path": path, "limit": 20},
        {"path": path, "system": "s"},
        {"path": path, "strip": True, "template": " {question}"},
        {"path": path, "loss_turns": "last"},
        {"path": path, "loss_turns": ["user", "assistant"]},
        {"path": path, "chat_template_kwargs": {"mood": "calm"}},
        {"path": path, "chat_template": "{# other #}" + TEMPLATE},
        {"path": path, "map": "helpers.row_functions:shouts"},
    ):
        assert not was_read(reader.conversations(tokenizer, **settings)), settings
    for another in (
        make_tokenizer("{# other #}" + TEMPLATE),
        make_tokenizer(TEMPLATE, ("<|more|>",)),
    ):
        assert not was_read(reader.conversations(another, path=path))
    assert not was_read(reader.prompts(tokenizer, path=path))
    assert len(entries(folder)) == 13
    assert was_read(reader.conversations(tokenizer, path=path))


def test_what_does_not_decide_them_makes_none(
    path: str, folder: Path, write_rows: WriteRows, tokenizer: Any
) -> None:
    reader = Reader(folder)
    reader.conversations(tokenizer, path=path)
    renamed = write_rows([{**row, "level": 0} for row in ROWS], "renamed.jsonl")
    for settings in ({"path": renamed}, {"path": path, "max_len": 30, "shuffle": False}):
        assert was_read(reader.conversations(tokenizer, **settings))
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("where", [10, 0.5, -3])
def test_a_damaged_entry_is_told_and_made_again(
    where: float, path: str, folder: Path, tokenizer: Any
) -> None:
    reader = Reader(folder)
    wanted = [
        conversation.token_ids.tolist()
        for conversation in reader.conversations(tokenizer, path=path).all()
    ]
    (entry,) = entries(folder)
    entry_bytes = entry.read_bytes()
    place = int(where * len(entry_bytes)) if where == 0.5 else int(where)
    for damaged in (entry_bytes[: len(entry_bytes) // 2], b"", flipped(entry_bytes, place)):
        entry.write_bytes(damaged)
        reread = reader.conversations(tokenizer, path=path)
        assert [conversation.token_ids.tolist() for conversation in reread.all()] == wanted
        note, _ = reread.account.notes  # then the column that is not read
        assert note.startswith(f"the cache entry {entry} cannot be used: ")
        assert note.endswith("; it is computed again")
        assert entry.read_bytes() == entry_bytes
        assert entries(folder) == [entry]


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def test_a_folder_that_takes_nothing_costs_a_note(
    path: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    conversations = Reader(tmp_path / "file" / "cache").conversations(tokenizer, path=path)
    assert len(conversations) == len(ROWS)
    assert any(note.startswith("tokens are not kept") for note in conversations.account.notes)
    for name in ("POSTGRAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    homeless = load_conversations(DataSettings(path=path), tokenizer, cache=TokenCache(tokenizer))
    assert homeless.account.notes[0].startswith("tokens are not kept: there is no home folder")


def test_a_template_that_writes_the_date_is_rendered_anew_each_time(
    path: str, folder: Path, make_tokenizer: Callable[..., Any], tokenizer: Any
) -> None:
    dated = "{{ strftime_now('%d') }}" + TEMPLATE
    reader = Reader(folder)
    for _ in range(2):
        text = "{% include 'tokenizer' %}"
        assert not was_read(reader.prompts(make_tokenizer(dated), path=path))
        assert not was_read(reader.prompts(make_tokenizer(dated), path=path, chat_template=text))
        assert not was_read(reader.prompts(tokenizer, path=path, chat_template=dated))
    assert not folder.exists()


def test_small_sets_and_recipes_that_say_so_leave_nothing_behind(
    path: str, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(folder))
    training_rows(
        load_conversations, MixSettings(path=path, cache=False), tokenizer, exclude=HeldOut()
    )
    monkeypatch.setattr(caching, "SMALLEST", len(ROWS) + 1)
    training_rows(load_conversations, MixSettings(path=path), tokenizer, exclude=HeldOut())
    assert not folder.exists()
    monkeypatch.setattr(caching, "SMALLEST", len(ROWS))
    training_rows(load_conversations, MixSettings(path=path), tokenizer, exclude=HeldOut())
    assert [entry.parent for entry in entries(folder / "tokens")] == [folder / "tokens"]


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder("tokens") == Path("/one/tokens")
    monkeypatch.delenv("POSTGRAD_CACHE")
    assert cache_folder("tokens") == Path("/two/postgrad/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("tokens") == Path(os.environ["HOME"]) / ".cache" / "postgrad" / "tokens"


def test_pairs_and_labels_from_the_cache_are_the_same_bits(
    folder: Path, tokenizer: Any, write_rows: WriteRows
) -> None:
    rows = [{"prompt": "q" * i, "chosen": f"good {i}", "rejected": "bad"} for i in range(5)]
    settings = PairSettings(path=write_rows(rows, "pairs.jsonl"))
    cache = TokenCache(tokenizer, folder)
    fresh_pairs = load_pairs(settings, tokenizer, cache=cache)
    read = load_pairs(settings, tokenizer, cache=cache)
    assert (was_read(fresh_pairs), was_read(read)) == (False, True)
    for fresh, cached in zip(fresh_pairs.all(), read.all(), strict=True):
        assert fresh.chosen.tobytes() == cached.chosen.tobytes()
        assert fresh.rejected.tobytes() == cached.rejected.tobytes()
        assert fresh.chosen_mask.tobytes() == cached.chosen_mask.tobytes()
        assert fresh.rejected_mask.tobytes() == cached.rejected_mask.tobytes()
    labelled = load_labelled(settings, tokenizer, cache=cache)
    assert was_read(labelled)  # the same conversations with the same answers
    assert labelled.all()[0].token_ids.tobytes() == fresh_pairs.all()[0].chosen.tobytes()


def test_the_same_conversations_with_other_answers_meet_no_old_entry(
    folder: Path, tokenizer: Any, write_rows: WriteRows
) -> None:
    """Of whole conversations the last message is the answer, of others all that answers."""
    user, first_answer, second_answer = (
        {"role": role, "content": role} for role in ("user", "assistant", "assistant")
    )
    joined_row = {"completion": [user, first_answer, user, second_answer], "label": True}
    apart = {"prompt": [user], "completion": [first_answer, user, second_answer], "label": True}
    cache = TokenCache(tokenizer, folder)
    loaded = [
        load_labelled(PairSettings(path=write_rows([row] * 2)), tokenizer, cache=cache)
        for row in (joined_row, apart)
    ]
    assert [was_read(each) for each in loaded] == [False, False]
    first, second = (each.all()[0] for each in loaded)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.loss_mask.sum() == second.loss_mask.sum() / 2

"""Memory that was freed goes back to the system where there is much of it."""

import sys

import psutil
import pytest

from postgrad.core import process

glibc = pytest.mark.skipif(
    process._library() is None, reason="a C library that cannot be asked for its free memory"
)
PIECE = 2**16  # less than what the C library maps for itself: it lies in the heap


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture
def holes():
    """32 MB that are free, between pieces that are not."""
    pieces = [bytearray(PIECE) for _ in range(1024)]
    kept = pieces[::2]
    del pieces
    return kept


@glibc
def test_much_free_memory_is_given_back(holes, monkeypatch):
    monkeypatch.setattr(process, "TRIM_BYTES", 2**24)
    assert process.free_heap_bytes() >= 2**24
    before = resident()
    process.trim_heap()
    assert before - resident() > 2**24
    assert all(piece == bytes(PIECE) for piece in holes)


@glibc
def test_little_free_memory_stays(holes, monkeypatch):
    monkeypatch.setattr(process, "TRIM_BYTES", process.free_heap_bytes() + 2**20)
    before = resident()
    process.trim_heap()
    assert before - resident() < 2**24


def test_elsewhere_nothing_is_known_and_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    process._library.cache_clear()
    try:
        assert process.free_heap_bytes() == 0
        process.trim_heap()
    finally:
        process._library.cache_clear()

"""Progress of work deep inside calls."""

from postgrad.core.progress import EVERY, report, reported_to, tracked


def test_a_listener_hears_of_every_so_many_items_and_nobody_else_does() -> None:
    heard: list[tuple[str, int, int]] = []
    with reported_to(lambda *counts: heard.append(counts)):
        assert list(tracked("rows read", range(2 * EVERY), 2 * EVERY)) == list(range(2 * EVERY))
        report("rows tokenised", 1, 2)
    report("rows tokenised", 2, 2)
    assert heard == [
        ("rows read", 0, 2 * EVERY),
        ("rows read", EVERY, 2 * EVERY),
        ("rows tokenised", 1, 2),
    ]

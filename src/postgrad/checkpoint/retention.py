"""Which checkpoints may be deleted: pure."""

from collections.abc import Collection, Iterable


def surplus(steps: Iterable[int], keep: int, always: Collection[int]) -> list[int]:
    """The steps to delete: all but the `keep` newest and those in `always` (best and latest).

    A best checkpoint is never pushed out by newer ones (OpenRLHF#506), and does not take the place
    of one of the newest.
    """
    ordered = sorted(set(steps))
    newest = set(ordered[-keep:])
    return [step for step in ordered if step not in newest and step not in always]

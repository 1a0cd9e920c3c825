"""Which hardware a recipe would run on as it is, and what that costs in device-hours."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.plan.hardware import Device, Hardware, catalogue
from postgrad.plan.plan import Facts, Outlook, outlook
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Offer:
    """The fewest devices of a kind on which the recipe fits. overrides: how its ranks are set."""

    device: Device
    count: int
    overrides: tuple[str, ...]
    outlook: Outlook

    @property
    def device_hours(self) -> float | None:
        """Hours times devices; None where the steps are not known."""
        hours = self.outlook.timing.hours
        return None if hours is None else hours * self.count

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "device": self.device.name,
            "count": self.count,
            "overrides": " ".join(self.overrides),
            "peak_bytes": self.outlook.memory.peak_bytes,
            "hours": self.outlook.timing.hours,
            "device_hours": self.device_hours,
            "price": _price(self) or None,
        }


def search(recipe: Recipe, facts: Facts) -> list[Offer]:
    """One offer for each kind of GPU that the recipe fits on, the cheapest first."""
    devices = [device for device in catalogue().values() if not device.is_cpu]
    found = [offer for device in devices for offer in _first(recipe, facts, device)]
    return sorted(found, key=lambda one: (one.device_hours or 0.0, one.count))


def _first(recipe: Recipe, facts: Facts, device: Device) -> Iterator[Offer]:
    """The fewest devices that do, weights divided only where that is needed."""
    for count in COUNTS:
        for stage in ("zero1", "zero2", "zero3") if count > 1 else ("none",):
            ranks = ("--cluster.type", "ray", "--learner.sharding", stage) if count > 1 else ()
            flags = ("--learner.ranks", str(count), *ranks)
            try:
                changed = with_overrides(recipe, flags)
                there = outlook(
                    changed, replace(facts, hardware=Hardware(count=count, device=device))
                )
            except UsageError:  # batches that do not divide into so many ranks
                continue
            if there.fits:
                yield Offer(device, count, flags, there)
                return


def search_rows(found: Sequence[Offer]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings, and a line for each offer."""
    rows = [
        [
            f"{one.count} x {one.device.name}",
            one.outlook.recipe.learner.sharding,
            f"{one.outlook.memory.peak_bytes / 1e9:.1f} of {one.device.memory_bytes / 1e9:.0f}",
            "" if one.outlook.timing.hours is None else f"{one.outlook.timing.hours:,.2f}",
            "" if one.device_hours is None else f"{one.device_hours:,.2f}",
            _price(one),
        ]
        for one in found
    ]
    headings = ["devices", "sharding", "GB at the peak", "hours", "device-hours", "price"]
    keep = [any(row[n] for row in rows) or n < 3 for n in range(len(headings))]
    kept = [[cell for cell, stays in zip(row, keep, strict=True) if stays] for row in rows]
    return [text for text, stays in zip(headings, keep, strict=True) if stays], kept


def search_note(found: Sequence[Offer]) -> str:
    """How an offer is taken, below the table."""
    if not found:
        return f"no hardware of the table does, up to {COUNTS[-1]} devices of a kind"
    several = [one for one in found if one.count > 1]
    flags = shlex.join((several or found)[0].overrides)
    return f"the recipe with its ranks set so: {flags}, as the line says"


def _price(one: Offer) -> str:
    """What it costs where the device's row says what an hour does."""
    price, hours = one.device.price_per_hour, one.device_hours
    return "" if price is None or hours is None else f"{price * hours:,.2f}"

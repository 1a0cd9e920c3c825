"""The hardware on which a recipe fits as it is, and the device-hours that it takes there."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.plan.advice import ranked
from postgrad.plan.hardware import Device, Hardware, catalogue
from postgrad.plan.plan import Facts, Outlook, outlook
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Offer:
    """The fewest devices of a kind on which the recipe fits."""

    device: Device
    count: int  # devices
    overrides: tuple[str, ...]  # flags that set the recipe's ranks: ("--learner.ranks", "8", ...)
    outlook: Outlook  # of the recipe with these ranks

    @property
    def device_hours(self) -> float | None:
        """Hours times devices; None where the steps are not known."""
        hours = self.outlook.timing.hours
        return None if hours is None else hours * self.count

    def to_json(self) -> dict[str, Any]:
        """Its entry in the output of --json."""
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
    offers = [offer for device in devices for offer in _first(recipe, facts, device)]
    return sorted(offers, key=lambda offer: (offer.device_hours or 0.0, offer.count))


def _first(recipe: Recipe, facts: Facts, device: Device) -> Iterator[Offer]:
    """The fewest devices of a kind that are enough, with the least sharding that fits."""
    for count in COUNTS:
        for stage in ("zero1", "zero2", "zero3") if count > 1 else ("none",):
            flags = ranked(recipe, count, stage) if count > 1 else ("--learner.ranks", "1")
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


def search_rows(offers: Sequence[Offer]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings, and a row for each offer. Columns that are empty in all rows are left out."""
    rows = [
        [
            f"{offer.count} x {offer.device.name}",
            offer.outlook.recipe.learner.sharding,
            f"{offer.outlook.memory.peak_bytes / 1e9:.1f} of {offer.device.memory_bytes / 1e9:.0f}",
            "" if offer.outlook.timing.hours is None else f"{offer.outlook.timing.hours:,.2f}",
            "" if offer.device_hours is None else f"{offer.device_hours:,.2f}",
            _price(offer),
        ]
        for offer in offers
    ]
    headings = ["devices", "sharding", "GB at the peak", "hours", "device-hours", "price"]
    keep = [any(row[n] for row in rows) or n < 3 for n in range(len(headings))]
    kept = [[cell for cell, stays in zip(row, keep, strict=True) if stays] for row in rows]
    return [text for text, stays in zip(headings, keep, strict=True) if stays], kept


def search_note(offers: Sequence[Offer]) -> str:
    """The note below the table: how to run on an offered hardware."""
    if not offers:
        return f"no hardware of the table does, up to {COUNTS[-1]} devices of a kind"
    several = [offer for offer in offers if offer.count > 1]
    flags = shlex.join((several or offers)[0].overrides)
    return f"the recipe with its ranks set so: {flags}, as the line says"


def _price(offer: Offer) -> str:
    """The price of the run; empty where the device's row has none, or the hours are not known."""
    price, hours = offer.device.price_per_hour, offer.device_hours
    return "" if price is None or hours is None else f"{price * hours:,.2f}"

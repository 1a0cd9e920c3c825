"""The hardware on which a recipe fits as it is, and the device-hours that it takes there."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.core.settings import ShardingStage
from postgrad.plan.change import digits
from postgrad.plan.hardware import Device, Hardware, catalogue
from postgrad.plan.plan import Facts, RunPlan
from postgrad.plan.splits import STAGES, Split, best_split
from postgrad.recipe.recipe import Recipe

COUNTS = (1, 2, 4, 8, 16, 32, 64)
SHOWN = 8  # splits of the cards that are there


@dataclass(frozen=True, slots=True)
class Offer:
    """The fewest devices of a kind on which the recipe fits."""

    device: Device
    count: int  # devices
    overrides: tuple[str, ...]  # flags of ranks and engines: ("--learner.ranks", "8", ...)
    plan: RunPlan  # of the recipe with these ranks

    @property
    def device_hours(self) -> float | None:
        """Hours times devices; None where the steps are not known."""
        hours = self.plan.timing.hours
        return None if hours is None else hours * self.count

    def to_json(self) -> dict[str, Any]:
        """Its entry in the output of --json."""
        return {
            "device": self.device.name,
            "count": self.count,
            "overrides": shlex.join(self.overrides),
            "learner_devices": self.plan.recipe.learner.ranks,
            "engine_devices": self.plan.places.own_cards,
            "peak_bytes": self.plan.memory.peak_bytes,
            "hours": self.plan.timing.hours,
            "device_hours": self.device_hours,
            "price": _price(self) or None,
        }


def search(recipe: Recipe, facts: Facts) -> list[Offer]:
    """One offer for each kind of GPU that the recipe fits on, the cheapest first."""
    devices = [device for device in catalogue().values() if not device.is_cpu]
    offers = [offer for device in devices for offer in _first(recipe, facts, device)]
    return sorted(offers, key=lambda offer: (offer.device_hours or 0.0, offer.count))


def _first(recipe: Recipe, facts: Facts, device: Device) -> Iterator[Offer]:
    """The fewest devices of a kind that are enough, with the least sharding that fits, in the
    fastest way to share them between learner and engines.
    """
    for count in COUNTS:
        there = replace(facts, hardware=Hardware(count=count, device=device))
        stages: tuple[ShardingStage, ...] = STAGES[1:] if count > 1 else STAGES[:1]
        best = best_split(recipe, count, there, stages)
        if best is not None:
            yield Offer(device, count, best.overrides, best.plan)
            return


def search_rows(offers: Sequence[Offer]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings, and a row for each offer. Columns that are empty in all rows are left out."""
    rows = [
        [
            f"{offer.count} x {offer.device.name}",
            offer.plan.recipe.learner.sharding,
            _engines_on(offer),
            f"{offer.plan.memory.peak_bytes / 1e9:.1f}/{offer.device.memory_bytes / 1e9:.0f}",
            _hours(offer.plan.timing.hours),
            _hours(offer.device_hours),
            _price(offer),
        ]
        for offer in offers
    ]
    headings = ["devices", "sharding", "engines on", "GB", "hours", "device-h", "price"]
    keep = [any(row[n] for row in rows) or n in (0, 1, 3) for n in range(len(headings))]
    kept = [[cell for cell, stays in zip(row, keep, strict=True) if stays] for row in rows]
    return [text for text, stays in zip(headings, keep, strict=True) if stays], kept


def search_note(offers: Sequence[Offer]) -> str:
    """The note below the table: how to run on an offered hardware."""
    if not offers:
        return f"no hardware of the table fits, up to {COUNTS[-1]} devices of a kind"
    several = [offer for offer in offers if offer.count > 1]
    flags = shlex.join((several or offers)[0].overrides)
    return f"to run the recipe so, otherwise unchanged (the advice may need less): {flags}"


def split_rows(splits: Sequence[Split]) -> tuple[Sequence[str], list[list[str]]]:
    """Headings, and a row for each way to share the cards, the fastest first."""
    rows = [
        [
            str(split.plan.recipe.learner.ranks),
            split.engines,
            split.plan.recipe.learner.sharding,
            f"{split.plan.memory.peak_bytes / 1e9:.1f}",
            digits(split.plan.timing.step.get("sample", 0.0)),
            digits(split.plan.timing.step_seconds),
            "" if split.plan.timing.hours is None else f"{split.plan.timing.hours:,.1f}",
        ]
        for split in splits[:SHOWN]
    ]
    return ("learn", "sample", "sharding", "GB", "sample s", "step s", "hours"), rows


def split_note(splits: Sequence[Split], hardware: Hardware) -> str:
    """The best way to share the cards, as flags."""
    where = f"{hardware.count} x {hardware.device.name}"
    if not splits:
        return f"no split of {where} between learner and engines fits"
    return f"the best split of {where}: {shlex.join(splits[0].overrides)}"


def _engines_on(offer: Offer) -> str:
    """On how many of the devices engines are, and whether a learner is there too."""
    places = offer.plan.places
    if not offer.plan.recipe.trains_on_rollouts or not places.engines:
        return ""
    return str(places.own_cards) if places.own_cards else "the same"


def _hours(hours: float | None) -> str:
    """Two decimals of few hours, none of many; empty where they are not known."""
    if hours is None:
        return ""
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.2f}"


def _price(offer: Offer) -> str:
    """The price of the run; empty where the device's row has none, or the hours are not known."""
    price, hours = offer.device.price_per_hour, offer.device_hours
    return "" if price is None or hours is None else f"{price * hours:,.2f}"

"""What a session is held to, in one table; what it came to, and what missed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu.session import PARTS, Result
from benchmarks.gpu.work import FULL, JOBS, LOADS, SMALL, WAYS, step_name, way_name

CHECK = "passes"  # the form, and the goal, of figures that are yes or no
Read = Callable[[Result], float]
Verdict = Literal["met", "missed", "not run"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a result, and its goal.

    case: of its part. read: the number in
    the case's result. least, most: the goal; neither: it is shown, and held to nothing. form: how
    it is written.
    """

    label: str
    part: str
    case: str
    read: Read
    form: str
    least: float | None = None
    most: float | None = None

    @property
    def goal(self) -> str:
        """ ">= 45%"; "" where it has none."""
        if self.form == CHECK:
            return CHECK
        if self.least is not None:
            return f">= {self.text(self.least)}"
        return "" if self.most is None else f"<= {self.text(self.most)}"

    def text(self, value: float) -> str:
        """A number as tables have it; of a check a word."""
        if self.form == CHECK:
            return "passes" if value else "does not pass"
        return self.form.format(value)

    def verdict(self, value: float | None) -> Verdict:
        """Whether the goal is met."""
        if value is None:
            return "not run"
        low = self.least is not None and not value >= self.least
        high = self.most is not None and not value <= self.most
        return "missed" if low or high else "met"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A figure of a session. why: there is no value."""

    figure: Figure
    value: float | None
    why: str = ""

    @property
    def shown(self) -> str:
        """The number in words."""
        if self.value is not None:
            return self.figure.text(self.value)
        return "failed" if self.why.startswith("failed") else "not run yet"

    @property
    def verdict(self) -> str:
        """ "met", "missed", "failed", "not run"; "" where there is no goal and a number."""
        if self.shown == "failed":
            return "failed"
        figure_verdict = self.figure.verdict(self.value)
        return "" if figure_verdict == "met" and not self.figure.goal else figure_verdict


def key(name: str) -> Read:
    """The number of that name."""
    return lambda result: float(result[name])


def passed(result: Result) -> float:
    """1 where a check passed: one without a word of its own passed where it did not fail."""
    return float(result.get("passed", True))


def phase(name: str) -> Read:
    """Seconds of a phase."""
    return lambda result: float(result["phases"][name]["seconds"])


def figures(small: bool = False) -> Iterator[Figure]:
    """All of them, in the order of the tables."""
    yield from _checks()
    yield from _training()
    yield from _decode(small)
    yield from _steps(small)
    yield Figure("plan: memory, worst miss", "planner", "memory", key("worst"), "{:.1%}", most=0.05)
    yield Figure("plan: time after --calibrate, worst miss", "planner", "time after --calibrate",
                 key("worst"), "{:.1%}", most=0.15)  # fmt: skip
    yield Figure("plan: time by the table, worst miss", "planner", "time by the table",
                 key("worst"), "{:.1%}")  # fmt: skip
    yield Figure("100M learns: reward of RL's last five steps", "learning", "100M spells backward",
                 lambda result: float(result["rl"]["last_reward"]), "{:.3f}")  # fmt: skip


CHECKS = (
    "SFT of the quickstart", "reward rises in 20 steps", "flex attention is tree attention",
    "graphs are eager decoding", "tests/gpu", "kill and resume",
)  # fmt: skip


def _checks() -> Iterator[Figure]:
    for name in CHECKS:
        yield Figure(f"check: {name}", "checks", name, passed, CHECK, least=1)


def _training() -> Iterator[Figure]:
    for job in JOBS:
        goal = 0.45 if job == JOBS[0] else None
        if "free" not in job.words:
            yield Figure(f"SFT {job.name}: MFU", "training", job.name, key("mfu"), "{:.1%}", goal)
    profile = f"profile {JOBS[0].name}"
    yield Figure(
        f"SFT {JOBS[0].name}: idle share", "training", profile, key("idle_share"), "{:.1%}"
    )
    yield Figure(
        "cost of deterministic mode, SFT 1.5B 4k", "training", "1.5B 4k free",
        key("deterministic_cost"), "{:.1%}", most=0.10,
    )  # fmt: skip


def _decode(small: bool) -> Iterator[Figure]:
    sizes = SMALL if small else FULL
    for load in LOADS:
        name = load.name(sizes)
        goal = 0.60 if load is LOADS[0] else None
        yield Figure(f"decode 1.5B, {name}: tokens/s", "decode", name, key("tokens_per_second"),
                     "{:,.0f}")  # fmt: skip
        yield Figure(f"decode 1.5B, {name}: of the bandwidth limit", "decode", name,
                     key("share_of_limit"), "{:.0%}", goal)  # fmt: skip
    first = LOADS[0].name(sizes)
    for other in ("graphs off", "transformers"):
        name = f"{first} {other}"
        yield Figure(f"decode 1.5B, {name}: tokens/s", "decode", name, key("tokens_per_second"),
                     "{:,.0f}")  # fmt: skip
    yield Figure("rollouts: times as fast as vLLM", "decode", "vllm", ratio, "{:.2f}")


def ratio(result: Result) -> float:
    """Of the medians of elapsed time."""
    return float(result["ratio"]["seconds"]["of_medians"])


def _steps(small: bool) -> Iterator[Figure]:
    sizes = SMALL if small else FULL
    for prompts in sizes.prompts:
        name = step_name(prompts, sizes.samples)
        yield Figure(f"GRPO 1.5B {name}: s a step", "step", name, key("step_seconds"), "{:.2f}")
        for part in ("sample", "train", "publish"):
            yield Figure(f"GRPO 1.5B {name}: {part}, s", "step", name, phase(part), "{:.2f}")
        yield Figure(f"GRPO 1.5B {name}: times as fast as TRL", "step", f"{name} trl", ratio,
                     "{:.2f}", least=3)  # fmt: skip
    for way in WAYS:
        yield Figure(f"weights to an engine by {way}: s per GB", "step", way_name(way),
                     key("seconds_per_gb"), "{:.3f}")  # fmt: skip


def outcomes(results: Mapping[str, Any]) -> list[Outcome]:
    """Every figure, with its number in the file of results or the reason why there is none."""
    small = bool(results.get("about", {}).get("small"))
    return [outcome(figure, results) for figure in figures(small)]


def outcome(figure: Figure, results: Mapping[str, Any]) -> Outcome:
    """A figure as the results have it."""
    part = results.get("parts", {}).get(figure.part)
    if part is None:
        return Outcome(figure, None, "its part has not run")
    result = part["cases"].get(figure.case)
    if result is None:
        return Outcome(figure, None, f"its part ended before it: {part.get('ended', 'cut')}")
    for word in ("skipped", "failed"):
        if word in result:
            return Outcome(figure, None, f"{word}: {result[word]}")
    try:
        return Outcome(figure, figure.read(result))
    except (KeyError, TypeError, IndexError):
        return Outcome(figure, None, "the case has no such number")


def report(results: Mapping[str, Any]) -> str:
    """The table, and the list of what missed its goal, failed, or did not run."""
    all_outcomes = outcomes(results)
    width = max(len(entry.figure.label) for entry in all_outcomes)
    lines = [heading(results), f"{'':{width}}  {'measured':>13}  {'goal':>10}"]
    lines += [
        f"{entry.figure.label:{width}}  {'-' if entry.value is None else entry.shown:>13}  "
        f"{entry.figure.goal:>10}  {entry.verdict}".rstrip()
        for entry in all_outcomes
    ]
    for title, listed in (
        (
            "missed",
            [
                f"{entry.figure.label}: {entry.shown}, wanted {entry.figure.goal}"
                for entry in all_outcomes
                if entry.verdict == "missed"
            ],
        ),
        ("failed", failures(results)),
        (
            "not run",
            [
                f"{entry.figure.label}: {entry.why[:160]}"
                for entry in all_outcomes
                if entry.value is None and not entry.why.startswith("failed")
            ],
        ),
    ):
        lines += ["", f"{title}: {len(listed)}", *(f"  {line}" for line in listed)]
    return "\n".join(lines)


def failures(results: Mapping[str, Any]) -> list[str]:
    """Cases that failed, and parts that did not end well."""
    lines: list[str] = []
    for name in PARTS:
        part = results.get("parts", {}).get(name, {"cases": {}})
        lines += [
            f"{name}: {case}: {result['failed'][:300]}"
            for case, result in part["cases"].items()
            if "failed" in result
        ]
        if part.get("ended", "whole") != "whole":
            lines.append(f"{name}: {part['ended']}")
    return lines


def heading(results: Mapping[str, Any]) -> str:
    """Card, versions and date."""
    about = results.get("about", {})
    card = results.get("parts", {}).get("training", {}).get("cases", {}).get("card", {})
    versions = ", ".join(f"{name} {text}" for name, text in about.get("versions", {}).items())
    words = [card.get("name", "no card was measured"), versions, str(about.get("date", ""))[:10]]
    return "; ".join(word for word in words if word)

"""Mathematical equality by math-verify (Hugging Face): LaTeX and plain expressions."""

import logging
from collections.abc import Collection
from functools import cache, lru_cache
from typing import Any, ClassVar

from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

_FORMULA_NAMES = """
    Integer Float Rational Number Symbol Function Add Mul Pow Mod Eq Ne Lt Le Gt Ge Rel Not And Or
    Xor E I S pi oo zoo nan EulerGamma GoldenRatio Catalan Poly Tuple Matrix Interval FiniteSet
    Union Intersection Complement EmptySet Reals Integers Naturals Rationals Complexes Derivative
    Integral Sum Product Limit diff integrate limit summation product expand factor simplify cancel
    together apart gcd lcm binomial factorial evaluate abs max min pow round divmod sum True False
    None
"""
_DELIMITED = ("$", r"\boxed", r"\(", r"\[")


class Math(Verifier):
    """1 where math-verify finds the sample's answer equal to the reference answer, else 0.

    The answer of a sample is what math-verify extracts: \\boxed{...} (several of one paragraph are
    a set), else the last LaTeX or plain expression. Its own timeouts are signals that fail off the
    main thread and return "wrong" in silence (Math-Verify#65): they are off, because workers are
    killed from outside.
    """

    sandboxed: ClassVar[bool] = True  # sympy's parser of plain expressions is Python's eval
    imports_bytes: ClassVar[int] = 52_000_000  # sympy, and the grammar of LaTeX

    boxed_only: bool = False  # a sample without \boxed{...} scores 0
    float_rounding: int = 6
    strict: bool = True  # names of variables matter, and a set is no tuple

    def prepare(self) -> None:
        _quiet_library()
        _parse(r"\boxed{\frac{1}{2}}", True)  # the first parse builds its grammar

    def formulas(self) -> Collection[str]:
        return formula_names()

    def check(self, prompt: PromptView) -> str | None:
        if prompt.answer is None:
            return "there is no reference answer"
        if not _reference(prompt.answer):
            return f"math-verify reads no answer in {prompt.answer[-80:]!r}"
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        return _marked(prompt.answer or "")

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        reason = self.check(prompt)
        if reason is not None:
            raise ValueError(reason)
        from math_verify import verify

        gold = _reference(prompt.answer or "")
        answers = _parse(rollout.text, self.boxed_only)
        right = bool(answers) and verify(
            gold,
            answers,
            float_rounding=self.float_rounding,
            strict=self.strict,
            timeout_seconds=None,
        )
        # The matched string: to print a huge parsed power would compute its digits.
        answer = answers[-1][:200] if answers and isinstance(answers[-1], str) else None
        return Score(float(right), {"answer": answer})


@cache
def formula_names() -> frozenset[str]:
    """Names of sympy's functions, numbers and sets: all that a formula in plain text may use."""
    import sympy

    return frozenset([*sympy.functions.__all__, *_FORMULA_NAMES.split()])


def _quiet_library() -> None:
    """Turns off math-verify's warning that timeouts are off: they are off on purpose."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@lru_cache(maxsize=64)
def _reference(answer: str) -> list[Any]:
    return _parse(_marked(answer), False, "no_fallback")


def _marked(answer: str) -> str:
    """A reference answer as a text that math-verify finds it in."""
    answer = answer.replace(r"\$", "")  # the sign of an amount, which begins no formula
    bare = not any(mark in answer for mark in _DELIMITED)
    return rf"\boxed{{{answer}}}" if bare else answer


def _parse(text: str, boxed_only: bool, fallback: Any = "first_match") -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if boxed_only and r"\boxed" not in text:
        return []
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, configs, fallback_mode=fallback, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

"""Mathematical equality by math-verify (Hugging Face): LaTeX and plain expressions."""

import logging
import math
import re
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import Any, ClassVar

from postgrad.rewards.math_text import readable
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier, only_answer

_FORMULA_NAMES = """
    Integer Float Rational Number Symbol Function Add Mul Pow Mod Eq Ne Lt Le Gt Ge Rel Not And Or
    Xor E I S pi oo zoo nan EulerGamma GoldenRatio Catalan Poly Tuple Matrix Interval FiniteSet
    Union Intersection Complement EmptySet Reals Integers Naturals Rationals Complexes Derivative
    Integral Sum Product Limit diff integrate limit summation product expand factor simplify cancel
    together apart gcd lcm binomial factorial evaluate abs max min pow round divmod sum True False
    None
"""
# Space between the rows of a matrix, which math-verify would read as a product.
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(pt|pc|mm|cm|in|ex|em|bp|mu)\s*\]")
_MOST_BITS = 2**23  # of a power that is computed: about a second; a tower never ends
_LONGEST = 400  # characters of a ballot
# What is multiplied out for a ballot, so that it takes milliseconds and never a clock.
_MOST_TERMS, _HIGHEST_POWER, _LARGEST_NUMBER = 200, 64, 10**40
_PARTS = 6  # of an exponent
_DIGITS = 25  # of a value that is compared by relative difference
_TINY_SHARE, _HUGE_SHARE, _HUGE = 0.01, 1e-12, 10**15
_MOST_SIZES = _MOST_TERMS, _HIGHEST_POWER, _LARGEST_NUMBER
_TEXTS = re.compile(r'\s*\[\s*"')  # a JSON list of texts begins so, and no formula
_DELIMITED = ("$", r"\boxed", r"\(", r"\[")


class Math(Verifier):
    """1 where math-verify finds the sample's answer equal to the reference answer, else 0.

    The answer of a sample is what math-verify extracts: \\boxed{...} (several of one paragraph are
    a set), else the last LaTeX or plain expression. Its own timeouts are signals that fail off the
    main thread and return "wrong" in silence (Math-Verify#65): they are off, because workers are
    killed from outside. A power that would take longer than that is not computed: it is equal to
    one that is written alike, else the score is an error.
    """

    highest: ClassVar[float | None] = 1.0
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
        return _marked(only_answer(prompt.answer) or "")

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        reason = self.check(prompt)
        if reason is not None:
            raise ValueError(reason)
        from math_verify import verify

        gold = _reference(prompt.answer or "")
        answers = _parse(rollout.text, self.boxed_only)
        if any(map(_is_endless, [*gold, *answers])):
            right = _alike(gold, answers)
        else:
            right = bool(answers) and verify(
                gold,
                answers,
                float_rounding=self.float_rounding,
                strict=self.strict,
                timeout_seconds=None,
            )
            right = _near(gold, answers, right, self.float_rounding)
        # The matched string: to print a huge parsed power would compute its digits.
        answer = answers[-1][:200] if answers and isinstance(answers[-1], str) else None
        return Score(float(right), {"answer": answer, **({} if right else _ballot(answers))})


@cache
def formula_names() -> frozenset[str]:
    """Names of sympy's functions, numbers and sets: all that a formula in plain text may use."""
    import sympy

    return frozenset([*sympy.functions.__all__, *_FORMULA_NAMES.split()])


def _quiet_library() -> None:
    """Turns off math-verify's warning that timeouts are off: they are off on purpose."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _is_endless(answer: Any) -> bool:
    """Whether a parsed answer has a power that takes too long to compute."""
    from sympy import Pow, preorder_traversal

    parts = () if isinstance(answer, str) else preorder_traversal(answer)
    return any(isinstance(part, Pow) and _bits(part) > _MOST_BITS for part in parts)


def _bits(part: Any) -> float:
    """At most so many bits has the exact value of an expression, numerator and denominator
    together; 0 for what is no whole number or quotient, since sympy rounds it or leaves it as it
    is. NaN for powers of 1 whose exponent is beyond a float.
    """
    if part.is_Rational:
        return math.log2(abs(part.p) or 1) + math.log2(part.q)
    if part.is_Pow:
        return _bits(part.base) * abs(_value(part.exp))
    if part.is_Add or part.is_Mul:
        return sum(map(_bits, part.args)) + (math.log2(len(part.args)) if part.is_Add else 0.0)
    return 0.0


def _value(part: Any) -> float:
    """About the value of an expression: infinite beyond a float, 0 where it is no number."""
    values = [_value(inner) for inner in part.args]
    try:
        if part.is_Rational:
            return part.p / part.q
        if part.is_Pow:
            power = values[0] ** values[1]
            return power if isinstance(power, float) else 0.0  # the power of a negative number
    except OverflowError:
        return math.inf
    except ZeroDivisionError:
        return 0.0
    if part.is_Add or part.is_Mul:
        return sum(values) if part.is_Add else math.prod(values)
    return 0.0


def _near(gold: Sequence[Any], answers: Sequence[Any], equal: bool, rounding: int) -> bool:
    """`equal`, but by relative difference for numbers at the ends of the scale: math-verify rounds
    to `rounding` decimal places, which leaves nothing of tiny numbers, and huge ones differ by
    their last bits.
    """
    from sympy import Float

    if not answers:
        return equal
    wanted, number = _number(gold[0]), _number(answers[0])
    if wanted is None or number is None or not wanted:
        return equal
    off = abs(wanted - number)
    if abs(wanted) < 10.0**-rounding:
        return equal and bool(off <= _TINY_SHARE * abs(wanted))
    if abs(wanted) > _HUGE and any(answer.has(Float) for answer in (gold[0], answers[0])):
        return equal or bool(off <= _HUGE_SHARE * abs(wanted))
    return equal


def _number(answer: Any) -> Any:
    """The value of sums, products and powers of real numbers; None of anything else, such as a
    percentage, which may be equal to two numbers.
    """
    from sympy import Basic, preorder_traversal

    if not isinstance(answer, Basic) or not all(
        part.is_Number or part.is_NumberSymbol or part.is_Add or part.is_Mul or part.is_Pow
        for part in preorder_traversal(answer)
    ):
        return None
    value = answer.evalf(_DIGITS)  # pyright: ignore[reportAttributeAccessIssue]
    return value if value.is_Float or value.is_Integer else None


def _alike(gold: Sequence[Any], answers: Sequence[Any]) -> bool:
    """Whether an answer is written as the reference is. Raises ValueError where it is not: whether
    they are equal is not known.
    """
    if answers and not set(map(_form, gold)) & set(map(_form, answers)):
        digits = int(_MOST_BITS * math.log10(2))
        raise ValueError(
            "answer and reference answer are written differently, and to compare their values "
            f"takes a power of more than {digits} digits, which is not computed"
        )
    return bool(answers)


def _ballot(answers: Sequence[Any]) -> dict[str, str]:
    """What a wrong answer votes as where its spelling may differ, as 2(x + 1) and 2x + 2 do.

    math-verify's own equality is no equivalence: it rounds. Here only identities of algebra lead to
    one form, so answers that vote together are equal, though not all equal ones vote together.
    """
    formula = _immutable(answers[0]) if answers else ""
    if isinstance(formula, str) or not formula.args:
        return {}
    texts = (_form(spelling) for spelling in (_multiplied_out(formula), formula))
    text = next((text for text in texts if len(text) <= _LONGEST), None)
    return {} if text is None else {"votes_as": text}


def _immutable(answer: Any) -> Any:
    """The same; a matrix that may be changed has no parts to look at."""
    from sympy import ImmutableMatrix, MatrixBase

    return ImmutableMatrix(answer) if isinstance(answer, MatrixBase) else answer


def _form(answer: Any) -> str:
    """A parsed answer as it is built, its terms sorted. sympy's own order would compute powers."""
    answer = _immutable(answer)
    if isinstance(answer, str) or not answer.args:
        return str(answer)
    return _written(answer, [_form(part) for part in answer.args])


def _written(answer: Any, parts: list[str]) -> str:
    from sympy import Add, FiniteSet, Mul

    if isinstance(answer, Add | Mul | FiniteSet):
        parts = sorted({*parts} if isinstance(answer, FiniteSet) else parts)
    return f"{type(answer).__name__}({', '.join(parts)})"


def _multiplied_out(part: Any) -> Any:
    """A formula with its sums, products and powers of numbers computed, and a symbol for any other
    function of them; as it is where that would be large, or divides by zero.
    """
    from sympy import nan, zoo

    if not all(size <= most for size, most in zip(_size(part), _MOST_SIZES, strict=True)):
        return part
    value = _computed(part)
    return part if value.has(nan, zoo) else value


def _computed(part: Any) -> Any:
    from sympy import Add, Expr, Mul, Rational, Symbol, UnevaluatedExpr, expand

    if not part.args:
        return Rational(str(part)) if part.is_Float else part
    inner = [_computed(argument) for argument in part.args]
    if isinstance(part, UnevaluatedExpr):  # one in a hundred, of a percent sign
        return inner[0]
    plain = all(isinstance(argument, Expr) and argument.is_commutative for argument in inner)
    if plain and (type(part) in (Add, Mul) or (part.is_Pow and _exponent(part) is not None)):
        return expand(part.func(*inner))
    return Symbol(_written(part, [_form(argument) for argument in inner]))


def _exponent(power: Any) -> Any:
    """The exponent of a power where it is a number of a few parts, as -1/2 is; else None."""
    from sympy import preorder_traversal

    parts = list(islice(preorder_traversal(power.exp), _PARTS + 1))
    if len(parts) > _PARTS or not all(part.args or part.is_Rational for part in parts):
        return None
    exponent = _multiplied_out(power.exp)
    return exponent if exponent.is_Rational else None


def _size(part: Any) -> tuple[float, float, float]:
    """At most so many terms has a part that is multiplied out, its degree, and the largest number
    in it; infinite where they are not worth counting.
    """
    if not part.args:
        return 1, 1, _largest(part)
    terms, degrees, numbers = zip(*map(_size, part.args), strict=True)
    if part.is_Add:
        return sum(terms), max(degrees), max(numbers)
    if part.is_Mul:
        return math.prod(terms), sum(degrees), max(numbers)
    exponent = _exponent(part) if part.is_Pow else None
    if exponent is None:
        return max(terms), max(degrees), max(numbers)
    power = max(abs(exponent.p), exponent.q)
    if power * degrees[0] > _HIGHEST_POWER or terms[0] > _MOST_TERMS:
        return math.inf, math.inf, math.inf
    return math.comb(power + terms[0] - 1, power), power * degrees[0], max(numbers)


def _largest(number: Any) -> float:
    """Of numerator and denominator; infinite for a decimal number of many zeros, 0 for a symbol."""
    if number.is_Rational:
        return max(abs(number.p), number.q)
    if not number.is_Float:
        return 0
    return 1 if number == 0 or 1e-30 < abs(number) < 1e30 else math.inf


@lru_cache(maxsize=64)
def _reference(stated: str) -> list[Any]:
    answer = only_answer(stated) or ""
    if _TEXTS.match(answer):  # several: brackets would make an interval of two
        return []
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
    text = readable(_ROW_SPACE.sub(lambda _: r"\\", text.replace(r"\$", "")))
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, configs, fallback_mode=fallback, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

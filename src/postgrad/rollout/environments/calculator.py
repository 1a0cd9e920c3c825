"""Exact arithmetic on an expression that a model wrote: parsed to a syntax tree, never run."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

LONGEST = 200  # characters of an expression
_BITS = 4096  # of the numerator or denominator of any intermediate result
_DIGITS = 12  # of a decimal that does not end

_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as "(2 + 3) * 4.5".
    """
    # Raises ValueError or ZeroDivisionError for what cannot be computed, with a reason for a model.
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST}")
    text = expression.strip()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        raise ValueError(f"{text!r} is no arithmetic expression") from error
    return written(_value(tree.body, text))


def written(number: Fraction) -> str:
    """A number as text: exact as an integer or a finite decimal, else "1/3 (about 0.333...)"."""
    if number.denominator == 1:
        return str(number.numerator)
    twos, fives, rest = 0, 0, number.denominator
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    if rest == 1:
        return _decimal(number, max(twos, fives))
    return f"{number.numerator}/{number.denominator} (about {_decimal(number, _DIGITS)})"


def _decimal(number: Fraction, places: int) -> str:
    digits = str(abs(round(number * 10**places))).rjust(places + 1, "0")
    return f"{'-' if number < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return _bounded(_number(node, text))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
    part = ast.get_source_segment(text, node) or text
    hint = "; a power is written **" if isinstance(node, ast.BinOp) else ""
    raise ValueError(f"{part!r} is not arithmetic: numbers and + - * / // % ** only{hint}")


def _number(node: ast.Constant, text: str) -> Fraction:
    if type(node.value) is int:
        return Fraction(node.value)
    if type(node.value) is float:
        digits = (ast.get_source_segment(text, node) or "").replace("_", "")
        if re.search(r"[eE][+-]?\d{4}", digits):
            raise ValueError(f"{digits} is too large or too small")
        return Fraction(digits)  # 0.1 is a tenth, which no float is
    raise ValueError(f"{ast.get_source_segment(text, node)} is no number")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"{written(base)} ** {written(exponent)} is not exact: a whole exponent")
    size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if size > 1 and abs(exponent) * (size - 1) > _BITS:
        raise ValueError("the power is too large")
    if abs(exponent) > _BITS:  # of 0 and 1
        exponent = exponent % 2 + 2 * (1 if exponent > 0 else -1)
    return _bounded(base ** int(exponent))


def _bounded(number: Fraction) -> Fraction:
    if max(abs(number.numerator).bit_length(), number.denominator.bit_length()) > _BITS:
        raise ValueError("a number on the way is too large")
    return number

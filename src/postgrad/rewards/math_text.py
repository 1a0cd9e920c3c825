"""Numbers and marks of answers that math-verify would read as something else, written so that it
reads them right.
"""

import re
from fractions import Fraction

_MOST_POWER = 400  # of ten, whose zeros are written out
_BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=[^\s*])((?:[^*\n]|\*(?!\*))++)(?<!\s)\*\*(?![\w(\[{*$])")
# Only what nobody means as Euler's number: 1.5e3, 1e-05, 2e3, 2E-5, but not 2e-5.
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\])(?<!\d,)(?P<digits>\d++(?:\.\d++)?+)(?P<e>[eE])(?P<power>[-+]?\d{1,3}+)"
    r"(?!\w|[.,]\d)"
)
_THOUSANDS = re.compile(r"(?<![\w.,\\])[1-9]\d{0,2}+(?:(?:\\[,;:! ]|~)\d{3})++(?!\d)")
_SPACED = re.compile(r"(?<=\\boxed\{)\s*+-?+[1-9]\d{0,2}+(?: \d{3})++(?=\s*(?:\.\d+\s*)?\})")
_SEPARATOR = re.compile(r"\\[,;:! ]|~| ")
_REPEATING = re.compile(
    r"(?<![\w.,])(\d{0,50}+)\.(\d{0,50}+)\\(?:overline|bar)\s*\{\s*(\d{1,50})\s*\}"
)
_MIXED = re.compile(r"(?<![\w.,/^)}\\])(\d{1,9}+) (\d{1,9}+)/(\d{1,9}+)(?![\w/^]|[.,]\d)")
_ENDED = re.compile(r"(?<=\d)[.,;]\s*+(?=\})")
# Four letters or more: 5 xyz is a product.
_COUNTED = re.compile(
    r"(?<=\\boxed\{)(\s*+-?+[\d.,]++)\s++((?P<word>[A-Za-z]{4,}+)(?: [A-Za-z]++)*+)\.?+\s*+(?=\})"
)
_NOT_COUNTED = """
    hundred thousand million billion trillion quadrillion dozen hundreds thousands millions
    billions trillions dozens percent infinity half halves third thirds quarter quarters alpha
    beta gamma delta epsilon zeta theta iota kappa lambda sigma upsilon omega sqrt sinh cosh
    tanh arcsin arccos arctan choose times over plus minus
"""
_NO_UNITS = {*_NOT_COUNTED.split()}


def readable(text: str) -> str:
    """`text` with bold print removed, and with numbers in scientific notation, with spaces between
    thousands, mixed with a fraction, repeating without end, or of things ("5 eggs" in a box) as
    math-verify reads them by their values.
    """
    text = _BOLD.sub(r"\1", text.replace("\u2212", "-"))
    text = _SCIENTIFIC.sub(_written_out, text)
    for grouped in (_THOUSANDS, _SPACED):
        text = grouped.sub(lambda match: _SEPARATOR.sub("", match[0]), text)
    text = _REPEATING.sub(_as_fraction, text)
    text = _MIXED.sub(_improper, text)
    return _COUNTED.sub(_with_unit, _ENDED.sub("", text))


def _written_out(match: re.Match[str]) -> str:
    """The number with its zeros; as it is where `e` may be Euler's number."""
    digits, power = match["digits"], match["power"]
    plain = power.lstrip("+-")
    scientific = match["e"] == "E" or "." in digits or digits == "1" or plain == power
    if not (scientific or plain.startswith("0")) or int(plain) > _MOST_POWER:
        return match[0]
    first, _, rest = digits.partition(".")
    place, digits = len(first) + int(power), first + rest
    if place <= 0:
        return f"0.{'0' * -place}{digits}"
    digits = digits.ljust(place, "0")
    decimals = digits[place:]
    return f"{digits[:place]}.{decimals}" if decimals else digits


def _as_fraction(match: re.Match[str]) -> str:
    """0.1666... is 16/90 - 1/90."""
    before, once, period = match.groups()
    value = Fraction(int(period), 10 ** len(once) * (10 ** len(period) - 1))
    value += Fraction(int(before + once or "0"), 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _improper(match: re.Match[str]) -> str:
    units, above, below = map(int, match.groups())
    return f"{units * below + above}/{below}" if 0 < above < below else match[0]


def _with_unit(match: re.Match[str]) -> str:
    number, words = match[1], match[2]
    unit = match["word"].lower() not in _NO_UNITS
    return rf"{number}\text{{ {words}}}" if unit else match[0]

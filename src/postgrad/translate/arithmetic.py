"""$(( ... )) of a shell, computed without one: 64-bit whole numbers, as bash has them.

Operators are bash's but for those that assign. Nothing is looked up but the script's variables.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

LONGEST = 500  # characters of an expression
DEEPEST = 30  # brackets, signs, powers and names within each other
MOST = 1000  # numbers and names that are read, those within the values of names too
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|(?:\$\{)?\$?([A-Za-z_]\w*)\}?"
    r"|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:()]))"
)
# From the loosest to the tightest; all of them group to the left. ** and ?: are read elsewhere.
_LEVELS: tuple[Mapping[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
    },
    {"<<": lambda a, b: a << (b % 64), ">>": lambda a, b: a >> (b % 64)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: _divide(a, b), "%": lambda a, b: _rest(a, b)},
)


def compute(expression: str, variables: Mapping[str, object]) -> int:
    """The value of an expression. A variable's value may be an expression itself.

    Raises ValueError for what is none, a division by zero, a name that the script does not set, and
    for more than a person would write.
    """
    return _Reader(expression, variables, [0], 0).value()


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    text, place = expression.strip(), 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text[place:]!r} is no arithmetic")
        tokens.append(next(filter(None, match.groups())))
        place = match.end()
    return tokens


class _Reader:
    """A recursive-descent parser that computes while it reads, operators by precedence."""

    def __init__(
        self, expression: str, variables: Mapping[str, object], read: list[int], depth: int
    ) -> None:
        """read: [count] of the numbers and names read so far, shared with the readers of names'
        values. depth: how deep this expression lies within others.
        """
        if len(expression) > LONGEST:
            raise ValueError("the expression is too long")
        self._tokens, self._place = _tokens(expression), 0
        self._variables, self._read, self._depth = variables, read, depth

    def value(self) -> int:
        """The value of the whole expression."""
        value = self._choice()
        if self._place < len(self._tokens):
            raise ValueError(f"{self._tokens[self._place]!r} is too many")
        return value

    def _take(self, *wanted: str) -> str | None:
        token = self._tokens[self._place] if self._place < len(self._tokens) else None
        if token not in wanted:
            return None
        self._place += 1
        return token

    def _need(self, token: str) -> None:
        if self._take(token) is None:
            raise ValueError(f"{token!r} is missing")

    @contextmanager
    def _deeper(self) -> Generator[None]:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("the expression is too deep")
        yield
        self._depth -= 1

    def _choice(self) -> int:
        with self._deeper():
            condition = self._level(0)
            if self._take("?") is None:
                return condition
            yes = self._choice()
            self._need(":")
            no = self._choice()
            return yes if condition else no

    def _level(self, number: int) -> int:
        if number == len(_LEVELS):
            return self._power()
        value = self._level(number + 1)
        while (operator := self._take(*_LEVELS[number])) is not None:
            value = _wrapped(_LEVELS[number][operator](value, self._level(number + 1)))
        return value

    def _power(self) -> int:
        base = self._sign()
        if self._take("**") is None:
            return base
        with self._deeper():
            exponent = self._power()
        if exponent < 0:
            raise ValueError("an exponent is below 0")
        return _wrapped(pow(base, exponent, 1 << 64))

    def _sign(self) -> int:
        sign = self._take("-", "+", "!", "~")
        if sign is None:
            return self._operand()
        with self._deeper():
            value = self._sign()
        return {"-": _wrapped(-value), "+": value, "!": int(not value), "~": ~value}[sign]

    def _operand(self) -> int:
        if self._take("(") is not None:
            value = self._choice()
            self._need(")")
            return value
        if self._place == len(self._tokens):
            raise ValueError("the expression ends early")
        token = self._tokens[self._place]
        self._place += 1
        self._read[0] += 1
        if self._read[0] > MOST:
            raise ValueError("names stand for too much")
        if token[0].isdigit():
            return _wrapped(_number(token))
        value = self._variables.get(token)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{token!r} has no value")
        return _Reader(value, self._variables, self._read, self._depth).value()


def _number(token: str) -> int:
    base, sharp, digits = token.partition("#")
    if sharp:
        return int(digits, int(base))
    octal = token[0] == "0" and token.isdigit()
    return int(token, 8) if octal else int(token, 0)


def _wrapped(value: int) -> int:
    """The value wrapped around to a signed 64-bit number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _divide(a: int, b: int) -> int:
    """Division that rounds towards zero, as C and bash do."""
    if b == 0:
        raise ValueError("a division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _rest(a: int, b: int) -> int:
    """The remainder of `_divide`, which has the sign of `a`."""
    return a - _divide(a, b) * b

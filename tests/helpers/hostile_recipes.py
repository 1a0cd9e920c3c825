"""Recipes as a slip of the hand, a broken editor or somebody who means harm leaves them.

Every mutation is drawn from a counter, so that a case can be made again from its number.
"""

import random
import re
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(path for path in RECIPES.rglob("*.toml") if path.name != "pipeline.toml")
PIPELINES = sorted(path.parent for path in RECIPES.rglob("pipeline.toml"))
DEEP_LIST = "[" * 1000 + "]" * 1000
VALUES = (  # TOML texts
    "0", "1", "-1", "2", "7", "1_000_000_007", str(2**31), str(2**53), str(2**63 - 1), str(2**63),
    "-" + str(2**63), "9" * 400, "9" * 5000, "0xffffffffffffffff", "0.0", "-0.0", "1e-300",
    "1e300", "1e400", "inf", "-inf", "nan", "0.5", "true", "false", '""', '"x"', '"auto"',
    '"\\u0000"', '"a\\u0000b"', '"../../x"', '"@x"', '"x:y"', '"reasoning-gym:x"', '"{"', '"{{ x"',
    '"/dev/zero"', '"/dev/null"', '"' + "a" * 300 + '"', '"' + "a/" * 3000 + '"', '"é\U0001f600"',
    "[]", "{}", "[[]]", '[""]', "[1, 2]", "[0]", '{ x = 1 }', '[{ x = 1 }]', DEEP_LIST,
    "[" * 60 + "]" * 60, "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "'", '"', "[", "{",
    "1.2.3", "\\", "\x00", "\ud7ff", "", "1 2", "'''", '"""',
)  # fmt: skip
KEYS = (
    "x", "type", "path", "steps", "epochs", "total_episodes", "job", "model.path", "sets",
    ".".join("a" * 300), '"\\u0000"', "a" * 2000, '""', "learner.lr", "[data]", "[[data.sets]]",
    "[[eval.sets]]", "[model.lora]", "[critic]", "[reference]", "[environment]", "[rollout.vllm]",
    "[" + ".".join("b" * 300) + "]", "[[rewards]]", "[data", "[]",
)  # fmt: skip
BYTES = (b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r", b"\xed\xa0\x80", b"\x1b[2J")
_ASSIGNED = re.compile(r"^\s*[\w.-]+\s*=")


def mutate(drawn: random.Random, text: str) -> bytes:
    """A recipe with one to three things changed."""
    lines = text.splitlines()
    for _ in range(drawn.randint(1, 3)):
        kind = drawn.random()
        number = drawn.randrange(len(lines)) if lines else 0
        assigned = [n for n, line in enumerate(lines) if _ASSIGNED.match(line)]
        if kind < 0.55 and assigned:
            number = drawn.choice(assigned)
            key = lines[number].partition("=")[0]
            lines[number] = f"{key}= {drawn.choice(VALUES)}"
        elif kind < 0.65:
            lines[number : number + 1] = []
        elif kind < 0.72 and lines:
            lines.insert(drawn.randrange(len(lines)), lines[number])
        elif kind < 0.82:
            key = drawn.choice(KEYS)
            entry = key if key.startswith("[") else f"{key} = {drawn.choice(VALUES)}"
            lines.insert(number, entry)
        elif kind < 0.9 and assigned:  # a key of one recipe in another's section
            other = drawn.choice(drawn.choice(SHIPPED).read_text("utf-8").splitlines() or [""])
            lines.insert(number, other)
        elif lines:
            line = lines[number]
            at = drawn.randrange(len(line) + 1)
            lines[number] = line[:at] + drawn.choice("\"'[]{}=.#\n\t\\,:-e0") + line[at + 1 :]
    content = "\n".join(lines).encode(errors="surrogatepass") + b"\n"
    if drawn.random() < 0.05:
        at = drawn.randrange(len(content))
        content = content[:at] + drawn.choice(BYTES) + content[at:]
    return content


def overrides(drawn: random.Random, text: str) -> list[str]:
    """Flags with keys of a recipe, or none of its, and such values."""
    section, keys = "", ["steps", "run_dir", "a.b.c", "data.sets.0.path", "x" * 2000, "9" * 5000]
    for line in text.splitlines():
        if header := re.match(r"\s*\[+([\w.]+)\]+", line):
            section = header[1] + "."
        elif _ASSIGNED.match(line):
            keys.append(section + line.partition("=")[0].strip())
    options: list[str] = []
    for _ in range(drawn.randint(1, 2)):
        value = drawn.choice(VALUES).replace("\x00", "")
        options += [f"--{drawn.choice(keys)}", value] if drawn.random() < 0.9 else ["--x"]
    return options

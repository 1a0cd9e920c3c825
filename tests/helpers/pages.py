"""What README and the documentation show as code: blocks, and commands in blocks and sentences."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md")),
)
SHELLS = ("sh", "bash", "console", "shell")
OURS = ("postgrad", "make")  # what a line of a block without a language may begin with
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True, slots=True)
class Block:
    """language: "" where the block is indented or names none. line: its first one's number."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """words: as a shell splits them, without redirections and what is before the program."""

    at: str
    text: str
    words: tuple[str, ...]
    shown: bool  # in a block, not in a sentence

    def __str__(self) -> str:
        return f"{self.at} {self.text}"

    @property
    def is_synopsis(self) -> bool:
        """Says how a command is written, and is none itself."""
        marks = ("[--", "...", "…", "|")
        return any(mark in self.text.rpartition(" | ")[2] for mark in marks)


@cache
def blocks() -> tuple[Block, ...]:
    """Every code block of every page, fenced or indented."""
    return tuple(block for page in PAGES for block in _of_page(page))


def _of_page(path: Path) -> list[Block]:
    page, page_blocks = str(path.relative_to(ROOT)), []
    lines = path.read_text("utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"( *)```(\w*)", lines[at])
        indented = lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip())
        end = at + 1
        if fence:
            while not lines[end].strip().startswith("```"):
                end += 1
            text = textwrap.dedent("\n".join(lines[at + 1 : end]))
            page_blocks.append(Block(page, at + 2, fence[2], text))
            end += 1
        elif indented:
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = textwrap.dedent("\n".join(lines[at:end])).strip("\n")
            page_blocks.append(Block(page, at + 1, "", text))
        at = end
    return page_blocks


@cache
def commands() -> tuple[Command, ...]:
    """Every command of the shell blocks, those of ours in other blocks, and those in sentences."""
    typed_commands: list[Command] = []
    for block in blocks():
        joined = re.sub(r"\\\n\s*", " ", block.text)
        for line in joined.splitlines():
            text = re.sub(r"(^|\s+)#.*", "", line).removeprefix("$ ").strip()
            typed = block.language != "console" or line.startswith("$ ")
            if text and typed and (block.language in SHELLS or _is_ours(block, text)):
                typed_commands.append(_command(str(block), text, shown=True))
    return (*typed_commands, *_in_sentences(), *_in_recipes())


def _is_ours(block: Block, text: str) -> bool:
    return block.language in ("", "text") and text.split()[0] in OURS


def _in_sentences() -> list[Command]:
    quoted_commands: list[Command] = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in re.findall(r"(?ms)^```.*?^```", text):
            text = text.replace(block, "\n" * block.count("\n"))
        for match in re.finditer(r"`(postgrad [a-z][^`]*)`", text):
            line = text.count("\n", 0, match.start()) + 1
            quoted = " ".join(match[1].split())
            quoted_commands.append(
                _command(f"{page.relative_to(ROOT)}:{line}", quoted, shown=False)
            )
    return quoted_commands


def _in_recipes() -> list[Command]:
    """What the comments of the shipped recipes tell to type; a command may go on over lines."""
    recipe_commands: list[Command] = []
    for path in sorted((ROOT / "recipes").rglob("*.toml")):
        lines = iter(enumerate(path.read_text("utf-8").splitlines(), 1))
        for number, line in lines:
            if match := re.match(r"# {2,}(postgrad .*?)(\s{2,}#.*)?$", line):
                typed = match[1]
                while typed.endswith("\\"):
                    typed = typed[:-1] + next(lines)[1].lstrip("# ")
                recipe_commands.append(
                    _command(f"{path.relative_to(ROOT)}:{number}", typed, shown=True)
                )
    return recipe_commands


def _command(at: str, text: str, shown: bool) -> Command:
    typed = text.rpartition(" | ")[2]  # of a pipe, its last program
    words = shlex.split(typed) if "..." not in typed else typed.split()
    while words and ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    return Command(at, text, tuple(words), shown)

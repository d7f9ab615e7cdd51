"""The Markdown of the repository, taken apart as far as the tests of the docs need it."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SEPARATORS = frozenset({"&&", "||", ";", "|", "&", "(", ")", "\n"})
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


class Block(NamedTuple):
    file: str
    language: str
    text: str


@cache
def files() -> list[Path]:
    """Every Markdown file that is ours: nothing in hidden folders such as .venv."""
    found = [path for path in ROOT.rglob("*.md") if not any(p.startswith(".") for p in path.relative_to(ROOT).parts)]
    return sorted(found)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def all_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in files())


def blocks(language: str) -> list[Block]:
    """The fenced blocks of this language."""
    return [
        Block(name(path), match[1], match[2])
        for path in files()
        for match in _FENCE.finditer(path.read_text(encoding="utf-8"))
        if match[1] == language
    ]


def links(path: Path) -> list[str]:
    """Targets outside fences that lead into the repository."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [target for target in _LINK.findall(text) if not target.startswith(("http://", "https://"))]


def anchors(path: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a file."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(script: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell script, without assignments and redirections before or behind."""
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars="();|&\n<>")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, "\n"]:
        if set(token) <= set("();|&\n"):
            yield from _simple(words)
            words = []
        else:
            words.append(token)


def _simple(words: list[str]) -> Iterator[list[str]]:
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif set(word) <= set("<>"):
            skip = True
            if kept and kept[-1].isdigit():
                kept.pop()  # the descriptor in 2>
        else:
            kept.append(word)
    if kept:
        yield kept

"""What a report is made of: sections of text, tables and plots, written once, shown anywhere.

`markdown` writes them for the README, `web.py` for a page that needs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Text:
    """A paragraph. `code` and **bold** mean what they mean in Markdown, and nothing else does."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells of text as in `Text`; the first `left` columns are set to the left, others right."""

    header: list[str]
    rows: list[list[str]]
    left: int = 1
    caption: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure of matplotlib's, drawn when asked for; `name` is a file's stem, unique in a report.

    `alt` says what it shows to who cannot see it.
    """

    name: str
    alt: str
    draw: Callable[[], Any]
    caption: str = ""


Block = Text | Table | Plot


@dataclass(frozen=True)
class Section:
    """One part of a report; a folded one opens when it is asked for."""

    title: str
    blocks: tuple[Block, ...]
    is_folded: bool = False


def markdown(sections: Iterable[Section], level: int, image: Callable[[Plot], str]) -> str:
    """Sections in Markdown under headings of `level`; `image` gives the path of a plot's file."""
    return "\n".join(_lines(sections, level, image)).strip() + "\n"


def markdown_of(blocks: Iterable[Block], image: Callable[[Plot], str]) -> str:
    """Blocks in Markdown without a heading."""
    return "\n\n".join("\n".join(_block(block, image)) for block in blocks)


def _lines(sections: Iterable[Section], level: int, image: Callable[[Plot], str]) -> Iterator[str]:
    for section in sections:
        if section.is_folded:
            yield from (f"<details><summary>{section.title}</summary>", "")
        else:
            yield from (f"{'#' * level} {section.title}", "")
        for block in section.blocks:
            yield from (*_block(block, image), "")
        if section.is_folded:
            yield from ("</details>", "")


def _block(block: Block, image: Callable[[Plot], str]) -> Iterator[str]:
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, Plot):
        yield f"![{block.alt}]({image(block)})"
        if block.caption:
            yield from ("", block.caption)
    else:
        if block.caption:
            yield from (f"{block.caption}", "")
        yield f"| {' | '.join(block.header)} |"
        rules = ["---"] * block.left + ["---:"] * (len(block.header) - block.left)
        yield f"| {' | '.join(rules)} |"
        for row in block.rows:
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"

"""A card's report: a headline, then chapters, the race and each part measured beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from flash_rosetta.bench import card as cards
from flash_rosetta.bench import race_page
from flash_rosetta.bench.card import Card
from flash_rosetta.bench.page import Block, Plot, Section
from flash_rosetta.bench.parts import PARTS, load

NOT_MEASURED = "Not measured on this card."


@dataclass(frozen=True)
class Chapter:
    """`name` is a key of PARTS, or "race"; `note` says when and of what it was measured, or not.

    `lead` is a sentence less its capital and its full stop; `details` are sections that the README
    has no room for.
    """

    name: str
    lead: str
    note: str
    sections: tuple[Section, ...] = ()
    details: tuple[Section, ...] = ()

    @property
    def title(self) -> str:
        return self.name.capitalize()


@dataclass(frozen=True)
class Report:
    """All there is to say of a card; `anchor` is unique among the reports made together."""

    anchor: str
    name: str
    facts: dict[str, str]
    headline: tuple[Block, ...]
    chapters: tuple[Chapter, ...]

    def plots(self) -> Iterator[Plot]:
        """Every plot, in the order in which they are shown."""
        sections = chain.from_iterable((*c.sections, *c.details) for c in self.chapters)
        blocks = chain(self.headline, chain.from_iterable(s.blocks for s in sections))
        yield from (block for block in blocks if isinstance(block, Plot))


def reports(files: Iterable[Card]) -> list[Report]:
    """The report of each card."""
    made: dict[str, Report] = {}
    for card in files:
        slug = cards.slug(card["machine_info"].get("card"))
        anchors = chain([slug], (f"{slug}-{n}" for n in count(2)))
        anchor = next(a for a in anchors if a not in made)
        headline, facts = tuple(race_page.headline(card)), race_page.facts(card)
        made[anchor] = Report(anchor, cards.name(card), facts, headline, tuple(chapters(card)))
    return list(made.values())


def chapters(card: Card) -> list[Chapter]:
    """The race, and every part; one that is missing or failed says so."""
    held = card.get("parts", {})
    return [_race(card), *(_part(name, held.get(name), card) for name in PARTS)]


def _race(card: Card) -> Chapter:
    lead = "every contender against every other, correct before fast"
    if "error" in card or not card["benchmarks"]:
        return Chapter("race", lead, _note(card) if "error" in card else NOT_MEASURED)
    note = _note(card)
    if matmul := card["machine_info"].get("matmul_tflops"):
        note += (
            f" In the same run a bf16 matmul of 8192^3 random numbers reached {matmul:.0f} TFLOP/s."
        )
    return Chapter(
        "race", lead, note, tuple(race_page.sections(card)), tuple(race_page.details(card))
    )


def _part(name: str, part: dict[str, Any] | None, card: Card) -> Chapter:
    if part is None:
        return Chapter(name, PARTS[name], NOT_MEASURED)
    if "error" in part:
        return Chapter(name, PARTS[name], _note(part))
    return Chapter(name, PARTS[name], _note(part), tuple(load(name).sections(part, card)))


def _note(measured: dict[str, Any]) -> str:
    when = f"on {measured['datetime'][:10]} at commit `{race_page.commit_of(measured)}`"
    if "error" in measured:
        return f"Measuring it {when} failed: `{measured['error']}`"
    return f"Measured {when}" + (f" in {s:.0f} s." if (s := measured.get("seconds")) else ".")


def sentence(lead: str) -> str:
    """A lead with its capital and its full stop."""
    return f"{lead[0].upper()}{lead[1:]}."


def without_plots(sections: Iterable[Section]) -> list[Section]:
    """The sections for a text that has no place for plots; who held nothing else is left out."""
    kept = (
        replace(s, blocks=tuple(b for b in s.blocks if not isinstance(b, Plot))) for s in sections
    )
    return [section for section in kept if section.blocks]

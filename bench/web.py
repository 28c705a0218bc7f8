"""A report as one HTML page that needs nothing but itself: no network, no script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flash_rosetta.bench import card as cards
from flash_rosetta.bench.chapters import Report, sentence
from flash_rosetta.bench.page import Plot, Table, Text
from flash_rosetta.bench.plot import COLOURS

TEMPLATE = "page.html.jinja"

ON_DARK = {
    "sdpa-cudnn": "#5B8DEF",
    "sdpa-flash": "#8CD3F5",
    "flash-attn-4": "#D98A6F",
    "sdpa-math": "#A0A0A0",
}
"""Colours too dark for a dark page, and what they are there."""


def page(reports: Sequence[Report], sources: Sequence[str], drawings: Mapping[Plot, str]) -> str:
    """The page of one or more cards, made from `sources`; a plot is shown as its SVG element."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = inline
    environment.filters["anchor"] = cards.slug
    environment.filters["sentence"] = sentence
    environment.filters["svg"] = lambda plot: Markup(drawings.get(plot, ""))
    environment.tests |= {
        kind.__name__.lower(): lambda block, kind=kind: isinstance(block, kind)
        for kind in (Text, Table, Plot)
    }
    return environment.get_template(TEMPLATE).render(
        title=", ".join(dict.fromkeys(report.name for report in reports)),
        sources=sources,
        reports=reports,
        colours=COLOURS,
        on_dark=COLOURS | ON_DARK,
    )


def without_drawings(html: str) -> str:
    """A page less its plots, whose bytes differ between releases of matplotlib."""
    return re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)


def inline(text: str) -> Markup:
    """`code` and **bold** of a `Text` as HTML, the rest as it is."""
    html = str(escape(text))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html))

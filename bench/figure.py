"""A plot as SVG that takes its colours from the page around it, or as a PNG on white."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from flash_rosetta.bench.page import Plot
from flash_rosetta.bench.plot import COLOURS

INK = "#010203"
"""Stands for the page's text colour until the SVG is written; nothing else is drawn in it."""

_INKED = (
    "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "hatch.color",
)  # fmt: skip
_CLEAR = ("figure.facecolor", "axes.facecolor", "legend.facecolor", "savefig.facecolor")


def svg(plot: Plot, prefix: str) -> str:
    """The plot as an SVG element; its ids begin with `prefix`, which no other on the page has.

    Text stays text. The same plot gives the same SVG, with the same release of matplotlib.
    """
    settings = dict.fromkeys(_INKED, INK) | dict.fromkeys(_CLEAR, "none")
    settings |= {"svg.fonttype": "none", "svg.hashsalt": prefix}
    buffer = io.StringIO()
    _save(plot, settings, buffer, format="svg")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', _with_width, text, count=1)
    text = text.replace(INK, "currentColor")
    for name, colour in COLOURS.items():
        text = re.sub(colour, f"var(--{name})", text, flags=re.IGNORECASE)
    return text.strip()


def _with_width(match: re.Match[str]) -> str:
    """As wide as matplotlib made it, where there is room; the view box keeps the proportions."""
    return f'{match[1]} style="width: {float(match[2]) * 4 / 3:.0f}px"'


def png(plot: Plot, path: Path, note: str = "") -> None:
    """Write the plot to a file, with a note in its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(plot, {}, path, format="png", dpi=150, metadata={"Software": None, "Comment": note})


def _save(plot: Plot, settings: dict[str, Any], target: Any, **options: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(settings):
        figure = plot.draw()
        figure.savefig(target, **options)
        pyplot.close(figure)

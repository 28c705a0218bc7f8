"""Rewrite the generated parts of README.md: `python -m flash_rosetta.bench.readme [--check]`.

The parts stand between `<!-- NAME:begin -->` and `<!-- NAME:end -->`: the headline and the results,
from bench/results/*.json, and what runs where, from `why_not`. Beside each file of results stand
its page, CARD.html, and the headline's plot, CARD.png.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console

from flash_rosetta.bench import card as cards
from flash_rosetta.bench import report_command
from flash_rosetta.bench.card import Card
from flash_rosetta.bench.chapters import NOT_MEASURED, Report, reports, sentence, without_plots
from flash_rosetta.bench.page import Plot, markdown, markdown_of
from flash_rosetta.bench.parts import Lab

HERE = Path(__file__).parent
OPEN = ("race", "ladder")
"""Chapters that the README does not fold."""

NO_RESULTS = "No race on a GPU has been committed yet, so there is nothing to show here."


def main(argv: list[str] | None = None) -> int:
    """Rewrite README, pages and plots; with --check change nothing, and return 1 if one is old."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_rosetta.bench.readme",
        description="Rewrite the generated parts of README.md, and the pages of bench/results.",
    )
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    parser.add_argument(
        "--root", type=Path, default=HERE.parent, metavar="FOLDER", help="the checkout"
    )
    arguments = parser.parse_args(argv)
    readme = arguments.root / "README.md"
    if not readme.is_file():
        parser.error(f"no README.md in {arguments.root}; --root must name a checkout")
    os.environ.pop("TRITON_INTERPRET", None)  # the table is about kernels as they are compiled
    from flash_rosetta.bench.support import support_markdown

    files = read_results(arguments.root / "bench" / "results")
    made = dict(zip(files, reports(files.values()), strict=True))
    text = readme.read_text(encoding="utf-8")
    new = replace_section(text, "headline", headline_markdown(made))
    new = replace_section(new, "support", support_markdown())
    new = replace_section(new, "results", results_markdown(made))
    if arguments.check:
        old = [readme.name] * (new != text) + list(_old(made))
        for name in old:
            print(f"{name} is out of date; run make readme", file=sys.stderr)
        if not old:
            print("README.md and bench/results are up to date")
        return int(bool(old))
    lab = Lab(torch.device("cpu"), Console(stderr=True))
    for path, report in made.items():
        page = report_command.html({path: files[path]}, [report], lab)
        report_command.write(path.with_suffix(".html"), page, lab)
        _write_plot(path, report)
    readme.write_text(new, encoding="utf-8")
    return 0


def replace_section(text: str, name: str, content: str) -> str:
    """`text` with what stands between the markers of `name` replaced. ValueError without them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md must hold {begin} and {end}, in this order, once each")
    return f"{text.partition(begin)[0]}{begin}\n{content}\n{end}{text.partition(end)[2]}"


def read_results(folder: Path) -> dict[Path, Card]:
    """Every result file of a GPU, by path."""
    found = {path: cards.read(path) for path in sorted(folder.glob("*.json"))}
    return {path: card for path, card in found.items() if card["machine_info"].get("card")}


def headline_markdown(made: Mapping[Path, Report]) -> str:
    """The first table and plot of every card, or that there are none."""
    shown = [
        markdown_of(report.headline, lambda plot, path=path: _beside(path, ".png"))
        for path, report in made.items()
        if report.headline
    ]
    return "\n\n".join(shown) if shown else NO_RESULTS


def results_markdown(made: Mapping[Path, Report]) -> str:
    """The results of every card but for their plots, or that there are none."""
    lines = [line for path, report in made.items() for line in _report_lines(path, report)]
    return "\n\n".join(lines) if lines else NO_RESULTS


def _report_lines(path: Path, report: Report) -> Iterator[str]:
    yield f"### {report.name}"
    facts = ", ".join(f"{label} {value}" for label, value in report.facts.items())
    yield sentence(facts)
    yield (
        f"[`{path.name}`]({_beside(path, '.json')}) has every figure, "
        f"[`{path.stem}.html`]({_beside(path, '.html')}) every table and plot: one page that needs "
        "nothing but itself, to be opened in a browser."
    )
    for chapter in report.chapters:
        if chapter.note == NOT_MEASURED:
            continue
        title = f"{chapter.title}: {chapter.lead}"
        is_open = chapter.name in OPEN
        yield f"#### {title}" if is_open else f"<details><summary>{title}</summary>"
        yield chapter.note
        if sections := without_plots(chapter.sections):
            yield markdown(sections, 5, lambda plot: "").strip()
        if not is_open:
            yield "</details>"
    if missing := [c.name for c in report.chapters if c.note == NOT_MEASURED]:
        yield f"Not measured on this card: {', '.join(missing)}."


def _beside(path: Path, suffix: str) -> str:
    """The link from the README to a file made from results."""
    return f"bench/results/{path.stem}{suffix}"


def _write_plot(path: Path, report: Report) -> None:
    from flash_rosetta.bench import figure

    for plot in report.headline:
        if isinstance(plot, Plot):
            figure.png(plot, path.with_suffix(".png"), cards.digest(path))


def _old(made: Mapping[Path, Report]) -> Iterator[str]:
    """Pages and plots that are missing, or made of other results.

    A page is compared word by word, but for its plots: their bytes differ between releases of
    matplotlib. A plot of its own says in its metadata what it was made of.
    """
    from flash_rosetta.bench import web

    for path, report in made.items():
        page, image = path.with_suffix(".html"), path.with_suffix(".png")
        new = web.page([report], report_command.sources([path]), {})
        if not page.exists() or web.without_drawings(page.read_text("utf-8")) != new:
            yield f"{page.parent.name}/{page.name}"
        digest = cards.digest(path).encode()
        if report.headline and not (image.exists() and digest in image.read_bytes()):
            yield f"{image.parent.name}/{image.name}"


if __name__ == "__main__":
    sys.exit(main())

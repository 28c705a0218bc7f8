"""`flash-rosetta report`: files of results as Markdown, as one HTML page, and as plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from flash_rosetta.bench import card as cards
from flash_rosetta.bench.card import Card
from flash_rosetta.bench.chapters import Report, reports, sentence, without_plots
from flash_rosetta.bench.page import Plot, Section, Text, markdown
from flash_rosetta.bench.parts import Lab
from flash_rosetta.bench.race import RESULTS

PAGE = Path("report.html")

DESCRIPTION = """\
Turn files of results, as measure and race write them, into a report: one HTML page that needs
nothing but itself, Markdown tables, plots as PNG. Several files stand one after another on the
page. Nothing is measured."""


def main(argv: list[str] | None = None) -> int:
    """Write what is asked for, report.html if nothing is. 0, or 2 for bad usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if needs := [package for package in ("matplotlib", "jinja2") if find_spec(package) is None]:
        parser.error(f"a report needs {' and '.join(needs)}: pip install 'flash-rosetta[bench]'")
    paths = arguments.file or sorted(RESULTS.glob("*.json"))
    if not paths:
        parser.error(f"no FILE given, and none in {RESULTS}")
    try:
        files = {path: cards.read(path) for path in paths}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    made = reports(files.values())
    lab = Lab(torch.device("cpu"), Console(stderr=True))
    if not (arguments.html or arguments.markdown or arguments.plots):
        arguments.html = PAGE
    if arguments.html:
        write(arguments.html, html(files, made, lab), lab)
    if arguments.plots:
        write_plots(made, arguments.plots, lab)
    if arguments.markdown:
        text = "\n".join(_markdown(report, arguments.plots) for report in made)
        if str(arguments.markdown) == "-":
            print(text, end="")
        else:
            write(arguments.markdown, text, lab)
    return 0


def html(files: Mapping[Path, Card], made: Sequence[Report], lab: Lab) -> str:
    """The page of the files' reports, with a bar while its plots are drawn."""
    from flash_rosetta.bench import figure, web

    plots = [plot for report in made for plot in report.plots()]
    drawings = {
        plot: figure.svg(plot, f"plot-{i}") for i, plot in enumerate(lab.track(plots, "plots"), 1)
    }
    return web.page(made, sources(files), drawings)


def sources(files: Iterable[Path]) -> list[str]:
    """What a page says of each file that it was made of: its name and its content's digest."""
    return [f"{path.name} sha256:{cards.digest(path)}" for path in files]


def write_plots(made: Sequence[Report], folder: Path, lab: Lab) -> None:
    """Every plot as a PNG."""
    from flash_rosetta.bench import figure

    plots = [(report, plot) for report in made for plot in report.plots()]
    for report, plot in lab.track(plots, "plots"):
        figure.png(plot, folder / _file_name(report, plot))
    lab.say(f"wrote {len(plots)} plots to {folder}")


def write(path: Path, text: str, lab: Lab) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    lab.say(f"wrote {path}")


def _file_name(report: Report, plot: Plot) -> str:
    return f"{report.anchor}-{plot.name}.png"


def _markdown(report: Report, folder: Path | None) -> str:
    """A report in Markdown; without a folder of plots, without plots."""

    def write_sections(sections: Iterable[Section], level: int) -> str:
        chosen = without_plots(sections) if folder is None else sections
        return markdown(chosen, level, lambda plot: f"{folder}/{_file_name(report, plot)}")

    facts = ", ".join(f"{label} {value}" for label, value in report.facts.items())
    parts = [write_sections([Section(report.name, (Text(facts), *report.headline))], 1)]
    for chapter in report.chapters:
        parts += [f"## {chapter.title}\n\n{sentence(chapter.lead)} {chapter.note}\n"]
        if sections := (*chapter.sections, *chapter.details):
            parts += [write_sections(sections, 3)]
    return "\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-rosetta report",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", nargs="*", type=Path, metavar="FILE", help="default: bench/results/*.json")
    add("--html", type=Path, metavar="PAGE", help=f"write the page there (default: {PAGE})")
    add("--markdown", type=Path, metavar="FILE", help="write Markdown there; - prints it")
    add("--plots", type=Path, metavar="FOLDER", help="write each plot there, as a PNG")
    return parser


if __name__ == "__main__":
    sys.exit(main())

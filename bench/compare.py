"""`flash-rosetta compare A B`: two files of results, and what in them is noise or change.

Rounds of one contender in one heat are compared by ranks: the Hodges-Lehmann estimate of the ratio
of two samples is the median of all ratios between a round of one and a round of the other, and the
Mann-Whitney test inverted gives its confidence interval, whatever the distribution (J. L. Hodges
and E. L. Lehmann, "Estimates of Location Based on Rank Tests", Annals of Mathematical Statistics
34, 1963).

Such an interval knows how far the rounds of one run are apart. It does not know how far two runs
are: a card is warmer on another day, or it is another card of its kind. That is measured: PyTorch's
kernels and the third parties' are the same in both runs where their versions are, so what they
differ by is drift. It is taken for each kind of inputs by itself, for a call of microseconds drifts
more than one that fills the card. A change exceeds the drift for sure: the whole interval lies
beyond it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from flash_rosetta.bench import card as cards
from flash_rosetta.bench.card import Card
from flash_rosetta.bench.page import Section, Table, Text, markdown
from flash_rosetta.bench.race_page import commit_of
from flash_rosetta.bench.report import (
    KINDS,
    OTHERS,
    Record,
    geometric_mean,
    heat_of,
    heat_title,
    is_yardstick,
    kind_of,
)

NORMAL = 2.5758
"""Standard deviations that 99 % of a normal distribution lie within: there are many heats."""

LEAST_DRIFT = 0.01
"""One kernel differs by that much between runs: no smaller drift is believed."""

WIDTH = 130
"""Columns that the tables need; a narrower terminal wraps their lines."""

VERSIONS = ("driver", "cuda", "cudnn", "torch")
"""Keys of machine_info that must be equal for kernels of others to be the same."""

DESCRIPTION = """\
Compare the race in two files of results, heat by heat and contender by contender. Of one card at
two commits: what changed, and what is noise. Of two cards: how much faster the second is.
Ratios are rates, B over A: above 1, B is faster."""

Verdict = Literal["noise", "faster", "slower", "too few rounds", "other card"]
CHANGES: tuple[Verdict, ...] = ("faster", "slower")


@dataclass(frozen=True)
class Pair:
    """One contender in one heat of both files.

    `ratio` is B's rate over A's, and lies between `low` and `high` with 99 % confidence.
    """

    a: Record
    b: Record
    ratio: float
    low: float
    high: float
    verdict: Verdict


def main(argv: list[str] | None = None) -> int:
    """Print the comparison. 0; 1 with --fail-on-slower when a backend is; 2: bad usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        a, b = (cards.read(path) for path in (arguments.a, arguments.b))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    is_one_card = cards.name(a) == cards.name(b)
    if arguments.by == "commit" and not is_one_card:
        parser.error(
            f"--by commit needs one card, got {cards.name(a)} and {cards.name(b)}; use --by card"
        )
    by = arguments.by or ("commit" if is_one_card else "card")
    pairs = compare(a, b, by)
    if not pairs:
        parser.error("the files have no heat with a time in common")
    shown = sections(a, b, pairs, arguments.all)
    if arguments.markdown:
        print(markdown(shown, 2, lambda plot: ""), end="")
    else:
        _print(shown)
    slower = [p for p in pairs if p.verdict == "slower" and not is_yardstick(p.a["backend"])]
    return int(arguments.fail_on_slower and bool(slower))


def compare(a: Card, b: Card, by: Literal["card", "commit"]) -> list[Pair]:
    """Every contender and heat that has times in both files, as A has them in order."""
    drift = drift_between(a, b)
    return [_pair(mine, theirs, by, drift) for mine, theirs in _matched(a, b)]


def drift_between(a: Card, b: Card) -> dict[str, float]:
    """How far kernels that did not change lie apart, by kind of inputs: 95 % of them by no more.

    LEAST_DRIFT where there are none, as where the versions differ.
    """
    apart: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for mine, theirs in _matched(a, b):
        record = mine["extra_info"]
        if _is_unchanged(record["backend"], a, b):
            ratio, _, _ = interval(_rounds(mine), _rounds(theirs))
            apart[kind_of(record["workload"])].append(abs(math.log(ratio)))
    return {kind: max(LEAST_DRIFT, _highest(logs)) for kind, logs in apart.items()}


def _is_unchanged(name: str, a: Card, b: Card) -> bool:
    """Whether a contender is the same kernel in both, by the versions that it depends on."""
    keys = (*VERSIONS, name) if name in OTHERS else VERSIONS
    same = all(a["machine_info"].get(key) == b["machine_info"].get(key) for key in keys)
    return same and is_yardstick(name)


def _highest(logs: list[float]) -> float:
    """What 95 % of the differences do not exceed, as a share."""
    if len(logs) < 2:
        return 0.0
    return math.expm1(quantiles(logs, n=20, method="inclusive")[-1])


def interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The ratio a / b of two samples of positive numbers, and the bounds that are 99 % sure.

    The bounds are 0 and inf where there are too few to be sure of any.
    """
    logs = np.sort(np.subtract.outer(np.log(a), np.log(b)), axis=None)
    m, n = len(a), len(b)
    outside = math.floor(m * n / 2 - NORMAL * math.sqrt(m * n * (m + n + 1) / 12))
    ratio = float(np.exp(np.median(logs)))
    if outside < 1:
        return ratio, 0.0, math.inf
    low, high = np.exp(logs[[outside - 1, m * n - outside]])
    return ratio, float(low), float(high)


def verdict_of(low: float, high: float, drift: float) -> Verdict:
    """What an interval of the rates' ratio says, where runs drift by such a share."""
    if high == math.inf:
        return "too few rounds"
    if low > 1 + drift:
        return "faster"
    return "slower" if high < 1 / (1 + drift) else "noise"


def sections(a: Card, b: Card, pairs: list[Pair], is_all: bool) -> list[Section]:
    """What is compared, a summary by backend, and the heats: those that changed, or all."""
    is_change = pairs[0].verdict != "other card"
    texts = [Text(f"{label}: {_what(card)}") for label, card in (("A", a), ("B", b))]
    if is_change:
        kinds = dict.fromkeys(kind_of(pair.a["workload"]) for pair in pairs)
        drift = drift_between(a, b)
        shares = ", ".join(f"{100 * drift[kind]:.1f} % on {kind} inputs" for kind in kinds)
        texts.append(
            Text(
                f"Kernels that are the same in both runs drift by {shares}. A change is beyond "
                "that with the whole of its 99 % interval."
            )
        )
    shown = pairs if is_all or not is_change else [p for p in pairs if p.verdict in CHANGES]
    found = [Section("A and B", tuple(texts)), Section("Summary", (_summary(pairs, is_change),))]
    if lost := list(_lost(a, b)):
        found.append(Section("In one of them alone", tuple(map(Text, lost))))
    if shown:
        title = "Heats" if is_all or not is_change else "Heats that changed"
        found.append(Section(title, (_table(shown),)))
    return found


def _matched(a: Card, b: Card) -> Iterator[tuple[dict, dict]]:
    """pytest-benchmark's records of one contender in one heat, of A and of B."""
    theirs = {_key(record): record for record in b["benchmarks"]}
    for record in a["benchmarks"]:
        if (other := theirs.get(_key(record))) and record["extra_info"]["ms"]:
            yield record, other


def _key(record: dict) -> tuple:
    return (*heat_of(record["extra_info"]), record["extra_info"]["backend"])


def _rounds(record: dict) -> list[float]:
    return record["stats"]["data"]


def _pair(a: dict, b: dict, by: str, drift: dict[str, float]) -> Pair:
    ratio, low, high = interval(_rounds(a), _rounds(b))
    mine, theirs = a["extra_info"], b["extra_info"]
    verdict: Verdict = "other card"
    if by == "commit":
        verdict = verdict_of(low, high, drift[kind_of(mine["workload"])])
    return Pair(mine, theirs, ratio, low, high, verdict)


def _what(card: Card) -> str:
    return f"{cards.name(card)}, commit `{commit_of(card)}`, {card['datetime'][:10]}"


def _summary(pairs: list[Pair], is_change: bool) -> Table:
    """By contender and direction: the mean ratio, and how many heats changed."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    names = list(dict.fromkeys(pair.a["backend"] for pair in pairs))
    for pair in sorted(pairs, key=lambda p: (names.index(p.a["backend"]), p.a["direction"])):
        groups.setdefault((pair.a["backend"], pair.a["direction"]), []).append(pair)
    header = ["contender", "direction", "heats", "B / A"]
    rows = []
    for (name, direction), members in groups.items():
        row = [f"`{name}`", direction, f"{len(members)}"]
        row.append(f"{geometric_mean([p.ratio for p in members]):.3f}")
        if is_change:
            row += [f"{sum(p.verdict == v for p in members)}" for v in CHANGES]
        rows.append(row)
    return Table([*header, *(CHANGES if is_change else ())], rows, left=2)


def _table(pairs: list[Pair]) -> Table:
    rows = [
        [
            f"{p.a['direction']} {heat_title(p.a)}",
            f"`{p.a['backend']}`",
            f"{p.a['ms']:.4f}",
            f"{p.b['ms']:.4f}",
            f"{p.ratio:.3f}",
            f"{p.low:.3f} to {p.high:.3f}" if p.high < math.inf else "",
            p.verdict,
        ]
        for p in pairs
    ]
    return Table(["heat", "contender", "A, ms", "B, ms", "B / A", "99 %", "verdict"], rows, left=2)


def _lost(a: Card, b: Card) -> Iterator[str]:
    """Contenders with a time in one file alone, and how many heats of theirs."""
    held = [{_key(r) for r in card["benchmarks"]} for card in (a, b)]
    for label, own, other in (("A", *held), ("B", *reversed(held))):
        names = [key[-1] for key in sorted(own - other)]
        if names:
            counts = ", ".join(f"`{n}` in {names.count(n)} heats" for n in dict.fromkeys(names))
            yield f"Only in {label}: {counts}."


def _print(shown: list[Section]) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    for section in shown:
        console.print(f"\n[bold]{section.title}[/]")
        for block in section.blocks:
            if isinstance(block, Table):
                table = RichTable(box=box.SIMPLE_HEAD)
                for i, heading in enumerate(block.header):
                    if i < block.left:
                        table.add_column(heading, overflow="fold")  # so that numbers stay whole
                    else:
                        table.add_column(heading, justify="right", no_wrap=True)
                for row in block.rows:
                    table.add_row(*(cell.strip("`") for cell in row))
                console.print(table, markup=False, highlight=False)
            elif isinstance(block, Text):
                console.print(block.text.replace("`", ""), markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-rosetta compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("a", type=Path, metavar="A.json")
    add("b", type=Path, metavar="B.json")
    add(
        "--by",
        choices=("card", "commit"),
        help="two cards: ratios alone; two commits: a verdict on each (default: commit where the "
        "card is the same)",
    )
    add("--all", action="store_true", help="show every heat, not only those that changed")
    add("--markdown", action="store_true", help="print Markdown")
    add("--fail-on-slower", action="store_true", help="exit with 1 if a backend became slower")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Rewrite the generated parts of README.md: `python -m flash_rosetta.bench.readme [--check]`.

The parts stand between `<!-- NAME:begin -->` and `<!-- NAME:end -->`: what runs where, from
`why_not`, and the results, from bench/results/*.json, with a plot of each beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flash_rosetta.bench.report import (
    DIRECTIONS,
    KINDS,
    Record,
    geometric_mean,
    heat_of,
    heat_title,
    is_yardstick,
    kind_of,
    short,
    summary,
)

HERE = Path(__file__).parent
NO_RESULTS = "No race on a GPU has been committed yet, so there is nothing to show here."


def main(argv: list[str] | None = None) -> int:
    """Rewrite the README; with --check change nothing, and return 1 if it is out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_rosetta.bench.readme",
        description="Rewrite the generated parts of README.md, and the plots of bench/results.",
    )
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    parser.add_argument(
        "--root", type=Path, default=HERE.parent, metavar="FOLDER", help="the checkout"
    )
    arguments = parser.parse_args(argv)
    readme, results = arguments.root / "README.md", arguments.root / "bench" / "results"
    if not readme.is_file():
        parser.error(f"no README.md in {arguments.root}; --root must name a checkout")
    os.environ.pop("TRITON_INTERPRET", None)  # the table is about kernels as they are compiled
    from flash_rosetta.bench.support import support_markdown

    text = readme.read_text()
    cards = read_results(results)
    new = replace_section(text, "support", support_markdown())
    new = replace_section(new, "results", results_markdown(cards))
    missing = [path for path in cards if not path.with_suffix(".png").exists()]
    if arguments.check:
        for path in missing:
            print(f"{path.with_suffix('.png')} is missing; run make readme", file=sys.stderr)
        if new != text:
            print("README.md is out of date; run make readme", file=sys.stderr)
        if not missing and new == text:
            print("README.md is up to date")
        return int(bool(missing) or new != text)
    from flash_rosetta.bench.plot import plot_card

    for path, card in cards.items():
        plot_card(_records(card), _card_name(card), path.with_suffix(".png"))
    readme.write_text(new)
    return 0


def replace_section(text: str, name: str, content: str) -> str:
    """`text` with what stands between the markers of `name` replaced. ValueError without them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md must hold {begin} and {end}, in this order, once each")
    return f"{text.partition(begin)[0]}{begin}\n{content}\n{end}{text.partition(end)[2]}"


def read_results(folder: Path) -> dict[Path, dict[str, Any]]:
    """Every result file of a GPU, by path."""
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {path: card for path, card in found.items() if card["machine_info"].get("card")}


def results_markdown(cards: dict[Path, dict[str, Any]]) -> str:
    """The results of every card, or that there are none."""
    if not cards:
        return NO_RESULTS
    return "\n\n".join("\n".join(_card_lines(path, card)) for path, card in cards.items())


def _records(card: dict[str, Any]) -> list[Record]:
    return [benchmark["extra_info"] for benchmark in card["benchmarks"]]


def _card_name(card: dict[str, Any]) -> str:
    return card["machine_info"]["card"]


def _card_lines(path: Path, card: dict[str, Any]) -> Iterator[str]:
    machine, records = card["machine_info"], _records(card)
    grid, tiled, single = ([r for r in records if kind_of(r["workload"]) == kind] for kind in KINDS)
    versions = ", ".join(
        f"{label} {machine[key]}"
        for label, key in (
            ("driver", "driver"),
            ("CUDA", "cuda"),
            ("cuDNN", "cudnn"),
            ("torch", "torch"),
            ("Triton", "triton"),
            ("TileLang", "tilelang"),
            ("CuTe DSL", "nvidia-cutlass-dsl"),
            ("flash-attn-4", "flash-attn-4"),
        )
        if machine.get(key)
    )
    yield f"### {machine['card']}"
    yield ""
    yield (
        f"{card['datetime'][:10]}, commit {machine.get('commit') or 'unknown'}, {versions}. In the "
        f"same run a bf16 matmul of 8192^3 random numbers reached {machine['matmul_tflops']:.0f} "
        "TFLOP/s."
    )
    yield from _default_line(records)
    if grid:
        yield ""
        yield f"![TFLOP/s over sequence length on {machine['card']}](bench/results/{path.stem}.png)"
    yield from _summary_lines(records)
    yield from _memory_lines(grid)
    yield from _host_lines(records)
    yield from _missing_lines(card.get("no_number", []))
    for direction in DIRECTIONS:
        yield from _rate_lines(grid, direction, "standard normal inputs, 16k tokens a call")
        yield from _rate_lines(tiled, direction, "captured inputs tiled to 16k tokens a call")
        yield from _time_lines(single, direction)


def _default_line(records: list[Record]) -> Iterator[str]:
    ran = [r["ran"] for r in records if r.get("ran")]
    if ran:
        parts = (
            f"`{name}` in {ran.count(name)} of {len(ran)} heats" for name in dict.fromkeys(ran)
        )
        yield ""
        yield f"`sdpa-default` launched {', '.join(parts)}."


def _summary_lines(records: list[Record]) -> Iterator[str]:
    rows = list(summary(records))
    if not rows:
        return
    others = list(rows[0][3])
    yield ""
    yield "Geometric mean of a backend's rate as a share of each rival's, over the heats:"
    yield ""
    yield from _table(
        ["backend", "direction", "inputs", *others],
        [
            [
                f"`{name}`",
                direction,
                kind,
                *(f"{geometric_mean(r):.2f} ({len(r)})" if r else "" for r in ratios.values()),
            ]
            for name, direction, kind, ratios in rows
        ],
        left=3,
    )


def _rate_lines(records: list[Record], direction: str, inputs: str) -> Iterator[str]:
    def cell(record: Record, cudnn: Record | None) -> str:
        text = short(record["tflops"])
        if cudnn and not is_yardstick(record["backend"]):
            text += f" ({100 * record['tflops'] / cudnn['tflops']:.0f} %)"
        return text

    title = f"{direction}, {inputs}: TFLOP/s, and the share of sdpa-cudnn"
    yield from _folded(title, [r for r in records if r["direction"] == direction], cell)


def _time_lines(records: list[Record], direction: str) -> Iterator[str]:
    title = f"{direction}, captured inputs as they are, too small to fill a card: microseconds"
    yield from _folded(
        title,
        [r for r in records if r["direction"] == direction],
        lambda record, _: short(1e3 * record["ms"]),
    )


def _folded(
    title: str, records: list[Record], cell: Callable[[Record, Record | None], str]
) -> Iterator[str]:
    """A table of heats by contenders that a reader can unfold, the fastest of each heat in bold."""
    records = [r for r in records if r["tflops"]]
    if not records:
        return
    names = _names(records)
    rows = []
    for heat in dict.fromkeys(map(heat_of, records)):
        members = {r["backend"]: r for r in records if heat_of(r) == heat}
        best = max(r["tflops"] for r in members.values())
        cudnn = members.get("sdpa-cudnn")
        texts = {name: cell(record, cudnn) for name, record in members.items()}
        bold = {name for name, record in members.items() if record["tflops"] == best}
        cells = (f"**{texts[n]}**" if n in bold else texts.get(n, "") for n in names)
        rows.append([heat_title(next(iter(members.values()))).removeprefix("grid "), *cells])
    yield from ("", f"<details><summary>{title}</summary>", "")
    yield from _table(["problem", *names], rows)
    yield from ("", "</details>")


def _memory_lines(records: list[Record]) -> Iterator[str]:
    longest = max((r["seqlen_q"] for r in records), default=0)
    records = [r for r in records if r["seqlen_q"] == longest and r["peak_mb"] is not None]
    if not records:
        return
    names = _names(records)
    rows = []
    for direction in DIRECTIONS:
        for head_dim in sorted({r["head_dim"] for r in records}):
            members = [
                r for r in records if (r["direction"], r["head_dim"]) == (direction, head_dim)
            ]
            if members:
                cells = [
                    max((r["peak_mb"] / r["inputs_mb"] for r in members if r["backend"] == name),
                        default=None)
                    for name in names
                ]  # fmt: skip
                texts = ("" if cell is None else f"{cell:.2f}" for cell in cells)
                rows.append([f"{direction}, d{head_dim}", *texts])
    yield ""
    yield (
        f"Memory at sequence length {longest}: the most that a call has allocated, outputs "
        "included, over the size of q, k and v:"
    )
    yield ""
    yield from _table(["", *names], rows)


def _host_lines(records: list[Record]) -> Iterator[str]:
    records = [r for r in records if r.get("host_us")]
    if not records:
        return
    names = _names(records)
    by_name = {r["backend"]: r for r in records}
    rows = [
        [text, *(f"{us:.0f}" if (us := by_name[name].get(key)) else "" for name in names)]
        for text, key in (
            ("no gradients wanted", "host_us"),
            ("gradients wanted", "host_grad_us"),
        )
    ]
    yield ""
    yield "Host time of one forward call, Python to launch, in microseconds:"
    yield ""
    yield from _table(["", *names], rows)


def _missing_lines(without: list[Record]) -> Iterator[str]:
    broken = [r for r in without if r["verdict"] in ("wrong", "failed")]
    if broken:
        yield ""
        yield "Without a number, because the output was wrong or the call failed:"
        yield ""
        for record in broken:
            reason = record["reasons"][-1].strip().splitlines()[-1]
            yield (
                f"- `{record['backend']}`, {record['direction']}, {record['workload']} "
                f"`{record['problem']}`: {reason}"
            )


def _names(records: list[Record]) -> list[str]:
    """Contenders in the order in which they raced: backends first."""
    return list(dict.fromkeys(r["backend"] for r in records))


def _table(header: list[str], rows: list[list[str]], left: int = 1) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"| {' | '.join(['---'] * left + ['---:'] * (len(header) - left))} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.exit(main())

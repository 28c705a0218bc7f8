"""The report's section about the roofline (Williams and others, CACM 52(4), 2009).

A kernel that does f operations on b bytes of memory cannot be faster than the card's matmul rate,
nor than f / b times its bandwidth. f and b are counted from the problem: unmasked pairs, and each
input read and each output written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_rosetta.bench import card as cards
from flash_rosetta.bench.page import Plot, Section, Table, Text
from flash_rosetta.bench.plot import COLOURS
from flash_rosetta.bench.report import Record, heat_title, is_yardstick, kind_of
from flash_rosetta.problem import Problem

RIVALS = ("sdpa-cudnn", "flash-attn-4")
SHAPES = {"forward": "o", "backward": "s"}
TABLE_SEQLEN = 8192


@dataclass(frozen=True)
class Roof:
    """The card's limits, in FLOP/s and bytes/s."""

    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on the matmul rate is the limit."""
        return self.flops / self.bandwidth

    def at(self, intensity: float) -> float:
        """The most that a kernel of this intensity can reach, in FLOP/s."""
        return min(self.flops, self.bandwidth * intensity)


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """One section: the limits, every kernel of the race on them, and how near six of them come."""
    (measured,) = part["records"]
    roof = Roof(1e12 * measured["matmul_tflops"], 1e9 * measured["copy_gbps"])
    points = [
        (record, intensity(record))
        for record in cards.records(card)
        if record["direction"] in SHAPES
        and kind_of(record["workload"]) in ("grid", "models")
        and record["tflops"]
        and (record["backend"] in RIVALS or not is_yardstick(record["backend"]))
        and record["backend"] != "reference"
    ]
    text = Text(
        f"A bf16 matmul of {measured['matmul_size']}^3 random numbers reached "
        f"{measured['matmul_tflops']:.0f} TFLOP/s, a copy of "
        f"{measured['copy_bytes'] / 2**30:.0f} GiB {measured['copy_gbps']:,.0f} GB/s, read and "
        f"written. So memory is the limit below {roof.ridge:.0f} FLOPs a byte, the tensor cores "
        "above. Arithmetic intensity is counted from the problem, as if each input were read and "
        "each output written once. The matmul is a kernel as well, and no law: one that draws less "
        "power for its work can pass it."
    )
    if not points:
        return [Section("The roofline", (text,))]
    plot = Plot(
        "roofline",
        "TFLOP/s over FLOPs per byte, under the limits of memory and of tensor cores",
        lambda: _draw(points, roof),
        caption="Each point is one problem of the grid or of a named model: circles forward, "
        "squares backward.",
    )
    return [Section("The roofline", (text, plot, *_table(points, roof)))]


def intensity(record: Record) -> float:
    """FLOPs per byte of a record's problem."""
    problem = Problem.parse(record["problem"])
    direction = record["direction"]
    return problem.flops(direction) / problem.min_bytes(direction)


def _table(points: list[tuple[Record, float]], roof: Roof) -> list[Table]:
    rows = [
        [
            f"`{record['backend']}`",
            f"{record['direction']}, {heat_title(record).removeprefix('grid ')}",
            f"{found:.0f}",
            f"{record['tflops']:.0f}",
            f"{100 * record['tflops'] * 1e12 / roof.at(found):.0f} %",
        ]
        for record, found in points
        if record["workload"] == "grid"
        and record["head_dim"] == 128
        and record["seqlen_q"] == TABLE_SEQLEN
        and not record["is_causal"]
    ]
    header = ["", "problem", "FLOPs a byte", "TFLOP/s", "of the roof"]
    return [Table(header, rows, left=2)] if rows else []


def _draw(points: list[tuple[Record, float]], roof: Roof) -> Any:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    found = [x for _, x in points]
    left, right = min(*found, roof.ridge) / 5, max(*found, roof.ridge) * 2
    xs = [left, roof.ridge, right]
    axis.plot(xs, [roof.at(x) / 1e12 for x in xs], color="#888888", linewidth=1.6)
    for name in dict.fromkeys(record["backend"] for record, _ in points):
        for direction, marker in SHAPES.items():
            here = [
                (x, record["tflops"])
                for record, x in points
                if (record["backend"], record["direction"]) == (name, direction)
            ]
            if here:
                axis.scatter(
                    *zip(*here, strict=True), s=16, marker=marker, alpha=0.75, linewidths=0,
                    color=COLOURS.get(name, "#888888"),
                    label=name if direction == "forward" else None,
                )  # fmt: skip
    axis.annotate(
        f"matmul, {roof.flops / 1e12:.0f} TFLOP/s", (roof.ridge, roof.flops / 1e12),
        xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    axis.annotate(
        f"memory, {roof.bandwidth / 1e9:,.0f} GB/s", (left, roof.at(left) / 1e12), xytext=(12, 2),
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [t for t in (10, 20, 50, 100, 200, 500, 1000) if t >= roof.at(left) / 2e12]
    axis.set_yticks(ticks, ticks)
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("FLOPs per byte")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.25, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure

"""One figure for a card: TFLOP/s over sequence length, by direction, mask and head_dim."""

from __future__ import annotations

from pathlib import Path

from flash_rosetta.bench.report import DIRECTIONS, Record, is_yardstick

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = {
    "triton": "#D55E00",
    "tilelang": "#009E73",
    "cute": "#CC79A7",
    "sdpa-cudnn": "#0072B2",
    "sdpa-flash": "#56B4E9",
    "sdpa-efficient": "#E69F00",
    "sdpa-math": "#888888",
    "flash-attn-4": "#661100",
    "flex": "#F0E442",
}
LEGEND_COLUMNS = 5
"""More would not fit the width of two figures beside each other."""

LEFT_OUT = ("sdpa-default",)
"""Its line would lie on that of the kernel which it picked."""


def plot_card(records: list[Record], title: str, path: Path) -> None:
    """Write a PNG of the grid's records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = [r for r in records if r["workload"] == "grid" and r["backend"] not in LEFT_OUT]
    head_dims = sorted({r["head_dim"] for r in records})
    rows = [(direction, causal) for direction in DIRECTIONS for causal in (False, True)]
    rows = [row for row in rows if any((r["direction"], r["is_causal"]) == row for r in records)]
    names = sorted({r["backend"] for r in records}, key=lambda n: (is_yardstick(n), _order(n), n))
    figure, axes = plt.subplots(
        len(rows),
        len(head_dims),
        figsize=(3.4 * len(head_dims) + 0.6, 2.5 * len(rows) + 1),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, (direction, causal) in zip(axes, rows, strict=True):
        for axis, head_dim in zip(row, head_dims, strict=True):
            panel = [
                r
                for r in records
                if (r["direction"], r["is_causal"], r["head_dim"]) == (direction, causal, head_dim)
            ]
            for name in names:
                points = sorted((r["seqlen_q"], r["tflops"]) for r in panel if r["backend"] == name)
                if points:
                    axis.plot(*zip(*points, strict=True), label=name, **style_of(name))
            axis.set_title(f"{direction}{', causal' * causal}, head_dim {head_dim}", fontsize=9)
            axis.set_xscale("log", base=2)
            seqlens = sorted({r["seqlen_q"] for r in records})
            axis.set_xticks(seqlens, [f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens])
            axis.minorticks_off()
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("TFLOP/s")
        row[0].set_ylim(bottom=0)  # once the whole row is drawn, which shares it
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    lines = {
        label: line
        for axis in axes.flat
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [lines[name] for name in names],
        names,
        loc="outside upper center",
        ncols=min(len(names), LEGEND_COLUMNS),
        frameon=False,
        title=title,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _order(name: str) -> int:
    return list(COLOURS).index(name) if name in COLOURS else len(COLOURS)


def style_of(name: str) -> dict:
    """How a contender's line looks: backends drawn through, others dashed."""
    own = not is_yardstick(name)
    return {
        "color": COLOURS.get(name, "#000000"),
        "linewidth": 2.2 if own else 1.3,
        "linestyle": "-" if own else "--",
        "marker": "o" if own else ".",
        "markersize": 4 if own else 5,
    }

"""Figures of a race: TFLOP/s over sequence length."""

from __future__ import annotations

from typing import Any

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

RIVALS = ("sdpa-cudnn", "sdpa-flash", "flash-attn-4")
"""Those that the first figure has beside the backends."""

HEADLINE_HEAD_DIMS = (64, 128)


def draw_headline(records: list[Record]) -> Any:
    """Backends and RIVALS on the causal half of the grid, head_dim 64 and 128, in one row."""
    chosen = [
        r
        for r in records
        if r["workload"] == "grid"
        and r["is_causal"]
        and r["head_dim"] in HEADLINE_HEAD_DIMS
        and r["direction"] in DIRECTIONS[:2]
        and (r["backend"] in RIVALS or not is_yardstick(r["backend"]))
        and r["backend"] != "reference"
    ]
    panels = [(direction, True, d) for direction in DIRECTIONS[:2] for d in HEADLINE_HEAD_DIMS]
    return _draw(chosen, [panels], height=3.1, legend_columns=7)


def draw_grid(records: list[Record]) -> Any:
    """The whole grid and every contender: a row for each direction and mask."""
    chosen = [r for r in records if r["workload"] == "grid" and r["backend"] not in LEFT_OUT]
    head_dims = sorted({r["head_dim"] for r in chosen})
    rows = [
        [(direction, is_causal, head_dim) for head_dim in head_dims]
        for direction in DIRECTIONS
        for is_causal in (False, True)
        if any((r["direction"], r["is_causal"]) == (direction, is_causal) for r in chosen)
    ]
    return _draw(chosen, rows, height=2.5, legend_columns=LEGEND_COLUMNS)


def _draw(
    records: list[Record],
    rows: list[list[tuple[str, bool, int]]],
    height: float,
    legend_columns: int,
) -> Any:
    """Panels of (direction, is_causal, head_dim); those of a row share their scale."""
    from matplotlib.figure import Figure

    names = sorted({r["backend"] for r in records}, key=lambda n: (is_yardstick(n), _order(n), n))
    seqlens = sorted({r["seqlen_q"] for r in records})
    figure = Figure(
        figsize=(3.1 * len(rows[0]) + 0.6, height * len(rows) + 0.7), layout="constrained"
    )
    grid = figure.subplots(len(rows), len(rows[0]), sharex=True, sharey="row", squeeze=False)
    lines = {}
    for axes, panels in zip(grid, rows, strict=True):
        for axis, panel in zip(axes, panels, strict=True):
            direction, is_causal, head_dim = panel
            here = [r for r in records if (r["direction"], r["is_causal"], r["head_dim"]) == panel]
            for name in names:
                points = sorted((r["seqlen_q"], r["tflops"]) for r in here if r["backend"] == name)
                if points:
                    lines[name] = axis.plot(*zip(*points, strict=True), **style_of(name))[0]
            axis.set_title(f"{direction}{', causal' * is_causal}, head_dim {head_dim}", fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_xticks(seqlens, [f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens])
            axis.minorticks_off()
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("TFLOP/s")
        axes[0].set_ylim(bottom=0)  # once the whole row is drawn, which shares it
    for axis in grid[-1]:
        axis.set_xlabel("sequence length")
    figure.legend(
        [lines[name] for name in names],
        names,
        loc="outside upper center",
        ncols=min(len(names), legend_columns),
        frameon=False,
    )
    return figure


def _order(name: str) -> int:
    return list(COLOURS).index(name) if name in COLOURS else len(COLOURS)


def style_of(name: str) -> dict[str, Any]:
    """How a contender's line looks: backends drawn through, others dashed."""
    own = not is_yardstick(name)
    return {
        "color": COLOURS.get(name, "#888888"),
        "linewidth": 2.2 if own else 1.3,
        "linestyle": "-" if own else "--",
        "marker": "o" if own else ".",
        "markersize": 4 if own else 5,
    }

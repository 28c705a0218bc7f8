"""The report's section about tiles: heatmaps of rate, of shared memory, and the cost of trying."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flash_rosetta.bench.page import Block, Plot, Section, Table, Text
from flash_rosetta.bench.report import Record

CARDS = {"sm_89": 99 << 10, "sm_90": 227 << 10}
"""Shared memory that a program may use (CUDA C++ Programming Guide, by compute capability)."""


ACROSS = 12
"""Cells beside each other that a page has room for."""


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """A section for each backend, and one about the cost."""
    records = part["records"]
    sizes = [r for r in records if r["kind"] == "size"]
    made = [
        Section(
            f"Tiles in {name}",
            tuple(_blocks(name, [r for r in records if r["backend"] == name])),
        )
        for name in dict.fromkeys(r["backend"] for r in sizes)
    ]
    return [*made, *_cost([r for r in records if r["kind"] == "cost"])]


def _blocks(name: str, records: list[Record]) -> Iterable[Block]:
    for head_dim in dict.fromkeys(r["head_dim"] for r in records):
        here = [r for r in records if r["head_dim"] == head_dim]
        sizes = [r for r in here if r["kind"] == "size"]
        yield Text(_best(head_dim, here, sizes))
        yield Plot(
            f"sweep-{name}-d{head_dim}",
            f"TFLOP/s and shared memory by tile size, {name}, head_dim {head_dim}",
            lambda sizes=sizes, d=head_dim: _draw(name, d, sizes),
        )
        yield from _refused(sizes)


def _best(head_dim: int, here: list[Record], sizes: list[Record]) -> str:
    timed = [r for r in sizes if r.get("tflops")]
    if not timed:
        return f"At head_dim {head_dim} no size has a rate."
    best = max(timed, key=lambda r: r["tflops"])
    text = f"At head_dim {head_dim} the best of {len(timed)} sizes is `{best['size']}`, "
    text += f"{best['tflops']:.0f} TFLOP/s"
    for r in here:
        if r["kind"] == "shipped" and r.get("tflops"):
            text += f"; what ships reached {r['tflops']:.0f} in the same race"
    small = [r for r in timed if r["shared_bytes"] <= CARDS["sm_89"]]
    if small:
        best = max(small, key=lambda r: r["tflops"])
        text += f". Of the {len(small)} that fit the 99 KB of sm_89, `{best['size']}` is the "
        text += f"fastest here, {best['tflops']:.0f}"
    return text + ". A name is query rows x keys, warps, stages."


def _refused(sizes: list[Record]) -> list[Text]:
    left = [r for r in sizes if not r.get("tflops")]
    if not left:
        return []
    example = left[0]["reasons"][0] if left[0]["reasons"] else left[0]["verdict"]
    return [
        Text(f"{len(left)} sizes have no rate, because they do not fit or fail: {example}, ...")
    ]


def _cost(records: list[Record]) -> list[Section]:
    if not records:
        return []
    rows = [
        [
            f"`{r['backend']}`, head_dim {r['head_dim']}",
            str(r["sizes"]),
            f"{r['compile_s']:.0f}",
            f"{r['compile_s'] / r['sizes']:.1f}" if r["sizes"] else "",
            f"{r['timing_s']:.1f}",
        ]
        for r in records
    ]
    return [
        Section(
            "What autotuning costs",
            (
                Text(
                    "Seconds of one core's time to compile all sizes of one kernel, measured while "
                    "all cores compiled, and seconds to judge and time them. A kernel that tunes "
                    "itself at the first call would take them one after the other."
                ),
                Table(["", "sizes", "compile s", "each", "judge and time s"], rows),
            ),
        )
    ]


def _draw(name: str, head_dim: int, sizes: list[Record]) -> Any:
    """Panels by stages, and by warps unless rows fix them: rates above, shared memory below."""
    from matplotlib import pyplot as plt

    rows = sorted({r["tile_q"] for r in sizes})
    columns = sorted({r["tile_k"] for r in sizes})
    fixed = all(
        len({r["num_warps"] for r in sizes if r["tile_q"] == tile_q}) == 1 for tile_q in rows
    )
    panels = sorted({(0 if fixed else r["num_warps"], r["num_stages"]) for r in sizes})
    lines = -(-len(panels) * len(columns) // ACROSS)
    across = -(-len(panels) // lines)
    figure, axes = plt.subplots(
        2 * lines, across, squeeze=False, layout="constrained",
        figsize=(0.75 * len(columns) * across + 1.6, lines * (1.1 * len(rows) + 1.2) + 0.7),
    )  # fmt: skip
    for index in range(len(panels), lines * across):
        for line in (0, 1):
            axes[2 * (index // across) + line, index % across].set_visible(False)
    highest = max((r["tflops"] for r in sizes if r.get("tflops")), default=1.0)
    for index, (warps, stages) in enumerate(panels):
        here = {
            (r["tile_q"], r["tile_k"]): r
            for r in sizes
            if r["num_stages"] == stages and (fixed or r["num_warps"] == warps)
        }
        title = f"{stages} stages" if fixed else f"{warps} warps, {stages} stages"
        for line, (key, bound) in enumerate((("tflops", highest), ("shared_bytes", 0.0))):
            axis = axes[2 * (index // across) + line, index % across]
            grid = [[here.get((q, k), {}).get(key) or float("nan") for k in columns] for q in rows]
            axis.imshow(
                grid, aspect="auto", cmap="viridis" if line == 0 else "Greys",
                vmin=0, vmax=bound or 2 * CARDS["sm_90"],
            )  # fmt: skip
            for i, q in enumerate(rows):
                for j, k in enumerate(columns):
                    _write(axis, (j, i), here.get((q, k)), key, highest)
            axis.set_xticks(range(len(columns)), columns, fontsize=8)
            axis.set_yticks(range(len(rows)), rows, fontsize=8)
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
            if line == 0:
                axis.set_title(title, fontsize=9)
            else:
                axis.set_xlabel("keys", fontsize=9)
            if index % across == 0:
                axis.set_ylabel("query rows", fontsize=9)
    figure.suptitle(
        f"{name}, head_dim {head_dim}: TFLOP/s, and KB of shared memory "
        "(bold fits sm_89's 99, struck not even sm_90's 227)",
        fontsize=9,
    )
    return figure


def _write(axis: Any, place: tuple[int, int], record: Record | None, key: str, highest: float):
    """A cell's number, in a colour that its background lets one read."""
    if record is None:
        return
    value = record.get(key)
    if key == "tflops":
        if not value:
            axis.text(*place, "-", ha="center", va="center", fontsize=8, color="#888888")
            return
        colour = "#ffffff" if value < 0.6 * highest else "#000000"
        axis.text(*place, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
        return
    text = f"{value / 1024:.0f}"
    weight = "bold" if value <= CARDS["sm_89"] else "normal"
    colour = "#ffffff" if value > CARDS["sm_90"] else "#000000"
    if value > CARDS["sm_90"]:
        text = "\u0336".join(text) + "\u0336"
    axis.text(*place, text, ha="center", va="center", fontsize=8, weight=weight, color=colour)

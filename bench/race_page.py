"""The race in a report: what all heats say together, then each heat, then every figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flash_rosetta.bench import card as cards
from flash_rosetta.bench.card import Card
from flash_rosetta.bench.page import Block, Plot, Section, Table, Text
from flash_rosetta.bench.plot import COLOURS, HEADLINE_HEAD_DIMS, RIVALS, draw_grid, draw_headline
from flash_rosetta.bench.report import (
    DIRECTIONS,
    KINDS,
    OTHERS,
    YARDSTICKS,
    Record,
    geometric_mean,
    heat_of,
    heat_title,
    is_yardstick,
    kind_of,
    rates,
    short,
    summary,
)

VERSIONS = {
    "driver": "driver",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "torch": "torch",
    "triton": "Triton",
    "tilelang": "TileLang",
    "nvidia-cutlass-dsl": "CuTe DSL",
    "flash-attn-4": "flash-attn-4",
    "python": "Python",
}
"""Keys of machine_info, and what a reader calls them."""

INPUTS = {
    "grid": "standard normal inputs, 16k tokens a call",
    "models": "sizes of named models, about 16k tokens a call",
    "captured, tiled": "captured inputs tiled to 16k tokens a call",
    "captured": "captured inputs as they are, too small to fill a card",
}
"""What the KINDS of workloads are."""


LIMITS = {
    "SM clock": ("sm_clock_mhz", "{:.0f} MHz"),
    "highest SM clock": ("max_sm_clock_mhz", "{:.0f} MHz"),
    "memory clock": ("memory_clock_mhz", "{:.0f} MHz"),
    "power limit": ("power_limit_w", "{:.0f} W"),
    "multiprocessors": ("multiprocessors", "{}"),
}
"""What a reader calls what the card can do: its key in machine_info, and how it is written."""


def facts(card: Card) -> dict[str, str]:
    """What a reader must know of where the figures come from."""
    machine = card["machine_info"]
    return (
        {"measured": card["datetime"][:10], "commit": commit_of(card)}
        | {label: machine[key] for key, label in VERSIONS.items() if machine.get(key)}
        | {
            label: form.format(machine[key])
            for label, (key, form) in LIMITS.items()
            if machine.get(key) is not None
        }
    )


def commit_of(measured: dict[str, Any]) -> str:
    """The commit of a card or of a part, in twelve digits."""
    commit, dash, rest = (measured["machine_info"].get("commit") or "unknown").partition("-")
    return f"{commit[:12]}{dash}{rest}"


def headline(card: Card) -> list[Block]:
    """A table of each backend's rate over its rivals', and one plot; nothing without a grid."""
    records = cards.records(card)
    backends, rivals = _entrants(records)
    if not backends or not rivals:
        return []
    directions = DIRECTIONS[:2]
    ratios = {
        (name, direction, rival): _ratios(records, name, direction, rival)
        for name in backends
        for direction in directions
        for rival in rivals
    }
    columns = [(direction, rival) for direction in directions for rival in rivals]
    most = max(map(len, ratios.values()))
    best = {
        column: max((geometric_mean(r) for n in backends if (r := ratios[n, *column])), default=0)
        for column in columns
    }

    def cell(name: str, column: tuple[str, str]) -> str:
        found = ratios[name, *column]
        if not found:
            return ""
        mean = geometric_mean(found)
        text = f"{mean:.3f}" + (f" ({len(found)} heats)" if len(found) < most else "")
        return f"**{text}**" if mean == best[column] else text

    head_dims = " and ".join(map(str, HEADLINE_HEAD_DIMS))
    caption = (
        f"Rate on one {cards.name(card)} as a share of each rival's: geometric mean over {most} "
        f"heats, bf16, head_dim {head_dims}, {_span(records)} tokens, causal and not. Above 1 is "
        "faster than the rival."
    )
    table = Table(
        ["backend", *(f"{direction} / {rival}" for direction, rival in columns)],
        [[f"`{name}`", *(cell(name, column) for column in columns)] for name in backends],
        caption=caption,
    )
    plot = Plot(
        "headline",
        f"TFLOP/s over sequence length on {cards.name(card)}, causal, forward and backward, for "
        f"{', '.join([*backends, *rivals])}",
        lambda: draw_headline(records),
    )
    return [table, plot]


def _entrants(records: list[Record]) -> tuple[list[str], list[str]]:
    """Backends and rivals of the headline; the reference is no kernel."""
    present = {r["backend"] for r in records if _is_headline(r)}
    rivals = [name for name in RIVALS if name in present]
    backends = {name for name in present if not is_yardstick(name)} - {"reference"}
    return sorted(backends, key=_order), rivals


def _order(name: str) -> tuple[int, str]:
    """Our kernels first, as COLOURS has them."""
    known = list(COLOURS)
    return known.index(name) if name in known else len(known), name


def _is_headline(record: Record) -> bool:
    return (
        record["workload"] == "grid"
        and record["head_dim"] in HEADLINE_HEAD_DIMS
        and bool(record["tflops"])
    )


def _ratios(records: list[Record], name: str, direction: str, rival: str) -> list[float]:
    """Rates of one contender over those of another, over the headline's heats."""
    rate = rates(r for r in records if _is_headline(r) and r["direction"] == direction)
    return [
        own / theirs
        for (heat, backend), own in rate.items()
        if backend == name and (theirs := rate.get((heat, rival)))
    ]


def _span(records: list[Record]) -> str:
    seqlens = [r["seqlen_q"] for r in records if _is_headline(r)]
    return f"{min(seqlens)} to {max(seqlens)}"


def sections(card: Card) -> list[Section]:
    """What the README and the page both have."""
    records = cards.records(card)
    grid = [r for r in records if r["workload"] == "grid"]
    return [
        *_summary(records),
        *_spread(records),
        *_memory(grid),
        *_host(records),
        *_missing(card.get("no_number", [])),
        *(s for direction in DIRECTIONS[:2] for s in _heats(records, direction, "grid")),
    ]


def details(card: Card) -> list[Section]:
    """What only the page has."""
    records = cards.records(card)
    found = [
        section
        for kind in KINDS
        for direction in DIRECTIONS
        if kind != "grid" or direction not in DIRECTIONS[:2]
        for section in _heats(records, direction, kind)
    ]
    if any(r["workload"] == "grid" and r["tflops"] for r in records):
        plot = Plot(
            "grid",
            f"TFLOP/s of all contenders over sequence length on {cards.name(card)}",
            lambda: draw_grid(records),
        )
        found.append(Section("All contenders on the grid", (plot,)))
    sources = {r["workload"]: r["source"] for r in records if r.get("source")}
    if sources:
        rows = [[name, source] for name, source in sources.items()]
        found.append(
            Section("Where the workloads come from", (Table(["workload", "source"], rows, 2),),
                    is_folded=True)
        )  # fmt: skip
    return [*found, *_every_figure(records, card["machine_info"].get("matmul_tflops"))]


def _summary(records: list[Record]) -> Iterator[Section]:
    rows = sorted(summary(records), key=lambda row: _order(row[0]))
    if not rows:
        return
    rivals = list(rows[0][3])
    tables = [
        Table(
            ["backend", "inputs", *rivals],
            [
                [
                    f"`{name}`",
                    kind,
                    *(f"{geometric_mean(r):.2f} ({len(r)})" if r else "" for r in ratios.values()),
                ]
                for name, row_direction, kind, ratios in rows
                if row_direction == direction
            ],
            left=2,
            caption=f"**{direction}**",
        )
        for direction in DIRECTIONS
        if any(row[1] == direction for row in rows)
    ]
    text = "Geometric mean of a backend's rate as a share of each rival's (over how many heats)."
    yield Section("Against each rival", (*_default(records), Text(text), *tables))


def _default(records: list[Record]) -> Iterator[Text]:
    ran = [r["ran"] for r in records if r.get("ran")]
    if ran:
        parts = (
            f"`{name}` in {ran.count(name)} of {len(ran)} heats" for name in dict.fromkeys(ran)
        )
        yield Text(f"`sdpa-default` launched {', '.join(parts)}.")


def _spread(records: list[Record]) -> Iterator[Section]:
    """How far rounds are apart, how far one kernel is from itself, and what the clocks did."""
    spreads = [(r["ms_q75"] - r["ms_q25"]) / r["ms"] for r in records if r["ms"]]
    if len(spreads) < 2:
        return
    texts = [
        "The quartiles of a contender's rounds are apart by "
        f"{_percent(statistics.median(spreads))} of its median in half of all records, by "
        f"{_percent(_high(spreads))} at most in 95 % of them."
    ]
    rate = rates(records)
    twins = [
        abs(r["tflops"] / theirs - 1)
        for r in records
        if r.get("ran") and (theirs := rate.get((heat_of(r), r["ran"])))
    ]
    if len(twins) > 1:
        texts.append(
            "`sdpa-default` and the kernel that it launched are one kernel measured twice: they "
            f"differ by {_percent(statistics.median(twins))} in half of {len(twins)} heats, by "
            f"{_percent(_high(twins))} at most in 95 % of them. A smaller difference says nothing."
        )
    sensed = [r[when] for r in records for when in ("before", "after") if r.get(when)]
    ranges = [
        f"{label} {min(values):.0f} to {max(values):.0f} {unit}"
        for label, key, unit in (
            ("SM clock", "sm_clock_mhz", "MHz"),
            ("temperature", "temperature_c", "°C"),
            ("power", "power_w", "W"),
        )
        if (values := [s[key] for s in sensed if s.get(key) is not None])
    ]
    if ranges:
        texts.append(f"Read before and after each heat, never set: {', '.join(ranges)}.")
    yield Section("How exact the figures are", tuple(map(Text, texts)))


def _high(values: list[float]) -> float:
    """What 95 % of the values do not exceed."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _memory(records: list[Record]) -> Iterator[Section]:
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
    text = (
        f"At sequence length {longest}: the most that a call has allocated, outputs included, over "
        "the size of q, k and v."
    )
    yield Section("Memory", (Text(text), Table(["", *names], rows)))


def _host(records: list[Record]) -> Iterator[Section]:
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
    text = "One forward call, Python to launch, in microseconds."
    yield Section("Host time", (Text(text), Table(["", *names], rows)))


def _missing(without: list[Record]) -> Iterator[Section]:
    broken = [r for r in without if r["verdict"] in ("wrong", "failed")]
    if broken:
        rows = [
            [
                f"`{r['backend']}`",
                r["direction"],
                f"{r['workload']} `{r['problem']}`",
                r["verdict"],
                r["reasons"][-1].strip().splitlines()[-1],
            ]
            for r in broken
        ]
        text = "Because the output was wrong or the call failed."
        header = ["contender", "direction", "problem", "verdict", "reason"]
        yield Section("Without a number", (Text(text), Table(header, rows, left=5)))


def _heats(records: list[Record], direction: str, kind: str) -> Iterator[Section]:
    """A folded table of heats by contenders, the fastest of each heat in bold."""
    chosen = [
        r
        for r in records
        if r["direction"] == direction and kind_of(r["workload"]) == kind and r["tflops"]
    ]
    if not chosen:
        return
    is_small = kind == "captured"
    unit = "microseconds" if is_small else "TFLOP/s, and the share of sdpa-cudnn"
    cell = _microseconds if is_small else _rate_and_share
    title = f"{direction}, {INPUTS[kind]}: {unit}"
    yield Section(title, (_table_of_heats(chosen, cell),), is_folded=True)


def _rate_and_share(record: Record, cudnn: Record | None) -> str:
    text = short(record["tflops"])
    if cudnn and not is_yardstick(record["backend"]):
        text += f" ({100 * record['tflops'] / cudnn['tflops']:.0f} %)"
    return text


def _microseconds(record: Record, cudnn: Record | None) -> str:
    return short(1e3 * record["ms"])


def _table_of_heats(records: list[Record], cell: Callable[[Record, Record | None], str]) -> Table:
    names = _names(records)
    rows = []
    for members in _by_heat(records):
        by_name = {r["backend"]: r for r in members}
        best = max(r["tflops"] for r in members)
        cudnn = by_name.get("sdpa-cudnn")
        texts = {name: cell(record, cudnn) for name, record in by_name.items()}
        bold = {name for name, record in by_name.items() if record["tflops"] == best}
        cells = (f"**{texts[n]}**" if n in bold else texts.get(n, "") for n in names)
        rows.append([heat_title(members[0]).removeprefix("grid "), *cells])
    return Table(["problem", *names], rows)


def _every_figure(records: list[Record], matmul: float | None) -> Iterator[Section]:
    """For each direction a folded table of all that was measured."""
    rate = rates(records)
    present = {r["backend"] for r in records}
    rivals = {n: t for n, t in (YARDSTICKS | OTHERS).items() if n in present}
    header = [
        "problem", "contender", "ms", "quartiles, ms", "TFLOP/s", *rivals.values(), "% matmul",
        "relative error", "row error", "max error", "first call, s", "host, µs", "peak, MB",
        "peak / inputs",
    ]  # fmt: skip
    for direction in DIRECTIONS:
        rows = []
        for members in _by_heat(r for r in records if r["direction"] == direction and r["tflops"]):
            for record in members:
                own, heat = record["tflops"], heat_of(record)
                shares = (
                    f"{100 * own / theirs:.0f}" if (theirs := rate.get((heat, name))) else ""
                    for name in rivals
                )
                errors = (record.get(f"{kind}_error") for kind in ("rel", "row", "max"))
                host = (record.get("host_us"), record.get("host_grad_us"))
                peak = record["peak_mb"]
                rows.append(
                    [
                        heat_title(record),
                        f"`{record['backend']}`",
                        f"{record['ms']:.4f}",
                        f"{record['ms_q25']:.4f} to {record['ms_q75']:.4f}",
                        short(own),
                        *shares,
                        f"{100 * own / matmul:.0f}" if matmul else "",
                        *(f"{error:.1e}" if error is not None else "" for error in errors),
                        f"{record['compile_s']:.2f}",
                        " / ".join(f"{us:.0f}" for us in host if us),
                        f"{peak:.0f}" if peak is not None else "",
                        f"{peak / record['inputs_mb']:.2f}" if peak is not None else "",
                    ]
                )
        if rows:
            yield Section(f"{direction}: every figure", (Table(header, rows, 2),), is_folded=True)


def _by_heat(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records of each heat, in the order in which the heats first come."""
    heats: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        heats.setdefault(heat_of(record), []).append(record)
    yield from heats.values()


def _names(records: list[Record]) -> list[str]:
    """Contenders in the order in which they raced: backends first."""
    return list(dict.fromkeys(r["backend"] for r in records))

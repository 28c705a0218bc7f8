"""Tables of a race, from its records: `extra_info` of the race's JSON, and what has no number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from flash_rosetta.bench.workloads import DIRECTIONS

Record = dict[str, Any]
"""One contender in one heat: the extra_info of pytest-benchmark's record."""

YARDSTICKS = {
    "sdpa-cudnn": "% cudnn",
    "sdpa-flash": "% flash",
    "sdpa-efficient": "% effic.",
    "sdpa-math": "% math",
}
"""PyTorch's kernels, and the heading over what others reach of their rate."""

OTHERS = {"flash-attn-4": "% fa4", "flex": "% flex"}
"""The same for those who need not be there."""

_HEAT = ("direction", "workload", "problem")


KINDS = ("grid", "models", "captured, tiled", "captured")


def kind_of(workload: str) -> str:
    """Which of KINDS a workload is: the captured inputs as they are do not fill a card."""
    if workload == "grid":
        return "grid"
    if not workload.startswith("captured-"):
        return "models"
    return "captured, tiled" if workload.endswith("-tiled") else "captured"


def heat_of(record: Record) -> tuple:
    """What contenders must share to be compared."""
    return tuple(record[key] for key in _HEAT)


def heat_title(record: Record) -> str:
    """A few words about a heat's problem."""
    name = record["workload"].removeprefix("captured-")
    n = f"{record['seqlen_q']}"
    if record["seqlen_k"] != record["seqlen_q"]:
        n += f"x{record['seqlen_k']}"
    kv = f"/{record['num_kv_heads']}" if record["num_kv_heads"] != record["num_heads"] else ""
    causal = " causal" if record["is_causal"] else ""
    d = f"{record['head_dim']}"
    if record.get("head_dim_v", record["head_dim"]) != record["head_dim"]:
        d += f"/{record['head_dim_v']}"
    return f"{name} d{d} n{n}{causal} b{record['batch']} h{record['num_heads']}{kv}"


def rates(records: Iterable[Record]) -> dict[tuple, float]:
    """TFLOP/s by (heat, contender)."""
    return {(heat_of(r), r["backend"]): r["tflops"] for r in records if r["tflops"]}


def geometric_mean(values: list[float]) -> float:
    """The mean for ratios: nan for none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def short(number: float) -> str:
    """Three digits or more, for a table."""
    decimals = 0 if number >= 100 else 1 if number >= 10 else 2 if number >= 0.1 else 4
    return f"{number:.{decimals}f}"


def is_yardstick(name: str) -> bool:
    """Whether a contender is none of the backends: PyTorch's own, or a third party's."""
    return name.startswith("sdpa-") or name in OTHERS


def yardsticks(records: Iterable[Record]) -> list[str]:
    """PyTorch's kernels, and the others of which there are records."""
    present = {r["backend"] for r in records}
    return [*YARDSTICKS, *(name for name in OTHERS if name in present)]


def title_of(record: Record) -> str:
    """The contender's name, and for SDPA's default the kernel that it launched."""
    ran = record.get("ran")
    return f"{record['backend']} ({ran.removeprefix('sdpa-')})" if ran else record["backend"]


def speed_tables(
    records: list[Record], without: list[Record], matmul: float | None
) -> Iterator[Table]:
    """One table for each direction: every contender of every heat, with all that was measured."""
    rate = rates(records)
    others = yardsticks(records)
    for direction in DIRECTIONS:
        rows = [r for r in [*records, *_shown(without)] if r["direction"] == direction]
        if not rows:
            continue
        table = Table(
            title=f"{direction}: median device time with a cold L2; FLOPs of unmasked pairs",
            box=box.SIMPLE_HEAD,
            title_justify="left",
        )
        table.add_column("contender", min_width=27)
        for heading in (
            "ms",
            "iqr %",
            "TFLOP/s",
            *((YARDSTICKS | OTHERS)[name] for name in others),
            "% matmul",
            "max error",
            "first s",
            "host us",
            "peak MB",
            "/inputs",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for heat, group in _heats(rows):
            members = list(group)
            table.add_section()
            table.add_row(f"[bold]{heat_title(members[0])}")
            for record in members:
                table.add_row(title_of(record), *_speed_cells(record, heat, rate, others, matmul))
        yield table


def _speed_cells(
    record: Record,
    heat: tuple,
    rate: dict[tuple, float],
    others: list[str],
    matmul: float | None,
) -> list[str]:
    if "verdict" in record:
        return ["", "", f"[red]{record['verdict']}[/]"]
    own = record["tflops"]

    def percent(other: float | None) -> str:
        return f"{100 * own / other:.0f}" if other else ""

    peak, inputs = record["peak_mb"], record["inputs_mb"]
    host = [f"{us:.0f}" for us in (record.get("host_us"), record.get("host_grad_us")) if us]
    return [
        f"{record['ms']:.4f}",
        f"{100 * (record['ms_q75'] - record['ms_q25']) / record['ms']:.1f}",
        short(own),
        *(percent(rate.get((heat, name))) for name in others),
        percent(matmul),
        f"{record['max_error']:.1e}",
        f"{record['compile_s']:.2f}",
        "/".join(host),
        f"{peak:.0f}",
        f"{peak / inputs:.2f}",
    ]


def summary(records: list[Record]) -> Iterator[tuple[str, str, str, dict[str, list[float]]]]:
    """(backend, direction, kind of inputs, its rates over each yardstick's, by yardstick)."""
    rate = rates(records)
    others = yardsticks(records)
    names = dict.fromkeys(r["backend"] for r in records if not is_yardstick(r["backend"]))
    for name in names:
        for direction in DIRECTIONS:
            for kind in KINDS:
                ratios = {
                    other: [
                        own / theirs
                        for (heat, backend), own in rate.items()
                        if backend == name
                        and heat[0] == direction
                        and kind_of(heat[1]) == kind
                        and (theirs := rate.get((heat, other)))
                    ]
                    for other in others
                }
                if any(ratios.values()):
                    yield name, direction, kind, ratios


def summary_table(records: list[Record]) -> Table | None:
    """Geometric means of each backend's rate over each yardstick's; None if there is no pair."""
    table = Table(
        title="Geometric mean of the rate, as a share of each rival's (heats)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in ("backend", "direction", "inputs"):
        table.add_column(heading, no_wrap=True)
    for name in yardsticks(records):
        table.add_column(name, justify="right")
    for name, direction, kind, ratios in summary(records):
        cells = (f"{geometric_mean(r):.2f} ({len(r)})" if r else "" for r in ratios.values())
        table.add_row(name, direction, kind, *cells)
    return table if table.row_count else None


def correctness_table(records: list[Record], without: list[Record]) -> Table:
    """Who was right, and by how much: all that a machine without a GPU can say."""
    table = Table(
        title="Correctness only: no GPU here, so nothing about speed. Errors against\n"
        "the fp64 oracle, the worst output; tensor and row errors are relative.",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("contender")
    for heading in ("tensor error", "row error", "max error", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for _, group in _heats([*records, *_shown(without)]):
        members = list(group)
        table.add_section()
        table.add_row(f"[bold]{members[0]['direction']} {heat_title(members[0])}")
        for record in members:
            verdict = record.get("verdict", "right")
            colour = "green" if verdict == "right" else "red"
            errors = (
                f"{record[key]:.1e}" if key in record else ""
                for key in ("rel_error", "row_error", "max_error")
            )
            table.add_row(title_of(record), *errors, f"[{colour}]{verdict}[/]")
    return table


def notes(without: list[Record]) -> Iterator[str]:
    """Why something has no number: each reason once, with the heats that it cost."""
    counts: dict[tuple[str, str, str], list[Record]] = {}
    for record in without:
        for reason in record["reasons"]:
            counts.setdefault((record["backend"], record["verdict"], reason), []).append(record)
    for (name, verdict, reason), members in counts.items():
        where = heat_title(members[0]) if len(members) == 1 else f"{len(members)} heats"
        yield f"{name} {verdict} in {where}: {reason.strip()}"


def _shown(without: list[Record]) -> list[Record]:
    """Wrong and failed contenders stand in the tables; skipped ones are noted below."""
    return [record for record in without if record["verdict"] != "skipped"]


def _heats(rows: list[Record]) -> Iterator[tuple[tuple, Iterable[Record]]]:
    """Rows by heat, in the order in which the heats first come."""
    order = {heat: i for i, heat in enumerate(dict.fromkeys(map(heat_of, rows)))}
    return groupby(sorted(rows, key=lambda r: order[heat_of(r)]), key=heat_of)

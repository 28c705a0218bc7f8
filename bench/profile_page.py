"""The report's section about Nsight Compute's figures of the kernels at head_dim 128."""

from __future__ import annotations

import re
from typing import Any

from flash_rosetta.bench.page import Block, Section, Table, Text
from flash_rosetta.bench.parts import Record

FIGURES = {
    "time_us": "us",
    "tensor_pct": "tensor pipes %",
    "issue_pct": "issue slots %",
    "occupancy_pct": "warps %",
    "dram_read_mb": "DRAM read MB",
    "dram_write_mb": "written MB",
    "l2_hit_pct": "L2 hits %",
    "registers": "registers",
    "shared_dynamic_kb": "shared KB",
}
"""Keys of a record, and the headings over them."""

SHARE = 0.2
"""A kernel that takes less of its direction's time is a helper, and stands in no first table."""

NOT_WAITING = ("selected", "not_selected")
"""States of a warp that could issue."""

TOP = 3


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """The kernels that multiply; folded, their helpers; and for whom there is nothing, why."""
    kernels = [r for r in part["records"] if r["verdict"] == "profiled"]
    blocks: list[Block] = []
    main, helpers = _split(kernels)
    if main:
        blocks += [
            Text(
                "Nsight Compute on one call of each kernel: bf16, head_dim 128, 4096 tokens, 16k "
                "in all, not causal, with the clocks as they are. Under it a kernel has the card "
                "to itself, its caches cold. Tensor pipes: how much of the time in which a "
                "multiprocessor was active they were."
            ),
            Table(
                ["kernel", *FIGURES.values()],
                [[_title(r), *(_number(r.get(key)) for key in FIGURES)] for r in main],
            ),
            Table(
                ["kernel", *(f"{n}." for n in range(1, TOP + 1))],
                [[_title(r), *_waits(r)] for r in main],
                left=1 + TOP,
                caption="What warps wait for: the states that most of them were in, and how many "
                "warps on average for each instruction issued.",
            ),
        ]
    blocks += [
        Text(f"`{r['backend']}` {r['verdict']}: {'; '.join(r['reasons'])}")
        for r in part["records"]
        if r["verdict"] != "profiled"
    ]
    made = [Section("Six kernels under Nsight Compute", tuple(blocks))]
    if helpers:
        rows = [[_title(r), *(_number(r.get(key)) for key in FIGURES)] for r in helpers]
        table = Table(["kernel", *FIGURES.values()], rows)
        made.append(Section("Their helpers", (table,), is_folded=True))
    return made


def _split(kernels: list[Record]) -> tuple[list[Record], list[Record]]:
    """The kernels that take SHARE of their backend's direction or more, and the others."""
    times: dict[tuple[str, str], float] = {}
    for r in kernels:
        key = r["backend"], r["direction"]
        times[key] = times.get(key, 0.0) + (r["time_us"] or 0.0)
    main = [
        r for r in kernels if (r["time_us"] or 0) >= SHARE * times[r["backend"], r["direction"]]
    ]
    return main, [r for r in kernels if r not in main]


def _title(record: Record) -> str:
    return f"`{record['backend']}` {record['direction']}, {short_name(record['kernel'])}"


def short_name(kernel: str) -> str:
    """What a kernel is called in its source: CuTe DSL writes the types of all arguments behind it.

    "kernel_cutlass_kernel_..._implbackwardOnePass_object_at__..." is OnePass.
    """
    if match := re.search(r"_impl([a-z_]+)([A-Z]\w*?)_object_at", kernel):
        return match[2]
    return kernel.removesuffix("_kernel")


def _waits(record: Record) -> list[str]:
    waiting = {s: n for s, n in record["stalls"].items() if s not in NOT_WAITING and n}
    top = sorted(waiting, key=waiting.__getitem__, reverse=True)[:TOP]
    cells = [f"{state.replace('_', ' ')} {waiting[state]:.2f}" for state in top]
    return cells + [""] * (TOP - len(cells))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"

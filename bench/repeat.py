"""Some heats of the race again, in a process of its own: how far medians move by themselves.

The quartiles of one race say how its rounds differ, seconds apart. Minutes later the card is warmer
and buffers lie elsewhere. A difference between two medians that is no larger than what the same
kernel shows here is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from flash_rosetta import registry
from flash_rosetta.bench import card as cards
from flash_rosetta.bench.contenders import Contender, contenders
from flash_rosetta.bench.heat import run_heat
from flash_rosetta.bench.page import Block, Section, Table, Text
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.report import geometric_mean, heat_of
from flash_rosetta.bench.workloads import Timed, Workload, workloads

__all__ = ["measure", "sections"]

ROUNDS = 20
HEAD_DIMS, SEQLENS = (64, 128), (2048, 8192)
DIRECTIONS: tuple[Timed, ...] = ("forward", "backward")
RIVALS = ["sdpa-cudnn", "sdpa-flash", "flash-attn-4"]


def measure(lab: Lab) -> list[Record]:
    """The records of 16 heats of the grid; on a CPU, which has no times, of captured inputs."""
    field = _field(lab)
    watch = lab.watch
    records: list[Record] = []
    heats = [(w, direction) for w in _workloads(lab) for direction in DIRECTIONS]
    for workload, direction in lab.track(heats, "repeat"):
        outcomes = run_heat(
            workload, direction, field, watch, lab.device, budget=0.25, rounds=ROUNDS
        )
        records += [o.info for o in outcomes.values() if o.verdict == "raced"]
    return records


def _field(lab: Lab) -> list[Contender]:
    slow = {"reference"} if lab.device.type == "cuda" else set()
    names = [n for n in registry.names() if n not in {*registry.ONLY_BY_NAME, *slow}]
    return contenders(list(lab.backends) or names, RIVALS)


def _workloads(lab: Lab) -> list[Workload]:
    if lab.device.type == "cpu":
        return workloads("captured", lab.device)[:1]
    seqlens = SEQLENS[:1] if lab.is_quick else SEQLENS
    return workloads("grid", lab.device, HEAD_DIMS, seqlens)


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """How far each contender's medians are from those of the race."""
    first = {(heat_of(r), r["backend"]): r for r in cards.records(card) if r.get("ms")}
    moved: dict[str, list[float]] = {}
    inside = 0
    for again in part["records"]:
        before = first.get((heat_of(again), again["backend"]))
        if before is not None and again.get("ms"):
            moved.setdefault(again["backend"], []).append(again["ms"] / before["ms"])
            inside += before["ms_q25"] <= again["ms"] <= before["ms_q75"]
    return [Section("The same heats again", tuple(_blocks(moved, inside)))]


def _blocks(moved: dict[str, list[float]], inside: int) -> Iterator[Block]:
    ratios = [ratio for each in moved.values() for ratio in each]
    if len(ratios) < 2:
        yield Text("The race and the repetition have too few heats in common to compare.")
        return
    shifts = sorted(abs(ratio - 1) for ratio in ratios)
    high = statistics.quantiles(shifts, n=20, method="inclusive")[-1]
    yield Text(
        f"Of {len(ratios)} medians of the race, measured again in a new process, half moved by "
        f"{100 * statistics.median(shifts):.1f} % or less, 95 % by {100 * high:.1f} % or less, the "
        f"furthest by {100 * shifts[-1]:.1f} %. That is the spread of a median here; {inside} of "
        "them lie between the quartiles of the race's own rounds."
    )
    yield Table(
        ["", "heats", "time, times the race's", "least", "most"],
        [
            [
                f"`{name}`",
                str(len(each)),
                f"{geometric_mean(each):.3f}",
                f"{min(each):.3f}",
                f"{max(each):.3f}",
            ]
            for name, each in moved.items()
        ],
    )

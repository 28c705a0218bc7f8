"""The report's sections about the ladder: what each rung reaches, and what it gains on the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_rosetta.bench.page import Block, Plot, Section, Table, Text
from flash_rosetta.bench.plot import COLOURS
from flash_rosetta.bench.report import Record, geometric_mean, short
from flash_rosetta.variants import RUNGS

CLIMBS = tuple(rung for rung in RUNGS if rung.direction == "forward")
CHOICES = tuple(rung for rung in RUNGS if rung.direction == "backward")

NOTICED = 0.02
"""A gain of less than this, either way, is said to be none: as far as medians of a run repeat."""

Key = tuple[str, str, str]
"""Of a record: backend, rung, problem."""


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """What was learned, every language's plot and table, the backward, what P's cast costs."""
    speed = [r for r in part["records"] if r["kind"] == "speed"]
    rates = {(r["backend"], r["rung"], r["problem"]): r["tflops"] for r in speed if r.get("tflops")}
    if not rates:
        return [Section("The ladder", (Text("No rung has a rate."), *_missing(speed)))]
    names = list(dict.fromkeys(r["backend"] for r in speed))
    forward = _problems([r for r in speed if r["direction"] == "forward"])
    backward = _problems([r for r in speed if r["direction"] == "backward"])
    blocks: list[Block] = [Text(text) for text in _learned(names, forward, rates)]
    blocks += [
        Plot(
            f"ladder-{name}",
            f"TFLOP/s of each rung in {name}",
            lambda name=name: _draw(name, forward, rates),
        )
        for name in names
    ]
    blocks.append(
        Table(
            ["rung", "adds"],
            [[f"`{rung.name}`", rung.adds] for rung in RUNGS],
            left=2,
            caption="Each rung has all that those above it in this list have.",
        )
    )
    blocks += _missing(speed)
    folded = tuple(
        Table(["rung", *names], _rows(CLIMBS, names, problem, rates), caption=f"{title}, forward")
        for problem, title in forward.items()
    )
    made = [
        Section("The ladder", tuple(blocks)),
        Section("Every rung: TFLOP/s, and times the rung below", folded, is_folded=True),
    ]
    if backward:
        made.append(_backward(names, backward, rates))
    made += _accuracy([r for r in part["records"] if r["kind"] == "accuracy"])
    return made


def _problems(records: list[Record]) -> dict[str, str]:
    """A few words for each problem, by its id."""
    return {
        r["problem"]: f"head_dim {r['head_dim']}, {'causal' if r['is_causal'] else 'full'}, "
        f"{r['seqlen_q']} tokens"
        for r in records
    }


def _gain(name: str, rung: str, problem: str, rates: dict[Key, float]) -> float | None:
    """A rung's rate over that of the highest rung below it that has one."""
    order = [each.name for each in CLIMBS]
    for below in reversed(order[: order.index(rung)]):
        if (lower := rates.get((name, below, problem))) is not None:
            upper = rates.get((name, rung, problem))
            return upper / lower if upper is not None else None
    return None


def _rows(rungs: Any, names: list[str], problem: str, rates: dict[Key, float]) -> list[list[str]]:
    def cell(name: str, rung: str) -> str:
        rate = rates.get((name, rung, problem))
        if rate is None:
            return ""
        gain = _gain(name, rung, problem, rates) if rungs is CLIMBS else None
        return short(rate) + (f" (x {gain:.2f})" if gain else "")

    return [[f"`{rung.name}`", *(cell(name, rung.name) for name in names)] for rung in rungs]


def _learned(names: list[str], problems: dict[str, str], rates: dict[Key, float]) -> Iterator[str]:
    """Sentences made of the numbers alone."""
    for name in names:
        gains = {
            rung.name: [g for p in problems if (g := _gain(name, rung.name, p, rates)) is not None]
            for rung in CLIMBS
        }
        means = {rung: geometric_mean(found) for rung, found in gains.items() if found}
        if not means:
            continue
        whole = [
            rates[name, "overlap", p] / rates[name, "baseline", p]
            for p in problems
            if (name, "overlap", p) in rates and (name, "baseline", p) in rates
        ]
        best = sorted(means, key=means.__getitem__, reverse=True)
        paid = [f"`{rung}` x {means[rung]:.2f}" for rung in best if means[rung] > 1 + NOTICED]
        none = [f"`{rung}`" for rung in means if abs(means[rung] - 1) <= NOTICED]
        cost = [f"`{rung}` x {means[rung]:.2f}" for rung in means if means[rung] < 1 - NOTICED]
        text = f"**{name}** climbs x {geometric_mean(whole):.1f} in all: " if whole else f"{name}: "
        text += f"{', '.join(paid) or 'no rung pays'}."
        if none:
            text += f" Within {100 * NOTICED:.0f} %: {', '.join(none)}."
        if cost:
            text += f" Slower with it: {', '.join(cost)}."
        yield text
    yield from _by_mask(names, problems, rates)


def _by_mask(names: list[str], problems: dict[str, str], rates: dict[Key, float]) -> Iterator[str]:
    """What a rung gains where there is a mask, and where there is none."""
    means = {
        is_causal: [
            g
            for name in names
            for p, title in problems.items()
            if ("causal" in title) == is_causal and (g := _gain(name, "skip", p, rates)) is not None
        ]
        for is_causal in (True, False)
    }
    if means[True] and means[False]:
        yield (
            f"Over all of them, `skip` gains x {geometric_mean(means[True]):.2f} in causal "
            f"problems and x {geometric_mean(means[False]):.2f} in full ones, where there is "
            "nothing to skip. A figure above is the geometric mean over "
            f"{len(problems)} problems."
        )


def _missing(records: list[Record]) -> list[Text]:
    """Who has no number, and the first reason for it, once for all problems."""
    without: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if not record.get("tflops"):
            name = f"`{record['backend']}:{record['rung']}`"
            without.setdefault((name, record["verdict"]), []).append(record)
    return [
        Text(f"{name} {verdict} in {len(found)} problems: {' '.join(found[0]['reasons'][:1])}.")
        for (name, verdict), found in without.items()
    ]


def _backward(names: list[str], problems: dict[str, str], rates: dict[Key, float]) -> Section:
    rows = [
        [title, *(_choice(name, problem, rates) for name in names)]
        for problem, title in problems.items()
    ]
    ratios = {
        name: [
            rates[name, "atomics", p] / rates[name, "second-pass", p]
            for p in problems
            if (name, "atomics", p) in rates and (name, "second-pass", p) in rates
        ]
        for name in names
    }
    text = (
        "Every key tile adds to dQ. Either a second pass owns query tiles and computes the scores "
        "again, or the pass over keys adds to memory."
    )
    said = ", ".join(
        f"x {geometric_mean(found):.2f} in {name}" for name, found in ratios.items() if found
    )
    if said:
        text += f" By atomics the backward reaches, of what two passes reach: {said}."
    table = Table(["TFLOP/s, second pass / atomics", *names], rows)
    return Section("dQ: a second pass, or atomics", (Text(text), table))


def _choice(name: str, problem: str, rates: dict[Key, float]) -> str:
    found = [rates.get((name, choice.name, problem)) for choice in CHOICES]
    return " / ".join("-" if rate is None else short(rate) for rate in found)


def _accuracy(records: list[Record]) -> list[Section]:
    """What rounding P costs: the error of o before and after."""
    right = {
        (r["backend"], r["rung"], r["dtype"], r["inputs"]): r["rel_error"]
        for r in records
        if r["verdict"] == "right"
    }
    rows = []
    for name, dtype, inputs in dict.fromkeys((n, d, i) for n, _, d, i in right):
        before, after = (right.get((name, rung, dtype, inputs)) for rung in ("exp2", "cast"))
        if before and after:
            rows.append(
                [f"`{name}`", dtype, inputs, f"{before:.2e}", f"{after:.2e}",
                 f"{after / before:.2f}"]
            )  # fmt: skip
    if not rows:
        return []
    return [
        Section(
            "What the cast of P costs",
            (
                Text(
                    "The relative error of o against the fp64 oracle, with P in two halves and "
                    "rounded to the operands' dtype. Rounding o itself is in both. Peaked inputs "
                    "have queries eight times as long: one key then has nearly all the weight, and "
                    "P is nearly exact."
                ),
                Table(["", "dtype", "inputs", "before", "after", "times"], rows, left=3),
            ),
        )
    ]


def _draw(name: str, problems: dict[str, str], rates: dict[Key, float]) -> Any:
    """A panel for each problem: a bar for each rung, its gain beside it."""
    from matplotlib import pyplot as plt

    columns = min(2, len(problems))
    lines = -(-len(problems) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.4 * columns, 2.7 * lines), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    order = [rung.name for rung in CLIMBS]
    highest = max((rate for (n, _, p), rate in rates.items() if n == name and p in problems),
                  default=1.0)  # fmt: skip
    for axis, (problem, title) in zip(axes.flat, problems.items(), strict=False):
        values = [rates.get((name, rung, problem), 0.0) for rung in order]
        axis.barh(order, values, color=COLOURS.get(name, "#888888"), height=0.68)
        for place, rung in enumerate(order):
            gain = _gain(name, rung, problem, rates)
            rate = rates.get((name, rung, problem))
            text = "none" if rate is None else f"{rate:.0f}" + (f"  x {gain:.2f}" if gain else "")
            axis.annotate(
                text, (rate or 0.0, place), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=8,
            )  # fmt: skip
        axis.set_title(title, fontsize=9)
        axis.set_xlim(0, 1.3 * highest)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0, 0].invert_yaxis()
    for axis in axes.flat[len(problems) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("TFLOP/s", fontsize=9)
    figure.suptitle(f"The ladder in {name}", fontsize=10)
    return figure

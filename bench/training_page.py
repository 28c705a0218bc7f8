"""The report's section about training: the curves on each other, the speed, the verdict."""

from __future__ import annotations

from typing import Any

from flash_rosetta.bench.page import Block, Plot, Section, Table, Text
from flash_rosetta.bench.parts import Record
from flash_rosetta.bench.plot import style_of
from flash_rosetta.bench.report import is_yardstick


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """One section; of a run in which nothing was trained, what was said."""
    records = part["records"]
    trained = [r for r in records if "losses" in r]
    blocks: list[Block] = []
    if trained:
        blocks += [
            Text(_what(trained)),
            Plot("training", "Loss over training steps, by backend", lambda: _curves(trained)),
            Table(
                ["attention", "tokens/s", "final loss", "deviation", "band", "verdict"],
                [_row(record) for record in trained],
                caption="Speed is that of the whole training step. The deviation is the largest "
                "distance of the smoothed losses from the mean of SDPA's kernels; the band is what "
                "those kernels differ by among themselves, twice.",
            ),
            Text(_verdict(trained)),
        ]
    blocks += [
        Text(f"`{r['backend']}` {r['verdict']}: {'; '.join(r['reasons'])}")
        for r in records
        if "losses" not in r
    ]
    return [Section("It trains", tuple(blocks))]


def _what(trained: list[Record]) -> str:
    one = trained[0]
    return (
        f"A GPT of {one['layers']} layers, {one['num_heads']} heads of {one['head_dim']} and "
        f"{one['parameters'] / 1e6:.1f} million parameters learns Python's own documentation "
        f"({one['text_bytes'] / 1e6:.2f} MB of bytes, `pydoc_data.topics`): {one['steps']} steps "
        f"of {one['batch']} x {one['seqlen']} bytes, attention in {one['dtype']}. Weights and "
        "batches are the same in all runs."
    )


def _row(record: Record) -> list[str]:
    return [
        f"`{record['backend']}`",
        f"{record['tokens_per_s']:,}",
        f"{record['final_loss']:.4f}",
        f"{record['deviation']:.4f}" if "deviation" in record else "",
        f"{record['band']:.4f}" if "band" in record else "",
        record["verdict"],
    ]


def _verdict(trained: list[Record]) -> str:
    own = [r for r in trained if not is_yardstick(r["backend"])]
    outside = [f"`{r['backend']}`" for r in own if r["verdict"] == "outside"]
    if outside:
        return f"**Outside the noise: {', '.join(outside)}.**"
    if not own or "band" not in own[0]:
        return "There are too few of SDPA's kernels to tell noise from difference."
    worst = max(own, key=lambda r: r["deviation"])
    return (
        f"{len(own)} of {len(own)} backends train within the noise: the furthest, "
        f"`{worst['backend']}`, is at most {worst['deviation']:.4f} nats per byte off, "
        f"of {worst['band']:.4f} allowed."
    )


def _curves(trained: list[Record]) -> Any:
    from matplotlib import pyplot as plt

    from flash_rosetta.bench.training import smoothed

    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(7.5, 5.6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    reference = [smoothed(r["losses"]) for r in trained if is_yardstick(r["backend"])]
    mean = [sum(losses) / len(losses) for losses in zip(*reference, strict=True)]
    for record in trained:
        style = style_of(record["backend"]) | {"marker": None}
        curve = smoothed(record["losses"])
        first = len(record["losses"]) - len(curve) + 1
        steps = range(first, len(record["losses"]) + 1)
        upper.plot(steps, curve, label=record["backend"], **style)
        if mean:
            difference = [a - b for a, b in zip(curve, mean, strict=True)]
            lower.plot(steps, difference, **style)
    if mean and "band" in trained[0]:
        band = trained[0]["band"]
        lower.axhspan(-band, band, color="#888888", alpha=0.15, linewidth=0)
        lower.annotate(
            "allowed", (1, band), xycoords=("axes fraction", "data"), xytext=(-4, -4),
            textcoords="offset points", fontsize=8, color="#666666", ha="right", va="top",
        )  # fmt: skip
    upper.set_ylabel("loss, nats per byte")
    lower.set_ylabel("less SDPA's mean")
    lower.set_xlabel(f"training step (mean of {first} in a row)")
    for axis in (upper, lower):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False, fontsize=8, ncols=2)
    return figure

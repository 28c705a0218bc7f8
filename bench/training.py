"""Whether a model learns the same with every backend: one seed, one order of batches, many kernels.

Kernels round differently, and training amplifies what differs, so that no two curves are equal. How
far apart they may be is measured: PyTorch's own kernels, which are taken to be right, differ from
their mean by so much, and a backend may by TOLERANCE times as much.
"""

from __future__ import annotations

from dataclasses import replace

from flash_rosetta import registry
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.contenders import SDPA
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.train import CPU_SIZES, GPU_SIZES, attention_of, problem_of, train
from flash_rosetta.bench.training_page import sections

__all__ = ["measure", "sections"]

SMOOTHED_OVER = 20
"""Steps whose mean is compared: one batch is harder than the next, alike for all."""

TOLERANCE = 2.0
LEAST = 0.005
"""Nats per byte that are no difference, however close PyTorch's kernels happen to be."""


def measure(lab: Lab) -> list[Record]:
    """A run of every backend and of each of SDPA's kernels, and whether their losses agree."""
    sizes = GPU_SIZES if lab.device.type == "cuda" else CPU_SIZES
    if lab.is_quick:
        sizes = replace(sizes, layers=1)
    steps = 40 if lab.is_quick else None
    records: list[Record] = []
    names = [*SDPA, *(lab.backends or _backends(lab))]
    for name in lab.track(names, "training"):
        try:
            attention_of(name, problem_of(sizes, lab.device))
            record = train(name, lab.device, steps, sizes=sizes, console=lab.console)
            records.append({"verdict": "trained", "reasons": [], **record})
        except Unsupported as error:
            records.append({"backend": name, "verdict": "skipped", "reasons": error.reasons})
        except Exception as error:  # one curve less
            reasons = [f"{type(error).__name__}: {error}"]
            records.append({"backend": name, "verdict": "failed", "reasons": reasons})
    judge(records)
    return records


def _backends(lab: Lab) -> list[str]:
    """All but those that race only when named, and on a GPU but the reference, Python loops."""
    left_out = {*registry.ONLY_BY_NAME, *(["reference"] if lab.device.type == "cuda" else [])}
    return [name for name in registry.names() if name not in left_out]


def judge(records: list[Record]) -> None:
    """Give each trained record its `deviation`, the `band` it must stay in, and a verdict.

    The deviation is the largest distance, over all steps, of the smoothed losses from the mean of
    PyTorch's kernels. Without two of those there is no band, and no verdict.
    """
    trained = [record for record in records if record["verdict"] == "trained"]
    curves = {record["backend"]: smoothed(record["losses"]) for record in trained}
    own = [curve for name, curve in curves.items() if name in SDPA]
    if len(own) < 2:
        return
    mean = [sum(losses) / len(losses) for losses in zip(*own, strict=True)]
    deviations = {name: _distance(curve, mean) for name, curve in curves.items()}
    spread = max(deviation for name, deviation in deviations.items() if name in SDPA)
    band = max(LEAST, TOLERANCE * spread)
    for record in trained:
        record["deviation"] = round(deviations[record["backend"]], 5)
        record["band"] = round(band, 5)
        # Written so that a loss which is no number is outside.
        record["verdict"] = "within noise" if record["deviation"] <= band else "outside"


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each SMOOTHED_OVER losses in a row, or of a quarter where they are few."""
    n = max(1, min(SMOOTHED_OVER, len(losses) // 4))
    return [sum(losses[i : i + n]) / n for i in range(len(losses) - n + 1)]


def _distance(a: list[float], b: list[float]) -> float:
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return float("nan") if any(d != d for d in differences) else max(differences)

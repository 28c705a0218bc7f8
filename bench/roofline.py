"""The card's own limits, measured: the rate of a matmul, and of a copy."""

from __future__ import annotations

import statistics

import torch

from flash_rosetta.bench import timing
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.roofline_page import sections

__all__ = ["measure", "sections"]

MATMUL_SIZE = 8192
COPY_BYTES = 4 << 30
"""Far more than any L2 holds."""


def measure(lab: Lab) -> list[Record]:
    """One record: TFLOP/s of a bf16 matmul of random numbers, GB/s of a copy, read and written."""
    if lab.device.type == "cpu":
        raise ValueError("the roofline is a GPU's: device cpu has no rates worth a plot")
    watch = lab.watch
    source = torch.empty(COPY_BYTES // 8 if lab.is_quick else COPY_BYTES, dtype=torch.uint8,
                         device=lab.device).random_()  # fmt: skip
    target = torch.empty_like(source)
    seconds = timing.race({"copy": lambda: target.copy_(source)}, watch, budget=0.25)["copy"]
    return [
        {
            "matmul_tflops": round(timing.matmul_tflops(watch, lab.device, MATMUL_SIZE), 1),
            "matmul_size": MATMUL_SIZE,
            "copy_gbps": round(2 * source.nbytes / statistics.median(seconds) / 1e9, 1),
            "copy_bytes": source.nbytes,
        }
    ]

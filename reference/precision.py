"""The precision of PyTorch's own fp32 matrix products, pinned to what a problem allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flash_rosetta.problem import Problem

LIBRARIES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
"""Set one by one: `set_float32_matmul_precision` fails after a user has done so."""


@contextmanager
def matmul_precision(problem: Problem) -> Iterator[None]:
    """Within it, fp32 products are exact fp32, or TF32 where `problem` is fp32 and allows it.

    fp16 and bf16 operands are multiplied as fp32 numbers, so that they too need exact products,
    whatever the user's setting says: on a CPU "medium" would round them to bf16.
    """
    wanted = "tf32" if problem.dtype == torch.float32 and problem.allow_tf32 else "ieee"
    before = [library.fp32_precision for library in LIBRARIES]
    if problem.dtype == torch.float64 or all(precision == wanted for precision in before):
        yield
        return
    for library in LIBRARIES:
        library.fp32_precision = wanted
    try:
        yield
    finally:
        for library, precision in zip(LIBRARIES, before, strict=True):
            library.fp32_precision = precision

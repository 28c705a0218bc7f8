"""Triton's interpreter, which runs kernels on the CPU in NumPy, and where it is wrong itself.

Some releases multiply bf16 as if it were an integer (triton-lang/triton#11584), and Triton 3.6 with
NumPy 2.4 cannot loop up to a runtime bound (triton-lang/triton#9171). What the installed release
does is found out by running a small kernel, not by its version.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels were defined under TRITON_INTERPRET=1, so that they run on the CPU."""


@lru_cache
def faults(dtype: torch.dtype) -> tuple[str, ...]:
    """What the interpreter gets wrong in `dtype`, which the kernels need; empty if nothing."""
    a = torch.arange(256).remainder(7).reshape(16, 16).to(dtype)
    product = torch.zeros(16, 16)
    try:
        _multiply[(1,)](a, product, 2)
    except Exception as error:
        reason = (
            f"Triton {triton.__version__}'s interpreter cannot loop to a runtime bound: {error}"
        )
        return (reason,)
    if not torch.equal(product, 2 * (a.float() @ a.float())):
        return (f"Triton {triton.__version__}'s interpreter multiplies {dtype} wrongly",)
    return ()


@triton.jit
def _multiply(a, product, times):
    rows = tl.arange(0, 16)
    offsets = rows[:, None] * 16 + rows[None, :]
    tile = tl.load(a + offsets)
    acc = tl.zeros([16, 16], tl.float32)
    for _ in range(0, times):
        acc = tl.dot(tile, tile, acc)
    tl.store(product + offsets, acc)

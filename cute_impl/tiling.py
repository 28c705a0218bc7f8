"""Where a tile comes from and goes to, and how two tiles are multiplied, shared by all kernels."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

from flash_rosetta import copy_engine
from flash_rosetta.layout import Layout
from flash_rosetta.problem import Problem

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}


def can_use_tma(problem: Problem, *inputs: Layout) -> bool:
    """Whether Hopper's copy engine can move tiles of the inputs and of our outputs.

    fp32 has no use for it: its products need more than a copy.
    """
    halves = problem.dtype.itemsize == 2
    return problem.target == "sm_90" and halves and copy_engine.can_move(problem, *inputs)


def strided(dtype: torch.dtype, rank: int, tma: bool) -> cute.Tensor:
    """The type of a parameter with any strides, in 64 bits: an index times a stride can pass 2^31.

    `tma`: they are those of a tensor that the copy engine can move.
    """
    steps = 16 // dtype.itemsize if tma else 1
    strides = [cute.sym_int64(divisibility=steps) for _ in range(rank)]
    if tma:
        strides[-1] = 1
    return make_fake_tensor(
        DTYPES[dtype],
        tuple(cute.sym_int() for _ in range(rank)),
        tuple(strides),
        assumed_align=16 if tma else dtype.itemsize,
    )

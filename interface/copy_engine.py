"""What the copy engine (TMA) of sm_90 and later can move."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flash_rosetta.layout import Layout
from flash_rosetta.problem import Problem


def can_move(problem: Problem, *inputs: Layout) -> bool:
    """Whether the copy engine can move tiles of the inputs and of our outputs.

    It takes rows of unit stride, other strides that are positive multiples of 16 bytes below 2^40,
    and a base aligned to 16 bytes.
    """
    itemsize = problem.dtype.itemsize
    if problem.head_dim * itemsize % 16:  # the row stride of a contiguous output
        return False
    for layout in inputs:
        *strides, last = layout.stride
        if last != 1 or layout.misalignment:
            return False
        for size, stride in zip(layout.shape, strides, strict=False):
            if size > 1 and not can_step(stride, itemsize):
                return False
    return True


def can_step(stride: int, itemsize: int) -> bool:
    """Whether the copy engine takes a stride in elements, of any dimension but the last."""
    return stride * itemsize % 16 == 0 and 0 < stride * itemsize < 1 << 40


def operand(layout: Layout, tma: bool, itemsize: int = 2) -> Callable[[Tensor], Tensor]:
    """What makes a kernel's argument of a tensor laid out so; `tma`: the copy engine moves it."""
    strides = layout.stride[:-1]
    if not tma or all(can_step(stride, itemsize) for stride in strides):
        return as_is
    # In a dimension of one element the tensor may have any stride, and the copy engine still not.
    steps = [s if can_step(s, itemsize) else 16 // itemsize for s in strides]
    return lambda t: t.as_strided(layout.shape, [*steps, 1])


def as_is(t: Tensor) -> Tensor:
    return t

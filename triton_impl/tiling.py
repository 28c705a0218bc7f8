"""Where a tile comes from and goes to, shared by all kernels.

An operand is a [batch, heads, seqlen, head_dim] tensor as a kernel receives it: a TMA tensor
descriptor where the card and the tensor's strides allow one, else a pointer with four strides.
Either way a tile's rows past the tensor read as zero and are not written, and so are its columns
past head_dim, which is how any head_dim and seqlen fit a power-of-two tile without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_rosetta import copy_engine
from flash_rosetta.layout import Layout
from flash_rosetta.problem import Problem


def can_use_tma(problem: Problem, *inputs: Layout) -> bool:
    """Whether the copy engine of sm_90 and later can move tiles of the inputs and of our outputs.

    The interpreter ("cpu") plays by the same rules.
    """
    return has_copy_engine(problem.target) and copy_engine.can_move(problem, *inputs)


def has_copy_engine(target: str) -> bool:
    """Whether Triton has descriptors for a target, of a card or of the interpreter."""
    return target == "cpu" or (target.startswith("sm_") and int(target[3:]) >= 90)


class _Descriptor(TensorDescriptor):
    """A descriptor whose conditions `can_use_tma` has checked: checking again costs host time."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape


def operand(layout: Layout, rows: int, columns: int, tma: bool) -> Callable[[Tensor], Any]:
    """What makes a tensor of this layout an argument that moves in tiles of [rows, columns]."""
    if not tma:
        return lambda t: (t, *layout.stride)
    # A dimension of one element may have any stride; the descriptor wants multiples of 16 bytes.
    outer = zip(layout.shape[:3], layout.stride[:3], strict=True)
    strides = [*(stride if size > 1 else 16 for size, stride in outer), 1]
    shape, block = list(layout.shape), [1, 1, rows, columns]
    return lambda t: _Descriptor(t, shape, strides, block)


def pointer(t: Tensor) -> Tensor:
    """A contiguous tensor of row statistics is passed as it is."""
    return t


@triton.jit
def load_tile(
    x,
    batch,
    head,
    row,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows [row, row + ROWS) of one head of operand x, zero past num_rows and num_columns."""
    if TMA:
        return x.load([batch, head, row, 0]).reshape([ROWS, COLUMNS])
    else:
        pointers, mask = _pointers(x, batch, head, row, num_rows, num_columns, ROWS, COLUMNS)
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(
    x,
    tile,
    batch,
    head,
    row,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write a [ROWS, COLUMNS] tile to rows [row, row + ROWS) of one head of operand x."""
    if TMA:
        x.store([batch, head, row, 0], tile.reshape([1, 1, ROWS, COLUMNS]))
    else:
        pointers, mask = _pointers(x, batch, head, row, num_rows, num_columns, ROWS, COLUMNS)
        tl.store(pointers, tile, mask=mask)


@triton.jit
def _pointers(
    x, batch, head, row, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # 64-bit offsets: an index times a stride can pass 2^31.
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    base = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[2]
    pointers = base + rows.to(tl.int64)[:, None] * x[3] + columns.to(tl.int64)[None, :] * x[4]
    return pointers, (rows < num_rows)[:, None] & (columns < num_columns)[None, :]

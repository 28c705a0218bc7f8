"""Tile sizes by head_dim, operand width and card, with the reason for each number."""

from __future__ import annotations


def padded_head_dim(head_dim: int) -> int:
    """The power of two, 64 at least, that `head_dim` is padded to in a kernel's tile.

    At least 64, so that few kernels are compiled: each takes seconds.
    """
    return max(64, 1 << (head_dim - 1).bit_length())

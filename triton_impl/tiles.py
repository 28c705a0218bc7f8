"""Tile sizes by head_dim, operand width and what the card holds, with the reason for each number.

Shared memory of a program, in bytes, for operands of `itemsize` bytes and head_dim padded to D:
    forward (tile_q + 2 num_stages tile_k) D itemsize
    dk/dv (2 tile_k + 2 num_stages tile_q) D itemsize
    dq (2 tile_q + 2 num_stages tile_k) D itemsize
A program may use 227 KB on sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flash_rosetta.problem import Problem


@dataclass(frozen=True)
class Tile:
    """Query rows and key rows that one program holds at a time, its warps and pipeline depth."""

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    dkdv: Tile
    dq: Tile


def padded_head_dim(head_dim: int) -> int:
    """The power of two, 16 at least, that `head_dim` is padded to in a kernel's tile."""
    return max(16, 1 << (head_dim - 1).bit_length())


INTERPRETED = Tiles(
    forward=Tile(32, 16, 4, 1),  # tiny and unequal, so that tiny problems cross both boundaries
    dkdv=Tile(16, 32, 4, 1),
    dq=Tile(32, 16, 4, 1),
)

HOPPER = {
    32: Tiles(
        forward=Tile(64, 64, 4, 3),
        dkdv=Tile(64, 64, 4, 3),
        dq=Tile(64, 64, 4, 3),
    ),
    64: Tiles(
        forward=Tile(64, 128, 4, 2),
        dkdv=Tile(64, 64, 4, 3),
        dq=Tile(64, 64, 4, 3),
    ),
    128: Tiles(
        forward=Tile(64, 64, 4, 3),
        dkdv=Tile(64, 64, 4, 2),
        dq=Tile(128, 64, 8, 3),
    ),
    256: Tiles(
        forward=Tile(128, 64, 8, 2),
        dkdv=Tile(32, 64, 8, 3),
        dq=Tile(64, 32, 4, 3),
    ),
}

AMPERE = {
    64: Tiles(
        forward=Tile(64, 64, 4, 3),
        dkdv=Tile(32, 64, 4, 2),
        dq=Tile(64, 32, 4, 2),
    ),
    128: Tiles(
        forward=Tile(64, 32, 4, 3),
        dkdv=Tile(32, 64, 8, 2),
        dq=Tile(64, 32, 4, 2),
    ),
    256: Tiles(
        forward=Tile(64, 32, 8, 1),
        dkdv=Tile(32, 32, 8, 1),
        dq=Tile(64, 16, 8, 1),
    ),
}

TF32 = {
    64: Tiles(
        forward=Tile(64, 32, 4, 2),
        dkdv=Tile(16, 32, 4, 1),
        dq=Tile(32, 16, 4, 1),
    ),
    128: Tiles(
        forward=Tile(64, 16, 8, 1),
        dkdv=Tile(16, 16, 8, 1),
        dq=Tile(16, 16, 8, 1),
    ),
    256: Tiles(
        forward=Tile(16, 16, 8, 1),
        dkdv=Tile(16, 16, 8, 1),
        dq=Tile(16, 16, 8, 1),
    ),
}

FP32 = {
    64: Tiles(
        forward=Tile(16, 32, 4, 1),
        dkdv=Tile(32, 16, 4, 1),
        dq=Tile(16, 32, 4, 1),
    ),
    128: Tiles(
        forward=Tile(16, 16, 8, 1),
        dkdv=Tile(16, 16, 8, 1),
        dq=Tile(16, 16, 8, 1),
    ),
    256: Tiles(
        forward=Tile(16, 16, 8, 1),
        dkdv=Tile(16, 16, 8, 1),
        dq=Tile(16, 16, 8, 1),
    ),
}


@lru_cache
def tiles_for(problem: Problem) -> Tiles:
    """The tiles that run `problem` on its target."""
    if problem.target == "cpu":
        return INTERPRETED
    if problem.dtype.itemsize == 4:
        table = TF32 if problem.allow_tf32 else FP32
    else:
        table = HOPPER if problem.target in ("sm_90", "sm_100", "sm_103") else AMPERE
    return table[max(64, padded_head_dim(problem.head_dim))]

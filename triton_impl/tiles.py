"""Tile sizes by head_dim, operand width and what the card holds, with the reason for each number.

Shared memory of a program, in bytes, for operands of `itemsize` bytes and head_dim padded to D:
    forward (tile_q + 2 num_stages tile_k) D itemsize, without tile_q where Q is in registers
    dk/dv (2 tile_k + 2 num_stages tile_q) D itemsize
    dq (2 tile_q + 2 num_stages tile_k) D itemsize
A program may use 227 KB on sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120, and
each of its threads 255 registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from flash_rosetta.problem import Problem


@dataclass(frozen=True)
class Tile:
    """Query rows and key rows that one program holds at a time, its warps and pipeline depth.

    `tile_q` divides 128, to which the backward pads its row statistics.

    `q_in_registers` (forward): S = Q K^T takes Q from registers instead of shared memory.
    `mask_every_tile` (dk/dv, causal): no branch around the mask, which saves registers.
    """

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int
    q_in_registers: bool = False
    mask_every_tile: bool = False


@dataclass(frozen=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    dkdv: Tile
    dq: Tile


def padded_head_dim(head_dim: int) -> int:
    """The power of two, 16 at least, that `head_dim` is padded to in a kernel's tile."""
    return max(16, 1 << (head_dim - 1).bit_length())


BASELINE = Tile(16, 16, 1, 1)  # the first rung of the ladder: the least that a tensor core takes

INTERPRETED = Tiles(
    # Tiny and unequal, so that tiny problems cross both boundaries.
    forward=Tile(32, 16, 4, 1, q_in_registers=True),
    dkdv=Tile(16, 32, 4, 1),
    dq=Tile(32, 16, 4, 1),
)

# Measured on an H200 (NOTES.md has the figures). What wins is two to four programs of one
# warpgroup on each multiprocessor, whose softmax and matrix products fill each other's gaps.
HOPPER = {
    32: Tiles(
        forward=Tile(64, 64, 4, 3),
        dkdv=Tile(64, 64, 4, 3),
        dq=Tile(64, 64, 4, 3),
    ),
    64: Tiles(
        forward=Tile(64, 64, 4, 3, q_in_registers=True),  # 48 KB, 128 registers: four programs
        dkdv=Tile(64, 64, 4, 3),  # 65 KB: three
        dq=Tile(64, 64, 4, 3),
    ),
    128: Tiles(
        forward=Tile(64, 64, 4, 3),  # 113 KB: two
        dkdv=Tile(64, 64, 4, 2),  # 97 KB and all 255 registers: two
        dq=Tile(128, 64, 8, 3),  # 160 KB: one, of two warpgroups that share keys and values
    ),
    256: Tiles(
        forward=Tile(128, 64, 8, 2),  # 192 KB; 64 query rows fill no tensor core beside 256 columns
        dkdv=Tile(64, 64, 8, 2, mask_every_tile=True),  # a branch would make it spill
        dq=Tile(64, 32, 4, 3),
    ),
}

# Hopper's, but for what spilled registers when compiled for sm_100. Not measured.
BLACKWELL = HOPPER | {
    128: replace(HOPPER[128], dkdv=Tile(64, 64, 8, 2)),
    256: replace(HOPPER[256], dkdv=Tile(32, 64, 8, 1)),
}

# Compiled without spills within the 99 KB of sm_89, which leaves room for two programs on sm_80.
# Not measured.
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

SMALLEST = Tiles(
    forward=Tile(16, 16, 8, 1),
    dkdv=Tile(16, 16, 8, 1),
    dq=Tile(16, 16, 8, 1),
)

# fp32 operands are twice as wide, and 3xTF32 holds each of them twice. Chosen to compile quickly
# and to spill little; not tuned.
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
    256: SMALLEST,
}

FP32 = {
    64: Tiles(
        forward=Tile(16, 32, 4, 1),
        dkdv=Tile(32, 16, 4, 1),
        dq=Tile(16, 32, 4, 1),
    ),
    128: SMALLEST,
    256: SMALLEST,
}


# The rung "atomics" holds a visit's dQ beside dK and dV: few queries at a time, more warps.
ATOMIC_BACKWARD = {
    64: Tile(64, 64, 4, 2),
    128: Tile(64, 64, 8, 2),
    256: Tile(32, 64, 8, 1),
}
ATOMIC_INTERPRETED = Tile(16, 32, 4, 1)
ATOMIC_SMALL = Tile(32, 32, 8, 1)


def atomic_tile_for(problem: Problem) -> Tile:
    """The tile of the rung "atomics" on the problem's target."""
    if problem.target == "cpu":
        return ATOMIC_INTERPRETED
    if most_shared_bytes(problem.target) == SMALL_SHARED_BYTES:
        return ATOMIC_SMALL
    return ATOMIC_BACKWARD[max(padded_head_dim(problem.head_dim), min(ATOMIC_BACKWARD))]


MOST_SHARED_BYTES = dict.fromkeys(("sm_90", "sm_100", "sm_103"), 227 << 10) | {"sm_80": 163 << 10}
SMALL_SHARED_BYTES = 99 << 10
"""Shared memory that one program may use, by target; the small one for those not listed."""


def most_shared_bytes(target: str) -> int:
    """What one program may use of shared memory on a target, in bytes."""
    return MOST_SHARED_BYTES.get(target, SMALL_SHARED_BYTES)


def forward_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of one program of the forward, in bytes: the formula above."""
    rows = 2 * tile.num_stages * tile.tile_k + (0 if tile.q_in_registers else tile.tile_q)
    return rows * padded_head_dim(problem.head_dim) * problem.dtype.itemsize


MOST_REGISTERS = 255
"""That a thread may have."""


def forward_accumulators(tile: Tile, problem: Problem) -> int:
    """Registers of a thread of the forward that hold S and O alone."""
    columns = tile.tile_k + padded_head_dim(problem.head_dim)
    return tile.tile_q * columns // (32 * tile.num_warps)


@lru_cache
def tiles_for(problem: Problem) -> Tiles:
    """The tiles that run `problem` on its target."""
    if problem.target == "cpu":
        return INTERPRETED
    if problem.dtype.itemsize == 4:
        table = TF32 if problem.allow_tf32 else FP32
    else:
        table = {"sm_90": HOPPER, "sm_100": BLACKWELL, "sm_103": BLACKWELL}.get(
            problem.target, AMPERE
        )
    width = padded_head_dim(problem.head_dim)
    return table[max(width, min(table))]

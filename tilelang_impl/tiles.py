"""Tile sizes by head_dim, operand width and card, with the reason for each number.

Shared memory of a program, in bytes, for operands of `itemsize` bytes and head_dim padded to D
(exact fp32 counts twice: each number is held as two):
    forward (tile_q + 2 num_stages tile_k) D itemsize, and on Hopper tile_q D itemsize for O, which
        lies where Q was if that is too much
    dk/dv (2 tile_k + 2 num_stages tile_q) D itemsize
    dq (2 tile_q + 2 num_stages tile_k) D itemsize
    in one pass as dk/dv, and tile_q tile_k itemsize for dS
and tile_q tile_k itemsize more for each of P and dS that does not stay in registers. A program may
use 227 KB on sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flash_rosetta.problem import Problem
from flash_rosetta.variants import ForwardTileSize


@dataclass(frozen=True)
class Tile:
    """Query rows and key rows that one program of the backward holds at a time, and its threads.

    `tile_q` divides 128, to which the backward pads its row statistics.

    `num_stages`: slots of the ring of tiles that the program visits.
    `programs`: how many should fit a multiprocessor; the compiler keeps to the registers for it.
    `in_registers`: P and dS go from one product to the next in registers, else by shared memory.
    `deferred` (not causal): a tile's last products are waited for behind the next tile's first.
    """

    tile_q: int
    tile_k: int
    threads: int
    num_stages: int = 1
    programs: int = 1
    in_registers: bool = True
    deferred: bool = False


@dataclass(frozen=True)
class ForwardTile:
    """Query rows and key rows that one program of the forward holds at a time.

    `num_stages`, `programs`: as in `Tile`. The rest is Hopper's kernel's: a warpgroup owns 64 rows
    and has `registers` for each thread, beside the producer's warpgroup, which keeps 24.
    `take_turns`: warpgroups start their products one after the other, so that each one's softmax
    runs beside another's products.
    `warp_rows`: rows that a warp owns in the ladder's kernels that multiply by mma; every product
    has a warp load all of the other operand, for 16 rows or for 32.
    """

    tile_q: int
    tile_k: int
    num_stages: int = 1
    programs: int = 1
    registers: int = 240
    take_turns: bool = False
    warp_rows: int = 16

    @property
    def warpgroups(self) -> int:
        return self.tile_q // 64

    @property
    def shares(self) -> int:
        """Programs that the compiler shares a multiprocessor's registers among.

        Two of one warpgroup at least: one alone would start with more for each thread than it can
        ask for later.
        """
        return max(self.programs, 2 if self.warpgroups == 1 else 1)


@dataclass(frozen=True)
class Tiles:
    """One tile for each kernel."""

    forward: ForwardTile
    dkdv: Tile
    dq: Tile


def padded_head_dim(head_dim: int) -> int:
    """The power of two, 64 at least, that `head_dim` is padded to in a kernel's tile.

    At least 64, so that few kernels are compiled: each takes seconds.
    """
    return max(64, 1 << (head_dim - 1).bit_length())


# Measured on an H200 (NOTES.md has the figures). What wins is two to four warpgroups on each
# multiprocessor, as programs of their own where keys need not be shared, whose softmax and matrix
# products fill each other's gaps.
HOPPER = {
    64: Tiles(
        forward=ForwardTile(64, 128, num_stages=2, programs=2, registers=232),  # 80 KB
        dkdv=Tile(64, 64, 128, num_stages=2, programs=3),  # 49 KB, 168 registers
        dq=Tile(64, 64, 128, num_stages=2, programs=4),  # 48 KB, 128 registers
    ),
    128: Tiles(
        forward=ForwardTile(128, 128, num_stages=2),  # 192 KB
        dkdv=Tile(64, 64, 128, num_stages=2, programs=2, deferred=True),  # 97 KB, 250 registers
        dq=Tile(64, 64, 128, num_stages=2, programs=2),  # 96 KB, 154 registers
    ),
    256: Tiles(
        forward=ForwardTile(128, 48, num_stages=2),  # 224 KB
        # dK and dV of 64 keys fill the registers of two warpgroups, which share each product's
        # columns; so each has half of P, and both need all of it.
        dkdv=Tile(64, 64, 256, num_stages=2, in_registers=False),  # 209 KB
        dq=Tile(128, 32, 256, num_stages=2),  # 192 KB
    ),
}


class Long(NamedTuple):
    """The forward's tile from so many queries on."""

    seqlen_q: int
    forward: ForwardTile


# By width and is_causal. Three warpgroups that share keys: short problems pay for the rows that 192
# leave over, and, when causal, for programs that differ more in length. A third stage only costs.
# At a width of 256, O where Q was leaves room for more keys, of which each is read for more rows.
LONG = {
    (64, False): Long(2048, ForwardTile(192, 128, 2, registers=160, take_turns=True)),  # 112 KB
    (64, True): Long(8192, ForwardTile(192, 112, 2, registers=160, take_turns=True)),  # 104 KB
    (128, False): Long(8192, ForwardTile(192, 80, 2, registers=160, take_turns=True)),  # 176 KB
    (256, False): Long(1024, ForwardTile(128, 80, 2)),  # 224 KB
    (256, True): Long(2048, ForwardTile(128, 80, 2)),
}

# The backward in one pass that adds dQ to memory. On Hopper 128 keys a program, for half the
# additions of 64, as two warpgroups of 64 each.
HOPPER_ATOMIC = {
    64: Tile(128, 128, 256, num_stages=2),  # 130 KB
    128: Tile(64, 128, 256, num_stages=2),  # 145 KB
    # Four warpgroups that share each product's columns: dK, dV and dQ of 64 rows fill two.
    256: Tile(64, 64, 512, num_stages=2, in_registers=False),  # 209 KB
}

# Everything else: other cards, and on Hopper strides that the copy engine cannot take. Compiled
# without spills within the 99 KB of sm_89. Not measured.
PORTABLE = {
    64: Tiles(
        forward=ForwardTile(64, 64),
        dkdv=Tile(32, 64, 128),
        dq=Tile(64, 32, 128),
    ),
    128: Tiles(
        forward=ForwardTile(64, 64),
        dkdv=Tile(32, 64, 256, in_registers=False),
        dq=Tile(64, 32, 128),
    ),
    256: Tiles(
        forward=ForwardTile(64, 32),
        dkdv=Tile(32, 32, 256, in_registers=False),
        dq=Tile(32, 32, 256, in_registers=False),
    ),
}

PORTABLE_ATOMIC = {
    64: Tile(32, 64, 128),  # 29 KB
    128: Tile(32, 64, 256, in_registers=False),  # 57 KB
    256: Tile(32, 32, 256, in_registers=False),  # 68 KB
}

# The ladder's rungs that multiply by mma: the smallest tile, and of those that fit 99 KB and do not
# spill with P in two halves, the one that loads a key for the most rows. Not measured.
BASELINE_FORWARD = ForwardTile(16, 16)
LADDER_FORWARD = {
    64: ForwardTile(128, 48, num_stages=2, warp_rows=32),  # 40 KB
    128: ForwardTile(128, 64, num_stages=2),  # 96 KB
    256: ForwardTile(128, 16, num_stages=2),  # 96 KB
}

# fp32 operands are twice as wide, and what a product leaves in registers is not what the next one
# takes. For correctness: chosen to compile quickly, not tuned; exact fp32 spills above head_dim 64.
TF32 = {
    64: Tiles(
        forward=ForwardTile(64, 32),
        dkdv=Tile(32, 32, 128, in_registers=False),
        dq=Tile(32, 32, 128, in_registers=False),
    ),
    128: Tiles(
        forward=ForwardTile(64, 16),
        dkdv=Tile(32, 32, 128, in_registers=False),
        dq=Tile(32, 32, 128, in_registers=False),
    ),
    256: Tiles(
        forward=ForwardTile(32, 16),
        dkdv=Tile(16, 16, 64, in_registers=False),
        dq=Tile(16, 16, 64, in_registers=False),
    ),
}

FP32 = {
    64: Tiles(
        forward=ForwardTile(64, 32),
        dkdv=Tile(32, 32, 128, in_registers=False),
        dq=Tile(32, 32, 128, in_registers=False),
    ),
    128: Tiles(
        forward=ForwardTile(32, 16),
        dkdv=Tile(16, 16, 64, in_registers=False),
        dq=Tile(16, 16, 64, in_registers=False),
    ),
    256: Tiles(
        forward=ForwardTile(16, 16),
        dkdv=Tile(16, 16, 64, in_registers=False),
        dq=Tile(16, 16, 64, in_registers=False),
    ),
}


def atomic_tile_for(problem: Problem, hopper: bool) -> Tile:
    """The tile of the backward in one pass; `hopper` as in `tiles_for`. Not for fp32."""
    return (HOPPER_ATOMIC if hopper else PORTABLE_ATOMIC)[padded_head_dim(problem.head_dim)]


def tiles_for(problem: Problem, hopper: bool) -> Tiles:
    """The tiles that run `problem`; `hopper`: with the copy engine and warpgroup products."""
    width = padded_head_dim(problem.head_dim)
    if hopper:
        tiles, long = HOPPER[width], LONG.get((width, problem.is_causal))
        if long and problem.seqlen_q >= long.seqlen_q:
            tiles = replace(tiles, forward=long.forward)
        return tiles
    if problem.dtype != torch.float32:
        return PORTABLE[width]
    return (TF32 if problem.allow_tf32 else FP32)[width]


# What a multiprocessor of Hopper has, and what of it the system takes from each program.
HOPPER_REGISTERS = 65536
HOPPER_SHARED_BYTES = 228 * 1024
RESERVED_BYTES = 1024
MOST_SHARED_BYTES = HOPPER_SHARED_BYTES - RESERVED_BYTES

PRODUCER_REGISTERS = 24
"""A thread of the producer's warpgroup keeps these and leaves the others to the consumers."""


def hopper_tile(size: ForwardTileSize, width: int, is_causal: bool) -> ForwardTile:
    """The tile of Hopper's forward that has a given size; gives those that ship for their sizes.

    As many programs a multiprocessor as its shared memory and its registers hold, one at least.
    """
    tile = ForwardTile(size.tile_q, size.tile_k, size.num_stages, take_turns=size.tile_q == 192)
    most = HOPPER_SHARED_BYTES // (hopper_forward_bytes(tile, width) + RESERVED_BYTES)
    for programs in range(most, 1, -1):
        shared = replace(tile, programs=programs)
        demands = register_demands(shared, width, is_causal)
        if all(needed <= there for _, needed, there in demands):
            return replace(shared, registers=consumer_registers(shared))
    return replace(tile, registers=consumer_registers(tile))


def hopper_forward_bytes(tile: ForwardTile, width: int) -> int:
    """Shared memory of a program of Hopper's forward: its tiles, and its barriers before them."""
    return _bytes(tile, width, o_tiles=0 if o_takes_q(tile, width) else 1)


def o_takes_q(tile: ForwardTile, width: int) -> bool:
    """Whether O is stored from where the query tile was, as there is no room for both.

    The next query tile then waits for that, which short problems notice.
    """
    return _bytes(tile, width, o_tiles=1) > MOST_SHARED_BYTES


def _bytes(tile: ForwardTile, width: int, o_tiles: int) -> int:
    barriers = 1024  # a few of 8 bytes, after which the tiles start at a multiple of this
    rows = (1 + o_tiles) * tile.tile_q + 2 * tile.num_stages * tile.tile_k
    return rows * width * 2 + barriers


def register_demands(
    tile: ForwardTile, width: int, is_causal: bool
) -> tuple[tuple[str, int, int], ...]:
    """What takes registers of a consumer's thread in Hopper's forward: how many, and of how many.

    The assembler compiles no product whose registers, with some for addresses, a thread does not
    have when it starts. Beside the last figure stands what a loop took without spilling.
    """
    product = max(width, tile.tile_k) // 2 + 30
    loop = tile.tile_k // 2 + tile.tile_k // 4 + width // 2 + (40 if is_causal else 32)
    return (
        ("operands of a product", product, starting_registers(tile)),
        ("S, P and O", loop, consumer_registers(tile)),
    )


def starting_registers(tile: ForwardTile) -> int:
    """Registers that each thread of a program starts with, in eights."""
    threads = 128 * (tile.warpgroups + 1)
    return min(HOPPER_REGISTERS // (threads * tile.shares), 255) // 8 * 8


def consumer_registers(tile: ForwardTile) -> int:
    """Registers that there are for a consumer's thread, when the producer has given back its own.

    To ask for one that is not there means to wait for ever.
    """
    all_threads = 128 * (tile.warpgroups + 1) * starting_registers(tile)
    left = all_threads - 128 * PRODUCER_REGISTERS
    return left // (128 * tile.warpgroups) // 8 * 8

"""Tile sizes by head_dim, operand width and card, with the reason for each number.

Shared memory of a program, in bytes, for operands of 2 bytes and head_dim padded to D:
    forward 2 D (query_stages tile_q + 2 num_stages tile_k + tile_q), the last of them for O, which
        lies where Q was if that is too much
    one pass 2 D (256 + 2 num_stages tile_q), and 512 tile_q for dS, 4 D tile_q for dQ
    dk/dv 2 D (128 + 4 tile_q), and by product 256 tile_q for P
    dq 2 D (2 tile_q + (key_stages + value_stages) tile_k)
of the portable kernels, for operands of `itemsize` bytes:
    forward (tile_q + 2 num_stages tile_k) D itemsize
    dk/dv (2 tile_k + 2 num_stages tile_q) D itemsize, and 8 num_stages tile_q of statistics
    dq (2 tile_q + 2 num_stages tile_k) D itemsize
A program may use 227 KB on sm_90 and sm_100, 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flash_rosetta.cute_impl.tiling import PRODUCER_REGISTERS
from flash_rosetta.problem import Problem


@dataclass(frozen=True)
class ForwardTile:
    """Query rows and key rows that one program of Hopper's forward holds at a time.

    A warpgroup owns 64 rows.

    `num_stages`: slots of the rings of key and of value tiles; `query_stages`: of query tiles.
    `programs`: how many should fit a multiprocessor; the compiler keeps to the registers for it.
    `take_turns`: warpgroups start their products one after the other, so that each one's softmax
    runs beside another's products.
    """

    tile_q: int
    tile_k: int
    num_stages: int = 2
    query_stages: int = 1
    programs: int = 1
    take_turns: bool = False

    @property
    def warpgroups(self) -> int:
        return self.tile_q // 64

    @property
    def registers(self) -> int:
        """What a consumer's thread gets: what all threads start with, and the producer leaves.

        That is 65536 shared evenly, in eights. A program that asked for more would wait for ever.
        """
        threads = 128 * (self.warpgroups + 1)
        start = min(65536 // (threads * self.programs), 255) // 8 * 8
        return (start * threads - 128 * PRODUCER_REGISTERS) // (128 * self.warpgroups) // 8 * 8


@dataclass(frozen=True)
class OnePassTile:
    """Query rows that one program of Hopper's backward, which owns 128 keys, holds at a time.

    `num_stages`: slots of the rings of query and of dO tiles.
    """

    tile_q: int
    num_stages: int = 2


@dataclass(frozen=True)
class DqTile:
    """Query rows that one program of Hopper's dq pass owns, and key rows that it visits at a time.

    A warpgroup owns 64 rows; where there is more than one, a producer loads for them.

    `key_stages`, `value_stages`: slots of the rings of key and of value tiles.
    `programs`: how many should fit a multiprocessor; the compiler keeps to the registers for it.
    """

    tile_q: int
    tile_k: int
    key_stages: int = 2
    value_stages: int = 2
    programs: int = 1


@dataclass(frozen=True)
class DkDvTile:
    """Query rows that one program of Hopper's dk/dv pass, which owns 64 keys, visits at a time.

    `programs`: as in `DqTile`.
    `deferred`: a visit's last products are waited for behind the next one's first.
    `by_product`: one warpgroup computes dV and another one dK, and a producer loads for them.
    """

    tile_q: int
    programs: int = 1
    deferred: bool = False
    by_product: bool = False


@dataclass(frozen=True)
class Tiles:
    """One tile for each of Hopper's kernels; no backward in one pass where none is."""

    forward: ForwardTile
    dkdv: DkDvTile
    dq: DqTile
    one_pass: OnePassTile | None = None


def padded_head_dim(head_dim: int) -> int:
    """The power of two, 64 at least, that `head_dim` is padded to in a kernel's tile.

    At least 64, so that few kernels are compiled: each takes seconds.
    """
    return max(64, 1 << (head_dim - 1).bit_length())


# Measured on an H200 (NOTES.md has the figures), but for two passes at widths of 64 and 128. Two
# warpgroups on each multiprocessor at least, whose softmax and matrix products fill each other's
# gaps.
HOPPER = {
    # Two programs, whose queries need not be of one head: none waits for another at either end.
    64: Tiles(
        forward=ForwardTile(64, 128, programs=2),  # 80 KB, 232 registers
        # As many queries as registers hold S^T and dP^T of: the fewer visits, the fewer meetings.
        one_pass=OnePassTile(128),  # 194 KB, 240 registers
        # In two passes: as many programs of one warpgroup as registers are enough for.
        dkdv=DkDvTile(64, programs=3),  # 50 KB, 168 registers
        dq=DqTile(64, 64, programs=4),  # 49 KB, 122 registers
    ),
    # 128 keys: all registers that P and the next S can have beside O. A second query tile, which
    # the 32 KB left would hold, gains nothing.
    128: Tiles(
        forward=ForwardTile(128, 128),  # 192 KB, 240 registers
        # dK and dV take twice the registers. 80 queries spill.
        one_pass=OnePassTile(64),  # 193 KB, 240 registers
        # Two warpgroups a multiprocessor leave gaps where each waits for its last products.
        dkdv=DkDvTile(64, programs=2, deferred=True),  # 98 KB, 250 registers
        dq=DqTile(64, 64, programs=2),  # 97 KB, 154 registers
    ),
    256: Tiles(
        # The most keys that two stages have room for.
        forward=ForwardTile(128, 48),  # 224 KB, 240 registers
        # dK and dV of 64 keys fill the registers of two warpgroups.
        dkdv=DkDvTile(64, by_product=True),  # 210 KB, 240 registers
        # Values are needed for the shorter part of a visit: one slot of them. Two would leave room
        # for 48 keys, whose (1) and (3) read shared memory for longer than they multiply.
        dq=DqTile(128, 64, value_stages=1),  # 226 KB, 240 registers
    ),
}

MOST_SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on Hopper."""

BARRIER_BYTES = 1024
"""What a program's barriers take of it at most, tiles starting at multiples of this."""


def forward_bytes(tile: ForwardTile, width: int) -> int:
    """Shared memory of one program of Hopper's forward, in bytes: the formula above."""
    o_stages = 0 if o_takes_q(tile, width) else 1
    return _bytes(tile, width, o_stages)


def o_takes_q(tile: ForwardTile, width: int) -> bool:
    """Whether O is stored from where the query tile was, as there is no room for both.

    The next query tile then waits for that, which short problems notice.
    """
    return _bytes(tile, width, o_stages=1) > MOST_SHARED_BYTES - BARRIER_BYTES


def _bytes(tile: ForwardTile, width: int, o_stages: int) -> int:
    rows = (tile.query_stages + o_stages) * tile.tile_q + 2 * tile.num_stages * tile.tile_k
    return 2 * width * rows


def forward_registers(tile: ForwardTile, width: int) -> int:
    """What a consumer's thread of Hopper's forward needs: S, a P of half the size, O, and others.

    32 others are what the tiles that ship leave beside these.
    """
    return tile.tile_k // 2 + tile.tile_k // 4 + width // 2 + 32


class Long(NamedTuple):
    """The forward's tile from so many queries on."""

    seqlen_q: int
    forward: ForwardTile


# By width and is_causal. Three warpgroups that share their keys ask L2 for a third of the bytes.
# Short problems pay for the rows that 192 leave over, and, when causal, for programs that differ
# more in length. A third stage only costs. At a width of 256, O where Q was leaves room for more
# keys: fewer steps for the same products.
LONG = {
    (64, False): Long(512, ForwardTile(192, 128, take_turns=True)),  # 112 KB, 160 registers
    (64, True): Long(2048, ForwardTile(192, 128, take_turns=True)),
    (128, False): Long(2048, ForwardTile(192, 80)),  # 176 KB, 160 registers
    (256, False): Long(1024, ForwardTile(128, 80)),  # 224 KB, 240 registers
    (256, True): Long(2048, ForwardTile(128, 80)),
}

# By width and is_causal: up to how many queries (at a width of 64) or keys (of 128) the backward
# takes two passes. Of these rows the one pass holds 128 at a time, many of them empty in a short
# problem, and it clears, adds up and rounds dq, which two passes write at once.
SHORT = {(64, False): 768, (64, True): 1024, (128, False): 256, (128, True): 768}


def tiles_for(problem: Problem) -> Tiles:
    """The tiles that run `problem` on Hopper."""
    width = padded_head_dim(problem.head_dim)
    tiles, long = HOPPER[width], LONG.get((width, problem.is_causal))
    if long and problem.seqlen_q >= long.seqlen_q:
        tiles = replace(tiles, forward=long.forward)
    return tiles


def takes_one_pass(problem: Problem) -> bool:
    """Whether the backward of `problem` runs in one pass on Hopper."""
    width = padded_head_dim(problem.head_dim)
    if HOPPER[width].one_pass is None or problem.deterministic:
        return False
    rows = problem.seqlen_q if width == 64 else problem.seqlen_k
    return rows > SHORT[width, problem.is_causal]


@dataclass(frozen=True)
class PortableTile:
    """Query rows and key rows that one program of a portable kernel holds at a time, and its warps.

    In the backward `tile_q` divides 128, to which it pads its row statistics.

    `warps` share the rows that the program owns; `column_groups`: see `portable_tiling.Engine`.
    `num_stages`: slots of the ring of tiles that the program visits.
    `programs`: how many should fit a multiprocessor; the compiler keeps to the registers for it.
    """

    tile_q: int
    tile_k: int
    warps: int = 4
    column_groups: int = 1
    num_stages: int = 1
    programs: int = 1


@dataclass(frozen=True)
class PortableTiles:
    """One tile for each portable kernel."""

    forward: PortableTile
    dkdv: PortableTile
    dq: PortableTile


# For all cards: compiled without spills, within the 99 KB of sm_89. Not measured. A warp that owns
# 32 rows reads each operand from shared memory half as often as with 16, and shared memory is what
# limits mma.sync; 255 registers hold that up to a width of 128 in the forward and 64 in dq.
PORTABLE = {
    64: PortableTiles(
        forward=PortableTile(128, 64, num_stages=2, programs=2),  # 48 KB
        dkdv=PortableTile(64, 64, num_stages=2, programs=2),  # 49 KB
        dq=PortableTile(128, 32, num_stages=2, programs=2),  # 48 KB
    ),
    128: PortableTiles(
        forward=PortableTile(128, 32, num_stages=2, programs=2),  # 64 KB
        dkdv=PortableTile(32, 64, num_stages=2, programs=2),  # 64 KB
        dq=PortableTile(64, 64, programs=2),  # 64 KB
    ),
    256: PortableTiles(
        forward=PortableTile(64, 64),  # 96 KB
        # dK and dV of 32 keys fill the registers of two warps; two more share their columns.
        dkdv=PortableTile(32, 32, warps=2, column_groups=2, programs=2),  # 64 KB
        # Keys and values for two visits, or there would be nothing to do while they come.
        dq=PortableTile(64, 16, num_stages=2),  # 96 KB
    ),
}

# Operands of twice the bytes, so tiles of half the rows. Exact fp32 is split in registers: its
# tiles are the same.
PORTABLE_FP32 = {
    64: PortableTiles(
        forward=PortableTile(64, 64, programs=2),  # 48 KB
        dkdv=PortableTile(32, 64, programs=2),  # 48 KB
        dq=PortableTile(64, 32, programs=2),  # 48 KB
    ),
    128: PortableTiles(
        forward=PortableTile(64, 32, programs=2),  # 64 KB
        dkdv=PortableTile(16, 64, programs=2),  # 80 KB
        dq=PortableTile(64, 32, programs=2),  # 96 KB
    ),
    256: PortableTiles(
        forward=PortableTile(64, 16),  # 96 KB
        dkdv=PortableTile(16, 32, warps=2, column_groups=2),  # 96 KB
        dq=PortableTile(32, 16, warps=2, column_groups=2),  # 96 KB
    ),
}


# The ladder's tiles below tma. What P's second half takes of the registers leaves fewer keys.
BASELINE_FORWARD = PortableTile(16, 16, warps=1)
LADDER_FORWARD = {
    64: PortableTile(64, 64, num_stages=2, programs=2),  # 40 KB
    128: PortableTile(64, 32, num_stages=2, programs=2),  # 48 KB
    256: PortableTile(64, 16, num_stages=2),  # 64 KB
}


def portable_tiles_for(problem: Problem, vector: bool) -> PortableTiles:
    """The tiles that run `problem` on any card; `vector`: copied 16 bytes at a time."""
    width = padded_head_dim(problem.head_dim)
    if problem.dtype.itemsize == 4:
        return PORTABLE_FP32[width]
    tiles = PORTABLE[width]
    if vector:
        return tiles
    # Single elements are not copied in the background, and their addresses take registers: 128 rows
    # of queries would spill in the forward.
    return PortableTiles(
        forward=replace(tiles.forward, num_stages=1, tile_q=64),
        dkdv=replace(tiles.dkdv, num_stages=1),
        dq=replace(tiles.dq, num_stages=1),
    )

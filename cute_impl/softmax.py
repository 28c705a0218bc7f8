"""Softmax over keys that come a tile at a time, as both forward kernels compute it."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, range_constexpr

from flash_rosetta.cute_impl.tiling import Fixed, by_row, column_of, in_order

LN_2 = math.log(2)

HUGE = 2.0**28
"""Base-2 scores beyond this need another factor: see `online_softmax`."""

SLACK = 8.0
"""How far base-2 scores may pass m before m follows: P is 2^8 then, which fp16 holds as well."""


class RowStatistics(Fixed):
    """What a thread keeps of each of its query rows, in registers, while it visits key tiles.

    m is the maximum of the scores so far, or a little less; P = exp2(factor s + shift), and l is
    its sum over this thread's columns, even and odd ones apart; alpha rescales the sums of the
    tiles before.

    Args:
        numbers: the rows' numbers in the tile.
        first_column: of a tile, that this thread has. Four neighbours share each row.
        scale: |scale| log2(e), for a negative scale Q or S is negated.
        scale_huge: the next power of two.
        exact_steps: m follows the row maximum at once, not in steps of SLACK.
        natural: scores are multiplied by the scale already, and P = exp of them.
    """

    def __init__(
        self,
        numbers: list,
        first_column: Int32,
        scale: Float32,
        scale_huge: Float32,
        exact_steps: bool = False,
        natural: bool = False,
    ):
        self.numbers = numbers
        self.first_column = first_column
        self.scale = scale
        self.scale_huge = scale_huge
        self.slack = 0.0 if exact_steps else SLACK
        self.exp = exp if natural else exp2
        self.to_base_2 = math.log2(math.e) if natural else scale
        self.m, self.factor, self.shift, self.alpha = (
            cute.make_rmem_tensor(len(numbers), Float32) for _ in range(4)
        )
        self.l = cute.make_rmem_tensor((2, len(numbers)), Float32)


def no_key_seen(row: RowStatistics, acc: cute.Tensor) -> None:
    """Where the sums over keys start from."""
    acc.fill(0.0)
    row.l.fill(0.0)
    row.m.fill(-Float32.inf)
    row.factor.fill(row.scale)
    row.shift.fill(0.0)
    row.alpha.fill(1.0)


@cute.jit
def online_softmax(s: cute.Tensor, row: RowStatistics) -> Boolean:
    """s = P, and the row statistics follow; returns whether the sums so far must be rescaled.

    The scale is folded into the exponent, one multiply-add a score, and exp2 replaces exp.

    m follows the row maximum only in steps of SLACK or more, so that after the first tile the sums
    are rarely rescaled: P stays below 2^SLACK, and any m gives the same P / l.

    The multiply-add rounds once where factor * m was rounded before. Exponents are off by up to
    half a unit in the last place of that for it, but all of a row by the same amount, which cancels
    in P / l. Beyond 2^28 it would overflow instead. There neighbouring scores are so far apart that
    P is one or next to nothing, and a smaller factor will do: a power of two, with which no product
    is rounded, and small enough for none to overflow.
    """
    s = by_row(s)
    rows = len(row.numbers)
    m_tile = [[s[r, 0], s[r, 1]] for r in range(rows)]  # of even and of odd columns: shorter chains
    for r, j in in_order(s)[2 * rows :]:
        m_tile[r][j % 2] = cute.arch.fmax(m_tile[r][j % 2], s[r, j])
    grown = Boolean(False)
    for r in range_constexpr(rows):
        m_tile[r] = cute.arch.warp_reduction_max(cute.arch.fmax(*m_tile[r]), threads_in_group=4)
        grown = grown | follows(row, r, m_tile[r])
    grown = cute.arch.vote_any_sync(grown)
    if grown:
        for r in range_constexpr(rows):
            before = row.m[r]
            # Each row by itself, though all of a warp come here: what other rows see must not show.
            m = m_tile[r] if follows(row, r, m_tile[r]) else before
            factor = row.scale
            if cute.arch.fmax(m, -m) * row.scale > HUGE:
                factor = cute.arch.fmin(power_near(m), row.scale_huge)
            shift = -m * factor
            if m == -Float32.inf:  # nothing seen so far: (-inf) - (-inf) would be NaN
                shift = Float32(0.0)
            row.m[r] = m
            row.factor[r] = factor
            row.shift[r] = shift
            # The same m again gives one, which the exponential of its rounded product may not be.
            row.alpha[r] = Float32(1.0) if m == before else row.exp(before * factor + shift)
            for c in range_constexpr(2):
                row.l[c, r] = row.l[c, r] * row.alpha[r]
    for r, j in in_order(s):
        s[r, j] = row.exp(s[r, j] * row.factor[r] + row.shift[r])
    for r, j in in_order(s):
        row.l[j % 2, r] = row.l[j % 2, r] + s[r, j]
    return grown


def follows(row: RowStatistics, r: int, m_tile: Float32) -> Boolean:
    """Whether m of a row follows the maximum of a tile."""
    return (m_tile - row.m[r]) * row.scale > row.slack


def exp(x: Float32) -> Float32:
    return cute.math.exp(x, fastmath=True)


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def power_near(x: Float32) -> Float32:
    """A power of two whose product with x is near 2^30, where there is one."""
    exponent = x.bitcast(Int32) & 0x7F800000
    return ((254 << 23) - cutlass.max(exponent - (30 << 23), Int32(0))).bitcast(Float32)


@cute.jit
def mask(s: cute.Tensor, row: RowStatistics, q_start, k_start, seqlen_k, causal_offset):
    """Let no row see a key past seqlen_k or past the causal diagonal."""
    s = by_row(s)
    for r in range_constexpr(len(row.numbers)):
        # How many keys of the tile the row sees, less the thread's first column: to be compared
        # with numbers known when compiling.
        seen = cutlass.min(seqlen_k, q_start + row.numbers[r] + causal_offset + 1)
        seen = seen - k_start - row.first_column
        for j in range_constexpr(cute.size(s, mode=[1])):
            s[r, j] = s[r, j] if column_of(j) < seen else -Float32.inf


def rescale(acc: cute.Tensor, alpha: cute.Tensor) -> None:
    acc = by_row(acc)
    for r, j in in_order(acc):
        acc[r, j] = acc[r, j] * alpha[r]


@cute.jit
def finish(acc: cute.Tensor, row: RowStatistics, lse, q_start, seqlen_k, causal_offset):
    """Write lse [seqlen_q] of one head, and divide acc by the row sums."""
    for r in range_constexpr(len(row.numbers)):
        i = q_start + row.numbers[r]
        l = cute.arch.warp_reduction_sum(row.l[0, r] + row.l[1, r], threads_in_group=4)
        if row.first_column == 0 and i < lse.shape[0]:
            lse[i] = (row.m[r] * row.to_base_2 + cute.math.log2(l, fastmath=True)) * LN_2
        # A row that sees no key has l = 0 and gets o = 0. A row whose seen scores are all -inf has
        # l = 0 as well, but must get NaN, as softmax gives.
        if cutlass.min(seqlen_k, i + causal_offset + 1) <= 0:
            l = Float32(1.0)
        row.alpha[r] = cute.arch.rcp_approx(l)
    rescale(acc, row.alpha)

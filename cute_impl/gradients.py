"""P and dS of a tile of scores, and the row statistics they need, as backward kernels compute them.

Tiles of S are products of tiling.py, with queries as rows, or S^T with keys as rows: then queries,
and with them lse and delta, go by columns. And what the plans of all backward kernels share.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, range_constexpr
from torch import Tensor

from flash_rosetta.cute_impl.launch import Launch
from flash_rosetta.cute_impl.softmax import exp2
from flash_rosetta.cute_impl.tiling import Fixed, by_row, column_of
from flash_rosetta.kernels import last_key_offset
from flash_rosetta.problem import Problem

LOG2_E = math.log2(math.e)

Plan = tuple[list[Launch], Tensor, Tensor, Tensor]
"""Launches, and dq, dk and dv, which they will fill."""


def empty_dense(t: Tensor) -> Tensor:
    """A gradient's memory."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def score_scalars(problem: Problem) -> tuple[float, float, int]:
    """What kernels that recompute P take of the scale and the mask."""
    return problem.scale, problem.scale * LOG2_E, last_key_offset(problem)


def owned_by(num_tiles, num_heads) -> tuple:
    """The tile, head and batch that a program owns; programs of one head are neighbours."""
    program = cute.arch.block_idx()[0]
    head = program // num_tiles
    return program % num_tiles, head % num_heads, head // num_heads


class Visits(Fixed):
    """A program's key tile, and the query tiles of each head of its group that it visits.

    Tiles [first, end) see a key of it, [full, end) see all of them.
    """

    def __init__(self, number, kv_head, batch, group_size, first, full, end):
        self.number = number
        self.kv_head = kv_head
        self.batch = batch
        self.group_size = group_size
        self.first = first
        self.full = full
        self.end = end
        self.total = group_size * (end - first)


class RowPieces(Fixed):
    """Which parts of `rows` rows of o and dO a thread multiplies, one of `threads`: 16 bytes each.

    `start`: the first row's number in its head.
    """

    def __init__(self, start: Int32, rows: int, width: int, thread: Int32, threads: int):
        self.threads_per_row = width // 8
        rows_at_once = threads // self.threads_per_row
        first = thread // self.threads_per_row
        self.start = start
        self.numbers = [first + i * rows_at_once for i in range(rows // rows_at_once)]
        self.piece = thread % self.threads_per_row


@cute.jit
def load_pieces(x: cute.Tensor, at: RowPieces) -> cute.Tensor:
    """A thread's pieces of one head x [seqlen_q, head_dim], zero past its end."""
    pieces = cute.logical_divide(x, (None, 8))
    result = cute.make_rmem_tensor((8, len(at.numbers)), x.element_type)
    result.fill(0)
    for i in range_constexpr(len(at.numbers)):
        row = at.start + at.numbers[i]
        if row < x.shape[0] and at.piece * 8 < x.shape[1]:
            cute.autovec_copy(pieces[row, (None, at.piece)], result[None, i])
    return result


@cute.jit
def put_stats(o, do, lse, dlse, has_dlse, at: RowPieces, stats: cute.Tensor, first):
    """Write lse in base 2 and delta of one head's rows to stats [2, ...], from row `first` on.

    Of rows past seqlen_q, and of those that see no key, lse is +inf and delta 0: so P is zero.
    """
    for i in range_constexpr(len(at.numbers)):
        row = at.start + at.numbers[i]
        products = o[None, i].load().to(Float32) * do[None, i].load().to(Float32)
        delta = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        delta = cute.arch.warp_reduction_sum(delta, threads_in_group=at.threads_per_row)
        if at.piece == 0:
            lse_row = -Float32.inf
            if row < lse.shape[0]:
                lse_row = lse[row]
                if has_dlse != 0:
                    delta -= dlse[row]
            sees_no_key = lse_row == -Float32.inf
            stats[0, first + at.numbers[i]] = Float32.inf if sees_no_key else lse_row * LOG2_E
            stats[1, first + at.numbers[i]] = Float32(0.0) if sees_no_key else delta


def pair_of(rows: cute.Tensor, column) -> cute.Tensor:
    """The numbers of the queries at an even column and the next one, from shared memory."""
    pair = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(cute.logical_divide(rows, 2)[None, column // 2], pair)
    return pair


@cute.jit
def exponential_by_columns(s_t: cute.Tensor, scale_log2: Float32, lse: cute.Tensor, first_column):
    """S^T becomes P^T = exp2(scale_log2 S^T - lse)."""
    s_t = by_row(s_t)
    for j in range_constexpr(0, cute.size(s_t, mode=[1]), 2):
        lse_j = pair_of(lse, first_column + column_of(j))
        for i in range_constexpr(cute.size(s_t, mode=[0])):
            for c in range_constexpr(2):
                s_t[i, j + c] = exp2(cute.math.fma(s_t[i, j + c], scale_log2, -lse_j[c]))


@cute.jit
def hide_by_columns(p_t: cute.Tensor, seen_from, q_start):
    """P^T is zero where the query does not see the key.

    `seen_from`: of each row, the first query that does, less the thread's first column: to be
    compared with numbers known when compiling.
    """
    p_t = by_row(p_t)
    for i in range_constexpr(cute.size(p_t, mode=[0])):
        bound = seen_from[i] - q_start
        for j in range_constexpr(cute.size(p_t, mode=[1])):
            p_t[i, j] = p_t[i, j] if column_of(j) >= bound else Float32(0.0)


@cute.jit
def score_gradient_by_columns(
    p_t: cute.Tensor, dp_t: cute.Tensor, delta: cute.Tensor, first_column
):
    """dP^T becomes dS^T = P^T (dP^T - delta)."""
    p_t, dp_t = by_row(p_t), by_row(dp_t)
    for j in range_constexpr(0, cute.size(dp_t, mode=[1]), 2):
        delta_j = pair_of(delta, first_column + column_of(j))
        for i in range_constexpr(cute.size(dp_t, mode=[0])):
            for c in range_constexpr(2):
                dp_t[i, j + c] = p_t[i, j + c].to(Float32) * (dp_t[i, j + c] - delta_j[c])


@cute.jit
def exponential_by_rows(s: cute.Tensor, scale_log2: Float32, lse):
    """S becomes P = exp2(scale_log2 S - lse)."""
    s = by_row(s)
    for i in range_constexpr(cute.size(s, mode=[0])):
        for j in range_constexpr(cute.size(s, mode=[1])):
            s[i, j] = exp2(cute.math.fma(s[i, j], scale_log2, -lse[i]))


@cute.jit
def hide_by_rows(p: cute.Tensor, seen, k_start):
    """P is zero where the query does not see the key.

    `seen`: how many keys each row sees, less the thread's first column: to be compared with numbers
    known when compiling.
    """
    p = by_row(p)
    for i in range_constexpr(cute.size(p, mode=[0])):
        bound = seen[i] - k_start
        for j in range_constexpr(cute.size(p, mode=[1])):
            p[i, j] = p[i, j] if column_of(j) < bound else Float32(0.0)


@cute.jit
def score_gradient_by_rows(p: cute.Tensor, dp: cute.Tensor, delta):
    """dP becomes dS = P (dP - delta)."""
    p, dp = by_row(p), by_row(dp)
    for i in range_constexpr(cute.size(p, mode=[0])):
        for j in range_constexpr(cute.size(p, mode=[1])):
            dp[i, j] = p[i, j] * (dp[i, j] - delta[i])

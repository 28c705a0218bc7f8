"""FlashAttention-2 forward in Triton (arXiv 2307.08691, algorithm 1).

Shapes
    q [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]
    o [batch, num_heads, seqlen_q, head_dim] in q's dtype, lse [batch, num_heads, seqlen_q] fp32

Steps of one program, which owns one query tile of one head
    1. load the query tile
    2. for each key tile that every row sees: online softmax without a mask
    3. for each key tile on the diagonal or past seqlen_k: the same with a mask
    4. divide by the row sums, write o and lse; tiles that no row sees were never visited
Online softmax: S = Q K^T, m and l follow the row maximum and sum, O accumulates P V.

Constraints
    head_dim 1 to 256, padded to a power of two in the tile; fp16, bf16, fp32; any strides.

What lives where
    registers: S and P [tile_q, tile_k], acc [tile_q, head_dim] fp32, m and l [tile_q] fp32
    shared memory: the query tile, and a ring of num_stages key and value tiles filled ahead
    HBM: q, k, v read; o, lse written; never S or P
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.launch import Launch, dot_precision
from flash_rosetta.triton_impl.tiles import padded_head_dim, tiles_for
from flash_rosetta.triton_impl.tiling import can_use_tma, load_tile, operand, store_tile


def plan_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[list[Launch], Tensor, Tensor]:
    """The launch that computes o and lse, and the tensors it will fill."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tile = tiles_for(problem).forward
    width = padded_head_dim(problem.head_dim)
    tma = can_use_tma(problem.target, q, k, v, o)
    launch = Launch(
        forward_kernel,
        grid=triton.cdiv(problem.seqlen_q, tile.tile_q) * problem.num_heads * problem.batch,
        args=(
            operand(q, tile.tile_q, width, tma),
            operand(k, tile.tile_k, width, tma),
            operand(v, tile.tile_k, width, tma),
            operand(o, tile.tile_q, width, tma),
            lse,
            problem.scale * math.log2(math.e),
            problem.num_heads,
            problem.group_size,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.head_dim,
            problem.causal_offset,
        ),
        options={
            "HEAD_DIM": width,
            "TILE_Q": tile.tile_q,
            "TILE_K": tile.tile_k,
            "IS_CAUSAL": problem.is_causal,
            "EVEN_K": problem.seqlen_k % tile.tile_k == 0,
            "POSITIVE_SCALE": problem.scale > 0,
            "TMA": tma,
            "PRECISION": dot_precision(problem),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
    )
    return [launch], o, lse


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    o,
    lse,
    scale_log2,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    head_dim,
    causal_offset,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs of one head are neighbours, so that its keys and values stay in L2. In a causal
    # problem the last query tile sees the most keys: it starts first and the short ones fill in.
    num_tiles = tl.cdiv(seqlen_q, TILE_Q)
    tile = tl.program_id(0) % num_tiles
    if IS_CAUSAL:
        tile = num_tiles - 1 - tile
    batch_head = tl.program_id(0) // num_tiles
    batch = batch_head // num_heads
    head = batch_head % num_heads
    q_start = tile * TILE_Q

    # Keys [0, full) are seen by every row of the tile, keys [full, end) by some.
    full, end = key_ranges(q_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL)

    q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
    m = tl.full([TILE_Q], float("-inf"), tl.float32)
    l = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, HEAD_DIM], tl.float32)
    acc, m, l = online_softmax(
        acc, m, l, q_tile, k, v, batch, head // group_size, q_start, 0, full, scale_log2, seqlen_k, head_dim,
        causal_offset, False, HEAD_DIM, TILE_Q, TILE_K, IS_CAUSAL, POSITIVE_SCALE, TMA, PRECISION,
    )  # fmt: skip
    if IS_CAUSAL or not EVEN_K:
        acc, m, l = online_softmax(
            acc, m, l, q_tile, k, v, batch, head // group_size, q_start, full, end, scale_log2, seqlen_k, head_dim,
            causal_offset, True, HEAD_DIM, TILE_Q, TILE_K, IS_CAUSAL, POSITIVE_SCALE, TMA, PRECISION,
        )  # fmt: skip

    rows = q_start + tl.arange(0, TILE_Q)
    if IS_CAUSAL:
        # A row that sees no key has l = 0 and gets o = 0. A row whose seen scores are all -inf has
        # l = 0 as well, but must get NaN, as softmax gives.
        l_or_one = tl.where(rows + causal_offset < 0, 1.0, l)
    else:
        l_or_one = l
    acc = acc / l_or_one[:, None]
    if POSITIVE_SCALE:
        m *= scale_log2
    lse_rows = (m + tl.log2(l)) * 0.6931471805599453  # ln 2
    tl.store(lse + batch_head.to(tl.int64) * seqlen_q + rows, lse_rows, mask=rows < seqlen_q)
    o_tile = acc.to(q_tile.dtype)
    store_tile(o, o_tile, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)


@triton.jit
def key_ranges(
    q_start, seqlen_k, causal_offset, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """`full` and `end`: every row of the query tile sees keys [0, full), no row sees one past end."""
    full = seqlen_k
    end = seqlen_k
    if IS_CAUSAL:
        full = tl.maximum(tl.minimum(full, q_start + causal_offset + 1), 0)
        end = tl.maximum(tl.minimum(end, q_start + causal_offset + TILE_Q), 0)
    return full // TILE_K * TILE_K, end


@triton.jit
def online_softmax(
    acc, m, l, q_tile, k, v, batch, kv_head, q_start, start, end, scale_log2, seqlen_k, head_dim, causal_offset,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_CAUSAL: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys [start, end) into acc, m and l.

    The scale is folded into the exponent, one multiply-add a score, and exp2 replaces exp. m is the
    maximum of the unscaled scores; a scale that is not positive would turn it into a minimum, so
    there the scores are scaled first.
    """
    factor = scale_log2 if POSITIVE_SCALE else 1.0
    for k_start in tl.range(start, end, TILE_K):
        k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (1) S = Q K^T [tile_q, tile_k]
        if not POSITIVE_SCALE:
            s *= scale_log2
        if MASKED:
            s = tl.where(visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # (-inf) - (-inf) would be NaN
        alpha = tl.exp2((m - m_safe) * factor)
        p = tl.exp2(s * factor - (m_safe * factor)[:, None])
        l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)  # O += P V
        m = m_new
    return acc, m, l


@triton.jit
def visible(
    q_start, k_start, seqlen_k, causal_offset, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    """[tile_q, tile_k], true where the row sees the key."""
    keys = k_start + tl.arange(0, TILE_K)
    seen = (keys < seqlen_k)[None, :]
    if IS_CAUSAL:
        rows = q_start + tl.arange(0, TILE_Q)
        seen = seen & (keys[None, :] <= rows[:, None] + causal_offset)
    return seen

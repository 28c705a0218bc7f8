"""FlashAttention-2 backward in Triton with dQ by atomics (arXiv 2307.08691, algorithm 2).

The rung "atomics" of the ladder: the pass over key tiles of `backward.py` also computes dQ, which
many of its programs add to, so that no second pass computes the scores again.

Shapes
    those of `backward.py`, and dq_sum [batch, num_heads, seqlen_q, head_dim] fp32

Steps
    1. preprocess, as in `backward.py`
    2. dk/dv and dq: a program owns a key tile of one key/value head and visits the query tiles that
       see it; each visit adds dS K to dq_sum
    3. dq = scale * dq_sum, rounded
The GEMMs, numbered as in the reference:
    (1) S = Q K^T   (2) dV = P^T dO   (3) dP = dO V^T   (4) dQ = dS K   (5) dK = dS^T Q

Constraints
    fp16, bf16; otherwise those of `backward.py`. Not deterministic: atomics add in any order, and
    floating-point sums depend on it.

What lives where
    registers: dK and dV [tile_k, head_dim], a visit's dQ [tile_q, head_dim] in fp32; P and dS tiles
    shared memory: the key and value tile, and a ring of num_stages query and dO tiles
    HBM: as in `backward.py`, and dq_sum, which a program reads and writes once for each visit
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.backward import new_stats, padded_rows_of, recipes
from flash_rosetta.triton_impl.forward import visible
from flash_rosetta.triton_impl.launch import Launch, Recipe, dot_precision
from flash_rosetta.triton_impl.tiles import atomic_tile_for, padded_head_dim
from flash_rosetta.triton_impl.tiling import can_use_tma, load_tile, operand, pointer, store_tile

ROUND_BLOCK = 1024


def plan_atomic_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    problem: Problem,
) -> tuple[list[Launch], Tensor, Tensor, Tensor]:
    """The launches that compute dq, dk and dv, and the tensors they will fill."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    dq_sum = torch.zeros_like(dq, dtype=torch.float32)
    lse2, delta = new_stats(q, problem)
    key = launch_key(problem, q, k, v, do, o, lse, dlse)
    preprocess, _, _ = recipes(key)
    one_pass, rounding = _recipes(key)
    launches = [
        preprocess.launch(o, do, lse, lse if dlse is None else dlse, lse2, delta),
        one_pass.launch(q, k, v, do, dk, dv, dq_sum, lse2, delta),
        rounding.launch(dq_sum, dq),
    ]
    return launches, dq, dk, dv


@lru_cache(maxsize=4096)
def _recipes(key: LaunchKey) -> tuple[Recipe, Recipe]:
    """Of the one pass and of the rounding after it."""
    problem = key.problem
    q, k, v, do, *_ = key.layouts
    dkv = contiguous(*k.shape)
    width = padded_head_dim(problem.head_dim)
    tma = can_use_tma(problem, q, k, v, do)
    tile = atomic_tile_for(problem)
    one_pass = Recipe(
        atomic_kernel,
        key.device,
        grid=triton.cdiv(problem.seqlen_k, tile.tile_k) * problem.num_kv_heads * problem.batch,
        operands=(
            operand(q, tile.tile_q, width, tma),
            operand(k, tile.tile_k, width, tma),
            operand(v, tile.tile_k, width, tma),
            operand(do, tile.tile_q, width, tma),
            operand(dkv, tile.tile_k, width, tma),
            operand(dkv, tile.tile_k, width, tma),
            pointer,
            pointer,
            pointer,
        ),
        scalars=(
            problem.scale,
            problem.scale * math.log2(math.e),
            problem.num_kv_heads,
            problem.group_size,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.head_dim,
            problem.causal_offset,
            padded_rows_of(problem),
        ),
        options={
            "HEAD_DIM": width,
            "TILE_Q": tile.tile_q,
            "TILE_K": tile.tile_k,
            "IS_CAUSAL": problem.is_causal,
            "TMA": tma,
            "PRECISION": dot_precision(problem),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
    )
    elements = problem.batch * problem.num_heads * problem.seqlen_q * problem.head_dim
    rounding = Recipe(
        round_kernel,
        key.device,
        grid=triton.cdiv(elements, ROUND_BLOCK),
        operands=(pointer, pointer),
        scalars=(problem.scale, elements),
        options={"BLOCK": ROUND_BLOCK, "num_warps": 4},
    )
    return one_pass, rounding


@triton.jit(do_not_specialize=("num_kv_heads", "seqlen_q", "seqlen_k", "causal_offset"))
def atomic_kernel(
    q,
    k,
    v,
    do,
    dk,
    dv,
    dq_sum,
    lse2,
    delta,
    scale,
    scale_log2,
    num_kv_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    head_dim,
    causal_offset,
    padded_rows,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # In a causal problem the first key tile is seen by the most queries, and starts first.
    num_tiles = tl.cdiv(seqlen_k, TILE_K)
    k_start = tl.program_id(0) % num_tiles * TILE_K
    batch_head = tl.program_id(0) // num_tiles
    batch = batch_head // num_kv_heads
    kv_head = batch_head % num_kv_heads

    # No query before `first` sees a key of the tile; from `full` on, each query sees all of them,
    # unless the tile reaches past seqlen_k.
    first = 0
    full = 0
    if IS_CAUSAL:
        first = tl.maximum(k_start - causal_offset, 0) // TILE_Q * TILE_Q
        full = k_start + TILE_K - 1 - causal_offset
    if k_start + TILE_K > seqlen_k:
        full = seqlen_q

    k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
    v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
    dk_acc = tl.zeros([TILE_K, HEAD_DIM], tl.float32)
    dv_acc = tl.zeros([TILE_K, HEAD_DIM], tl.float32)
    rows = tl.arange(0, TILE_Q)
    columns = tl.arange(0, HEAD_DIM)
    for head in range(kv_head * group_size, (kv_head + 1) * group_size):
        head_index = tl.cast(batch * num_kv_heads * group_size + head, tl.int64)
        for q_start in tl.range(first, seqlen_q, TILE_Q):
            q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
            do_tile = load_tile(do, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
            stats = head_index * padded_rows + q_start + rows
            lse2_rows = tl.load(lse2 + stats)
            s_t = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)  # (1) S^T = K Q^T
            dp_t = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)  # (3) dP^T = V dO^T
            p_t = tl.exp2(s_t * scale_log2 - lse2_rows[None, :])  # [tile_k, tile_q]
            if q_start < full:
                # Keys past seqlen_k too: what they leave in dS, (4) would mix into rows that count.
                seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL)
                p_t = tl.where(seen.T, p_t, 0.0)
            delta_rows = tl.load(delta + stats)
            ds_t = (p_t * (dp_t - delta_rows[None, :])).to(q_tile.dtype)
            p_t = p_t.to(do_tile.dtype)
            dv_acc = tl.dot(p_t, do_tile, dv_acc, input_precision=PRECISION)  # (2) dV += P^T dO
            dk_acc = tl.dot(ds_t, q_tile, dk_acc, input_precision=PRECISION)  # (5) dK += dS^T Q
            dq_part = tl.dot(ds_t.T, k_tile, input_precision=PRECISION)  # (4) dQ += dS K
            target = dq_sum + head_index * seqlen_q * head_dim
            target += (q_start + rows)[:, None] * tl.cast(head_dim, tl.int64) + columns[None, :]
            inside = (q_start + rows < seqlen_q)[:, None] & (columns < head_dim)[None, :]
            tl.atomic_add(target, dq_part, mask=inside, sem="relaxed")
    dk_tile = (dk_acc * scale).to(k_tile.dtype)
    dv_tile = dv_acc.to(v_tile.dtype)
    store_tile(dk, dk_tile, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
    store_tile(dv, dv_tile, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)


@triton.jit
def round_kernel(dq_sum, dq, scale, elements, BLOCK: tl.constexpr):
    """dq = scale * dq_sum in dq's dtype."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    tl.store(dq + index, tl.load(dq_sum + index, mask=inside, other=0.0) * scale, mask=inside)

"""BASELINE, the first rung of the ladder: a FlashAttention-2 forward with 16 x 16 tiles.

What the faster kernel of `forward.py` is measured against: the same algorithm, and nothing done for
speed. It computes every tile of a causal problem and masks every tile, uses exp instead of exp2,
loads through plain pointers, and its tiles are the smallest that a tensor core takes.

Shapes
    q, o [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]
    lse [batch, num_heads, seqlen_q] fp32

Steps of one program, which owns one query tile of one head
    1. load the query tile
    2. for each key tile: S = Q K^T, mask, online softmax, O += P V
    3. divide by the row sums, write o and lse

Constraints
    forward only; otherwise those of `forward.py`

What lives where
    registers: everything a program works on, acc [16, head_dim] fp32 the largest
    HBM: q, k, v read (k and v once per 16 queries); o, lse written
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.backend import refusals
from flash_rosetta.triton_impl.forward import SIZES, tile_of_program, visible
from flash_rosetta.triton_impl.launch import Launch, Recipe, dot_precision
from flash_rosetta.triton_impl.tiles import padded_head_dim
from flash_rosetta.triton_impl.tiling import load_tile, operand, pointer, store_tile

TILE = 16


class BaselineBackend:
    """The 16 x 16 forward kernel; refuses to be differentiated. Runs only when named."""

    name = "triton_baseline"
    expected_failures: ClassVar = {
        "test_nan_in_a_value_stays_out_of_earlier_tiles": "it visits every key tile, skipping none"
    }

    def why_not(self, problem: Problem) -> list[str]:
        reasons = refusals(problem)
        if problem.needs_backward:
            reasons.append("the baseline has no backward: call it on tensors that need no gradient")
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        launch, o, lse = plan_forward(q, k, v, problem)
        launch.run()
        return o, lse

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError(f"backend {self.name!r} has no backward, as its why_not says")


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that computes o and lse, and the tensors it will fill."""
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return _recipe(launch_key(problem, q, k, v)).launch(q, k, v, o, lse), o, lse


@lru_cache(maxsize=4096)
def _recipe(key: LaunchKey) -> Recipe:
    problem = key.problem
    q, k, v = key.layouts
    o = contiguous(*q.shape)
    width = padded_head_dim(problem.head_dim)
    return Recipe(
        baseline_kernel,
        key.device,
        grid=triton.cdiv(problem.seqlen_q, TILE) * problem.num_heads * problem.batch,
        operands=(*(operand(t, TILE, width, tma=False) for t in (q, k, v, o)), pointer),
        scalars=(
            problem.scale,
            problem.num_heads,
            problem.group_size,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.head_dim,
            problem.causal_offset,
        ),
        options={
            "HEAD_DIM": width,
            "TILE": TILE,
            "IS_CAUSAL": problem.is_causal,
            "PRECISION": dot_precision(problem),
        },
    )


@triton.jit(do_not_specialize=SIZES)
def baseline_kernel(
    q,
    k,
    v,
    o,
    lse,
    scale,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    head_dim,
    causal_offset,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch, head, q_start = tile_of_program(num_heads, seqlen_q, TILE, False)
    kv_head = head // group_size

    q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE, HEAD_DIM, False)
    m = tl.full([TILE], float("-inf"), tl.float32)
    l = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for k_start in tl.range(0, seqlen_k, TILE):
        k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE, HEAD_DIM, False)
        v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE, HEAD_DIM, False)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * scale  # (1) S = Q K^T
        seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE, TILE, IS_CAUSAL)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp(m - m_safe)
        p = tl.exp(s - m_safe[:, None])
        l = l * alpha + tl.sum(p, 1)
        p = p.to(v_tile.dtype)
        acc = tl.dot(p, v_tile, acc * alpha[:, None], input_precision=PRECISION)  # O += P V
        m = m_new

    rows = q_start + tl.arange(0, TILE)
    lse_head = lse + (tl.cast(batch, tl.int64) * num_heads + head) * seqlen_q
    tl.store(lse_head + rows, m + tl.log(l), mask=rows < seqlen_q)
    if IS_CAUSAL:
        l = tl.where(rows + causal_offset < 0, 1.0, l)
    o_tile = (acc / l[:, None]).to(q_tile.dtype)
    store_tile(o, o_tile, batch, head, q_start, seqlen_q, head_dim, TILE, HEAD_DIM, False)


backend = BaselineBackend()

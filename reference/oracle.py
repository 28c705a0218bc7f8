r"""The oracle: naive attention with its whole score matrix, and the backward written out.

Forward, for one head (scores that are masked count as -inf):

    S = scale * Q K^T                        [seqlen_q, seqlen_k]   (1)
    lse_i = log sum_j exp(S_ij)              [seqlen_q]
    P_ij = exp(S_ij - lse_i)                 [seqlen_q, seqlen_k]
    O = P V                                  [seqlen_q, head_dim_v]

Backward. dO and dlse are given, and the chain rule through the two products with P and S gives

    dV = P^T dO                                                     (2)
    dP = dO V^T                                                     (3)
    dQ = scale * dS K                                               (4)
    dK = scale * dS^T Q                                             (5)

with dS between (3) and (4) from the softmax. Its Jacobian, for one row, is
dP_j / dS_k = P_j (delta_jk - P_k), that is diag(P) - P P^T, and dlse / dS_k = P_k. So

    dS_k = P_k dP_k - P_k sum_j P_j dP_j + P_k dlse = P_k (dP_k - D),
    D = sum_j P_j dP_j - dlse = sum_j P_j (dO . V_j) - dlse = dO . O - dlse.

The last step needs no [seqlen_q, seqlen_k] matrix: D = rowsum(dO * O) - dlse, and the gradient of
lse costs nothing more (FlashAttention-2, arXiv 2307.08691, Algorithm 2, line 4; dlse is ours).

The dtype of the tensors decides what this is. Given fp64 it is the oracle. Given fp16, bf16 or
fp32 it is the twin: what plain PyTorch loses at the precision of a kernel that takes its operands
in that dtype (P and dS rounded to it, as such a kernel must) and keeps scores and sums in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_rosetta.problem import Problem, accumulate_dtype
from flash_rosetta.reference.precision import matmul_precision

CHUNK_ELEMENTS = 2**24
"""Scores held at a time, over all heads: 128 MiB in fp64, and a handful of such matrices live."""


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Naive attention; plain differentiable PyTorch.

    Args:
        q: [batch, num_heads, seqlen_q, head_dim] in any dtype of the contract, on any device.
        k: [batch, num_kv_heads, seqlen_k, head_dim].
        v: [batch, num_kv_heads, seqlen_k, head_dim_v].
        problem: gives scale, mask and whether TF32 is allowed; its dtype need not be the tensors'.

    Returns:
        o [batch, num_heads, seqlen_q, head_dim_v] in q's dtype and lse [batch, num_heads, seqlen_q]
        in fp32 (fp64 for fp64). A row that sees no key: o = 0, lse = -inf. A row that sees a NaN or
        +inf score: both NaN. A row whose visible scores are all -inf: o = NaN, lse = -inf.
        Masked keys reach nothing, whatever they hold.
    """
    if problem.is_empty:
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        return o, q.new_full(q.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
    q, k, v = (_grouped(x, problem) for x in (q, k, v))
    chunks = []
    with matmul_precision(problem):
        for rows in _row_chunks(problem):
            s, visible = _scores(q[..., rows, :], k, rows, problem)
            chunks.append(_softmax_times_v(s, v, visible))
    o, lse = (torch.cat(parts, dim=-2).flatten(1, 2) for parts in zip(*chunks, strict=True))
    return o.to(q.dtype), lse.squeeze(-1)


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by the formulas above, in the shapes and dtypes of q, k, v.

    `do` has o's shape, `dlse` lse's (None: zero). Where lse is -inf, dlse is ignored; a row that
    sees no key has zero gradients and adds none.
    """
    if problem.is_empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dtype, scale = accumulate_dtype(q.dtype), problem.scale
    q, k, v, do = (_grouped(x, problem) for x in (q, k, v, do))
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    with matmul_precision(problem):
        for rows in _row_chunks(problem):
            q_rows, do_rows = q[..., rows, :], do[..., rows, :]
            s, visible = _scores(q_rows, k, rows, problem)  # (1)
            o, lse = _softmax_times_v(s, v, visible)
            delta = (do_rows.to(dtype) * o.to(q.dtype)).sum(-1, keepdim=True)
            if dlse is not None:
                dlse_rows = _grouped(dlse[..., None], problem)[..., rows, :].to(dtype)
                delta = delta - dlse_rows.where(lse != -torch.inf, 0)
            p = (s - lse).exp().where(visible, 0)
            dv += _product(p.to(q.dtype).mT, do_rows, visible.mT).sum(2, keepdim=True)  # (2)
            dp = do_rows.to(dtype) @ v.to(dtype).mT  # (3)
            ds = (p * (dp - delta)).where(visible, 0).to(q.dtype)
            dq[..., rows, :] = scale * _product(ds, k, visible)  # (4)
            dk += scale * _product(ds.mT, q_rows, visible.mT).sum(2, keepdim=True)  # (5)
    dq, dk, dv = (grad.flatten(1, 2).to(q.dtype) for grad in (dq, dk, dv))
    return dq, dk, dv


def _grouped(x: Tensor, problem: Problem) -> Tensor:
    """[batch, num_kv_heads, heads per key/value head, seqlen, head_dim]: q and k then broadcast."""
    return x.unflatten(1, (problem.num_kv_heads, x.shape[1] // problem.num_kv_heads))


def _row_chunks(problem: Problem) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // (problem.batch * problem.num_heads * problem.seqlen_k))
    for start in range(0, problem.seqlen_q, rows):
        yield slice(start, min(start + rows, problem.seqlen_q))


def _scores(q: Tensor, k: Tensor, rows: slice, problem: Problem) -> tuple[Tensor, Tensor]:
    """Scaled scores [..., rows, seqlen_k], -inf where masked, and the mask [rows, seqlen_k]."""
    dtype = accumulate_dtype(q.dtype)
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(problem.seqlen_k, device=q.device)[None, :]
    visible = j <= i + problem.causal_offset if problem.is_causal else (i >= 0) & (j >= 0)
    s = problem.scale * (q.to(dtype) @ k.to(dtype).mT)  # (1)
    return s.where(visible, -torch.inf), visible


def _softmax_times_v(s: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse [..., rows, 1] of one chunk, both in the dtype of s."""
    m = s.amax(-1, keepdim=True).detach()  # any m gives the same o and lse: no gradient
    m = m.where(m != -torch.inf, 0)
    e = (s - m).exp()
    l = e.sum(-1, keepdim=True)
    p = (e / l).where(visible, 0)
    return _product(p.to(v.dtype), v, visible), m + l.log()


def _product(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """a @ b in fp32 or fp64, for an a that is 0 outside `visible`: there 0 * NaN counts as 0."""
    dtype = accumulate_dtype(a.dtype)
    a, b = a.to(dtype), b.to(dtype)
    finite = b.isfinite()
    if finite.all():
        return a @ b
    product = a @ b.where(finite, 0)
    for j in (~finite).flatten(0, -3).any(0).any(-1).nonzero()[:, 0].tolist():
        term = a[..., :, j, None] * b[..., j, None, :].masked_fill(finite[..., j, None, :], 0)
        product = product + term.where(visible[:, j, None], 0)
    return product

"""Standard attention, as three kernels forward and five backward: what flash attention avoids.

Every product and the softmax are kernels of their own, so S and P (backward: dP and dS) travel
through HBM, [seqlen_q, seqlen_k] elements each time. Each kernel reads its inputs and writes its
output once, as if no product needed a second pass over its operands: the best case for it. Masked
scores are computed and thrown away. This is here to be read and counted; no backend runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_rosetta.problem import Problem, accumulate_dtype
from flash_rosetta.reference.hbm import Hbm, Traffic
from flash_rosetta.reference.tiled import gemm, visible


def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, traffic: Traffic | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse, and p [batch, num_heads, seqlen_q, seqlen_k] in q's dtype, for the backward."""
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    s = q.new_empty(*q.shape[:3], seqlen_k)
    p = torch.empty_like(s)
    o = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    hbm = Hbm(problem.group_size, traffic, q=q, k=k, v=v, s=s, p=p, o=o, lse=lse[..., None])
    mask = visible(0, 0, seqlen_q, seqlen_k, problem, q.device)

    for g in range(problem.group_size):
        q_all, k_all = hbm.load("q", 0, seqlen_q, g), hbm.load("k", 0, seqlen_k)
        hbm.store("s", 0, problem.scale * gemm(q_all, k_all.mT, problem), g)  # (1)

        s_all = hbm.load("s", 0, seqlen_q, g).to(lse.dtype)
        if mask is not None:
            s_all = s_all.where(mask, -torch.inf)
        lse_all = s_all.logsumexp(-1, keepdim=True)
        p_all = (s_all - lse_all).exp()
        if mask is not None:
            p_all = p_all.where(mask, 0)
        hbm.store("p", 0, p_all, g)
        hbm.store("lse", 0, lse_all, g)

        p_all, v_all = hbm.load("p", 0, seqlen_q, g), hbm.load("v", 0, seqlen_k)
        hbm.store("o", 0, gemm(p_all, v_all, problem), g)
    return o, lse, p


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    problem: Problem,
    *,
    traffic: Traffic | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from o's gradient, with p saved by the forward instead of computed again."""
    seqlen_q, seqlen_k, dtype = problem.seqlen_q, problem.seqlen_k, accumulate_dtype(q.dtype)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    dp, ds = torch.empty_like(p), torch.empty_like(p)
    hbm = Hbm(problem.group_size, traffic, q=q, k=k, v=v, p=p, do=do, dp=dp, ds=ds,
              dq=dq, dk=dk, dv=dv)  # fmt: skip

    dv_all = torch.zeros_like(v, dtype=dtype)
    for g in range(problem.group_size):
        p_all, do_all = hbm.load("p", 0, seqlen_q, g), hbm.load("do", 0, seqlen_q, g)
        dv_all += gemm(p_all.mT, do_all, problem)  # (2)
    hbm.store("dv", 0, dv_all)

    for g in range(problem.group_size):
        do_all, v_all = hbm.load("do", 0, seqlen_q, g), hbm.load("v", 0, seqlen_k)
        hbm.store("dp", 0, gemm(do_all, v_all.mT, problem), g)  # (3)

        p_all = hbm.load("p", 0, seqlen_q, g).to(dtype)
        dp_all = hbm.load("dp", 0, seqlen_q, g).to(dtype)
        hbm.store("ds", 0, p_all * (dp_all - (p_all * dp_all).sum(-1, keepdim=True)), g)

        ds_all, k_all = hbm.load("ds", 0, seqlen_q, g), hbm.load("k", 0, seqlen_k)
        hbm.store("dq", 0, problem.scale * gemm(ds_all, k_all, problem), g)  # (4)

    dk_all = torch.zeros_like(k, dtype=dtype)
    for g in range(problem.group_size):
        ds_all, q_all = hbm.load("ds", 0, seqlen_q, g), hbm.load("q", 0, seqlen_q, g)
        dk_all += gemm(ds_all.mT, q_all, problem)  # (5)
    hbm.store("dk", 0, problem.scale * dk_all)
    return dq, dk, dv

"""FlashAttention-1's loop order: keys outside, queries inside (arXiv 2205.14135, Algorithm 1).

No S and no P in HBM either, but an output row meets its keys one outer iteration apart, so that its
state (o, m, l) waits in HBM and is read and written once per key tile: o_acc in fp32, since it is
still being summed. o is divided by l in every iteration, where FlashAttention-2 divides once at the
end. `tiled.py` is this with the two loops exchanged. It is here to be read and counted, for finite
inputs; no backend runs it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_rosetta.problem import Problem, accumulate_dtype
from flash_rosetta.reference.hbm import Hbm, Traffic
from flash_rosetta.reference.tiled import gemm, query_start, visible


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    tile_q: int = 128,
    tile_k: int = 128,
    traffic: Traffic | None = None,
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse, as `tiled.forward` gives them."""
    dtype, scale = accumulate_dtype(q.dtype), problem.scale
    o_acc = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
    m, l = q.new_empty(*q.shape[:3], 1, dtype=dtype), q.new_empty(*q.shape[:3], 1, dtype=dtype)
    hbm = Hbm(problem.group_size, traffic, q=q, k=k, v=v, o_acc=o_acc, m=m, l=l)
    hbm.store_all("o_acc", 0.0)
    hbm.store_all("m", -torch.inf)
    hbm.store_all("l", 0.0)

    for g in range(problem.group_size):
        for k_start in range(0, problem.seqlen_k, tile_k):
            k_tile = hbm.load("k", k_start, tile_k)
            v_tile = hbm.load("v", k_start, tile_k)

            for q_start in range(query_start(k_start, tile_q, problem), problem.seqlen_q, tile_q):
                q_tile = hbm.load("q", q_start, tile_q, g)
                o_tile = hbm.load("o_acc", q_start, tile_q, g)
                m_old = hbm.load("m", q_start, tile_q, g)
                l_old = hbm.load("l", q_start, tile_q, g)

                s = scale * gemm(q_tile, k_tile.mT, problem)  # (1)
                mask = visible(q_start, k_start, tile_q, tile_k, problem, q.device)
                if mask is not None:
                    s = s.where(mask, -torch.inf)
                m_new = torch.maximum(m_old, s.amax(-1, keepdim=True))
                m_safe = m_new.where(m_new != -torch.inf, 0)
                alpha = (m_old - m_safe).exp()
                p = (s - m_safe).exp()
                l_new = alpha * l_old + p.sum(-1, keepdim=True)
                o_new = (alpha * l_old * o_tile + gemm(p.to(v.dtype), v_tile, problem)) / l_new

                hbm.store("o_acc", q_start, o_new.where(l_new > 0, 0), g)
                hbm.store("m", q_start, m_new, g)
                hbm.store("l", q_start, l_new, g)
    return o_acc.to(q.dtype), (m + l.log()).squeeze(-1)

"""FlashAttention-2 in plain PyTorch, tile by tile: the text that every kernel here translates.

Shapes      q, do   [batch, num_heads, seqlen_q, head_dim], do and o with head_dim_v
            k, v    [batch, num_kv_heads, seqlen_k, head_dim], v with head_dim_v
            lse     [batch, num_heads, seqlen_q], natural logarithm; delta likewise
            tiles   [batch, num_kv_heads, tile, head_dim]: all batches and key/value heads at once,
                    as programs of one grid; the query heads of a group one after another (`g`)

Forward     one program per query tile, keys in the inner loop:
            s = scale q k^T (1), running maximum m and sum l, unnormalised output acc, all rescaled
            by alpha when m moves; one division at the end; lse = m + log l.

Backward    three kernels. Preprocess: delta = rowsum(do * o) - dlse. Main: one program per key
            tile, queries in the inner loop, p = exp(s - lse) recomputed, five GEMMs: (1) s, (2) dv,
            (3) dp, (4) dq, (5) dk; dq is summed across key tiles in HBM. Postprocess: scale dq.
            `oracle.py` derives the formulas.

Where       HBM: what `hbm.load` and `hbm.store` name, and nothing else. On chip: the tiles.
            Operands of GEMMs have the input dtype, so p and ds are rounded to it; scores,
            statistics and sums are fp32 (fp64 for fp64).

Mask        Tiles in which no pair is visible are skipped; `visible` is None for tiles in which
            every pair is, so that only tiles on the diagonal and on ragged edges pay for a mask.
            A load fills rows past the end with zeros, and a zero key scores 0, not -inf: the tail
            needs its mask. A row that sees no key at all has l = 0 and gets o = 0, lse = -inf.
            Masked scores are selected away, not added to, so a NaN in a masked key stays out. In a
            product p v a masked p is 0, but 0 * NaN is NaN: a NaN in v reaches the rows whose tile
            holds that key (in the backward so does one in k, do or q, through (4), (2) and (5)).

Source      arXiv 2307.08691, Algorithms 1 and 2. Kernels work in base 2 (exp2 with scale * log2(e)
            folded into one multiply) and convert lse at the end; here exp keeps the formulas plain.
            m is the maximum of *scaled* scores: before scaling it would be the minimum when the
            scale is negative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_rosetta.problem import Problem, accumulate_dtype
from flash_rosetta.reference.hbm import Hbm, Traffic
from flash_rosetta.reference.precision import matmul_precision

Observer = Callable[..., None]
"""Called as observe(step, **values) with the loop variables and tiles of a step."""


def _ignore(step: str, **values: object) -> None:
    pass


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    tile_q: int = 128,
    tile_k: int = 128,
    traffic: Traffic | None = None,
    observe: Observer = _ignore,
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and lse in fp32 (fp64 for fp64), by arXiv 2307.08691, Algorithm 1.

    Tile sizes need not divide the lengths. `traffic` collects what crossed HBM; `observe` is called
    at each step ("start", "tile", "end").
    """
    _check_tiles(tile_q, tile_k)
    dtype, scale = accumulate_dtype(q.dtype), problem.scale
    o = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    hbm = Hbm(problem.group_size, traffic, q=q, k=k, v=v, o=o, lse=lse[..., None])

    for g in range(problem.group_size):
        for q_start in range(0, problem.seqlen_q, tile_q):
            q_tile = hbm.load("q", q_start, tile_q, g)
            m = q_tile.new_full((*q_tile.shape[:3], 1), -torch.inf, dtype=dtype)
            l = torch.zeros_like(m)
            acc = m.new_zeros(*q_tile.shape[:3], v.shape[3])
            observe("start", g=g, q_start=q_start, q_tile=q_tile, m=m, l=l, acc=acc)

            for k_start in range(0, key_end(q_start + tile_q, problem), tile_k):
                k_tile = hbm.load("k", k_start, tile_k)
                v_tile = hbm.load("v", k_start, tile_k)
                s = scale * gemm(q_tile, k_tile.mT, problem)  # (1) [tile_q, tile_k]
                mask = visible(q_start, k_start, tile_q, tile_k, problem, q.device)
                if mask is not None:
                    s = s.where(mask, -torch.inf)

                m_old, m = m, torch.maximum(m, s.amax(-1, keepdim=True))
                m_safe = m.where(m != -torch.inf, 0)  # no key so far: -inf - -inf would be NaN
                alpha = (m_old - m_safe).exp()
                p = (s - m_safe).exp()
                l = alpha * l + p.sum(-1, keepdim=True)
                acc = alpha * acc + gemm(p.to(v.dtype), v_tile, problem)
                observe("tile", g=g, q_start=q_start, k_start=k_start, k_tile=k_tile, v_tile=v_tile,
                        s=s, m_old=m_old, m=m, alpha=alpha, p=p, l=l, acc=acc)  # fmt: skip

            sees_a_key = _rows_with_a_key(q_start, tile_q, problem, q.device)
            o_tile = (acc / l).where(sees_a_key, 0)
            lse_tile = m + l.log()
            hbm.store("o", q_start, o_tile, g)
            hbm.store("lse", q_start, lse_tile, g)
            observe("end", g=g, q_start=q_start, m=m, l=l, o_tile=o_tile, lse_tile=lse_tile)
    return o, lse


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    problem: Problem,
    *,
    tile_q: int = 128,
    tile_k: int = 128,
    traffic: Traffic | None = None,
    observe: Observer = _ignore,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtypes of q, k, v, by arXiv 2307.08691, Algorithm 2.

    `o` and `lse` are the forward's. `dlse` (None: zero) is ignored where lse is -inf. `observe` is
    called at each step ("start", "tile", "end").
    """
    _check_tiles(tile_q, tile_k)
    dtype, scale = accumulate_dtype(q.dtype), problem.scale
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    dq_acc = q.new_empty(q.shape, dtype=dtype)
    delta = torch.empty_like(lse)
    hbm = Hbm(problem.group_size, traffic, q=q, k=k, v=v, o=o, do=do, dq=dq, dk=dk, dv=dv,
              dq_acc=dq_acc, lse=lse[..., None], delta=delta[..., None])  # fmt: skip
    if dlse is not None:
        hbm.tensors["dlse"] = dlse[..., None]

    # Preprocess: delta, and zeros to add dq to.
    hbm.store_all("dq_acc", 0.0)
    for g in range(problem.group_size):
        for q_start in range(0, problem.seqlen_q, tile_q):
            o_tile = hbm.load("o", q_start, tile_q, g).to(dtype)
            do_tile = hbm.load("do", q_start, tile_q, g).to(dtype)
            delta_tile = (do_tile * o_tile).sum(-1, keepdim=True)
            if dlse is not None:
                lse_tile = hbm.load("lse", q_start, tile_q, g)
                dlse_tile = hbm.load("dlse", q_start, tile_q, g).to(dtype)
                delta_tile = delta_tile - dlse_tile.where(lse_tile != -torch.inf, 0)
            hbm.store("delta", q_start, delta_tile, g)

    # Main.
    for k_start in range(0, problem.seqlen_k, tile_k):
        k_tile = hbm.load("k", k_start, tile_k)
        v_tile = hbm.load("v", k_start, tile_k)
        dk_tile = torch.zeros_like(k_tile, dtype=dtype)
        dv_tile = torch.zeros_like(v_tile, dtype=dtype)
        observe("start", k_start=k_start, k_tile=k_tile)

        for g in range(problem.group_size):
            for q_start in range(query_start(k_start, tile_q, problem), problem.seqlen_q, tile_q):
                q_tile = hbm.load("q", q_start, tile_q, g)
                do_tile = hbm.load("do", q_start, tile_q, g)
                lse_tile = hbm.load("lse", q_start, tile_q, g)
                delta_tile = hbm.load("delta", q_start, tile_q, g)
                mask = visible(q_start, k_start, tile_q, tile_k, problem, q.device)

                s = scale * gemm(q_tile, k_tile.mT, problem)  # (1) [tile_q, tile_k]
                p = (s - lse_tile).exp()
                if mask is not None:
                    p = p.where(mask, 0)
                dv_tile += gemm(p.to(do.dtype).mT, do_tile, problem)  # (2) [tile_k, head_dim_v]
                dp = gemm(do_tile, v_tile.mT, problem)  # (3) [tile_q, tile_k]
                ds = p * (dp - delta_tile)
                if mask is not None:
                    ds = ds.where(mask, 0)
                ds = ds.to(q.dtype)
                dq_tile = hbm.load("dq_acc", q_start, tile_q, g)
                dq_tile = dq_tile + gemm(ds, k_tile, problem)  # (4) [tile_q, head_dim]
                hbm.store("dq_acc", q_start, dq_tile, g)
                dk_tile += gemm(ds.mT, q_tile, problem)  # (5) [tile_k, head_dim]
                observe("tile", g=g, q_start=q_start, k_start=k_start, q_tile=q_tile, s=s, p=p,
                        dp=dp, ds=ds, dq_tile=dq_tile, dk_tile=dk_tile,
                        dv_tile=dv_tile)  # fmt: skip

        hbm.store("dk", k_start, scale * dk_tile)
        hbm.store("dv", k_start, dv_tile)
        observe("end", k_start=k_start, dk_tile=scale * dk_tile, dv_tile=dv_tile)

    # Postprocess: the scale that (4) left out, and q's dtype.
    for g in range(problem.group_size):
        for q_start in range(0, problem.seqlen_q, tile_q):
            hbm.store("dq", q_start, scale * hbm.load("dq_acc", q_start, tile_q, g), g)
    return dq, dk, dv


def gemm(a: Tensor, b: Tensor, problem: Problem) -> Tensor:
    """a @ b as a tensor core does it: operands in the input dtype, sums in fp32 (fp64 for fp64)."""
    dtype = accumulate_dtype(a.dtype)
    with matmul_precision(problem):
        return a.to(dtype) @ b.to(dtype)


def key_end(q_end: int, problem: Problem) -> int:
    """One past the last key that a query before `q_end` sees: where the key loop stops."""
    if not problem.is_causal:
        return problem.seqlen_k
    return min(problem.seqlen_k, min(q_end, problem.seqlen_q) + problem.causal_offset)


def query_start(k_start: int, tile_q: int, problem: Problem) -> int:
    """Start of the first query tile that sees key `k_start`: where the query loop starts."""
    if not problem.is_causal:
        return 0
    return max(0, k_start - problem.causal_offset) // tile_q * tile_q


def visible(
    q_start: int, k_start: int, tile_q: int, tile_k: int, problem: Problem, device: torch.device
) -> Tensor | None:
    """Which pairs of a tile count, [tile_q, tile_k]; None when all of them do."""
    q_end, k_end = q_start + tile_q, k_start + tile_k
    on_edge = q_end > problem.seqlen_q or k_end > problem.seqlen_k
    on_diagonal = problem.is_causal and k_end - 1 > q_start + problem.causal_offset
    if not (on_edge or on_diagonal):
        return None
    i = torch.arange(q_start, q_end, device=device)[:, None]
    j = torch.arange(k_start, k_end, device=device)[None, :]
    mask = (i < problem.seqlen_q) & (j < problem.seqlen_k)
    return mask & (j <= i + problem.causal_offset) if problem.is_causal else mask


def _rows_with_a_key(q_start: int, tile_q: int, problem: Problem, device: torch.device) -> Tensor:
    """[tile_q, 1]: false past the end, and for the first rows if bottom-right has fewer keys."""
    i = torch.arange(q_start, q_start + tile_q, device=device)[:, None]
    first = -problem.causal_offset if problem.is_causal else 0
    return (i >= first) & (i < problem.seqlen_q)


def _check_tiles(tile_q: int, tile_k: int) -> None:
    for name, size in (("tile_q", tile_q), ("tile_k", tile_k)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")

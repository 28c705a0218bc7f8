"""flash-attn-4, FlashAttention in the CuTe DSL: `pip install flash-attn-4`.

Forward and gradients through its public `flash_attn_func`, lse and dlse included.
"""

from __future__ import annotations

import torch
from flash_attn.cute import flash_attn_func
from third_party_sdpa import autograd
from torch import Tensor

from flash_rosetta import Problem

CAPABILITIES = ((9, 0), (10, 0), (10, 3), (11, 0))
"""Of the cards whose forward and backward it has kernels for."""


class FlashAttn4:
    name = "flash_attn_4"

    def why_not(self, problem: Problem) -> list[str]:
        reasons = []
        cards = [f"sm_{major}{minor}" for major, minor in CAPABILITIES]
        if problem.target not in cards:
            reasons.append(f"target {problem.target} is not among {', '.join(cards)}")
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"dtype {problem.dtype} is neither torch.float16 nor torch.bfloat16")
        for name in ("head_dim", "head_dim_v"):
            width = getattr(problem, name)
            if width % 8 or not 8 <= width <= 256:
                reasons.append(f"{name} {width} is no multiple of 8 from 8 to 256")
        is_square = problem.seqlen_q == problem.seqlen_k
        if problem.is_causal and problem.causal_alignment == "top_left" and not is_square:
            reasons.append("causal_alignment top_left is not what its causal means")
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        o, lse = _attend(q, k, v, problem)
        return o.contiguous(), lse.contiguous()

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
    ) -> tuple[Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        with autograd():
            outputs = _attend(*inputs, problem)
            incoming = (do,) if dlse is None else (do, dlse)
            grads = torch.autograd.grad(outputs[: len(incoming)], inputs, incoming)
        return tuple(t.contiguous() for t in grads)


def _attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """o and lse; it takes [batch, seqlen, heads, head_dim]."""
    o, lse = flash_attn_func(
        *(t.transpose(1, 2) for t in (q, k, v)),
        softmax_scale=problem.scale,
        causal=problem.is_causal,
        deterministic=problem.deterministic,
        return_lse=True,
    )
    return o.transpose(1, 2), lse


backend = FlashAttn4()

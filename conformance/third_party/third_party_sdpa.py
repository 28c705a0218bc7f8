"""PyTorch's `scaled_dot_product_attention`, one backend for each of its kernels.

o and its gradients are the kernel's, which is forced. SDPA gives no lse: lse and what flows back
through it are computed here in fp32, so a fault in them is this adapter's, not PyTorch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_rosetta import Problem

MAX_SCORES = 2**31
"""Of one problem: this adapter's lse stores them."""

CAN_USE = {
    SDPBackend.FLASH_ATTENTION: cuda.can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: cuda.can_use_efficient_attention,
    SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
}


@contextmanager
def autograd() -> Iterator[None]:
    """Autograd at work inside a backend, which is called below it, for want of a backward."""
    keys = torch._C.DispatchKey
    with (
        torch.enable_grad(),
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
    ):
        yield


class Sdpa:
    expected_failures: ClassVar[dict[str, str]] = {
        "test_memory_grows_linearly": "lse is this adapter's, which stores the scores"
    }

    def __init__(self, name: str, kernel: SDPBackend):
        self.name = name
        self.kernel = kernel

    def why_not(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.is_causal and problem.causal_offset:
            reasons.append("causal_alignment bottom_right is not what SDPA's is_causal means")
        scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
        if scores > MAX_SCORES:
            reasons.append(f"{scores} scores are above {MAX_SCORES}, which this adapter can store")
        if problem.target == "cpu":
            if self.kernel == SDPBackend.FLASH_ATTENTION and problem.head_dim_v != problem.head_dim:
                reasons.append(
                    f"head_dim_v {problem.head_dim_v} differs from head_dim {problem.head_dim}"
                )
            if self.kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                reasons.append("target cpu has no such kernel in PyTorch")
        elif not problem.target.startswith("sm_"):
            reasons.append(f"target {problem.target} is neither cpu nor an NVIDIA GPU")
        elif not torch.cuda.is_available():
            reasons.append("PyTorch sees no GPU to ask")
        elif self.kernel in CAN_USE and not reasons and not problem.is_empty:
            reasons += _refusals(self.kernel, problem)
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        q, k, v = map(self._as_taken, (q, k, v))
        return self._attend(q, k, v, problem).contiguous(), _lse(q, k, problem)

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
        inputs = [self._as_taken(t).detach().requires_grad_() for t in (q, k, v)]
        do = self._as_taken(do)
        with autograd():
            grads = torch.autograd.grad(self._attend(*inputs, problem), inputs, do)
            if dlse is None:
                return tuple(t.contiguous() for t in grads)
            through_lse = torch.autograd.grad(_lse(*inputs[:2], problem), inputs[:2], dlse)
        dq, dk = (
            (of_o.to(dlse.dtype) + of_lse.to(dlse.dtype)).to(problem.dtype)
            for of_o, of_lse in zip(grads, through_lse, strict=False)
        )
        return dq.contiguous(), dk.contiguous(), grads[2].contiguous()

    def _as_taken(self, t: Tensor) -> Tensor:
        """t, copied where the fused kernels do not read it rightly: FINDINGS.md has what they do.

        SDPA falls back to its math kernel by itself for rows whose stride is not 1, but not for
        rows or a start that are no multiple of 16 bytes.
        """
        if self.kernel == SDPBackend.MATH:
            return t
        rows = zip(t.shape[:-1], t.stride()[:-1], strict=True)
        steps = [t.storage_offset(), *(stride for size, stride in rows if size > 1)]
        aligned = t.device.type == "cpu" or all(step * t.itemsize % 16 == 0 for step in steps)
        return (
            t if t.stride(-1) == 1 and aligned else t.clone(memory_format=torch.contiguous_format)
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        with sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=problem.is_causal,
                scale=problem.scale,
                enable_gqa=problem.num_kv_heads != problem.num_heads,
            )


@lru_cache(maxsize=4096)
def _refusals(kernel: SDPBackend, problem: Problem) -> list[str]:
    """What PyTorch says against running the problem on a CUDA kernel; asks with tiny tensors."""

    def shaped(heads: int, seqlen: int, width: int) -> Tensor:
        one = torch.empty(1, 1, 1, width, dtype=problem.dtype, device="cuda")
        t = one.expand(problem.batch, heads, seqlen, width)
        return t.requires_grad_(problem.needs_backward)

    q = shaped(problem.num_heads, problem.seqlen_q, problem.head_dim)
    k = shaped(problem.num_kv_heads, problem.seqlen_k, problem.head_dim)
    v = shaped(problem.num_kv_heads, problem.seqlen_k, problem.head_dim_v)
    is_grouped = problem.num_kv_heads != problem.num_heads
    params = cuda.SDPAParams(q, k, v, None, 0.0, problem.is_causal, is_grouped)
    with sdpa_kernel(kernel), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if CAN_USE[kernel](params, True):
            return []
    said = [str(warning.message).partition(" (Triggered")[0].strip() for warning in caught]
    return said or ["PyTorch refuses it and does not say why"]


def _lse(q: Tensor, k: Tensor, problem: Problem) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    if problem.is_causal:
        k = k[:, :, : problem.seqlen_q]  # no row sees the others, and 0 * NaN is NaN
    k = k.repeat_interleave(problem.group_size, dim=1)
    s = problem.scale * (q.to(wide) @ k.to(wide).mT)
    if problem.is_causal:
        unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(unseen, -torch.inf)
    lse = s.logsumexp(-1)
    return lse.where(lse != torch.inf, torch.nan)


math = Sdpa("sdpa_math", SDPBackend.MATH)
flash = Sdpa("sdpa_flash", SDPBackend.FLASH_ATTENTION)
efficient = Sdpa("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION)
cudnn = Sdpa("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION)

"""The operator: checks, layout and choice of backend, written once for all backends."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from flash_rosetta import ops, registry
from flash_rosetta.problem import DTYPE_NAMES, CausalAlignment, Problem

BACKEND_VARIABLE = "FLASH_ROSETTA_BACKEND"


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: CausalAlignment = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: CausalAlignment = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: CausalAlignment = ...,
    scale: float | None = ...,
    return_lse: bool,
    backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, without ever storing the scores (FlashAttention-2).

    Args:
        q: [batch, num_heads, seqlen_q, head_dim], fp16, bf16 or fp32 (the reference: fp64 too).
        k: [batch, num_kv_heads, seqlen_k, head_dim]; num_heads must be a multiple of
            num_kv_heads, and query head h reads key/value head h // (num_heads // num_kv_heads).
        v: [batch, num_kv_heads, seqlen_k, head_dim_v].
            All three may also be [batch, seqlen, head_dim]. Any strides; any dimension but
            head_dim may be 0. Under autocast they are cast to its dtype.
        is_causal: mask keys after the query.
        causal_alignment: query i sees key j when j <= i ("top_left", as in SDPA), or when
            j <= i + seqlen_k - seqlen_q ("bottom_right", as in flash-attn).
        scale: any finite number; 1/sqrt(head_dim) when left out.
        return_lse: also return lse.
        backend: a name from `flash_rosetta.names()`, or "auto". Left out, the environment variable
            FLASH_ROSETTA_BACKEND decides, and without it "auto" (see `explain`).

    Returns:
        o [batch, num_heads, seqlen_q, head_dim_v] in q's dtype; with `return_lse` also lse
        [batch, num_heads, seqlen_q] in fp32 (fp64 for fp64 inputs), the natural logarithm of the
        sum of exponentials of the scaled scores. Gradients flow through both. A row that sees no
        key has o = 0, lse = -inf and zero gradients.

    Raises:
        TypeError, ValueError: for arguments outside the above; names the argument and its value.
        Unsupported: the named backend cannot run this problem; carries every reason.

    Differentiable once, in reverse: second derivatives and forward-mode tangents raise. Gradients
    repeat to the bit under `torch.use_deterministic_algorithms(True)`; without it a backend may add
    up its sums in any order.
    """
    folded = isinstance(q, Tensor) and q.dim() == 3
    q, k, v, scale, needs_backward = _read(q, k, v, is_causal, causal_alignment, scale, return_lse)
    name = _backend_name(backend)
    ops.refuse_forward_mode(q, k, v)
    dispatched = needs_backward or ops.needs_dispatcher(q, k, v)
    forward = ops.dispatch_forward if dispatched else ops.run_forward
    o, lse = forward(q, k, v, is_causal, causal_alignment, scale, needs_backward, name)
    if folded:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a problem, and why each of the others does not."""

    problem: Problem
    chosen: str | None
    reasons: Mapping[str, list[str]]

    def __str__(self) -> str:
        lines = [
            f"{self.problem.id} on {self.problem.target}: {self.chosen or 'no backend can run it'}"
        ]
        for name, reasons in self.reasons.items():
            if name == self.chosen:
                verdict = "chosen"
            elif reasons:
                verdict = "cannot: " + "; ".join(reasons)
            else:
                verdict = "can, when named"
            lines.append(f"  {name}: {verdict}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Which backend `attention` would use for the same arguments, and why not each of the others.

    "auto" tries cute, tilelang, triton, reference, in this order, on sm_90 (Hopper), and triton,
    cute, tilelang, reference elsewhere; any other backend runs only when it is named. Raises
    TypeError and ValueError as `attention` does; a problem that nothing can run is no error here:
    `chosen` is None.
    """
    q, k, v, scale, needs_backward = _read(q, k, v, is_causal, causal_alignment, scale, return_lse)
    problem = ops.problem_of(q, k, v, is_causal, causal_alignment, scale, needs_backward)
    name = _backend_name(backend)
    if name != "auto":
        registry.why_not(name, problem)  # an unknown name is an error, as in attention()
    tried = registry.auto_candidates(problem.target)
    everybody = dict.fromkeys([*tried, *registry.names(), *([name] if name != "auto" else [])])
    reasons = {other: registry.why_not(other, problem) for other in everybody}
    candidates = tried if name == "auto" else [name]
    chosen = next((candidate for candidate in candidates if not reasons[candidate]), None)
    return Explanation(problem, chosen, reasons)


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, float, bool]:
    """q, k, v cast for autocast and 4-D, the scale, and whether gradients are wanted.

    Raises for arguments outside the contract.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    scale = _check_options(q, is_causal, causal_alignment, scale, return_lse)
    if q.dim() == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    needs_backward = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    return q, k, v, scale, needs_backward


def _backend_name(backend: str | None) -> str:
    if backend is None:
        name = os.environ.get(BACKEND_VARIABLE) or "auto"
        if name != "auto" and not torch.compiler.is_compiling() and not registry.is_known(name):
            accepted = ", ".join(["auto", *registry.names()])
            raise ValueError(f"{BACKEND_VARIABLE} must be one of {accepted}; got {name!r}")
        return name
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name (str) or None, got {type(backend).__name__}")
    return backend


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast as SDPA's entry in the autocast table does: all but fp64."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not ops.is_autocast_enabled(first.device):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


_accepted: set[tuple[object, ...]] = set()
"""Shapes, dtypes and devices that have passed `_check_facts`."""

MAX_ACCEPTED = 4096


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise for tensors outside the contract."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise TypeError(f"{name} must be a strided tensor, got {kind}")
    plain = (Tensor, torch.nn.Parameter)
    if (
        torch.compiler.is_compiling()
        or type(q) not in plain
        or type(k) not in plain
        or type(v) not in plain
    ):
        _check_facts(q, k, v)  # a tracer's sizes may be no numbers yet, which a set cannot hold
        return
    facts = tuple([(t.shape, t.dtype, t.device) for t in (q, k, v)])
    if facts not in _accepted:
        _check_facts(q, k, v)
        if len(_accepted) >= MAX_ACCEPTED:
            _accepted.clear()
        _accepted.add(facts)


def _check_facts(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What shapes, dtypes and devices alone decide."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPE_NAMES:
            accepted = ", ".join(map(str, DTYPE_NAMES))
            raise TypeError(f"{name} must have a dtype among {accepted}, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.dim() not in (3, 4):
            raise ValueError(
                f"{name} must be [batch, heads, seqlen, head_dim] or [batch, seqlen, head_dim], "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.dim() != q.dim():
            raise ValueError(
                f"{name} must have {q.dim()} dimensions as q has, got shape {tuple(tensor.shape)}"
            )
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} must have q's batch {q.shape[0]}, got shape {tuple(tensor.shape)}"
            )
        if tensor.shape[-1] == 0:
            raise ValueError(
                f"{name} must have a head_dim of at least 1, got shape {tuple(tensor.shape)}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head_dim {q.shape[-1]}, got shape {tuple(k.shape)}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have k's seqlen_k {k.shape[-2]}, got shape {tuple(v.shape)}")
    if q.dim() == 4:
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        if v.shape[1] != num_kv_heads:
            raise ValueError(
                f"v must have k's num_kv_heads {num_kv_heads}, got shape {tuple(v.shape)}"
            )
        if num_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
            raise ValueError(
                f"q must have a multiple of k's num_kv_heads, got num_heads={num_heads} and "
                f"num_kv_heads={num_kv_heads}"
            )


def _check_options(
    q: Tensor, is_causal: bool, causal_alignment: str, scale: float | None, return_lse: bool
) -> float:
    """The scale to use; raises for options outside the contract."""
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    if not isinstance(causal_alignment, str) or causal_alignment not in (
        "top_left",
        "bottom_right",
    ):
        raise ValueError(
            f"causal_alignment must be 'top_left' or 'bottom_right', got {causal_alignment!r}"
        )
    if scale is None:
        default: float = q.shape[-1] ** -0.5
        return default
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:  # unlike math.isfinite, the compiler can follow this
        raise ValueError(f"scale must be finite and fit a float, got {scale}")
    return number

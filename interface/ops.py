"""The custom op pair that all backends share: what PyTorch's compiler and autograd see.

`flash_rosetta::forward` and `flash_rosetta::backward` are opaque to `torch.compile`: shapes come
from the fake implementations, and the backend is chosen when the op runs, from real sizes.
Tensors are 4-D here; `flash_rosetta.attention` checks arguments and adds what is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_rosetta import registry
from flash_rosetta.problem import CausalAlignment, Problem, accumulate_dtype, target_of


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    causal_alignment: str,
    scale: float,
    needs_backward: bool,
) -> Problem:
    """The problem that 4-D tensors pose under PyTorch's precision and determinism settings."""
    return _problem(
        q.shape,
        k.shape,
        v.shape[3],
        q.dtype,
        q.device,
        is_causal,
        causal_alignment,
        scale,
        q.dtype == torch.float32 and _tf32_allowed(),
        torch.are_deterministic_algorithms_enabled(),
        needs_backward,
    )


def _tf32_allowed() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # raised once the newer setting for each library has been used
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@lru_cache(maxsize=4096)  # a call's host time goes mostly into building and hashing what repeats
def _problem(
    q_shape: torch.Size,
    k_shape: torch.Size,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    causal_alignment: str,
    scale: float,
    allow_tf32: bool,
    deterministic: bool,
    needs_backward: bool,
) -> Problem:
    batch, num_heads, seqlen_q, head_dim = q_shape
    return Problem(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=k_shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=k_shape[2],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        is_causal=is_causal,
        causal_alignment=cast(CausalAlignment, causal_alignment),  # Problem checks it
        scale=scale,
        target=target_of(device),
        allow_tf32=allow_tf32,
        deterministic=deterministic,
        needs_backward=needs_backward,
    )


def is_autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is on for `device`; "meta" knows no autocast."""
    return (
        torch._C._is_any_autocast_enabled()  # the common case, told without a look at the device
        and device.type != "meta"
        and torch.is_autocast_enabled(device.type)
    )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise NotImplementedError for tensors that carry a tangent: it would be dropped silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "flash_rosetta.attention has no forward-mode derivative (torch.func.jvp, jacfwd, "
            "torch.autograd.forward_ad): use reverse mode"
        )


_AS_IT_IS = nullcontext()


def _prepared(q: Tensor) -> AbstractContextManager[object]:
    """q's device as the current one, and autocast kept away from a backend's PyTorch calls."""
    device = q.device
    autocast = is_autocast_enabled(device)
    elsewhere = q.is_cuda and device.index != torch.cuda.current_device()
    if not autocast and not elsewhere:
        return _AS_IT_IS
    stack = ExitStack()
    if elsewhere:
        stack.enter_context(torch.cuda.device(device))
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    causal_alignment: str,
    scale: float,
    needs_backward: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem = problem_of(q, k, v, is_causal, causal_alignment, scale, needs_backward)
    chosen = registry.resolve(backend, problem)
    if problem.is_empty:
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        return o, q.new_full(q.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
    with _prepared(q):
        return chosen.forward(q, k, v, problem)


forward = torch.library.custom_op("flash_rosetta::forward", run_forward, mutates_args=())


def needs_dispatcher(*tensors: Tensor) -> bool:
    """Whether anything must see the op between a call of it and `run_forward`, gradients aside.

    The compiler, a torch.func transform, a mode, a tensor subclass, a meta tensor and a
    tensor that is not yet negated must. Where none is, calling `run_forward` gives the same and
    spares the host half of a small problem's time.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    ):
        return True
    for t in tensors:
        if type(t) not in (Tensor, torch.nn.Parameter) or t.is_neg() or t.is_meta:
            return True
    return False


@forward.register_fake
def _forward_shapes(q, k, v, is_causal, causal_alignment, scale, needs_backward, backend):
    o = q.new_empty(*q.shape[:3], v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


@torch.library.custom_op("flash_rosetta::backward", mutates_args=())
def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool,
    causal_alignment: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = problem_of(q, k, v, is_causal, causal_alignment, scale, needs_backward=True)
    chosen = registry.resolve(backend, problem)
    if problem.is_empty:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    with _prepared(q):
        do = _zero_where_no_key_is_seen(do, problem)
        return chosen.backward(do, dlse, q, k, v, o, lse, problem)


def _zero_where_no_key_is_seen(do: Tensor, problem: Problem) -> Tensor:
    """do, without what it says of rows whose o is 0 whatever the inputs are.

    A loss may well have a gradient of NaN there (o / |o|), and a kernel multiplies it by P = 0.
    """
    rows = -problem.causal_offset if problem.is_causal else 0
    if rows <= 0:
        return do
    do = do.clone(memory_format=torch.contiguous_format)
    do[:, :, :rows] = 0
    return do


@backward.register_fake
def _backward_shapes(do, dlse, q, k, v, o, lse, is_causal, causal_alignment, scale, backend):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _save_for_backward(ctx, inputs, output):
    q, k, v, is_causal, causal_alignment, scale, _, backend = inputs
    o, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.options = is_causal, causal_alignment, scale, backend


def _differentiate(ctx, do, dlse, backward=backward):
    q, k, v, o, lse = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 8
    if do is None:
        do = o.new_zeros(()).expand_as(o)
    grads = backward(do, dlse, q, k, v, o, lse, *ctx.options)
    wanted = (
        g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)
    )
    return *wanted, None, None, None, None, None


def _refuse(ctx, *grads):
    raise NotImplementedError(
        "flash_rosetta.attention is differentiable once: its backward has no derivative "
        "(create_graph=True was asked for); compute second derivatives with plain PyTorch"
    )


forward.register_autograd(_differentiate, setup_context=_save_for_backward)
backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)


def _refuse_vmap(info, in_dims, *args):
    raise NotImplementedError(
        "flash_rosetta.attention has no batching rule (torch.vmap, jacrev, per-sample gradients): "
        "fold the mapped dimension into batch"
    )


class _TransformedBackward(torch.autograd.Function):
    forward = staticmethod(backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_refuse)
    vmap = staticmethod(_refuse_vmap)


class _Transformed(torch.autograd.Function):
    """The forward op under torch.func.grad and vjp, which no custom op can go through itself."""

    forward = staticmethod(forward)
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(partial(_differentiate, backward=_TransformedBackward.apply))
    vmap = staticmethod(_refuse_vmap)


def dispatch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    causal_alignment: str,
    scale: float,
    needs_backward: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`forward`, in a way that whatever is active can see."""
    is_transformed = torch._C._are_functorch_transforms_active()
    call: Callable[..., tuple[Tensor, Tensor]] = forward
    if is_transformed and not torch.compiler.is_compiling():
        call = _Transformed.apply
    return call(q, k, v, is_causal, causal_alignment, scale, needs_backward, backend)

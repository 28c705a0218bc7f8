"""Who races: the registered backends, PyTorch's own attention with each kernel forced, others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_rosetta import registry
from flash_rosetta.attention import attention
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.workloads import Timed
from flash_rosetta.problem import Inputs, Problem

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
OUTPUT_NAMES: dict[str, tuple[str, ...]] = {
    "forward": ("o", "lse"),
    "backward": ("dq", "dk", "dv"),
}

AS_GIVEN = "as given"
"""The layout of contenders that take any strides: [batch, heads, seqlen, head_dim] in the grid."""

REFERENCE_LIMIT = 512
"""Longest sequence at which the reference, Python loops, races on a GPU without being named."""

FLEX_HEAD_DIMS, FLEX_SEQLENS = (64, 128), (2048, 8192)

MATH_LIMIT = 2048
"""Longest sequence for SDPA's math kernel, which stores all the scores."""


NOT_A_REASON = ("not used because:", "has been runtime disabled.")
"""Ends of PyTorch's lines that are a heading, or tell of the kernels that were not forced."""


class Contender(Protocol):
    """One way to compute attention, timed without anything that is not its own work.

    `layout` is how it has its tensors in memory: laid out so outside of the time taken.
    """

    name: str
    layout: str

    def why_not(self, problem: Problem) -> list[str]:
        """Reasons not to race on `problem`, known without running."""
        ...

    def prepare(self, direction: Timed, inputs: Inputs, problem: Problem) -> Run:
        """The function to time: (o,) or (o, lse) for forward, else (dq, dk, dv).

        "forward+backward" is what a user calls, and autograd after it. Raises Unsupported when the
        inputs themselves are refused.
        """
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        """Attention through the function that users call, for training with it."""
        ...

    def chosen(self) -> AbstractContextManager[object]:
        """Within it, `call` reaches this contender."""
        ...

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention through the function that users call, for its host time."""
        ...


class BackendContender:
    """A backend of the registry, its two functions called directly."""

    layout = AS_GIVEN

    def __init__(self, name: str, named: bool):
        self.name = name
        self.named = named

    def why_not(self, problem: Problem) -> list[str]:
        reasons = registry.why_not(self.name, problem)
        if self.named:
            return reasons
        if self.name in registry.ONLY_BY_NAME:
            return [*reasons, f"races only when named: --backend {self.name}"]
        if self.name == "reference" and problem.target != "cpu":
            longest = max(problem.seqlen_q, problem.seqlen_k)
            if longest > REFERENCE_LIMIT:
                return [
                    *reasons,
                    f"seqlen {longest} is above {REFERENCE_LIMIT}, its limit unless named: "
                    "--backend reference",
                ]
        return reasons

    def prepare(self, direction: Timed, inputs: Inputs, problem: Problem) -> Run:
        backend = registry.get(self.name)
        q, k, v, do, _ = inputs
        if direction == "forward+backward":
            leaves = _leaves(q, k, v)
            return lambda: torch.autograd.grad(self.attend(*leaves, problem), leaves, do)
        if direction == "forward":
            return lambda: backend.forward(q, k, v, problem)
        o, lse = backend.forward(q, k, v, problem)
        return lambda: backend.backward(do, None, q, k, v, o, lse, problem)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        return attention(
            q,
            k,
            v,
            is_causal=problem.is_causal,
            causal_alignment=problem.causal_alignment,
            scale=problem.scale,
            backend=self.name,
        )

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend=self.name)


class SdpaContender:
    """`scaled_dot_product_attention`, with one kernel forced, or with the one that it picks."""

    layout = AS_GIVEN

    def __init__(self, name: str, kernel: SDPBackend | None = None):
        self.name = name
        self.kernel = kernel

    def why_not(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.is_causal and problem.causal_offset:
            reasons.append("causal_alignment bottom_right is not what SDPA's is_causal means")
        if problem.target == "cpu" and self.kernel in (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        ):
            reasons.append("target cpu has no such kernel in PyTorch")
        longest = max(problem.seqlen_q, problem.seqlen_k)
        if self.kernel == SDPBackend.MATH and longest > MATH_LIMIT:
            reasons.append(f"seqlen {longest} is above {MATH_LIMIT}: it stores all the scores")
        return reasons

    def prepare(self, direction: Timed, inputs: Inputs, problem: Problem) -> Run:
        q, k, v, do, _ = inputs
        if direction != "forward":
            q, k, v = _leaves(q, k, v)
        if reasons := self._refusals(q, k, v, problem):
            raise Unsupported(self.name, reasons, problem)

        def forward() -> Outputs:
            return (self.attend(q, k, v, problem),)

        if direction == "forward":
            return forward
        if direction == "forward+backward":
            return lambda: torch.autograd.grad(forward(), (q, k, v), do)
        (o,) = forward()
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        with self.chosen():
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=problem.is_causal,
                scale=problem.scale,
                enable_gqa=problem.num_kv_heads != problem.num_heads,
            )

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def _refusals(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> list[str]:
        """What PyTorch itself says against the forced kernel and these tensors."""
        checks = {
            SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
            SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
            SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
        }
        if q.device.type != "cuda" or self.kernel not in checks:
            return []
        gqa = problem.num_kv_heads != problem.num_heads
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, problem.is_causal, gqa)
        with self.chosen():
            if checks[self.kernel](params):
                return []
        # The check tells its reasons to stderr, the call tells them as warnings.
        with warnings.catch_warnings(record=True) as caught, suppress(RuntimeError):
            warnings.simplefilter("always")
            self.attend(q, k, v, problem)
        said = [str(w.message).partition(" (Triggered")[0].strip() for w in caught]
        reasons = [text for text in said if not text.endswith(NOT_A_REASON)]
        return reasons or ["PyTorch refuses it and does not say why"]


class FlashAttn4Contender:
    """The package flash-attn-4, FlashAttention in CuTe DSL, by its public function.

    It takes and gives [batch, seqlen, heads, head_dim]: the race lays its tensors out so, outside
    of the time taken.
    """

    name = "flash-attn-4"
    layout = "batch, seqlen, heads, head_dim"

    def why_not(self, problem: Problem) -> list[str]:
        reasons = []
        if not _is_installed("flash_attn.cute"):
            reasons.append("not installed: pip install flash-attn-4")
        if problem.target not in ("sm_90", "sm_100", "sm_103", "sm_110"):
            reasons.append(f"target {problem.target} has no forward and backward in it")
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"dtype {problem.dtype} is neither torch.float16 nor torch.bfloat16")
        if problem.head_dim % 8 or problem.head_dim > 256:
            reasons.append(f"head_dim {problem.head_dim} is no multiple of 8 up to 256")
        widths = problem.head_dim, problem.head_dim_v
        if widths[0] != widths[1] and widths != (192, 128):
            reasons.append(f"head_dim_v {widths[1]} beside head_dim {widths[0]} is not in it")
        elif widths[0] == widths[1] and 128 < widths[0] < 256 and problem.target != "sm_90":
            reasons.append(f"head_dim {widths[0]} is in it for target sm_90 alone")
        bottom_right_offset = problem.seqlen_k - problem.seqlen_q
        if problem.is_causal and problem.causal_offset != bottom_right_offset:
            reasons.append("causal_alignment top_left is not what its causal means")
        return reasons

    def prepare(self, direction: Timed, inputs: Inputs, problem: Problem) -> Run:
        q, k, v, do = (t.transpose(1, 2).contiguous() for t in inputs[:4])
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        if direction == "forward":

            def forward() -> Outputs:
                with torch.no_grad():
                    return (self._attend(q, k, v, **options).transpose(1, 2),)

            return forward
        leaves = _leaves(q, k, v)

        def gradients(o: Tensor, retain_graph: bool) -> Outputs:
            found = torch.autograd.grad(o, leaves, do, retain_graph=retain_graph)
            return tuple(t.transpose(1, 2) for t in found)

        if direction == "forward+backward":
            return lambda: gradients(self._attend(*leaves, **options), False)
        o = self._attend(*leaves, **options)
        return lambda: gradients(o, True)

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        options = {"softmax_scale": problem.scale, "causal": problem.is_causal}
        return self._attend(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        from flash_attn.cute import flash_attn_func

        result = flash_attn_func(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result  # some releases add lse


class FlexContender:
    """PyTorch's `flex_attention`, compiled: a Triton kernel made for each mask and each shape."""

    name = "flex"
    layout = AS_GIVEN

    def __init__(self, named: bool):
        self.named = named

    def why_not(self, problem: Problem) -> list[str]:
        reasons = []
        if not problem.target.startswith("sm_"):
            reasons.append(f"target {problem.target}: races on NVIDIA GPUs alone")
        if problem.head_dim < 16:
            reasons.append(f"head_dim {problem.head_dim} is below 16")
        few = problem.head_dim in FLEX_HEAD_DIMS and problem.seqlen_q in FLEX_SEQLENS
        if not self.named and not (few and problem.seqlen_k == problem.seqlen_q):
            reasons.append(
                f"it compiles for each shape: unless named (--against flex), at head_dim "
                f"{' and '.join(map(str, FLEX_HEAD_DIMS))} and seqlen "
                f"{' and '.join(map(str, FLEX_SEQLENS))} alone"
            )
        return reasons

    def prepare(self, direction: Timed, inputs: Inputs, problem: Problem) -> Run:
        q, k, v, do, _ = inputs
        options = self._options(problem, q.device)
        flex = _compiled_flex()
        if direction == "forward":
            return lambda: (flex(q, k, v, **options),)
        leaves = _leaves(q, k, v)
        if direction == "forward+backward":
            return lambda: torch.autograd.grad(flex(*leaves, **options), leaves, do)
        o = flex(*leaves, **options)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = _compiled_flex()(q, k, v)
        return o

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        o: Tensor = _compiled_flex()(q, k, v, **self._options(problem, q.device))
        return o

    def _options(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        from torch.nn.attention.flex_attention import create_block_mask

        options: dict[str, Any] = {
            "scale": problem.scale,
            "enable_gqa": problem.num_kv_heads != problem.num_heads,
        }
        if problem.is_causal:
            offset = problem.causal_offset
            options["block_mask"] = create_block_mask(
                lambda batch, head, i, j: j <= i + offset,
                None, None, problem.seqlen_q, problem.seqlen_k, device=device,
            )  # fmt: skip
        return options


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as new leaves that want gradients."""
    return tuple(t.detach().requires_grad_() for t in tensors)


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1024  # one for each problem of the race
    torch._functorch.config.donated_buffer = False  # else a backward runs only once
    return torch.compile(flex_attention, dynamic=False)


@lru_cache
def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package around it, or by it
        return False


SDPA = {
    "sdpa-default": None,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
OTHERS = ("flash-attn-4", "flex")


def contenders(backends: list[str] | None, against: list[str] | None) -> list[Contender]:
    """The backends named, or all; then the SDPA kernels and others named, or all.

    Raises ValueError for an unknown name.
    """
    everybody = [*SDPA, *OTHERS]
    for name in backends or ():
        if not registry.is_known(name):
            raise ValueError(f"backend must be one of {', '.join(registry.names())}; got {name!r}")
    for name in against or ():
        if name not in everybody:
            raise ValueError(f"against must be one of {', '.join(everybody)}; got {name!r}")
    return [
        *(BackendContender(name, named=bool(backends)) for name in backends or registry.names()),
        *(_opponent(name, named=bool(against)) for name in against or everybody),
    ]


def contender(name: str) -> Contender:
    """The contender of a name, as if it had been named."""
    known = name in SDPA or name in OTHERS
    return _opponent(name, named=True) if known else BackendContender(name, named=True)


def _opponent(name: str, named: bool) -> Contender:
    if name == FlashAttn4Contender.name:
        return FlashAttn4Contender()
    if name == FlexContender.name:
        return FlexContender(named)
    return SdpaContender(name, SDPA[name])


def longest_kernel(run: Callable[[], object]) -> str | None:
    """The name of the GPU kernel in which one call spends most of its time, by the profiler.

    Profiling slows every later launch of the process: time first.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not kernels:
        return None
    return max(kernels, key=lambda event: event.self_device_time_total).key


def sdpa_family(kernel: str | None) -> str | None:
    """Which of SDPA's kernels a GPU kernel's name belongs to."""
    if kernel is None:
        return None
    lowered = kernel.lower()
    for family, marks in (
        ("sdpa-cudnn", ("cudnn",)),  # before flash: cuDNN's own names say flash too
        ("sdpa-flash", ("flash",)),
        ("sdpa-efficient", ("fmha_cutlass", "attentionkernel", "attentionbackwardkernel")),
    ):
        if any(mark in lowered for mark in marks):
            return family
    return "sdpa-math"

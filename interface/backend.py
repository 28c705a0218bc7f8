"""What a backend is, and what is raised when one cannot run a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from flash_rosetta.problem import Problem


@runtime_checkable
class Backend(Protocol):
    """Attention as two pure functions over 4-D strided tensors.

    `attention` has already checked devices, dtypes and shapes, cast for autocast, and answered
    problems with an empty dimension, so that a backend sees none of these. It sees any strides
    (0 included) and any storage offset. It must not write to its inputs, must launch on the
    current stream of the tensors' device, and must return tensors that nothing else holds.
    """

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot run `problem`; empty means that it can.

        A reason is a phrase that names the value and the limit: "head_dim 320 is above 256".
        """
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """o [batch, num_heads, seqlen_q, head_dim_v] in q's dtype, and lse.

        lse [batch, num_heads, seqlen_q] is fp32 (fp64 for fp64 inputs), the natural logarithm of
        the sum of exponentials of the scaled scores. A row that sees no key has o = 0, lse = -inf.
        """
        ...

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
        """dq, dk, dv with the shapes and dtypes of q, k, v.

        `o` and `lse` are what `forward` returned. `do` is o's gradient; `dlse`, if not None, is
        lse's, which enters through delta = rowsum(do * o) - dlse. A row that sees no key has zero
        gradients, whatever its dlse.
        """
        ...


@dataclass(frozen=True)
class KernelReport:
    """What a compiler made of one kernel, read off without running it.

    `registers` and `spill_bytes` are per thread, `shared_bytes` per thread block (static and
    dynamic). `assembly` is PTX or SASS text. Where nothing here can make that, it is the source
    that it would be made from, and registers and spills are None.
    `warnings` are the assembler's.
    """

    kernel: str
    target: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    assembly: str
    warnings: tuple[str, ...] = ()


@runtime_checkable
class Compilable(Protocol):
    """A backend that can compile without a GPU, which lets the suite inspect what it would run."""

    def compile_only(self, problem: Problem) -> list[KernelReport]:
        """Compile every kernel of `problem` for `problem.target` ("sm_80", "sm_90", ...).

        Forward kernels, and with `problem.needs_backward` also the backward's.
        """
        ...


class Unsupported(NotImplementedError):
    """A backend cannot run a problem, or cannot be loaded. Carries `backend` and `reasons`."""

    def __init__(self, backend: str, reasons: Sequence[str], problem: Problem | None = None):
        self.backend = backend
        self.reasons = list(reasons)
        self.problem = problem
        subject = f"cannot run {problem.id} on {problem.target}" if problem else "cannot be loaded"
        super().__init__(f"backend {backend!r} {subject}: {'; '.join(self.reasons)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend, self.reasons, self.problem)

"""Runs a backend through the public `attention`, and judges what comes out.

Every check of a case goes through here: a refusal must raise with the reasons of `why_not`, fresh
memory starts as NaN, inputs must stay as they were to the bit, outputs must have the promised
shapes, dtypes and device, and their errors must be within budget of the oracle in fp64.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_rosetta
from flash_rosetta import Inputs, Problem, Unsupported, ops, registry
from flash_rosetta.conformance.cases import Case
from flash_rosetta.conformance.poison import poisoned_memory
from flash_rosetta.conformance.tilemap import tile_map
from flash_rosetta.reference import budget, oracle
from flash_rosetta.variants import SEPARATOR, ForwardTileSize

GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}

SNAPSHOT_BYTES = 2**28
"""Memory around an input is watched too, up to this size; beyond it only the input itself."""


@dataclass(frozen=True)
class Outputs:
    """What one call gave; a gradient that was not asked for is None."""

    o: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in vars(self).items():
            if tensor is not None:
                yield name, tensor

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor | None = getattr(self, name)
        assert tensor is not None, f"{name} was not asked for"
        return tensor


@contextmanager
def settings(problem: Problem) -> Iterator[None]:
    """PyTorch's global switches as the problem wants them."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if problem.allow_tf32 else "highest")
    torch.use_deterministic_algorithms(problem.deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)


def attention(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`flash_rosetta.attention` on a backend; skips the test, with its reasons, if it refuses.

    The refusal is checked: it must raise Unsupported with exactly the reasons of `why_not`. A
    kernel by the size of its tiles may also refuse strides and alignment, which `why_not` does not
    see.
    """
    reasons = registry.why_not(backend, problem_of(q, k, v, **options))
    if not reasons:
        try:
            return flash_rosetta.attention(q, k, v, backend=backend, **options)
        except Unsupported as refusal:
            is_plain = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (q, k, v))
            if is_plain or not is_tile_variant(backend):
                raise
            pytest.skip(f"refused: {'; '.join(refusal.reasons)}")
    with pytest.raises(Unsupported) as caught:
        flash_rosetta.attention(q, k, v, backend=backend, **options)
    assert caught.value.reasons == reasons, (
        f"{backend} says {reasons} when asked and raises {caught.value.reasons} when called"
    )
    pytest.skip(f"refused: {'; '.join(reasons)}")


def is_tile_variant(backend: str) -> bool:
    """Whether a name is one such as "cute:64x128w4s2"."""
    return ForwardTileSize.parse(backend.rpartition(SEPARATOR)[2]) is not None


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    scale: float | None = None,
    return_lse: bool = False,
) -> Problem:
    """The problem that `flash_rosetta.attention` poses for these arguments."""
    if q.dim() == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    problem = ops.problem_of(q, k, v, is_causal, causal_alignment, scale, needs_backward)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        return replace(problem, dtype=torch.get_autocast_dtype(q.device.type))
    return problem


def options_of(problem: Problem) -> dict[str, Any]:
    """A problem's flags as arguments of `attention`."""
    return {
        "is_causal": problem.is_causal,
        "causal_alignment": problem.causal_alignment,
        "scale": problem.scale,
    }


def run(
    backend: str,
    x: Inputs,
    problem: Problem,
    *,
    gradients: Sequence[str] = (),
    through: str = "o lse",
) -> Outputs:
    """Call a backend on `x`, with all that can be checked without knowing the right answer.

    `gradients` are those to ask for, of "dq", "dk", "dv", `through` which of "o" and "lse" pass a
    gradient on.
    """
    q, k, v = (
        t.detach().requires_grad_(name in gradients)
        for name, t in zip(GRADIENTS, x[:3], strict=True)
    )
    before = [_Snapshot(name, t) for name, t in x._asdict().items()]
    with settings(problem), poisoned_memory(q.device):
        o, lse = attention(backend, q, k, v, return_lse=True, **options_of(problem))
        grads = {}
        if gradients:
            sources = {"o": (o, x.do), "lse": (lse, x.dlse)}
            outputs, incoming = zip(*(sources[name] for name in through.split()), strict=True)
            wanted = [t for name, t in zip(GRADIENTS, (q, k, v), strict=True) if name in gradients]
            found = torch.autograd.grad(outputs, wanted, incoming)
            grads = dict(zip([n for n in GRADIENTS if n in gradients], found, strict=True))
    for snapshot in before:
        snapshot.check()
    got = Outputs(o.detach(), lse.detach(), **grads)
    _check_kind(got, x, problem)
    return got


class _Snapshot:
    """The bytes of an input and of the memory around it, to see whether a call wrote there."""

    def __init__(self, name: str, tensor: Tensor):
        self.name = name
        storage = tensor.untyped_storage()
        if storage.nbytes() <= SNAPSHOT_BYTES:
            self.live = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        else:
            self.live = tensor
        self.saved = self.live.clone()

    def check(self) -> None:
        assert torch.equal(self.live.view(torch.uint8), self.saved.view(torch.uint8)), (
            f"{self.name} was an input and was written to"
        )


def _check_kind(got: Outputs, x: Inputs, problem: Problem) -> None:
    """Shapes, dtypes, device, and memory of their own."""
    rows = (problem.batch, problem.num_heads, problem.seqlen_q)
    lse_dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    expected = {"o": ((*rows, problem.head_dim_v), problem.dtype), "lse": (rows, lse_dtype)}
    expected |= {d: (tuple(getattr(x, t).shape), problem.dtype) for d, t in GRADIENTS.items()}
    owners = {t.untyped_storage().data_ptr(): name for name, t in x._asdict().items()}
    for name, tensor in got.items():
        shape, dtype = expected[name]
        assert tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.dtype == dtype, f"{name} has dtype {tensor.dtype}, not {dtype}"
        assert tensor.device == x.q.device, f"{name} is on {tensor.device}, not {x.q.device}"
        owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        assert owner == name or not tensor.numel(), f"{name} shares memory with {owner}"


def expected(
    x: Inputs, problem: Problem, *, gradients: Sequence[str] = (), through: str = "o lse"
) -> Outputs:
    """The oracle's answers in fp64."""
    return _oracle(Inputs(*(t.double() for t in x)), problem, gradients, through)


def _oracle(x: Inputs, problem: Problem, gradients: Sequence[str], through: str) -> Outputs:
    o, lse = oracle.forward(x.q, x.k, x.v, problem)
    if not gradients:
        return Outputs(o, lse)
    do = x.do if "o" in through.split() else torch.zeros_like(x.do)
    dlse = x.dlse if "lse" in through.split() else None
    all_grads = oracle.backward(do, dlse, x.q, x.k, x.v, problem)
    grads = dict(zip(GRADIENTS, all_grads, strict=True))
    return Outputs(o, lse, **{name: grads[name] for name in gradients})


def solves(
    backend: str,
    case: Case,
    device: torch.device,
    *,
    gradients: Sequence[str] = (),
    through: str = "o lse",
) -> Outputs:
    """Run a case and compare everything that came out with the oracle; returns what came out."""
    x, problem = case.inputs(device), case.problem
    got = run(backend, x, problem, gradients=gradients, through=through)
    compare(backend, got, x, problem, is_smooth=case.is_smooth, through=through, label=case.id)
    return got


def compare(
    backend: str,
    got: Outputs,
    x: Inputs,
    problem: Problem,
    *,
    is_smooth: bool = True,
    through: str = "o lse",
    label: str = "",
) -> None:
    """Judge outputs against the oracle; fails with all that is wrong.

    Not `is_smooth`: the budget is what plain PyTorch loses in the same precision, doubled.
    """
    gradients = [name for name, _ in got.items() if name in GRADIENTS]
    want = expected(x, problem, gradients=gradients, through=through)
    twin = None if is_smooth else _oracle(x, problem, gradients, through)
    floors = budget.rounding_floor(problem, x, want.o) if gradients else {}
    reports = []
    for name, tensor in got.items():
        allowed = budget.budget_of(problem)
        if twin is not None:
            allowed = budget.twin_budget(name, allowed, twin[name], want[name])
        verdict = budget.compare(name, tensor, want[name], allowed, floors.get(name))
        if not verdict.passed:
            row_budget = allowed.lse if name == "lse" else allowed.row
            reports.append(f"{verdict}\n{tile_map(name, tensor, want[name], row_budget)}")
    if reports:
        pytest.fail(_failure(backend, problem, label, reports), pytrace=False)


def agree(problem: Problem, name: str, got: Tensor, want: Tensor, times: float = 2) -> None:
    """Judge two results of one backend that must be equal but for rounding, `times` over.

    Gradients may be that far apart in two calls with the same inputs: their sums may come in any
    order, unless the problem is deterministic.
    """
    allowed = budget.budget_of(problem)
    wider = replace(
        allowed, tensor=times * allowed.tensor, row=times * allowed.row, lse=times * allowed.lse
    )
    verdict = budget.compare(name, got, want.double(), wider)
    assert verdict.passed, f"{problem.id}: {verdict}"


def agree_but_for_order(problem: Problem, got: Outputs, want: Outputs) -> None:
    """Judge two answers to the same question: o and lse to the bit, gradients but for rounding."""
    for name, tensor in got.items():
        if name in GRADIENTS:
            agree(problem, name, tensor, want[name])
        else:
            assert torch.equal(tensor, want[name]), f"{name} differs"


def _failure(backend: str, problem: Problem, label: str, reports: list[str]) -> str:
    what = f"{backend} is wrong on {label or problem.id}"
    return "\n".join([what, *reports, f"again: {rerun_command(backend, problem)}"])


def rerun_command(backend: str, problem: Problem) -> str:
    """The command line that runs the current test alone, on this problem where it takes any."""
    current = os.environ.get("PYTEST_CURRENT_TEST", "")
    test = re.search(r"::(\w+)", current)
    only = f" -k {test[1]}" if test else ""
    asked = f" --problem {problem.id}" if not test or problem.id in current else ""
    return f"flash-rosetta conformance --backend {backend}{asked}{only}"

"""How wrong a result may be: the error metrics and the budgets of suite and race.

A result is judged against the oracle run in fp64 on the same inputs (`oracle.py`), in this order:

1. Non-finite values must stand in the same places and be of the same kind, NaN, +inf or -inf. A
   NaN where the oracle has one is right; everything below looks at the remaining elements.
2. Tensor error, rms(got - want) / rms(want) over the whole tensor: an accumulation in low
   precision, a wrong scale, a sloppy exponential.
3. Row error, the same for each row (the last dimension), worst row. A row smaller than a tenth of
   the tensor's rms is measured against that tenth: so small a row is a sum that nearly cancels.
   This is what a maximum over the tensor cannot see: in a long causal problem late rows are
   averages over thousands of values, thirty times smaller than the first ones, and can be entirely
   wrong within a tolerance that the first rows set.
4. lse, a logarithm, is judged absolutely instead of 2 and 3.

The numbers in `BUDGETS` are what a well-built kernel needs and little more. Operands rounded to
bf16, p and ds included, leave a tensor error of 2.0e-3 to 2.7e-3 and a worst row of 1.3e-2; fp16
leaves 2.5e-4 to 3.7e-4 and 1.4e-3 (standard normal inputs, N up to 4096). A causal mask off by one
key, a gradient off by 10 % in half of its rows, a softmax scale 2 % too large leave worst rows from
0.1 up. Two things need more room, and get what they measurably need instead of a looser table:

- ds = p * (dp - delta) cancels where the softmax is peaked, and is exactly zero where a row sees
  one key, while delta = rowsum(do * o) inherits o's rounding. `rounding_floor` says, row by row,
  what that must leave in dq and dk. On rows that attend to many keys it is negligible.
- Adversarial inputs: `twin_budget` measures what plain PyTorch loses at the same precision
  (`oracle.py` run in that dtype), and allows twice that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_rosetta.problem import Inputs, Problem
from flash_rosetta.reference import oracle

ROW_FLOOR = 0.1
"""Rows are measured against at least this fraction of the tensor's rms, and against 16 / head_dim
times it for rows of fewer than 16 elements, which are more often small by chance."""


@dataclass(frozen=True)
class Budget:
    """Largest errors allowed: `tensor` and `row` relative, lse by `lse + lse_relative * |lse|`."""

    tensor: float
    row: float
    lse: float
    lse_relative: float


BUDGETS = {
    # P and dS have 8 (bf16) or 11 (fp16) bits; scores and statistics are fp32, and so is lse.
    "bf16": Budget(tensor=4e-3, row=3e-2, lse=1e-3, lse_relative=2e-6),
    "fp16": Budget(tensor=6e-4, row=4e-3, lse=1e-3, lse_relative=2e-6),
    # lse_relative: 16 units in the last place, since lse = m + log l can be no better than m.
    "fp32": Budget(tensor=2e-5, row=2e-4, lse=2e-5, lse_relative=2e-6),
    # Operands of 11 bits whose rest the hardware cuts off, not rounds: q, k, v and do are off by up
    # to 2^-10 before anything is computed, all towards zero. Measured on an H200: o 1.5e-3, dq and
    # dk 2.1e-3. Of 20,000 lse the worst is off by 4.8e-3.
    "tf32": Budget(tensor=3e-3, row=1.5e-2, lse=5e-3, lse_relative=2e-6),
    "fp64": Budget(tensor=1e-10, row=1e-9, lse=1e-10, lse_relative=1e-12),
}


def budget_of(problem: Problem) -> Budget:
    """The budget for unpeaked inputs of a problem."""
    if problem.dtype == torch.float32 and problem.allow_tf32:
        return BUDGETS["tf32"]
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return BUDGETS[names.get(problem.dtype, "fp64")]


@dataclass(frozen=True)
class Verdict:
    """What a comparison found; for a failure, the metric that failed worst and where.

    `metric` is "shape", "non-finite", "tensor", "row" or "absolute" (lse). `error` and `budget` are
    in that metric; for "non-finite" the number of elements of the wrong kind. `index` is the
    worst element, for "row" the worst element of the worst row, and `got` and `want` its values.
    `fraction_over` is the part of the rows (of the elements for lse and non-finite) over budget.
    """

    name: str
    passed: bool
    metric: str
    error: float
    budget: float
    index: tuple[int, ...]
    got: float
    want: float
    fraction_over: float

    def __str__(self) -> str:
        relation = "within" if self.passed else "over"
        place = ", ".join(map(str, self.index))
        return (
            f"{self.name}: {self.metric} error {self.error:.3g} is {relation} the budget "
            f"{self.budget:.3g}; worst at [{place}], got {self.got:.6g}, want {self.want:.6g}; "
            f"{self.fraction_over:.2%} over"
        )


def compare(
    name: str, got: Tensor, want: Tensor, budget: Budget, floor: Tensor | None = None
) -> Verdict:
    """Judge one output.

    Args:
        name: "o", "lse", "dq", "dk" or "dv"; "lse" is judged absolutely.
        got: the result under test, any dtype and device.
        want: the oracle's, fp64, same shape and device. Where it overflows got's dtype, inf is
            right.
        budget: from `budget_of` or `twin_budget`.
        floor: [...] per row, an rms error allowed on top of the budget, from `rounding_floor`.
    """
    if got.shape != want.shape:
        return Verdict(name, False, "shape", math.inf, 0, tuple(got.shape), math.nan, math.nan, 1)
    if not want.numel():
        return Verdict(name, True, "tensor", 0, budget.tensor, (), math.nan, math.nan, 0)
    kind = _kind(got)
    misplaced = kind != _kind(want.to(got.dtype))
    got, want = got.double(), want.double()
    if misplaced.any():
        return _verdict(
            name, "non-finite", int(misplaced.sum()), 0, misplaced, misplaced, got, want
        )
    error = (got - want).where(kind == 0, 0).abs()
    if name == "lse":
        allowed = budget.lse + budget.lse_relative * want.where(kind == 0, 0).abs()
        badness = error / allowed
        at = int(badness.argmax())
        return _verdict(name, "absolute", float(error.flatten()[at]), float(allowed.flatten()[at]),
                        badness, badness > 1, got, want)  # fmt: skip
    tensor_error, row_error = relative_errors(got, want, floor)
    worst, over = float(row_error.max()), row_error > budget.row
    if tensor_error / budget.tensor > worst / budget.row:
        return _verdict(name, "tensor", tensor_error, budget.tensor, error, over, got, want)
    in_worst_row = error.where(row_error[..., None] == worst, -1)
    return _verdict(name, "row", worst, budget.row, in_worst_row, over, got, want)


def relative_errors(got: Tensor, want: Tensor, floor: Tensor | None = None) -> tuple[float, Tensor]:
    """Tensor error, and row errors [...]: metrics 2 and 3 above, over what is finite in both.

    An rms error of a row up to its `floor` [...] counts as none. Floors are five times what is
    expected, so in a whole tensor only their rms / 5 counts as none, plus what the one largest may
    add alone. Where want is all zeros, errors are relative to the smallest fp64 number: enormous,
    but still comparable with one another.
    """
    got, want = got.double(), want.double()
    finite = got.isfinite() & want.isfinite()
    square_error, square = (got - want).where(finite, 0).square(), want.where(finite, 0).square()
    row_count, count = finite.sum(-1).clamp(min=1), finite.sum().clamp(min=1)
    row_size, size = (square.sum(-1) / row_count).sqrt(), (square.sum() / count).sqrt()
    row_rms = (square_error.sum(-1) / row_count).sqrt()
    rms = (square_error.sum() / count).sqrt()
    if floor is not None:
        floor = floor.nan_to_num(0)  # NaN only beside rows that are NaN themselves
        row_rms = (row_rms - floor).clamp(min=0)
        typical, largest = floor.square().mean().sqrt() / 5, floor.max() / floor.numel() ** 0.5
        rms = (rms - typical - largest).clamp(min=0)
    tiny = torch.finfo(torch.float64).tiny
    least = ROW_FLOOR * max(1, 16 / want.shape[-1]) * size
    return float(rms / size.clamp(min=tiny)), row_rms / row_size.clamp(min=least).clamp(min=tiny)


def twin_budget(name: str, budget: Budget, twin: Tensor, want: Tensor) -> Budget:
    """`budget`, widened for output `name` to twice the errors of a same-precision PyTorch twin.

    Args:
        twin: this output as `oracle.forward` or `oracle.backward` gives it on the problem's own
            inputs, not converted to fp64.
        want: the same in fp64.

    Twice, because rounding in another order may be that much less lucky. Never narrower than
    `budget`: a twin whose result happens to be exact is no reason to fail others. Raises ValueError
    if the twin's non-finite values are not the oracle's: such a twin bounds nothing.
    """
    if not torch.equal(_kind(twin), _kind(want.to(twin.dtype))):
        raise ValueError(f"twin of {name} must be non-finite exactly where want is")
    if not want.numel():
        return budget
    if name == "lse":
        error = (twin.double() - want).where(want.isfinite(), 0).abs().max()
        return replace(budget, lse=max(budget.lse, 2 * float(error)))
    tensor_error, row_error = relative_errors(twin, want)
    return replace(
        budget,
        tensor=max(budget.tensor, 2 * tensor_error),
        row=max(budget.row, 2 * float(row_error.max())),
    )


def rounding_floor(problem: Problem, inputs: Inputs, o: Tensor) -> dict[str, Tensor]:
    """The rms error per row that rounding of delta must leave in dq and dk, whatever the kernel.

    Args:
        inputs: as given to the kernel.
        o: the oracle's, fp64.

    Returns:
        {"dq": [batch, num_heads, seqlen_q], "dk": [batch, num_kv_heads, seqlen_k]}, fp64.

    delta = rowsum(do * o) is taken from an o rounded to its dtype: each product is off by up to the
    unit roundoff u, their sum by about 0.4 u ||do * o|| in the root mean square. (In fp32 the sums
    of dp and delta are rounded to as much, in different orders.) An error of delta acts exactly as
    a dlse of the opposite sign, so the oracle's backward for dlse alone turns it into errors of dq
    and dk. Taken at 2 u, five times the root mean square, with random signs.
    """
    o, do = o.double(), inputs.do.double()
    error = 2 * _unit_roundoff(problem) * (do * o).norm(dim=-1)
    generator = torch.Generator(o.device).manual_seed(0)
    error *= 1 - 2 * torch.randint(2, error.shape, generator=generator, device=o.device)
    q, k, v = (x.double() for x in (inputs.q, inputs.k, inputs.v))
    dq, dk, _ = oracle.backward(torch.zeros_like(do), error, q, k, v, problem)
    return {name: grad.square().mean(-1).sqrt() for name, grad in (("dq", dq), ("dk", dk))}


def _unit_roundoff(problem: Problem) -> float:
    """The largest relative rounding error of what delta is made from."""
    if problem.dtype in (torch.bfloat16, torch.float16):
        return torch.finfo(problem.dtype).eps / 2
    if problem.dtype == torch.float32 and problem.allow_tf32:
        return 2.0**-9  # dp from two operands whose last 13 bits may be cut off, delta from neither
    return torch.finfo(problem.dtype).eps * problem.head_dim_v**0.5  # of a sum, not of one term


def _kind(x: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    return x.isposinf() + 2 * x.isneginf() + 3 * x.isnan()


def _verdict(
    name: str,
    metric: str,
    error: float,
    budget: float,
    badness: Tensor,
    over: Tensor,
    got: Tensor,
    want: Tensor,
) -> Verdict:
    at = int(badness.flatten().to(torch.float64).argmax())
    return Verdict(
        name=name,
        passed=error <= budget,
        metric=metric,
        error=error,
        budget=budget,
        index=tuple(int(x) for x in torch.unravel_index(torch.tensor(at), got.shape)),
        got=float(got.flatten()[at]),
        want=float(want.flatten()[at]),
        fraction_over=float(over.double().mean()),
    )

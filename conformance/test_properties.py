"""What must hold between results, whatever the numbers: no oracle is needed to see it broken."""

import math
from dataclasses import replace

import pytest
import torch

from flash_rosetta import Inputs, Problem
from flash_rosetta.conformance import checks
from flash_rosetta.conformance.cases import BOTTOM_RIGHT, LAYOUTS, TOP_LEFT, Case, Lane

GRADIENTS = ("dq", "dk", "dv")


def dense(problem: Problem, device: torch.device) -> Inputs:
    return LAYOUTS["dense"](problem.inputs(device))


@pytest.mark.parametrize("mask", [TOP_LEFT, BOTTOM_RIGHT], ids=["top_left", "bottom_right"])
def test_no_later_key_counts(backend: str, lane: Lane, device: torch.device, mask: dict):
    """Not even to the bit, and wherever in a tile or a warp the rows lie that see them."""
    problem = lane.problem(lane.seqlen, lane.seqlen + lane.seqlen // 2, **mask)
    x = dense(problem, device)
    before = checks.run(backend, x, problem)
    middle, span = problem.seqlen_k // 2, min(32, lane.seqlen // 5)
    for first in range(middle, middle + span, span // min(lane.repeats, 8)):
        changed = x._replace(k=x.k.clone(), v=x.v.clone())
        changed.k[:, :, first:] *= 30  # scores far above all that earlier rows have seen
        changed.v[:, :, first:] = -7
        after = checks.run(backend, changed, problem)
        unaware = first - problem.causal_offset  # rows before it see keys before `first`
        assert 0 < unaware < problem.seqlen_q
        assert torch.equal(before.o[:, :, :unaware], after.o[:, :, :unaware])
        assert torch.equal(before.lse[:, :, :unaware], after.lse[:, :, :unaware])
        assert not torch.equal(before.o[:, :, unaware], after.o[:, :, unaware])


def test_order_of_keys_is_irrelevant(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem()
    x = dense(problem, device)
    order = torch.randperm(problem.seqlen_k, generator=torch.Generator().manual_seed(0)).to(device)
    got = checks.run(backend, x, problem, gradients=GRADIENTS)
    shuffled = x._replace(k=x.k[:, :, order], v=x.v[:, :, order])
    other = checks.run(backend, shuffled, problem, gradients=GRADIENTS)
    for name in ("o", "lse", "dq"):
        checks.agree(problem, name, other[name], got[name])
    for name in ("dk", "dv"):
        checks.agree(problem, name, other[name], got[name][:, :, order])


def test_a_shift_of_all_keys_shifts_lse_alone(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(dtype=torch.float32, **TOP_LEFT)
    x = dense(problem, device)
    shift = torch.linspace(-1, 1, problem.head_dim, device=device)
    got = checks.run(backend, x, problem)
    other = checks.run(backend, x._replace(k=x.k + shift), problem)
    checks.agree(problem, "o", other.o, got.o)
    checks.agree(problem, "lse", other.lse, got.lse + problem.scale * (x.q @ shift))


def test_groups_equal_repeated_heads(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(num_heads=6, num_kv_heads=2, **TOP_LEFT)
    x = dense(problem, device)
    repeated = x._replace(**{n: getattr(x, n).repeat_interleave(3, dim=1) for n in "kv"})
    got = checks.run(backend, x, problem, gradients=GRADIENTS)
    other = checks.run(backend, repeated, replace(problem, num_kv_heads=6), gradients=GRADIENTS)
    for name in ("o", "lse", "dq"):
        checks.agree(problem, name, got[name], other[name])
    for name in ("dk", "dv"):
        summed = other[name].unflatten(1, (2, 3)).double().sum(2)
        checks.agree(problem, name, got[name], summed)


def test_heads_and_batches_do_not_mix(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(batch=2, num_heads=2, **TOP_LEFT)
    x = dense(problem, device)
    got = checks.run(backend, x, problem, gradients=GRADIENTS)
    one = Inputs(*(t[1:, 1:] for t in x))
    alone = checks.run(
        backend, one, replace(problem, batch=1, num_heads=1, num_kv_heads=1), gradients=GRADIENTS
    )
    for name, tensor in alone.items():
        checks.agree(problem, name, tensor, got[name][1:, 1:])


@pytest.mark.capability("rows_without_keys")
def test_rows_without_keys(backend: str, lane: Lane, device: torch.device):
    """o = 0, lse = -inf, dq = 0, exactly, whatever comes back through them."""
    problem = lane.problem(lane.seqlen + lane.seqlen // 2, lane.seqlen, **BOTTOM_RIGHT)
    empty = -problem.causal_offset
    x = dense(problem, device)
    got = checks.run(backend, x, problem, gradients=GRADIENTS)
    assert not got.o[:, :, :empty].any()
    assert (got.lse[:, :, :empty] == -math.inf).all()
    assert not got["dq"][:, :, :empty].any()
    odd = x._replace(dlse=x.dlse.clone(), do=x.do.clone())
    odd.dlse[:, :, :empty] = math.nan
    odd.do[:, :, :empty] = math.nan  # as o / |o| has there
    other = checks.run(backend, odd, problem, gradients=GRADIENTS)
    assert not other["dq"][:, :, :empty].any()
    for name in GRADIENTS:
        checks.agree(problem, name, other[name], got[name])


@pytest.mark.parametrize("mask", [{}, TOP_LEFT], ids=["full", "causal"])
def test_a_scale_below_fp32_makes_a_mean(
    backend: str, lane: Lane, device: torch.device, mask: dict
):
    """It rounds to zero, which must not meet the -inf of a mask."""
    problem = lane.problem(scale=1e-46, **mask)
    x = dense(problem, device)
    checks.compare(backend, checks.run(backend, x, problem), x, problem)


@pytest.mark.parametrize("scale", [1e9, -1e9])
def test_huge_scores_pick_the_largest(backend: str, lane: Lane, device: torch.device, scale: float):
    """Scores near 1e10, all different, over several tiles: P is 1 at the largest, 0 elsewhere."""
    problem = lane.problem(scale=scale)
    x = dense(problem, device)
    got = checks.run(backend, x, problem)
    largest = (math.copysign(1, scale) * x.q.double() @ x.k.double().mT).topk(2, dim=-1)
    clear = largest.values[..., 0] - largest.values[..., 1] > 1e-3
    assert clear.any()
    want = x.v.gather(2, largest.indices[..., :1].expand_as(x.q))
    assert torch.equal(got.o[clear], want[clear])


@pytest.mark.parametrize("mask", [{}, TOP_LEFT], ids=["full", "causal"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inf_and_nan_in_a_key_reach_its_rows(
    backend: str, lane: Lane, device: torch.device, value: float, mask: dict
):
    problem = lane.problem(**mask)
    x = dense(problem, device)
    clean = checks.run(backend, x, problem)
    position = problem.seqlen_k // 2
    x.k[:, :, position, 0] = value
    got = checks.run(backend, x, problem)
    checks.compare(backend, got, x, problem, label=f"{problem.id} with {value} in key {position}")
    if problem.is_causal:
        assert torch.equal(got.o[:, :, :position], clean.o[:, :, :position])


def test_nan_in_a_value_stays_out_of_earlier_tiles(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(2 * lane.largest_tile + 5, batch=1, num_heads=1, **TOP_LEFT)
    x = dense(problem, device)
    clean = checks.run(backend, x, problem)
    x.v[:, :, -1, 0] = math.nan
    got = checks.run(backend, x, problem)
    assert got.o[:, :, -1, 0].isnan().all(), "NaN in a value vanished from the row that sees it"
    earlier = problem.seqlen_q - lane.largest_tile
    assert torch.equal(got.o[:, :, :earlier], clean.o[:, :, :earlier])
    assert torch.equal(got.lse, clean.lse), "lse does not depend on values"


def test_nan_in_keys_that_no_row_sees(backend: str, lane: Lane, device: torch.device):
    """A whole tile of them, which causal rows must not even visit, in neither direction."""
    seqlen_k = lane.seqlen + 2 * lane.largest_tile
    problem = lane.problem(lane.seqlen, seqlen_k, batch=1, num_heads=1, **TOP_LEFT)
    x = dense(problem, device)
    clean = checks.run(backend, x, problem, gradients=GRADIENTS)
    unseen = slice(lane.seqlen + lane.largest_tile, None)
    x.k[:, :, unseen] = math.nan
    x.v[:, :, unseen] = math.inf
    got = checks.run(backend, x, problem, gradients=GRADIENTS)
    checks.agree_but_for_order(problem, got, clean)
    assert not got["dk"][:, :, unseen].any()
    assert not got["dv"][:, :, unseen].any()


@pytest.mark.capability("deterministic")
def test_repeats_bit_for_bit(backend: str, lane: Lane, device: torch.device, monkeypatch):
    """As deterministic problems promise; many programs at once, to give races a chance."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_gpu = device.type == "cuda"
    sizes = {"num_heads": 16, "num_kv_heads": 4} if on_gpu else {}
    seqlen = 2 * lane.seqlen if on_gpu else 2 * lane.largest_tile // 3
    problem = lane.problem(seqlen, deterministic=True, **sizes, **TOP_LEFT)
    x = dense(problem, device)
    first = checks.run(backend, x, problem, gradients=GRADIENTS)
    for repeat in range(lane.repeats):
        again = checks.run(backend, x, problem, gradients=GRADIENTS)
        for name, tensor in again.items():
            assert torch.equal(tensor, first[name]), f"{name} differs in repeat {repeat}"


def test_calls_do_not_disturb_each_other(backend: str, lane: Lane, device: torch.device):
    """What a backend keeps between calls must be keyed by all that it depends on."""
    usual = Case(purpose="alternating", problem=lane.problem(**TOP_LEFT))
    same_shape = [
        replace(usual, layout="expanded"),
        replace(usual, layout="bshd"),
        replace(usual, layout="misaligned"),
        replace(usual, problem=lane.problem(**BOTTOM_RIGHT)),
        replace(usual, problem=lane.problem(scale=0.3, **TOP_LEFT)),
    ]
    longer = replace(usual, problem=lane.problem(lane.seqlen + 1, **TOP_LEFT))
    for case in (usual, longer, *same_shape, usual):
        checks.solves(backend, case, device, gradients=GRADIENTS)


def test_results_outlive_the_next_call(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(**TOP_LEFT)
    x = dense(problem, device)
    first = checks.run(backend, x, problem, gradients=GRADIENTS)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    other = Inputs(*(t + 1 for t in x))
    second = checks.run(backend, other, problem, gradients=GRADIENTS)
    for name, tensor in first.items():
        assert torch.equal(tensor, kept[name]), f"{name} was overwritten by the next call"
        assert not torch.equal(tensor, second[name]), f"{name} ignores its inputs"


def memory_for_far_rows(problem: Problem, device: torch.device) -> torch.Tensor:
    """2^32 elements. NaN on a GPU; on a CPU what the system gives when it is first touched."""
    size = 2**32 + 2**20
    if device.type == "cuda":
        if torch.cuda.mem_get_info(device)[0] < 12 * 2**30:
            pytest.skip("needs 12 GiB of free GPU memory")
        return torch.full((size,), math.nan, dtype=problem.dtype, device=device)
    try:
        return torch.empty(size, dtype=problem.dtype)
    except RuntimeError as error:
        pytest.skip(f"needs 8 GiB of address space: {error}")


@pytest.mark.capability("64_bit_offsets")
@pytest.mark.thorough
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "misaligned"])
def test_offsets_beyond_31_bits_in_the_inputs(
    backend: str, lane: Lane, device: torch.device, start: int
):
    """Rows 2^23 elements apart; an offset that wrapped would land in the same allocation.

    Misaligned, so that kernels that leave addresses to the copy engine must compute their own.
    """
    problem = lane.problem(257, batch=1, num_heads=1, **TOP_LEFT)
    memory = memory_for_far_rows(problem, device)

    def far(t: torch.Tensor, place: int) -> torch.Tensor:
        offset = 2**31 + place * problem.head_dim + start
        return torch.as_strided(memory, t.shape, (0, 0, 2**23, 1), offset).copy_(t)

    x = problem.inputs(device)
    x = Inputs(*(far(t, place) for place, t in enumerate(x[:4])), dlse=x.dlse)
    got = checks.run(backend, x, problem, gradients=GRADIENTS)
    checks.compare(backend, got, x, problem, label="rows 2^23 elements apart")


@pytest.mark.capability("64_bit_offsets")
@pytest.mark.thorough
@pytest.mark.parametrize("dimension", ["batch", "heads"])
def test_offsets_beyond_31_bits_in_the_outputs(
    backend: str, lane: Lane, gpu: torch.device, dimension: str
):
    """o and dq of over 2^31 elements: in many batch elements that repeat one, or in one's heads."""
    if torch.cuda.mem_get_info(gpu)[0] < 48 * 2**30:
        pytest.skip("needs 48 GiB of free GPU memory")
    one = lane.problem(2**16 + 1, 16, batch=1, num_heads=1)
    x = one.inputs(gpu)
    count = 2**31 // (one.seqlen_q * one.head_dim) + 2
    if dimension == "batch":
        many = replace(one, batch=count)
        repeated = Inputs(*(t.expand(count, *t.shape[1:]) for t in x))
    else:
        many = replace(one, num_heads=count, num_kv_heads=count)
        repeated = Inputs(*(t.repeat(1, count, *[1] * (t.dim() - 2)) for t in x))
    q, k, v = (t.detach().requires_grad_() for t in repeated[:3])
    o, lse = checks.attention(backend, q, k, v, return_lse=True)
    assert o.numel() > 2**31
    outputs = (o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), repeated.do))
    for n in (0, count - 1):
        pick = slice(n, n + 1)
        got = checks.Outputs(*(t[pick] if dimension == "batch" else t[:, pick] for t in outputs))
        checks.compare(backend, got, x, one, through="o", label=f"{dimension} {n} of {many.id}")

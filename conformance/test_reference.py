"""The reference is tested before it judges others: oracle, tiled loops, traffic counts, budgets."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from flash_rosetta import Inputs, Problem, attention, explain
from flash_rosetta.reference import budget, fa1, io, oracle, standard, tiled, trace
from flash_rosetta.reference.hbm import Traffic
from flash_rosetta.reference.precision import LIBRARIES, matmul_precision

MASKS = ("full", "top_left", "bottom_right")
NAMES = ("o", "lse", "dq", "dk", "dv")


def problem_of(mask: str = "full", **sizes) -> Problem:
    """A small fp64 problem, fields overridden by `sizes`."""
    flags = {} if mask == "full" else {"is_causal": True, "causal_alignment": mask}
    small = {"batch": 1, "num_heads": 2, "seqlen_q": 5, "head_dim": 3, "dtype": torch.float64}
    return Problem(**(small | flags | sizes))


def oracle_outputs(problem: Problem, inputs) -> dict[str, torch.Tensor]:
    """o, lse, dq, dk, dv in fp64."""
    q, k, v, do, dlse = (x.double() for x in inputs)
    outputs = oracle.forward(q, k, v, problem) + oracle.backward(do, dlse, q, k, v, problem)
    return dict(zip(NAMES, outputs, strict=True))


def tiled_outputs(problem: Problem, inputs, **tiles) -> dict[str, torch.Tensor]:
    q, k, v, do, dlse = inputs
    o, lse = tiled.forward(q, k, v, problem, **tiles)
    grads = tiled.backward(do, dlse, q, k, v, o, lse, problem, **tiles)
    return dict(zip(NAMES, (o, lse, *grads), strict=True))


def assert_same(got: dict, want: dict) -> None:
    for name in want:
        torch.testing.assert_close(
            got[name].double(), want[name], rtol=1e-11, atol=1e-12, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def seen_by(problem: Problem, key: int) -> torch.Tensor:
    """[seqlen_q]: the queries that see a key, by the definition."""
    if not problem.is_causal:
        return torch.ones(problem.seqlen_q, dtype=torch.bool)
    shift = 0
    if problem.causal_alignment == "bottom_right":
        shift = problem.seqlen_k - problem.seqlen_q
    return torch.tensor([key <= i + shift for i in range(problem.seqlen_q)])


# The oracle


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.5])
def test_oracle_is_the_definition(mask, scale):
    """Against sums written out in Python numbers, for grouped heads and another head_dim_v."""
    problem = problem_of(mask, num_heads=4, num_kv_heads=2, seqlen_k=4, head_dim_v=2, scale=scale)
    inputs = problem.inputs()
    o, lse = oracle.forward(inputs.q, inputs.k, inputs.v, problem)
    for h, i in itertools.product(range(4), range(problem.seqlen_q)):
        q, k, v = inputs.q[0, h, i].tolist(), inputs.k[0, h // 2].tolist(), inputs.v[0, h // 2]
        keys = [j for j in range(problem.seqlen_k) if seen_by(problem, j)[i]]
        weights = [math.exp(scale * sum(a * b for a, b in zip(q, k[j], strict=True))) for j in keys]
        if not keys:
            assert o[0, h, i].tolist() == [0, 0]
            assert lse[0, h, i] == -math.inf
            continue
        want = sum(w * v[j] for w, j in zip(weights, keys, strict=True)) / sum(weights)
        torch.testing.assert_close(o[0, h, i], want)
        assert lse[0, h, i].item() == pytest.approx(math.log(sum(weights)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.5])
@pytest.mark.parametrize("seqlen_k", [1, 4, 7])
def test_oracle_backward_is_the_derivative_of_its_forward(mask, scale, seqlen_k):
    problem = problem_of(mask, num_heads=4, num_kv_heads=2, seqlen_k=seqlen_k, scale=scale)
    inputs = problem.inputs()
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    o, lse = oracle.forward(q, k, v, problem)
    dlse = inputs.dlse.double()
    value = (o * inputs.do).sum() + (lse * dlse).where(lse.isfinite(), 0).sum()
    want = torch.autograd.grad(value, (q, k, v))
    got = oracle.backward(inputs.do, dlse, inputs.q, inputs.k, inputs.v, problem)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("path", ["oracle", "attention"])
def test_gradcheck(mask, path):
    """Through o and through lse, numerically; grouped heads; in bottom_right a row sees no key."""
    problem = problem_of(mask, num_kv_heads=1, seqlen_q=4, seqlen_k=3, head_dim=2)

    def run(q, k, v):
        if path == "oracle":
            o, lse = oracle.forward(q, k, v, problem)
        else:
            o, lse = attention(
                q, k, v, is_causal=problem.is_causal, causal_alignment=problem.causal_alignment,
                return_lse=True, backend="reference",
            )  # fmt: skip
        return o, lse.where(lse != -torch.inf, 0)  # -inf has no finite differences

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in problem.inputs()[:3]])


def test_oracle_in_chunks_is_the_same(monkeypatch):
    problem = problem_of("bottom_right", num_heads=4, num_kv_heads=2, seqlen_q=9, seqlen_k=7)
    whole = oracle_outputs(problem, problem.inputs())
    monkeypatch.setattr(oracle, "CHUNK_ELEMENTS", 2 * 4 * 7)  # two rows, and one left over
    assert_same(oracle_outputs(problem, problem.inputs()), whole)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_oracle_lets_a_bad_key_reach_exactly_the_rows_that_see_it(mask, value, tensor):
    problem = problem_of(mask, seqlen_q=7, seqlen_k=6)
    inputs, key = problem.inputs(), 4
    clean = oracle_outputs(problem, inputs)
    getattr(inputs, tensor)[0, 1, key, 2] = value
    got = oracle_outputs(problem, inputs)
    seen = seen_by(problem, key)
    assert_same(  # other heads, and rows that do not see the key
        {n: torch.cat([got[n][:, 0], got[n][:, 1, ~seen]], -2) for n in ("o", "dq")},
        {n: torch.cat([clean[n][:, 0], clean[n][:, 1, ~seen]], -2) for n in ("o", "dq")},
    )
    if value != value:
        reached = got["o"][0, 1, seen]
        assert reached.isnan().all() if tensor == "k" else reached[:, 2].isnan().all()
        assert got["lse"][0, 1, seen].isnan().all() == (tensor == "k")
        unseen_keys = torch.tensor([j for j in range(6) if not (seen_by(problem, j) & seen).any()])
        for name in ("dk", "dv"):
            torch.testing.assert_close(
                got[name][0, 1, unseen_keys.long()], clean[name][0, 1, unseen_keys.long()]
            )


# FlashAttention-2 in loops


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("tile_q", "tile_k"), [(1, 1), (4, 4), (3, 5), (16, 2), (128, 128)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(12, 12), (7, 12), (12, 5), (1, 9), (9, 1)])
def test_tiled_is_the_oracle(mask, tile_q, tile_k, seqlen_q, seqlen_k):
    """Tiles that divide the lengths, that do not, that are larger; grouped heads; odd widths."""
    problem = problem_of(
        mask, num_heads=4, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        head_dim_v=4, scale=-0.9,
    )  # fmt: skip
    inputs = problem.inputs()
    got = tiled_outputs(problem, inputs, tile_q=tile_q, tile_k=tile_k)
    assert_same(got, oracle_outputs(problem, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
def test_tiled_is_within_budget(dtype, mask):
    problem = problem_of(
        mask, num_heads=4, num_kv_heads=2, seqlen_q=130, seqlen_k=100, head_dim=40, dtype=dtype
    )
    inputs = problem.inputs()
    want = oracle_outputs(problem, inputs)
    floors = budget.rounding_floor(problem, inputs, want["o"])
    for name, got in tiled_outputs(problem, inputs, tile_q=64, tile_k=64).items():
        assert got.dtype == (torch.float32 if name == "lse" else dtype)
        verdict = budget.compare(name, got, want[name], budget.budget_of(problem), floors.get(name))
        assert verdict.passed, verdict


def test_tiled_visits_no_tile_above_the_diagonal_and_masks_only_where_it_must():
    problem = problem_of("top_left", seqlen_q=16, seqlen_k=14)
    inputs, visited, masked = problem.inputs(), [], []

    def observe(step, *, q_start, k_start=None, s=None, **values):
        if step == "tile":
            visited.append((q_start // 4, k_start // 4))
            masked.append(bool((s == -torch.inf).any()))

    tiled.forward(*inputs[:3], problem, tile_q=4, tile_k=4, observe=observe)
    assert visited == [(i, j) for i in range(4) for j in range(i + 1)]
    assert masked == [i == j for i, j in visited]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("tile_q", "tile_k"), [(4, 4), (3, 5), (5, 2), (1, 3)])
def test_visible_is_none_exactly_where_all_of_a_tile_is(mask, tile_q, tile_k):
    problem = problem_of(mask, seqlen_q=13, seqlen_k=11)
    pairs = torch.zeros(13 + tile_q, 11 + tile_k, dtype=torch.bool)
    for key in range(11):
        pairs[:13, key] = seen_by(problem, key)
    for i, j in itertools.product(range(0, 13, tile_q), range(0, 11, tile_k)):
        want = pairs[i : i + tile_q, j : j + tile_k]
        got = tiled.visible(i, j, tile_q, tile_k, problem, torch.device("cpu"))
        assert (got is None) == bool(want.all())
        assert got is None or torch.equal(got, want)


def test_tiled_rounds_every_operand_of_a_product_to_the_input_dtype(monkeypatch):
    """p and ds too: a tensor core takes nothing else."""
    problem = problem_of(dtype=torch.bfloat16)
    products, gemm = [], tiled.gemm
    monkeypatch.setattr(
        tiled, "gemm", lambda a, b, p: products.append((a.dtype, b.dtype)) or gemm(a, b, p)
    )
    tiled_outputs(problem, problem.inputs())
    assert products == [(torch.bfloat16, torch.bfloat16)] * (2 + 5)


@pytest.mark.parametrize("mask", MASKS)
def test_tiled_keeps_a_bad_key_from_rows_that_do_not_see_it(mask):
    """k: exactly. v: except within a tile. Rows without a key: always."""
    problem = problem_of(mask, seqlen_q=14, seqlen_k=12)
    tiles = {"tile_q": 4, "tile_k": 4}
    key = 5
    seen = seen_by(problem, key)
    clean = tiled_outputs(problem, problem.inputs(), **tiles)

    inputs = problem.inputs()
    inputs.k[..., key, 0] = math.nan
    got = tiled_outputs(problem, inputs, **tiles)
    for name in ("o", "lse"):
        assert got[name][:, :, seen].isnan().all()
        assert torch.equal(got[name][:, :, ~seen], clean[name][:, :, ~seen])

    inputs = problem.inputs()
    inputs.v[..., key, :] = math.nan
    got = tiled_outputs(problem, inputs, **tiles)
    assert got["o"][:, :, seen].isnan().all()
    in_tile = torch.zeros(14, dtype=torch.bool)
    for start in range(0, 14, 4):
        in_tile[start : start + 4] = tiled.key_end(start + 4, problem) > 4
    assert torch.equal(got["o"][:, :, ~in_tile], clean["o"][:, :, ~in_tile])
    without_key = clean["lse"] == -torch.inf
    assert without_key.any() == (mask == "bottom_right")
    for name in ("o", "dq"):
        assert (got[name][without_key] == 0).all()


@pytest.mark.parametrize("run", [oracle_outputs, tiled_outputs])
def test_rows_of_infinite_scores(run):
    """Only -inf scores in sight: o is NaN, as softmax gives, lse is -inf. A +inf score: NaN."""
    problem = problem_of(seqlen_q=2, seqlen_k=3, head_dim=1)
    inputs = problem.inputs()
    inputs.q[0, :, :, 0] = torch.tensor([1.0, -1.0])
    inputs.k[:] = -math.inf
    got = run(problem, inputs)
    assert got["o"].isnan().all()
    assert (got["lse"][..., 0] == -torch.inf).all()
    assert got["lse"][..., 1].isnan().all()
    assert got["dq"].isnan().all()


@pytest.mark.parametrize("run", [oracle_outputs, tiled_outputs])
def test_dlse_of_a_row_without_key_is_ignored(run):
    problem = problem_of("bottom_right", seqlen_q=6, seqlen_k=4)
    want = run(problem, problem.inputs())
    inputs = problem.inputs()
    inputs.dlse[..., :2] = math.nan
    assert_same(run(problem, inputs), want)


def test_reference_backend_repeats_bit_for_bit_and_shares_no_memory():
    problem = problem_of("top_left", num_heads=4, num_kv_heads=2, dtype=torch.bfloat16)
    inputs, before = problem.inputs(), problem.inputs()
    first, second = tiled_outputs(problem, inputs), tiled_outputs(problem, inputs)
    for name in NAMES:
        assert torch.equal(first[name], second[name])
        assert first[name].is_contiguous()
    for x in first.values():
        x.fill_(math.nan)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("strides", ["transposed", "expanded", "offset"])
def test_tiled_takes_any_strides(strides):
    problem = problem_of("top_left", num_heads=2, seqlen_q=6)
    inputs = problem.inputs()

    def restride(x):
        if strides == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if strides == "expanded":
            return x[:, :, :1].expand_as(x)
        return torch.cat([x, x], -1)[..., x.shape[-1] :]

    odd = type(inputs)(*(restride(x) for x in inputs[:4]), inputs.dlse)
    dense = type(inputs)(*(x.contiguous() for x in odd))
    assert_same(tiled_outputs(problem, odd, tile_q=4, tile_k=4), tiled_outputs(problem, dense))


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_fp32_products_are_exact_unless_the_problem_allows_tf32(setting):
    torch.set_float32_matmul_precision(setting)
    try:
        for dtype, allow_tf32, want in (
            (torch.float32, False, "ieee"),
            (torch.float32, True, "tf32"),
            (torch.float16, True, "ieee"),
        ):
            problem = problem_of(dtype=dtype, allow_tf32=allow_tf32)
            with matmul_precision(problem):
                assert {library.fp32_precision for library in LIBRARIES} == {want}
            assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("setting", "allow_tf32"), [("ieee", False), ("tf32", True)])
def test_precision_set_for_one_library(setting, allow_tf32):
    """PyTorch's setting for all libraries raises once one library's own was used."""
    x = problem_of(dtype=torch.float32).inputs()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        assert explain(x.q, x.k, x.v).problem.allow_tf32 == allow_tf32
        attention(x.q, x.k, x.v, backend="reference")
        assert torch.backends.cuda.matmul.fp32_precision == setting
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_tiles_must_be_positive():
    problem = problem_of()
    with pytest.raises(ValueError, match="tile_k must be at least 1, got 0"):
        tiled_outputs(problem, problem.inputs(), tile_q=4, tile_k=0)


# Other loop orders, and what they cost


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(12, 12), (7, 11), (12, 5)])
@pytest.mark.parametrize(("tile_q", "tile_k"), [(4, 4), (3, 5)])
def test_loop_orders_agree_and_their_traffic_is_what_the_formulas_say(
    mask, seqlen_q, seqlen_k, tile_q, tile_k
):
    problem = problem_of(
        mask, batch=2, num_heads=4, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        head_dim_v=2,
    )  # fmt: skip
    q, k, v, do, _ = inputs = problem.inputs()
    tiles = {"tile_q": tile_q, "tile_k": tile_k}
    counted = {name: Traffic() for name in ("standard", "FA1", "FA2", "standard bwd", "FA2 bwd")}

    o, lse, p = standard.forward(q, k, v, problem, traffic=counted["standard"])
    grads = standard.backward(do, q, k, v, p, problem, traffic=counted["standard bwd"])
    o1, lse1 = fa1.forward(q, k, v, problem, **tiles, traffic=counted["FA1"])
    o2, lse2 = tiled.forward(q, k, v, problem, **tiles, traffic=counted["FA2"])
    grads2 = tiled.backward(
        do, None, q, k, v, o2, lse2, problem, **tiles, traffic=counted["FA2 bwd"]
    )
    wanted = oracle_outputs(problem, inputs._replace(dlse=torch.zeros_like(inputs.dlse)))
    for outputs in ((o, lse, *grads), (o1, lse1), (o2, lse2, *grads2)):
        assert_same(dict(zip(NAMES, outputs, strict=False)),
                    dict(list(wanted.items())[: len(outputs)]))  # fmt: skip

    assert counted == {
        "standard": io.standard_forward(problem),
        "FA1": io.fa1_forward(problem, tile_q, tile_k),
        "FA2": io.fa2_forward(problem, tile_q, tile_k),
        "standard bwd": io.standard_backward(problem),
        "FA2 bwd": io.fa2_backward(problem, tile_q, tile_k),
    }


def test_traffic_of_a_problem_counted_by_hand():
    """N = 8, d = 4, tiles of 2: four query tiles each read all of k and v, 32 elements apiece."""
    problem = problem_of(num_heads=1, seqlen_q=8, head_dim=4, dtype=torch.float16)
    fa2 = io.fa2_forward(problem, 2, 2)
    assert fa2.reads == {"q": 32, "k": 128, "v": 128}
    assert fa2.writes == {"o": 32, "lse": 8}
    fa1_ = io.fa1_forward(problem, 2, 2)
    assert fa1_.reads == {"q": 128, "k": 32, "v": 32, "o_acc": 128, "m": 32, "l": 32}
    assert fa1_.writes == {"o_acc": 160, "m": 40, "l": 40}
    assert io.standard_forward(problem).writes == {"s": 64, "p": 64, "lse": 8, "o": 32}
    assert io.total_bytes(fa2, problem) == 2 * (32 + 128 + 128 + 32) + 4 * 8


def test_explain_io_prints_the_counts(capsys):
    assert io.main(["--seqlen-q", "1000", "--head-dim", "64", "--tile-q", "96", "--causal"]) == 0
    printed = capsys.readouterr().out
    problem = Problem(batch=1, num_heads=1, seqlen_q=1000, head_dim=64, is_causal=True)
    rows = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells:
            rows.setdefault(cells[0], []).append(cells[1:])
    fa1_traffic, fa2_traffic = io.fa1_forward(problem, 96, 128), io.fa2_forward(problem, 96, 128)
    assert rows["read k"][0] == ["64,000", "64,000", f"{fa2_traffic.reads['k']:,}"]
    assert rows["write o_acc"][0] == ["", f"{fa1_traffic.writes['o_acc']:,}", ""]
    asked = [
        io.total_bytes(t, problem) for t in (io.standard_forward(problem), fa1_traffic, fa2_traffic)
    ]
    assert rows["MB as asked"][0] == [f"{n / 1e6:.3f}" for n in asked]
    assert rows["times FA2's"][0] == [f"{n / asked[-1]:.2f}" for n in asked]
    sentence = " ".join(printed.split())
    assert f"FA2 asks for {asked[2] / 1e6:.2f} MB, " in sentence
    assert f"and {asked[1] / asked[2]:.1f} times less than FA1" in sentence
    wide = io.fa2_backward(problem, 96, 128)
    assert rows["read dq_acc"][0] == ["", f"{wide.reads['dq_acc']:,}"]


def test_explain_io_shrinks_tiles_to_what_fits_and_refuses_what_does_not(capsys):
    io.main(["--sram-kb", "64"])
    assert "tiles of 32 queries x 32 keys" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        io.main(["--tile-q", "1024"])
    assert exit_.value.code == 2
    assert "need 584 KB on chip, --sram-kb is 227" in capsys.readouterr().err


# The worked example


def test_trace_prints_the_states_of_the_running_loops(capsys):
    assert trace.main([]) == 0
    printed = capsys.readouterr().out
    problem = Problem(batch=1, num_heads=1, seqlen_q=8, head_dim=128, dtype=torch.float32)
    q, k, _, _, _ = problem.inputs(seed=0)
    s = (q @ k.mT)[0, 0] * problem.scale
    for row in range(0, 8, 2):
        old = s[row : row + 2, :2].amax(-1)
        new = s[row : row + 2, :4].amax(-1)
        l = (s[row : row + 2, :4] - new[:, None]).exp().sum(-1)
        for values in (new, (old - new).exp(), l):
            assert "[" + " ".join(f"{x:.4f}" for x in values.tolist()) + "]" in printed
    assert printed.count("key tile") >= 16
    for shape in ("[2 x 128]", "[2 x 2]", "[2 x 1]"):
        assert shape in printed
    assert printed.count("  ok\n") == len(NAMES)
    trace.main([])
    assert capsys.readouterr().out == printed
    trace.main(["--seed", "1"])
    assert capsys.readouterr().out != printed


def test_trace_fails_when_the_loops_are_wrong(capsys, monkeypatch):
    monkeypatch.setattr(tiled, "key_end", lambda q_end, problem: problem.seqlen_k - 2)
    assert trace.main(["--seqlen", "9", "--tile", "4", "--head-dim", "16"]) == 1
    assert "WRONG" in capsys.readouterr().out


# The budgets


class Judged(NamedTuple):
    problem: Problem
    inputs: Inputs
    want: dict[str, torch.Tensor]
    floors: dict[str, torch.Tensor]
    got: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def judged():
    """A causal bf16 problem: its inputs, the oracle's outputs, floors, and a well-built result."""
    problem = problem_of("top_left", num_heads=2, seqlen_q=512, head_dim=64, dtype=torch.bfloat16)
    inputs = problem.inputs()
    want = oracle_outputs(problem, inputs)
    floors = budget.rounding_floor(problem, inputs, want["o"])
    return Judged(problem, inputs, want, floors, tiled_outputs(problem, inputs))


def judge(judged, name, got, want=None):
    want = judged.want[name] if want is None else want
    return budget.compare(
        name, got, want, budget.budget_of(judged.problem), judged.floors.get(name)
    )


@pytest.mark.parametrize("name", NAMES)
def test_budget_admits_a_well_built_result(judged, name):
    verdict = judge(judged, name, judged.got[name])
    assert verdict.passed, verdict
    assert verdict.error > 0


def late(x, factor, part=2):
    """x with its last 1/part of rows times factor."""
    start = x.shape[2] - x.shape[2] // part
    return torch.cat([x[:, :, :start], x[:, :, start:] * factor], 2)


def with_visibility(inputs, visible):
    """o and lse in fp64 of another mask."""
    q, k, v = (x.double() for x in inputs[:3])
    s = (q @ k.mT * q.shape[-1] ** -0.5).where(visible, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


PLANTED = {
    "o late rows 10 % large": lambda out: ("o", late(out["o"], 1.1)),
    "dq late rows 10 % small": lambda out: ("dq", late(out["dq"], 0.9)),
    "dv last quarter 30 % small": lambda out: ("dv", late(out["dv"], 0.7, 4)),
    "dk 2 % large": lambda out: ("dk", out["dk"] * 1.02),
    "lse in base 2": lambda out: ("lse", out["lse"] / math.log(2)),
    "one row swapped": lambda out: ("o", out["o"].index_select(2, swapped(512, 300, 301))),
    "one element": lambda out: ("dk", changed(out["dk"], (0, 1, 400, 7), 0.3)),
}


def swapped(n, i, j):
    order = torch.arange(n)
    order[[i, j]] = order[[j, i]]
    return order


def changed(x, index, by):
    x = x.clone()
    x[index] += by
    return x


@pytest.mark.parametrize("fault", PLANTED)
def test_budget_catches_planted_faults(judged, fault):
    name, got = PLANTED[fault](judged.got)
    verdict = judge(judged, name, got.to(judged.got[name].dtype))
    assert not verdict.passed, verdict


def test_budget_catches_a_key_too_few_and_a_key_too_many(judged):
    """Both pass a maximum over the whole tensor, as does the late row that is 10 % off."""
    i, j = torch.arange(512)[:, None], torch.arange(512)[None]
    causal = j <= i
    for name, visible in {
        "late rows miss the diagonal": causal & ~((i == j) & (i >= 256)),
        "late rows see one future key": causal | ((j == i + 1) & (i >= 256)),
        "rows miss their first key": causal & ~((j == 0) & (i >= 256)),
    }.items():
        o, lse = with_visibility(judged.inputs, visible)
        for verdict in (judge(judged, "o", o.bfloat16()), judge(judged, "lse", lse.float())):
            assert not verdict.passed, f"{name}: {verdict}"


def test_budget_is_exact_about_non_finite_values(judged):
    got = judged.got["o"].clone()
    index = (0, 1, 5, 6)
    got[index] = math.nan
    verdict = judge(judged, "o", got)
    assert (verdict.passed, verdict.metric, verdict.error, verdict.index) == (
        False, "non-finite", 1, index,
    )  # fmt: skip
    want = judged.want["o"].clone()
    want[index] = math.nan
    assert judge(judged, "o", got, want).passed
    got[index], want[index] = math.inf, -math.inf
    assert not judge(judged, "o", got, want).passed
    want[index] = 1.0
    assert not judge(judged, "o", got, want).passed
    half, wide = torch.tensor([[1.0, math.inf]]).half(), torch.tensor([[1.0, 70000.0]]).double()
    assert budget.compare("o", half, wide, budget.BUDGETS["fp16"]).passed


def test_verdict_names_the_worst_row_and_how_much_is_over(judged):
    got = judged.got["dq"].clone()
    got[0, 1, 17] *= 2
    got[0, 0, 400] *= 1.5
    verdict = judge(judged, "dq", got)
    assert (verdict.passed, verdict.metric, verdict.index[:3]) == (False, "row", (0, 1, 17))
    assert verdict.error == pytest.approx(1, rel=0.05)
    assert verdict.got == pytest.approx(2 * verdict.want, rel=0.02)
    assert verdict.fraction_over == 2 / 1024
    assert "dq: row error" in str(verdict)
    assert "over the budget 0.03; worst at [0, 1, 17," in str(verdict)


def test_budget_of_a_wrong_shape_and_of_nothing():
    of = budget.BUDGETS["fp32"]
    verdict = budget.compare("o", torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5).double(), of)
    assert (verdict.passed, verdict.metric) == (False, "shape")
    assert budget.compare("o", torch.zeros(0, 4), torch.zeros(0, 4).double(), of).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_floor_admits_noise_where_gradients_are_zero_and_nothing_else(dtype):
    """One key: ds = 0 in exact arithmetic, so dq and dk have no size to be relative to."""
    problem = problem_of(seqlen_q=33, seqlen_k=1, head_dim=64, dtype=dtype)
    inputs = problem.inputs()
    inputs.dlse.zero_()
    want = oracle_outputs(problem, inputs)
    got = tiled_outputs(problem, inputs)
    floors = budget.rounding_floor(problem, inputs, want["o"])
    of = budget.budget_of(problem)
    for name in ("dq", "dk"):
        assert want[name].abs().max() < 1e-12
        assert got[name].abs().max() > 0
        assert not budget.compare(name, got[name], want[name], of).passed
        assert budget.compare(name, got[name], want[name], of, floors[name]).passed
        off = got[name] + 0.05
        assert not budget.compare(name, off, want[name], of, floors[name]).passed


def test_rounding_floor_is_small_where_gradients_are_not(judged):
    for name, floor in judged.floors.items():
        rows = judged.want[name].square().mean(-1).sqrt()
        assert (floor / rows.clamp(min=0.1 * rows.square().mean().sqrt())).median() < 1e-2


def test_tensor_error_counts_the_floor_of_many_rows_once_and_of_one_row_in_full():
    want = torch.ones(1, 1, 100, 16, dtype=torch.float64)
    error = torch.full((1, 1, 100), 0.1, dtype=torch.float64)
    tensor_error, row_error = budget.relative_errors(want + error[..., None], want, error)
    assert tensor_error == pytest.approx(0.1 - 0.1 / 5 - 0.1 / 10)
    assert row_error.max() < 1e-12
    error[..., 1:] = 0
    assert budget.relative_errors(want + error[..., None], want, error)[0] == 0


def test_narrow_rows_are_measured_against_more_of_the_tensor():
    """A row of one element is small by chance; a row of 64 is not."""
    for width, share in ((1, 1.6), (4, 0.4), (16, 0.1), (64, 0.1)):
        want = torch.ones(1, 1, 10_000, width, dtype=torch.float64)
        want[..., 3, :] = 0
        got = changed(want, (0, 0, 3), 0.01)
        row_error = budget.relative_errors(got, want)[1][0, 0, 3]
        assert row_error == pytest.approx(0.01 / share, rel=1e-3)


def test_twin_budget_widens_for_peaked_inputs_and_still_catches_faults():
    problem = problem_of("top_left", seqlen_q=128, head_dim=64, dtype=torch.bfloat16)
    inputs = problem.inputs()
    inputs.q.mul_(8)
    want = oracle_outputs(problem, inputs)
    twin = dict(
        zip(
            NAMES,
            oracle.forward(*inputs[:3], problem)
            + oracle.backward(inputs.do, inputs.dlse, *inputs[:3], problem),
            strict=True,
        )
    )
    plain = budget.budget_of(problem)
    floors = budget.rounding_floor(problem, inputs, want["o"])
    for name, got in tiled_outputs(problem, inputs).items():
        assert twin[name].dtype == got.dtype
        wider = budget.twin_budget(name, plain, twin[name], want[name])
        assert wider.tensor >= plain.tensor
        assert wider.row >= plain.row
        assert budget.compare(name, got, want[name], wider, floors.get(name)).passed
        if name != "lse":
            wrong = late(got, 0.5)
            assert not budget.compare(name, wrong, want[name], wider, floors.get(name)).passed
    assert budget.twin_budget("dq", plain, twin["dq"], want["dq"]).row > plain.row


def test_twin_of_zeros_bounds_noise_and_refuses_garbage():
    plain, want = budget.BUDGETS["bf16"], torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    noise = torch.full_like(want, 1e-7)
    wider = budget.twin_budget("dq", plain, noise, want)
    assert math.isfinite(wider.tensor)
    assert budget.compare("dq", 1.5 * noise, want, wider).passed
    assert not budget.compare("dq", 3 * noise, want, wider).passed
    noise[..., 0] = math.nan
    with pytest.raises(ValueError, match="twin of dq must be non-finite exactly where want is"):
        budget.twin_budget("dq", plain, noise, want)


@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "name"),
    [(torch.bfloat16, True, "bf16"), (torch.float16, True, "fp16"), (torch.float32, False, "fp32"),
     (torch.float32, True, "tf32"), (torch.float64, True, "fp64")],
)  # fmt: skip
def test_budget_of_a_problem(dtype, allow_tf32, name):
    problem = problem_of(dtype=dtype, allow_tf32=allow_tf32)
    assert budget.budget_of(problem) is budget.BUDGETS[name]

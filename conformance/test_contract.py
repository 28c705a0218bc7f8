"""What a call promises beside its numbers: shapes, refusals, errors, choice of the backend."""

import math
import pickle
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import combinations
from typing import Any

import pytest
import torch

import flash_rosetta
from flash_rosetta import Backend, Problem, Unsupported, registry
from flash_rosetta.conformance import checks
from flash_rosetta.conformance.cases import TOP_LEFT, Lane

Q = torch.zeros(2, 4, 5, 8)
KV = torch.zeros(2, 2, 6, 8)
GOOD: dict[str, Any] = {"q": Q, "k": KV, "v": KV}

BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "q_no_tensor": ({"q": [1.0]}, TypeError, ("q must", "torch.Tensor", "list")),
    "k_no_tensor": ({"k": None}, TypeError, ("k must", "torch.Tensor", "NoneType")),
    "v_array": ({"v": KV.numpy()}, TypeError, ("v must", "torch.Tensor", "ndarray")),
    "q_integers": ({"q": Q.int()}, TypeError, ("q must", "torch.float16", "torch.int32")),
    "k_complex": ({"k": KV.cfloat()}, TypeError, ("k must", "torch.bfloat16", "torch.complex64")),
    "q_sparse": ({"q": Q.to_sparse()}, TypeError, ("q must", "strided", "sparse")),
    "k_other_dtype": ({"k": KV.half()}, TypeError, ("k must", "torch.float32", "torch.float16")),
    "v_other_dtype": ({"v": KV.double()}, TypeError, ("v must", "torch.float32", "torch.float64")),
    "v_other_device": ({"v": KV.to("meta")}, ValueError, ("v must", "cpu", "meta")),
    "q_two_dims": ({"q": Q[0, 0]}, ValueError, ("q must", "seqlen", "(5, 8)")),
    "q_five_dims": ({"q": Q[None]}, ValueError, ("q must", "seqlen", "(1, 2, 4, 5, 8)")),
    "k_three_dims": ({"k": KV[:, 0]}, ValueError, ("k must", "4 dimensions", "(2, 6, 8)")),
    "k_other_batch": ({"k": KV[:1]}, ValueError, ("k must", "batch 2", "(1, 2, 6, 8)")),
    "v_other_batch": ({"v": KV[:1]}, ValueError, ("v must", "batch 2", "(1, 2, 6, 8)")),
    "k_other_head_dim": ({"k": KV[..., :7]}, ValueError, ("k must", "head_dim 8", "6, 7)")),
    "no_head_dim": ({"q": Q[..., :0]}, ValueError, ("q must", "at least 1", "(2, 4, 5, 0)")),
    "no_value_width": ({"v": KV[..., :0]}, ValueError, ("v must", "at least 1", "(2, 2, 6, 0)")),
    "v_other_length": ({"v": KV[:, :, :5]}, ValueError, ("v must", "seqlen_k 6", "5, 8)")),
    "v_other_heads": ({"v": KV[:, :1]}, ValueError, ("v must", "num_kv_heads 2", "(2, 1, 6")),
    "heads_no_multiple": ({"q": Q[:, :3]}, ValueError, ("q must", "num_heads=3", "num_kv_heads=2")),
    "more_kv_heads": ({"q": Q[:, :1]}, ValueError, ("q must", "num_heads=1", "num_kv_heads=2")),
    "no_kv_heads": (
        {"k": KV[:, :0], "v": KV[:, :0]},
        ValueError,
        ("q must", "num_heads=4", "num_kv_heads=0"),
    ),
    "causal_number": ({"is_causal": 1}, TypeError, ("is_causal must", "bool", "int")),
    "alignment": (
        {"causal_alignment": "lower_right"},
        ValueError,
        ("causal_alignment must", "'bottom_right'", "'lower_right'"),
    ),
    "scale_nan": ({"scale": math.nan}, ValueError, ("scale must", "finite", "nan")),
    "scale_inf": ({"scale": -math.inf}, ValueError, ("scale must", "finite", "-inf")),
    "scale_text": ({"scale": "1"}, TypeError, ("scale must", "number", "str")),
    "scale_bool": ({"scale": True}, TypeError, ("scale must", "number", "bool")),
    "scale_tensor": ({"scale": Q.sum()}, TypeError, ("scale must", "number", "Tensor")),
    "scale_beyond_float": ({"scale": 10**400}, ValueError, ("scale must", "finite", "1000")),
    "scale_array": ({"scale": KV.numpy()}, TypeError, ("scale must", "number", "ndarray")),
    "return_lse_text": ({"return_lse": "no"}, TypeError, ("return_lse must", "bool", "str")),
    "q_nested": (
        {"q": torch.nested.nested_tensor([Q[0], Q[1]])},
        TypeError,
        ("q must", "strided", "nested"),
    ),
    "backend_number": ({"backend": 3}, TypeError, ("backend must", "str", "int")),
    "backend_unknown": ({"backend": "fastest"}, ValueError, ("backend must", "auto", "'fastest'")),
}


@pytest.mark.parametrize("function", [flash_rosetta.attention, flash_rosetta.explain])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_names_argument_value_and_what_is_accepted(
    backend: str, name: str, function: Any
):
    changes, kind, words = BAD_CALLS[name]
    with pytest.raises(kind) as caught:
        function(**{"backend": backend} | GOOD | changes)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value!r} does not say {missing}"
    assert not isinstance(caught.value, Unsupported)


def test_the_good_call_beside_the_bad_ones_is_good():
    assert flash_rosetta.attention(**GOOD, backend="reference").shape == (2, 4, 5, 8)


def test_registered_under_its_own_name(backend: str):
    loaded = registry.get(backend)
    assert isinstance(loaded, Backend)
    assert loaded.name == backend


USUAL = Problem(batch=1, num_heads=2, seqlen_q=64, head_dim=64, target="sm_90")
ODD = {
    "old_card": {"target": "sm_70"},
    "older_tensor_cores": {"target": "sm_75"},
    "other_vendor": {"target": "gfx942"},
    "no_card": {"target": "xpu"},
    "cpu": {"target": "cpu"},
    "fp64": {"dtype": torch.float64},
    "wide": {"head_dim": 257, "head_dim_v": 257},
    "very_wide": {"head_dim": 4096, "head_dim_v": 4096},
    "one_column": {"head_dim": 1, "head_dim_v": 1},
    "other_value_width": {"head_dim_v": 32},
    "deterministic": {"deterministic": True, "needs_backward": True},
    "four_million_keys": {"seqlen_k": 2**22},
    "empty": {"batch": 0},
}


@pytest.mark.parametrize("name", ODD)
def test_why_not_answers_in_phrases(backend: str, name: str):
    """For any problem and target, without a card, and the same when asked again."""
    problem = replace(USUAL, **ODD[name])
    reasons = registry.why_not(backend, problem)
    assert isinstance(reasons, list)
    assert all(isinstance(reason, str) and reason.strip() == reason for reason in reasons)
    assert all(reasons), "an empty reason explains nothing"
    assert registry.why_not(backend, problem) == reasons


def test_a_very_wide_head_is_right_or_refused_by_its_width(
    backend: str, lane: Lane, device: torch.device
):
    problem = lane.problem(5, batch=1, head_dim=4096)
    x = problem.inputs(device)
    if registry.why_not(backend, checks.problem_of(x.q, x.k, x.v)):
        with pytest.raises(Unsupported, match="4096"):
            flash_rosetta.attention(x.q, x.k, x.v, backend=backend)
    else:
        checks.compare(backend, checks.run(backend, x, problem), x, problem)


def test_three_dimensions_are_one_head(backend: str, lane: Lane, device: torch.device):
    x = lane.problem(num_heads=1, **TOP_LEFT).inputs(device)
    o, lse = checks.attention(backend, x.q, x.k, x.v, is_causal=True, return_lse=True)
    flat = [t.squeeze(1) for t in x[:3]]
    flat_o, flat_lse = checks.attention(backend, *flat, is_causal=True, return_lse=True)
    assert torch.equal(flat_o, o.squeeze(1))
    assert torch.equal(flat_lse, lse.squeeze(1))


def test_o_alone_unless_lse_is_asked_for(backend: str, lane: Lane, device: torch.device):
    x = lane.problem().inputs(device)
    o = checks.attention(backend, x.q, x.k, x.v)
    assert isinstance(o, torch.Tensor)
    assert torch.equal(o, checks.attention(backend, x.q, x.k, x.v, return_lse=True)[0])


def test_default_scale_is_that_of_the_real_head_dim(backend: str, lane: Lane, device: torch.device):
    x = lane.problem(head_dim=40).inputs(device)
    default = checks.attention(backend, x.q, x.k, x.v)
    assert torch.equal(default, checks.attention(backend, x.q, x.k, x.v, scale=40**-0.5))
    assert torch.equal(
        checks.attention(backend, x.q, x.k, x.v, scale=1),
        checks.attention(backend, x.q, x.k, x.v, scale=1.0),
    )


EMPTY = {
    "no_batch": {"batch": 0},
    "no_heads": {"num_heads": 0, "num_kv_heads": 0},
    "no_heads_but_kv_heads": {"num_heads": 0, "num_kv_heads": 2},
    "no_queries": {"seqlen_q": 0, "seqlen_k": 5},
    "no_keys": {"seqlen_q": 5, "seqlen_k": 0},
    "nothing": {"seqlen_q": 0, "seqlen_k": 0},
}


@pytest.mark.parametrize("mask", [{}, TOP_LEFT], ids=["full", "causal"])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_dimensions(backend: str, lane: Lane, device: torch.device, name: str, mask: dict):
    """Empty results, or for no keys o = 0 and lse = -inf; gradients are zero."""
    problem = replace(lane.problem(5, **mask), **EMPTY[name])
    x = problem.inputs(device)
    got = checks.run(backend, x, problem, gradients=("dq", "dk", "dv"))
    assert not got.o.any()
    assert (got.lse == -math.inf).all()
    for name in ("dq", "dk", "dv"):
        assert not got[name].any()


@pytest.mark.parametrize(
    "gradients",
    [chosen for n in (1, 2) for chosen in combinations(("dq", "dk", "dv"), n)],
    ids="-".join,
)
def test_gradients_of_some_inputs(
    backend: str, lane: Lane, device: torch.device, gradients: tuple[str, ...]
):
    problem = lane.problem(**TOP_LEFT)
    x = problem.inputs(device)
    got = checks.run(backend, x, problem, gradients=gradients)
    checks.compare(backend, got, x, problem, label=f"{problem.id} for {gradients} alone")


def test_an_input_that_wants_no_gradient_gets_none(backend: str, lane: Lane, device: torch.device):
    x = lane.problem().inputs(device)
    q, k, v = (t.requires_grad_() for t in x[:3])
    k.requires_grad_(False)
    checks.attention(backend, q, k, v).sum().backward()
    assert k.grad is None
    assert q.grad is not None
    assert v.grad is not None


def test_a_second_derivative_raises(backend: str, lane: Lane, device: torch.device):
    x = lane.problem().inputs(device)
    q = x.q.requires_grad_()
    o = checks.attention(backend, q, x.k, x.v)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="once"):
        torch.autograd.grad(dq.sum(), q)


def test_a_name_is_found_and_an_unknown_one_lists_the_known(backend: str):
    namespace = __import__("flash_rosetta.backends", fromlist=[backend])
    chosen = getattr(namespace, backend)
    assert chosen.backend is registry.get(backend)
    with pytest.raises(ImportError, match="reference"):
        from flash_rosetta.backends import fastest  # noqa: F401


def test_the_environment_names_a_backend(backend: str, monkeypatch):
    problem = Problem(batch=1, num_heads=1, seqlen_q=2, head_dim=8, dtype=torch.float16)
    x = problem.inputs()
    monkeypatch.setenv("FLASH_ROSETTA_BACKEND", backend)
    explanation = flash_rosetta.explain(x.q, x.k, x.v)
    assert explanation.chosen == (None if explanation.reasons[backend] else backend)
    other = flash_rosetta.explain(x.q, x.k, x.v, backend="reference")
    assert other.chosen == "reference", "the argument does not win over the environment"
    monkeypatch.setenv("FLASH_ROSETTA_BACKEND", "fastest")
    with pytest.raises(ValueError, match=r"FLASH_ROSETTA_BACKEND must be one of .*fastest"):
        flash_rosetta.attention(x.q, x.k, x.v)


def test_auto_takes_the_first_that_can_and_explains_the_others():
    problem = Problem(batch=1, num_heads=1, seqlen_q=2, head_dim=8, dtype=torch.float64)
    x = problem.inputs()
    explanation = flash_rosetta.explain(x.q, x.k, x.v)
    assert explanation.chosen == "reference"
    assert set(explanation.reasons) == set(flash_rosetta.names())
    for name in registry.auto_candidates("cpu"):
        if name == "reference":
            break
        assert explanation.reasons[name], f"{name} comes first and has no reason not to run"
        assert explanation.reasons[name][0] in str(explanation)
    o = flash_rosetta.attention(x.q, x.k, x.v)
    assert torch.equal(o, flash_rosetta.attention(x.q, x.k, x.v, backend="reference"))


def test_auto_has_an_order_for_each_kind_of_card():
    """CuTe's and TileLang's kernels are tuned for Hopper alone: elsewhere Triton comes first."""
    orders = {target: registry.auto_candidates(target) for target in ("cpu", "sm_80", "sm_90")}
    for target, order in orders.items():
        assert order[-1] == "reference"
        if {"triton", "tilelang"} <= set(order):
            hopper_first = order.index("tilelang") < order.index("triton")
            assert hopper_first == (target == "sm_90"), target
        if {"triton", "cute"} <= set(order):
            assert (order.index("cute") < order.index("triton")) == (target == "sm_90"), target


@pytest.mark.parametrize("name", ["triton", "tilelang", "cute"])
def test_more_tiles_than_can_be_counted_are_refused(name: str):
    """In 32 bits their number would wrap, and most of the output would stay as it was."""
    try:
        backend = registry.get(name)
    except Unsupported as error:
        pytest.skip(str(error))
    problem = Problem(batch=65537, num_heads=65537, seqlen_q=1, head_dim=8, target="sm_90")
    assert any("tiles" in reason for reason in backend.why_not(problem))


def test_a_name_is_registered_once_and_by_a_whole_backend():
    reference = registry.get("reference")
    with pytest.raises(ValueError, match="already registered"):
        registry.register(reference)
    with pytest.raises(TypeError, match="backward"):
        registry.register(type("Half", (), {"name": "half", "why_not": 0, "forward": 0})())
    with pytest.raises(TypeError, match="instance, got the class"):
        registry.register(type(reference))
    for name in ("auto", "", 5):
        other = type(reference)()
        other.name = name
        with pytest.raises(ValueError, match="name must be a non-empty str"):
            registry.register(other)
    with pytest.raises(ValueError, match=r"one of .*reference"):
        registry.get("auto")


def test_a_package_that_registers_nonsense_disturbs_no_other(monkeypatch):
    nonsense = EntryPoint("nonsense", "math:pi", registry.ENTRY_POINT_GROUP)
    found = {**registry._entry_points(), "nonsense": nonsense}
    monkeypatch.setattr(registry, "_entry_points", lambda: found)
    registry._clear_caches()
    try:
        explanation = flash_rosetta.explain(Q, KV, KV, backend="reference")
        assert explanation.chosen == "reference"
        assert "is no Backend" in explanation.reasons["nonsense"][0]
    finally:
        monkeypatch.undo()
        registry._clear_caches()


def test_a_backend_chosen_at_import_stays_chosen():
    from flash_rosetta.backends import reference as fa

    assert fa.attention(Q, KV, KV).shape == Q.shape
    assert fa.explain(Q, KV, KV).chosen == "reference"
    with pytest.raises(TypeError, match="backend was chosen at import"):
        fa.attention(Q, KV, KV, backend="auto")


def test_what_crosses_processes_arrives_whole():
    problem = Problem(batch=1, num_heads=2, seqlen_q=3, head_dim=4)
    assert hash(problem) == hash(replace(problem))
    assert "_hash" not in problem.__getstate__()
    assert pickle.loads(pickle.dumps(problem)) == problem
    error = pickle.loads(pickle.dumps(Unsupported("some", ["a reason"], problem)))
    assert (error.backend, error.reasons, error.problem) == ("some", ["a reason"], problem)


@pytest.mark.parametrize("name", ["batch", "seqlen_q", "head_dim"])
def test_a_problem_has_whole_sizes(name: str):
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 3, "head_dim": 4}
    with pytest.raises(TypeError, match=f"{name} must be an int, got 1.5"):
        Problem(**sizes | {name: 1.5})

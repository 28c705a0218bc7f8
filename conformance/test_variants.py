"""Variants of kernels are backends like any other, by names that say what they are."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

import flash_rosetta
from flash_rosetta import Problem, Unsupported, registry
from flash_rosetta.conformance.compiling import compile_kernels, compiler_pool
from flash_rosetta.variants import RUNGS, ForwardTileSize, Varied

VARIED = {"triton": "triton", "tilelang": "tilelang", "cute": "cutlass"}
"""Backends with variants, and what must be installed for them."""


@pytest.mark.parametrize("name", VARIED)
def test_every_rung_is_a_backend_under_its_name(name):
    pytest.importorskip(VARIED[name])
    backend = registry.get(name)
    assert isinstance(backend, Varied)
    for rung in RUNGS:
        found = registry.get(f"{name}:{rung.name}")
        assert found.name == f"{name}:{rung.name}"
        assert found is registry.get(name).rung(rung.name), "made anew each time"
        posed = Problem(batch=1, num_heads=1, seqlen_q=64, head_dim=64, target="sm_90")
        other = replace(posed, needs_backward=rung.direction == "forward")
        assert found.why_not(other), f"{found.name} takes the other direction as well"


@pytest.mark.parametrize("name", VARIED)
def test_a_size_of_tiles_says_what_it_needs_and_is_refused_where_that_is_not_there(name):
    pytest.importorskip(VARIED[name])
    backend = registry.get(name)
    problem = Problem(batch=1, num_heads=1, seqlen_q=256, head_dim=128, target="sm_90")
    sizes = backend.tile_sizes(problem)
    assert len(sizes) == len(set(sizes)) >= 12
    is_interpreted = any("interprets" in reason for reason in backend.why_not(problem))
    verdicts = set()
    for size in sizes:
        variant = registry.get(f"{name}:{size}")
        assert ForwardTileSize.parse(str(size)) == size
        assert variant.why_not(replace(problem, needs_backward=True))
        reasons = variant.why_not(problem)
        needed = backend.shared_bytes(size, problem)
        if needed > 227 << 10 and not is_interpreted:
            assert any(f"{needed} bytes" in reason for reason in reasons), (size, reasons)
        verdicts.add(bool(reasons))
    assert is_interpreted or verdicts == {True, False}, "a sweep shows what does not fit as well"


@pytest.mark.parametrize(
    ("variant", "complaint"),
    [
        ("nonsense", "must be one of baseline, tiles, .*or tiles such as.*'nonsense'"),
        ("7x64w4s2", "tile_q must be a power of two.*7"),
        ("64x64w3s2", "num_warps must be.*3"),
        ("64x64w4s0", "num_stages must be.*0"),
    ],
)
def test_a_variant_that_there_is_not_is_refused(variant, complaint):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=complaint):
        registry.get(f"triton:{variant}")
    assert not registry.is_known(f"triton:{variant}")
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=complaint):
        flash_rosetta.attention(q, q, q, backend=f"triton:{variant}")


def test_a_backend_without_variants_says_so():
    with pytest.raises(ValueError, match="'reference' has no variants, got 'skip'"):
        registry.get("reference:skip")
    with pytest.raises(ValueError, match=r"backend must be one of .*'nobody"):
        registry.get("nobody:skip")


@pytest.fixture(scope="module")
def pool():
    with compiler_pool() as processes:
        yield processes


def rungs(name: str, *variants: str) -> list[str]:
    """Names of the rungs `variants` of a backend."""
    return [f"{name}:{variant}" for variant in variants]


COPY_ENGINE = [
    *rungs("triton", "tma", "specialize", "overlap", "second-pass", "atomics"),
    *rungs("cute", "tma", "specialize", "overlap", "second-pass", "atomics"),
]
WARPGROUP_PRODUCTS = [*COPY_ENGINE, *rungs("triton", "tiles", "skip", "mask", "exp2", "cast")]
PRODUCER = ["triton:specialize", "cute:specialize", "cute:overlap"]


@pytest.mark.parametrize(
    ("name", "head_dim", "is_causal"),
    [
        ("triton", 64, True),
        ("triton", 64, False),
        ("triton", 128, True),
        ("triton", 128, False),
        ("cute", 64, True),
        ("cute", 128, True),
    ],
)
def test_rungs_compile_to_what_they_are_about(name, head_dim, is_causal, pool):
    pytest.importorskip(VARIED[name])
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 256, "head_dim": head_dim}
    problem = Problem(**sizes, is_causal=is_causal, target="sm_90")
    compiled = {}
    for rung in RUNGS:
        posed = replace(problem, needs_backward=rung.direction == "backward")
        compiled[rung] = compile_kernels(pool, f"{name}:{rung.name}", posed)
    products = {}
    for rung, future in compiled.items():
        variant = f"{name}:{rung.name}"
        if variant == "triton:specialize" and future.exception() is not None:
            with pytest.raises(Unsupported, match="warps of their own, not to be trusted"):
                future.result()
            continue
        kernels = future.result()
        assert kernels
        for kernel in kernels:
            assert kernel.spill_bytes == 0, f"{variant}: {kernel.kernel} spills"
            assert kernel.shared_bytes <= 227 << 10
            if any(part in kernel.kernel for part in ("process", "round")):
                continue  # multiplies nothing
            built = kernel.assembly
            assert ("cp.async.bulk.tensor" in built) == (variant in COPY_ENGINE), variant
            assert ("wgmma" in built) == (variant in WARPGROUP_PRODUCTS), variant
            if rung.direction == "forward":
                assert ("setmaxnreg" in built) == (variant in PRODUCER), variant
                products[rung.name] = len(re.findall(r"wgmma\.mma_async|mma\.sync", built))
    assert products["cast"] < products["exp2"], "two products with P below the cast, one from it on"


@pytest.mark.parametrize("rung", ["baseline", "exp2"])
def test_p_is_kept_in_two_halves_below_the_cast(rung):
    pytest.importorskip("triton")
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 64, "seqlen_k": 128, "head_dim": 32}
    problem = Problem(**sizes, dtype=torch.float16)
    if reasons := registry.why_not(f"triton:{rung}", problem):
        pytest.skip("; ".join(reasons))
    q, k, v, *_ = problem.inputs("cpu")
    exact = torch.softmax(q.double() @ k.double().mT * problem.scale, -1) @ v.double()
    rounding = (exact.half().double() - exact).norm()
    error = {}
    for name in (rung, "cast"):
        o, _ = registry.get(f"triton:{name}").forward(q, k, v, problem)
        error[name] = (o.double() - exact).norm() / rounding
    assert error[rung] < 1.01, "more than what rounding o itself costs"
    assert error["cast"] > 1.1, "P is not rounded where it should be"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": "sm_89"}, "target sm_89 has no copy engine"),
        ({"dtype": torch.float32}, "no warps of their own for torch.float32"),
        (
            {"head_dim": 256, "head_dim_v": 256},
            "no warps of their own for torch.bfloat16 and tiles of 256 columns",
        ),
    ],
)
def test_specialize_says_which_kernels_triton_cannot_split(change, reason, pool):
    pytest.importorskip("triton")
    problem = Problem(batch=1, num_heads=1, seqlen_q=64, head_dim=64, target="sm_90")
    future = compile_kernels(pool, "triton:specialize", replace(problem, **change))
    with pytest.raises(Unsupported, match=reason):
        future.result()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("text", ["64x64w4s2", "128x64w8s2", "64x32w4s3", "128x128w8s3"])
def test_shared_memory_of_triton_tiles_is_what_the_compiler_takes(text, head_dim, pool):
    pytest.importorskip("triton")
    problem = Problem(batch=1, num_heads=2, seqlen_q=256, head_dim=head_dim, target="sm_90")
    (kernel,) = compile_kernels(pool, f"triton:{text}", problem).result()
    counted = registry.get("triton").shared_bytes(ForwardTileSize.parse(text), problem)
    assert counted <= kernel.shared_bytes <= counted + 2048


def test_triton_tiles_that_no_thread_has_registers_for_are_refused(pool):
    pytest.importorskip("triton")
    problem = Problem(batch=1, num_heads=1, seqlen_q=64, head_dim=128, target="sm_90")
    future = compile_kernels(pool, "triton:128x128w4s2", problem)
    with pytest.raises(Unsupported, match="are 256 registers a thread, which has 255"):
        future.result()


def test_specialize_is_refused_for_releases_not_to_be_trusted(pool):
    pytest.importorskip("triton")
    release = version("triton")
    if release not in ("3.6.0", "3.7.1"):
        pytest.skip(f"nothing is known about Triton {release}")
    problem = Problem(batch=1, num_heads=1, seqlen_q=4096, head_dim=64, target="sm_90")
    future = compile_kernels(pool, "triton:specialize", problem)
    with pytest.raises(Unsupported, match=f"Triton {release} for sm_90 .*trusted: .*o is NaN"):
        future.result()


@pytest.mark.parametrize("name", ["tilelang", "cute"])
@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ("96x64w6s2", "64, 128 or 192 query rows"),
        ("64x64w8s2", "16 for each warp"),
        ("64x24w4s2", "a multiple of 16"),
        ("64x272w4s2", "16 to 256 keys"),
        ("64x64w4s0", "one stage or more"),
    ],
)
def test_a_size_that_hoppers_kernels_cannot_have_is_no_variant(name, size, complaint):
    pytest.importorskip(VARIED[name])
    with pytest.raises(ValueError, match=f"{complaint}.*got {size}"):
        registry.get(f"{name}:{size}")


@pytest.mark.parametrize("name", ["tilelang", "cute"])
def test_strides_that_the_copy_engine_cannot_take_are_refused_by_its_tiles(name):
    pytest.importorskip(VARIED[name])
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 8, "head_dim": 64, "target": "sm_90"}
    problem = Problem(**sizes)
    x = torch.empty(2, 4, 64, 8, dtype=problem.dtype).transpose(2, 3)
    for _ in range(2):
        with pytest.raises(Unsupported, match=rf"'{name}:64x64w4s2' cannot run .* unit stride"):
            registry.get(f"{name}:64x64w4s2").forward(x, x, x, problem)

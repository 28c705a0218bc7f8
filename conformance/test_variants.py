"""Variants of kernels are backends like any other, by names that say what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash_rosetta
from flash_rosetta import Problem, Unsupported, registry
from flash_rosetta.conformance.compiling import compile_kernels, compiler_pool
from flash_rosetta.variants import RUNGS, ForwardTileSize, Varied

VARIED = ("triton", "tilelang", "cute")


@pytest.mark.parametrize("name", VARIED)
def test_every_rung_is_a_backend_under_its_name(name):
    pytest.importorskip({"triton": "triton", "tilelang": "tilelang", "cute": "cutlass"}[name])
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
    pytest.importorskip({"triton": "triton", "tilelang": "tilelang", "cute": "cutlass"}[name])
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


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["triton", "cute"])
def test_rungs_compile_to_what_they_are_about(name, head_dim, pool):
    pytest.importorskip({"triton": "triton", "cute": "cutlass"}[name])
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": 256, "head_dim": head_dim, "is_causal": True}
    compiled = {}
    for rung in RUNGS:
        problem = Problem(**sizes, target="sm_90", needs_backward=rung.direction == "backward")
        compiled[rung] = compile_kernels(pool, f"{name}:{rung.name}", problem)
    for rung, future in compiled.items():
        if (name, rung.name) == ("triton", "specialize"):
            with pytest.raises(Unsupported, match="sm_90"):
                future.result()
            continue
        kernels = future.result()
        assert kernels
        for kernel in kernels:
            assert kernel.spill_bytes == 0, f"{rung.name}: {kernel.kernel} spills"
            assert kernel.shared_bytes <= 227 << 10
            if any(part in kernel.kernel for part in ("process", "round")):
                continue  # multiplies nothing
            by_engine = rung.direction == "backward" or rung.name in (
                "tma",
                "specialize",
                "overlap",
            )
            assert ("cp.async.bulk.tensor" in kernel.assembly) == by_engine, rung.name
            by_warpgroup = rung.name != "baseline" if name == "triton" else by_engine
            assert ("wgmma" in kernel.assembly) == by_warpgroup, rung.name
            sets_registers = name == "cute" and rung.name in ("specialize", "overlap")
            assert (
                rung.direction == "backward" or ("setmaxnreg" in kernel.assembly) == sets_registers
            )


@pytest.mark.parametrize("text", ["64x64w4s2", "128x64w8s2", "64x32w4s3"])
def test_shared_memory_of_triton_tiles_is_what_the_compiler_takes(text, pool):
    pytest.importorskip("triton")
    problem = Problem(batch=1, num_heads=2, seqlen_q=256, head_dim=128, target="sm_90")
    (kernel,) = compile_kernels(pool, f"triton:{text}", problem).result()
    counted = registry.get("triton").shared_bytes(ForwardTileSize.parse(text), problem)
    assert counted <= kernel.shared_bytes <= counted + 2048

"""The forward with tiles of many sizes: what each reaches, what it needs, what it costs to try."""

from __future__ import annotations

from time import perf_counter

from flash_rosetta import registry
from flash_rosetta.bench.ladder import SEQLEN, varied
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.sweep_page import sections
from flash_rosetta.bench.timing import Stopwatch
from flash_rosetta.bench.trial import trial
from flash_rosetta.bench.warm import Compiled, Job, compile_all
from flash_rosetta.bench.workloads import HIDDEN, TOKENS
from flash_rosetta.problem import Problem, target_of
from flash_rosetta.variants import SEPARATOR, ForwardTileSize

__all__ = ["measure", "sections"]

ROUNDS = 10


def measure(lab: Lab) -> list[Record]:
    """Every backend's tile sizes at head_dim 64 and 128, not causal, and one record of the cost."""
    head_dims = (64,) if lab.is_quick else (64, 128)
    posed = [(name, _problem(lab, head_dim)) for name in varied(lab) for head_dim in head_dims]
    jobs = {
        (name, problem): [
            Job(f"{name}{SEPARATOR}{size}", problem, "forward")
            for size in _sizes(name, problem, lab)
            if not registry.why_not(f"{name}{SEPARATOR}{size}", problem)
        ]
        for name, problem in posed
    }
    compiled = compile_all([job for each in jobs.values() for job in each], lab)
    watch = lab.watch
    records: list[Record] = []
    for name, problem in lab.track(posed, "sweep"):
        start = perf_counter()
        found = _sweep(lab, watch, name, problem, compiled)
        timing_s = perf_counter() - start
        records += found
        tried = [r for r in found if r["kind"] == "size" and r["verdict"] != "skipped"]
        records.append(
            {
                "kind": "cost",
                "backend": name,
                "problem": problem.id,
                "head_dim": problem.head_dim,
                "sizes": len(tried),
                "compile_s": round(sum(r["compile_s"] or 0.0 for r in tried), 1),
                "timing_s": round(timing_s, 1),
            }
        )
    return records


def _problem(lab: Lab, head_dim: int) -> Problem:
    return Problem(
        batch=TOKENS // SEQLEN,
        num_heads=HIDDEN // head_dim,
        seqlen_q=SEQLEN,
        head_dim=head_dim,
        target=target_of(lab.device),
    )


def _sizes(name: str, problem: Problem, lab: Lab) -> list[ForwardTileSize]:
    sizes: list[ForwardTileSize] = registry.get(name).tile_sizes(problem)
    return sizes[::6] if lab.is_quick else sizes


def _sweep(
    lab: Lab,
    watch: Stopwatch,
    name: str,
    problem: Problem,
    compiled: dict[Job, Compiled],
) -> list[Record]:
    """Judge all sizes of a backend, then time them in turns, the shipped forward among them."""
    about = {"backend": name, "problem": problem.id, "head_dim": problem.head_dim}
    records: dict[str, Record] = {name: {"kind": "shipped", **about, "size": None}}
    for size in _sizes(name, problem, lab):
        records[f"{name}{SEPARATOR}{size}"] = {
            "kind": "size",
            **about,
            "size": str(size),
            "tile_q": size.tile_q,
            "tile_k": size.tile_k,
            "num_warps": size.num_warps,
            "num_stages": size.num_stages,
            "shared_bytes": registry.get(name).shared_bytes(size, problem),
        }
    tried = trial(
        list(records), "forward", problem, compiled, watch, lab.device, budget=0.1, rounds=ROUNDS
    )
    return [record | tried[full_name] for full_name, record in records.items()]

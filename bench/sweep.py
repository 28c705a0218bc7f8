"""The forward with tiles of many sizes: what each reaches, what it needs, what it costs to try."""

from __future__ import annotations

from time import perf_counter

from flash_rosetta import registry
from flash_rosetta.bench import timing
from flash_rosetta.bench.contenders import Run
from flash_rosetta.bench.heat import figures, significant
from flash_rosetta.bench.judge import Judge
from flash_rosetta.bench.ladder import SEQLEN, varied
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.sweep_page import sections
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
        for record in found:
            job = Job(f"{name}{SEPARATOR}{record['size']}", problem, "forward")
            if job in compiled:
                record["compile_s"] = compiled[job].seconds
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
    watch: timing.Stopwatch,
    name: str,
    problem: Problem,
    compiled: dict[Job, Compiled],
) -> list[Record]:
    """Judge all sizes of a backend, then time them in turns, the shipped forward among them."""
    inputs = problem.inputs(lab.device)
    judge = Judge("forward", inputs, problem)
    records: dict[str, Record] = {}
    runs: dict[str, Run] = {}

    def enter(full_name: str, record: Record) -> None:
        records[full_name] = record
        if reasons := registry.why_not(full_name, problem):
            record |= {"verdict": "skipped", "reasons": reasons}
            return
        job = compiled.get(Job(full_name, problem, "forward"))
        if job is not None and job.error:
            record |= {"verdict": "failed", "reasons": [job.error]}  # here it might hang as well
            return
        backend = registry.get(full_name)

        def run() -> tuple:
            return backend.forward(*inputs[:3], problem)

        try:
            judgement = judge(run())
        except Exception as error:  # a compiler's or a launch's: one size less
            record |= {"verdict": "failed", "reasons": [f"{type(error).__name__}: {error}"]}
            return
        verdict = "wrong" if judgement.faults else "right"
        record |= {"verdict": verdict, "reasons": judgement.faults, **judgement.errors}
        if not judgement.faults:
            runs[full_name] = run

    about = {"backend": name, "problem": problem.id, "head_dim": problem.head_dim}
    enter(name, {"kind": "shipped", **about, "size": None, "compile_s": None})
    for size in _sizes(name, problem, lab):
        enter(
            f"{name}{SEPARATOR}{size}",
            {
                "kind": "size",
                **about,
                "size": str(size),
                "tile_q": size.tile_q,
                "tile_k": size.tile_k,
                "num_warps": size.num_warps,
                "num_stages": size.num_stages,
                "shared_bytes": registry.get(name).shared_bytes(size, problem),
                "compile_s": None,
            },
        )
    if runs:
        for full_name, seconds in timing.race(runs, watch, budget=0.1, rounds=ROUNDS).items():
            records[full_name] |= figures(
                [significant(s) for s in seconds], problem.flops("forward"), lab.device
            )
    return list(records.values())

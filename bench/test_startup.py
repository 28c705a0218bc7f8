"""What comes before the first result, under test: compiling beforehand, and starting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from flash_rosetta import Problem
from flash_rosetta.bench import plugin, startup, warm
from flash_rosetta.bench.contenders import BackendContender
from flash_rosetta.bench.page import markdown
from flash_rosetta.bench.parts import Lab
from flash_rosetta.bench.plugin import RaceOptions, RacePlugin
from flash_rosetta.bench.warm import Compiled, Job

CPU = torch.device("cpu")
DIES, HANGS = 7, 8
"""Lengths of sequences that `serve_badly` is asked to be bad at."""


def job_of(seqlen, contender="reference", **changes):
    sizes = {"batch": 3, "num_heads": 2, "seqlen_q": seqlen, "head_dim": 8} | changes
    return Job(contender, Problem(**sizes, dtype=torch.float32), "forward")


def serve_badly(pipe, device):
    """A worker that compiles nothing; two jobs end it, or keep it for ever."""
    while True:
        job = pipe.recv()
        if job.problem.seqlen_q == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.problem.seqlen_q == HANGS:
            time.sleep(3600)
        pipe.send(Compiled(float(job.problem.batch), None))


def test_compiling_together_tells_what_failed_and_goes_on():
    problem = Problem(batch=3, num_heads=2, seqlen_q=24, head_dim=8, dtype=torch.float32)
    jobs = [
        Job("reference", problem, "forward"),
        Job("reference", problem, "backward"),
        Job("reference", problem, "backward"),
        Job("cute", problem, "forward"),
        Job("nobody", problem, "forward"),
    ]
    found = warm.compile_all(jobs, Lab(CPU), processes=2)
    assert set(found) == set(jobs)
    assert found[jobs[0]].error is None
    assert found[jobs[1]].seconds >= 0
    assert "target cpu" in found[jobs[3]].error
    assert "nobody" in found[jobs[4]].error
    assert warm.compile_all([], Lab(CPU)) == {}


def test_a_job_that_dies_or_hangs_costs_no_other_its_result(monkeypatch):
    monkeypatch.setattr(warm, "serve", serve_badly)
    monkeypatch.setattr(warm, "PATIENCE", 20.0)
    jobs = [job_of(seqlen) for seqlen in (5, DIES, 6, 9)]
    found = warm.compile_all(jobs, Lab(CPU), processes=1)
    assert [found[job].seconds for job in jobs] == [1.0, None, 1.0, 1.0]
    assert "ended the process" in found[jobs[1]].error
    monkeypatch.setattr(warm, "PATIENCE", 0.5)
    (hung,) = warm.compile_all([job_of(HANGS)], Lab(CPU)).values()
    assert hung == Compiled(None, "took longer than 0 s")


@pytest.fixture
def ran(monkeypatch):
    """The jobs that workers got, in order; none has a process."""
    found = []

    def run(self, job):
        found.append(job)
        return Compiled(float(len(found)), None)

    monkeypatch.setattr(warm.Worker, "run", run)
    return found


def test_jobs_of_the_same_kernels_are_run_once_and_on_a_small_batch(ran):
    twins = [job_of(5), job_of(5, batch=40), job_of(5, needs_backward=True)]
    others = [job_of(5, contender="flex"), job_of(5, contender="flex", batch=40)]
    found = warm.compile_all([*twins, *others], Lab(CPU), processes=1)
    assert set(found) == {*twins, *others}
    assert len({found[job] for job in twins}) == 1
    assert [(job.contender, job.problem.batch) for job in ran] == [
        ("reference", 1),
        ("flex", 3),
        ("flex", 40),
    ]


def test_jobs_that_may_share_a_kernel_are_run_apart(ran):
    jobs = [job_of(5), job_of(6), job_of(7), job_of(5, is_causal=True), job_of(5, head_dim=16)]
    warm.compile_all(jobs, Lab(CPU), processes=1)
    smallest = [warm._smallest(job) for job in jobs]
    assert ran == [smallest[i] for i in (0, 3, 4, 1, 2)]


def test_a_race_compiles_each_direction_of_what_can_race(monkeypatch):
    asked = []
    monkeypatch.setattr(plugin, "compile_all", lambda jobs, lab: asked.extend(jobs))
    monkeypatch.setattr(BackendContender, "why_not", lambda self, problem: [])
    directions = ("forward", "backward", "forward+backward")
    RacePlugin(RaceOptions(backends=("triton", "reference"), directions=directions)).warm()
    assert {(job.contender, job.direction) for job in asked} == {
        ("triton", "forward"),
        ("triton", "backward"),
    }
    assert all(job.problem.needs_backward == (job.direction == "backward") for job in asked)


def rendered(sections):
    return markdown(sections, 3, lambda plot: "")


def test_a_start_is_cold_and_then_warm():
    (record,) = startup.measure(Lab(CPU, backends=("reference",)))
    assert record["verdict"] == "started"
    for state in ("cold", "warm"):
        assert set(record[state]) == {"forward", "backward"}
        assert all(0 <= seconds < 60 for seconds in record[state].values())
    text = rendered(startup.sections({"records": [record]}, {}))
    assert f"| `reference` | {record['cold']['forward']:.2f} |" in text


def test_a_start_that_fails_says_why():
    (record,) = startup.measure(Lab(CPU, backends=("cute",)))
    assert record["verdict"] == "failed"
    assert "target cpu" in record["reasons"][0]
    assert "`cute` failed" in rendered(startup.sections({"records": [record]}, {}))


def test_caches_of_a_start_are_its_own(monkeypatch, tmp_path):
    seen = []
    real = subprocess.run

    def run(command, env=None, **options):
        seen.append({variable: env[variable] for variable in startup.CACHES})
        return real([sys.executable, "-c", "print('{}')"], **options)

    monkeypatch.setattr(startup.subprocess, "run", run)
    startup._start("reference", CPU, tmp_path)
    assert all(path.startswith(str(tmp_path)) for path in seen[0].values())
    assert len(set(seen[0].values())) == len(startup.CACHES)

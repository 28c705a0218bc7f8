"""The race itself under test: turns, rounds, judging, records, tables, and one whole run."""

import io
import json
import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from flash_rosetta import Unsupported, registry
from flash_rosetta.bench import contenders as contenders_module
from flash_rosetta.bench import heat, report, support, timing, workloads
from flash_rosetta.bench.contenders import SDPA, BackendContender, SdpaContender, contenders
from flash_rosetta.bench.heat import run_heat
from flash_rosetta.bench.judge import Judge
from flash_rosetta.bench.plugin import RaceOptions, RacePlugin
from flash_rosetta.bench.race import main
from flash_rosetta.bench.workloads import Workload
from flash_rosetta.problem import Problem

CPU = torch.device("cpu")


class FakeWatch:
    """A stopwatch whose runs take as long as they say, in no time."""

    def __init__(self):
        self.turns = []

    def time(self, runs, rounds):
        self.turns.append(list(timing.interleave(rounds)))
        return {name: [runs[name]()] * rounds[name] for name in runs}

    def launch_seconds(self, run):
        return 0.0

    def hide(self, launch_seconds):
        pass


def test_interleaving_takes_turns_and_spreads_uneven_rounds():
    turns = list(timing.interleave({"a": 4, "b": 4, "c": 2}))
    assert turns == ["a", "b", "b", "c", "a", "a", "b", "a", "b", "c"]


def test_rounds_fit_the_budget():
    runs = {"fast": lambda: 1e-5, "middle": lambda: 0.01, "slow": lambda: 0.1, "awful": lambda: 1.0}
    seconds = timing.race(runs, FakeWatch(), budget=0.25)
    assert {name: len(s) for name, s in seconds.items()} == {
        "fast": 100,
        "middle": 25,
        "slow": 10,
        "awful": 3,
    }
    fixed = timing.race(runs, FakeWatch(), budget=0.25, rounds=7)
    assert {len(s) for s in fixed.values()} == {7}


def test_replay_clock_gives_back_exactly_what_it_was_given():
    clock, seconds = timing.ReplayClock(), [0.1 + 0.2, 1e-9, 3e-5, 7.0]
    clock.load(seconds)
    replayed = []
    for _ in seconds:
        start = clock()
        end = clock()
        replayed.append(end - start)
    assert replayed == seconds
    with pytest.raises(StopIteration):
        clock()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_stopwatch_measures_the_call_and_not_the_flush():
    device = torch.device("cuda", torch.cuda.current_device())
    watch = timing.stopwatch(device)
    watch.hide({"nothing": 1e-3})
    runs = {
        "nothing": lambda: None,
        "some": lambda: torch.cuda._sleep(1_000_000),
        "thrice": lambda: torch.cuda._sleep(3_000_000),
    }
    seconds = {name: min(s) for name, s in watch.time(runs, dict.fromkeys(runs, 5)).items()}
    assert seconds["nothing"] < 5e-5
    assert 2.5 < seconds["thrice"] / seconds["some"] < 3.5
    kept = []
    assert watch.peak_bytes(lambda: kept.append(torch.empty(1 << 20, device=device))) >= 4 << 20


@pytest.fixture
def late(monkeypatch):
    """A stopwatch of a device that is not there, and what `start.query()` will say, in turn.

    An event's time is the number of writes of the flush before it.
    """
    answers = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.writes = watch.writes

        def query(self):
            return answers.pop(0)

        def elapsed_time(self, end):
            return self.writes * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch = object.__new__(timing.CudaStopwatch)
    watch.device, watch.writes, watch.seconds_per_pass = None, 0, timing.LEAST_FLUSH

    class Buffer:
        def zero_(self):
            watch.writes += 1

    watch.buffer = Buffer()
    watch.hide({})
    return watch, answers


def test_a_round_that_the_host_was_late_for_is_run_again(late):
    watch, answers = late
    calls = []
    runs = {"call": lambda: calls.append(watch.writes)}
    answers[:] = [False, True, False, True, True, True]
    (seconds,) = watch.time(runs, {"call": 3}).values()
    assert calls == [1, 2, 4, 5, 7, 11], "each try behind a flush of its own, twice as long"
    assert seconds == [1, 4, 11], "the last try of each round counts"
    assert answers == []


def test_what_no_flush_can_hide_is_run_once(late):
    watch, answers = late
    calls = []
    runs = {"few": lambda: calls.append("few"), "many": lambda: calls.append("many")}
    watch.hide({"few": 1e-4, "many": 2 * timing.MOST_FLUSH})
    assert watch.passes == timing.MOST_FLUSH / timing.LEAST_FLUSH
    answers[:] = [True, False, True]
    watch.time(runs, {"few": 1, "many": 1})
    assert calls == ["few", "few", "many"]


@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_flops_are_those_that_pytorch_counts(head_dim_v):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    problem = Problem(batch=2, num_heads=3, seqlen_q=20, seqlen_k=28, head_dim=16,
                      head_dim_v=head_dim_v, dtype=torch.float32)  # fmt: skip
    q, k, v, do, _ = problem.inputs()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert problem.flops("forward") == counter.get_total_flops()
    q, k, v, do = (t.to("meta") for t in (q, k, v, do))
    lse, seed = torch.empty(q.shape[:3], device="meta"), torch.empty(2, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, do, lse, None, None, 20, 28, 0.0, False, seed, seed
        )
    assert problem.flops("backward") == counter.get_total_flops()
    both = workloads.flops(problem, "forward+backward")
    assert both == problem.flops("forward") + problem.flops("backward")


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("seqlens", [(5, 5), (3, 8), (8, 3), (1, 7), (7, 1), (4, 0)])
def test_causal_pairs_are_counted_one_by_one(seqlens, alignment):
    problem = Problem(batch=2, num_heads=3, seqlen_q=seqlens[0], seqlen_k=seqlens[1], head_dim=16,
                      is_causal=True, causal_alignment=alignment)  # fmt: skip
    offset = 0 if alignment == "top_left" else seqlens[1] - seqlens[0]
    seen = sum(j <= i + offset for i in range(seqlens[0]) for j in range(seqlens[1]))
    assert problem.flops("forward") == 2 * 3 * seen * 2 * (16 + 16)
    assert problem.flops("backward") == 2.5 * problem.flops("forward")


def tiny(direction="forward", **fields):
    """A workload of four heads, and the problem that it poses."""
    problem = Problem(
        **{"batch": 2, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 24, "head_dim": 16}
        | {"dtype": torch.float32}
        | fields
    )
    workload = Workload("tiny", problem, problem.inputs)
    return workload, workload.problem_for(direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_judge_knows_right_from_wrong(direction, dtype):
    workload, problem = tiny(direction, dtype=dtype, is_causal=True)
    inputs = workload.load(CPU)
    judge = Judge(direction, inputs, problem)
    outputs = BackendContender("reference", named=True).prepare(direction, inputs, problem)()
    assert judge(outputs).faults == []
    assert 0 < judge(outputs).errors["rel_error"] < 4e-3

    def with_fault(change):
        changed = [t.clone() for t in outputs]
        change(changed[0])
        return judge(tuple(changed)).faults

    def scale_late_rows(t):
        t[-1, -1, 12:] *= 0.9

    def lose_one_element_where_nobody_looks(t):
        t[0, -1, 3, 5] = torch.nan

    unseen = (0, 1)  # of (batch, key/value head), with the seed in use
    assert unseen not in judge.slices
    assert "is over the budget" in with_fault(scale_late_rows)[0]
    assert "not finite" in with_fault(lose_one_element_where_nobody_looks)[0]
    assert "batch or heads" in judge(tuple(t[:, :1] for t in outputs)).faults[0]
    if direction == "forward":
        in_base_two = (outputs[0], outputs[1] / 0.6931)
        assert judge(in_base_two).faults[0].startswith("lse")


class Faulty:
    """The reference, with something done to it."""

    def __init__(self, name, forward=None, refuses=()):
        self.name = name
        self.refuses = list(refuses)
        self.change = forward or (lambda o: o)
        self.reference = registry.get("reference")

    def why_not(self, problem):
        return self.refuses

    def forward(self, q, k, v, problem):
        o, lse = self.reference.forward(q, k, v, problem)
        return self.change(o), lse

    def backward(self, *args):
        return self.reference.backward(*args)


@pytest.fixture
def registered():
    added = []

    def register(backend):
        registry.register(backend)
        added.append(backend.name)
        return BackendContender(backend.name, named=True)

    yield register
    for name in added:
        registry.unregister(name)


def test_a_wrong_contender_gets_no_number_and_the_others_do(registered):
    calls = []

    def wrong_from_the_third_call(o):
        calls.append(o)
        return o if len(calls) < 3 else o * 1.01

    def explode(o):
        raise RuntimeError("out of cheese")

    field = [
        registered(Faulty("wrong", lambda o: o * 1.01)),
        registered(Faulty("wrong_later", wrong_from_the_third_call)),
        registered(Faulty("explodes", explode)),
        registered(Faulty("refuses", refuses=["head_dim 16 is above 8"])),
        BackendContender("reference", named=True),
        SdpaContender("sdpa-math", SDPA["sdpa-math"]),
        SdpaContender("sdpa-cudnn", SDPA["sdpa-cudnn"]),
    ]
    workload, _ = tiny()
    outcomes = run_heat(workload, "forward", field, timing.stopwatch(CPU), CPU, budget=0, rounds=2)
    assert {name: o.verdict for name, o in outcomes.items()} == {
        "wrong": "wrong",
        "wrong_later": "wrong",
        "explodes": "failed",
        "refuses": "skipped",
        "reference": "raced",
        "sdpa-math": "raced",
        "sdpa-cudnn": "skipped",
    }
    for name, outcome in outcomes.items():
        assert bool(outcome.seconds) == (outcome.verdict == "raced"), name
        assert bool(outcome.reasons) == (outcome.verdict != "raced"), name
    assert "error 0.01 is over the budget" in outcomes["wrong"].reasons[0]
    assert "out of cheese" in outcomes["explodes"].reasons[0]
    assert outcomes["refuses"].reasons == ["head_dim 16 is above 8"]


def test_gradients_through_autograd_are_judged_and_so_are_those_alone(registered):
    """What is wrong with a backward shows in both directions that have one."""

    class WrongKeys(Faulty):
        def backward(self, *args):
            dq, dk, dv = self.reference.backward(*args)
            return dq, dk * 1.01, dv

    field = [registered(WrongKeys("wrong_keys")), BackendContender("reference", named=True)]
    for direction in ("backward", "forward+backward"):
        workload, _ = tiny(direction)
        outcomes = run_heat(
            workload, direction, field, timing.stopwatch(CPU), CPU, budget=0, rounds=2
        )
        assert outcomes["reference"].verdict == "raced", outcomes["reference"].reasons
        assert outcomes["wrong_keys"].verdict == "wrong"
        assert outcomes["wrong_keys"].reasons[0].startswith("dk: ")


def test_a_record_has_what_the_card_said_before_and_after(monkeypatch):
    said = iter([{"sm_clock_mhz": 1980.0}, {"sm_clock_mhz": 1755.0}])
    monkeypatch.setattr(heat.machine, "sensors", lambda device: next(said))
    workload, _ = tiny()
    field = [BackendContender("reference", named=True), SdpaContender("sdpa-default")]
    watch = timing.stopwatch(CPU)
    outcomes = run_heat(workload, "forward", field, watch, CPU, budget=0, rounds=2)
    for outcome in outcomes.values():
        assert outcome.info["before"] == {"sm_clock_mhz": 1980.0}
        assert outcome.info["after"] == {"sm_clock_mhz": 1755.0}
        assert outcome.info["layout"] == "as given"


@pytest.mark.parametrize("direction", workloads.DIRECTIONS)
def test_sdpa_and_backends_race_on_grouped_heads(direction):
    workload, _ = tiny(direction, is_causal=True)
    field = [
        BackendContender("reference", named=True),
        SdpaContender("sdpa-default"),
        SdpaContender("sdpa-math", SDPA["sdpa-math"]),
    ]
    outcomes = run_heat(workload, direction, field, timing.stopwatch(CPU), CPU, budget=0, rounds=2)
    assert {o.verdict for o in outcomes.values()} == {"raced"}, [
        o.reasons for o in outcomes.values()
    ]


def test_contenders_are_everyone_unless_named():
    names = [c.name for c in contenders(None, None)]
    assert names == [*registry.names(), *SDPA, "flash-attn-4", "flex"]
    assert [c.name for c in contenders(["reference"], ["sdpa-math"])] == ["reference", "sdpa-math"]
    assert [c.name for c in contenders(["reference"], ["flex"])] == ["reference", "flex"]
    with pytest.raises(ValueError, match=r"backend must be one of .*; got 'tritn'"):
        contenders(["tritn"], None)
    with pytest.raises(ValueError, match=r"against must be one of .*; got 'cudnn'"):
        contenders(None, ["cudnn"])


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in for flash-attn-4: its layout and its function, and what this was called with."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        calls.append([t.is_contiguous() for t in (q, k, v)])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return o.transpose(1, 2), None

    for name in ("flash_attn", "flash_attn.cute"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.flash_attn_func = flash_attn_func
        monkeypatch.setitem(sys.modules, name, module)
    contenders_module._is_installed.cache_clear()
    yield calls
    contenders_module._is_installed.cache_clear()


@pytest.mark.parametrize("direction", workloads.DIRECTIONS)
def test_flash_attn_4_races_in_its_own_layout(direction, flash_attn, monkeypatch):
    (contender,) = contenders(["reference"], ["flash-attn-4"])[1:]
    workload, _ = tiny(direction, is_causal=True)
    monkeypatch.setattr(contender, "why_not", lambda problem: [])  # it refuses a CPU
    outcomes = run_heat(
        workload, direction, [contender], timing.stopwatch(CPU), CPU, budget=0, rounds=2
    )
    assert outcomes["flash-attn-4"].verdict == "raced", outcomes["flash-attn-4"].reasons
    assert outcomes["flash-attn-4"].info["layout"] == "batch, seqlen, heads, head_dim"
    assert flash_attn
    assert all(all(contiguous) for contiguous in flash_attn)
    q, k, v = workload.load(CPU)[:3]
    assert contender.call(q, k[:, :2], v[:, :2]).shape == q.shape


def test_others_race_where_they_are_installed_and_asked_for(flash_attn, monkeypatch):
    (fa4,) = contenders(["reference"], ["flash-attn-4"])[1:]
    problem = Problem(batch=1, num_heads=2, seqlen_q=64, seqlen_k=96, head_dim=64, target="sm_90")
    assert fa4.why_not(problem) == []
    for changes, reason in (
        ({"head_dim": 12, "head_dim_v": 12}, "head_dim 12 is no multiple of 8"),
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"target": "sm_80"}, "target sm_80"),
        ({"is_causal": True}, "causal_alignment top_left"),
        ({"head_dim": 128, "head_dim_v": 64}, "head_dim_v 64 beside head_dim 128"),
        ({"head_dim": 192, "head_dim_v": 192, "target": "sm_100"}, "target sm_90 alone"),
    ):
        (got,) = fa4.why_not(replace(problem, **changes))
        assert reason in got
    assert fa4.why_not(replace(problem, is_causal=True, causal_alignment="bottom_right")) == []
    for target, widths in (
        ("sm_90", (192, 128)), ("sm_90", (192, 192)), ("sm_100", (192, 128)), ("sm_100", (256, 256))
    ):  # fmt: skip
        sized = replace(problem, head_dim=widths[0], head_dim_v=widths[1], target=target)
        assert fa4.why_not(sized) == []
    monkeypatch.delitem(sys.modules, "flash_attn.cute")
    contenders_module._is_installed.cache_clear()
    assert fa4.why_not(problem) == ["not installed: pip install flash-attn-4"]
    named, unnamed = contenders(["reference"], ["flex"])[-1], contenders(["reference"], None)[-1]
    assert named.why_not(problem) == []
    (reason,) = unnamed.why_not(problem)
    assert "unless named (--against flex)" in reason
    assert not unnamed.why_not(replace(problem, head_dim=64, seqlen_q=2048, seqlen_k=2048))
    assert "target cpu" in named.why_not(replace(problem, target="cpu"))[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_whole_problem(monkeypatch):
    """Without the compiler, which a CPU would need minutes for; a CPU has no backward of it."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(contenders_module, "_compiled_flex", lambda: flex_attention)
    (flex,) = contenders(["reference"], ["flex"])[1:]
    monkeypatch.setattr(flex, "why_not", lambda problem: [])
    workload, _ = tiny(is_causal=True, seqlen_k=20, causal_alignment="bottom_right", scale=-0.3)
    watch = timing.stopwatch(CPU)
    outcomes = run_heat(workload, "forward", [flex], watch, CPU, budget=0, rounds=2)
    assert outcomes["flex"].verdict == "raced", outcomes["flex"].reasons


def test_slow_and_baseline_backends_race_on_a_gpu_only_when_named(monkeypatch):
    long = Problem(batch=1, num_heads=1, seqlen_q=2048, head_dim=64, target="sm_90")
    reasons = BackendContender("reference", named=False).why_not(long)
    assert "seqlen 2048 is above 512" in reasons[0]
    assert BackendContender("reference", named=True).why_not(long) == []
    on_cpu = Problem(batch=1, num_heads=1, seqlen_q=2048, head_dim=64)
    assert BackendContender("reference", named=False).why_not(on_cpu) == []
    monkeypatch.setattr("flash_rosetta.registry.ONLY_BY_NAME", ("reference",))
    reasons = BackendContender("reference", named=False).why_not(on_cpu)
    assert reasons == ["races only when named: --backend reference"]
    assert BackendContender("reference", named=True).why_not(on_cpu) == []


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Workloads as a card of compute capability 9.0 gets them; nothing is allocated there."""
    monkeypatch.setattr(workloads, "target_of", lambda device: "sm_90")
    return torch.device("cuda")


def test_grid_holds_the_published_points(as_on_hopper):
    grid = workloads.workloads("grid", as_on_hopper)
    problems = [w.problem for w in grid]
    assert {(p.head_dim, p.seqlen_q, p.is_causal) for p in problems} == {
        (d, n, causal)
        for d in (64, 128, 256)
        for n in (512, 2048, 8192, 16384)
        for causal in (False, True)
    }
    assert len(problems) == 24
    assert {p.batch * p.seqlen_q for p in problems} == {16384}
    assert {p.num_heads * p.head_dim for p in problems} == {2048}
    assert {(p.dtype, p.target) for p in problems} == {(torch.bfloat16, "sm_90")}
    only = workloads.workloads("grid", as_on_hopper, head_dims=(64,), seqlens=(512,))
    assert len(only) == 2
    with pytest.raises(ValueError, match=r"no workload of 'grid' on cuda has head_dim in \[40\]"):
        workloads.workloads("grid", as_on_hopper, head_dims=(40,))


def test_named_models_have_the_sizes_that_are_published(as_on_hopper):
    models = {w.name: w for w in workloads.workloads("named", as_on_hopper)}
    sizes = {
        name: (p.num_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v,
               p.is_causal)
        for name, p in ((name, w.problem) for name, w in models.items())
    }  # fmt: skip
    assert sizes == {
        "gpt2": (12, 12, 1024, 1024, 64, 64, True),
        "llama-3-8b": (32, 8, 8192, 8192, 128, 128, True),
        "qwen2.5-7b": (28, 4, 4096, 4096, 128, 128, True),
        "bert-base": (12, 12, 512, 512, 64, 64, False),
        "minilm-l6": (12, 12, 256, 256, 32, 32, False),
        "vit-b16": (12, 12, 197, 197, 64, 64, False),
        "whisper-large-v3": (20, 20, 1500, 1500, 64, 64, False),
        "sdxl-cross": (10, 10, 4096, 77, 64, 64, False),
        "sdxl-self": (10, 10, 4096, 4096, 64, 64, False),
        "deepseek-v3": (128, 128, 4096, 4096, 192, 128, True),
        "deepseek-v3-padded": (128, 128, 4096, 4096, 192, 192, True),
    }
    for name, workload in models.items():
        problem = workload.problem
        assert problem.dtype == torch.bfloat16
        assert workload.source, name
        if not name.startswith("deepseek"):
            assert (
                problem.batch * problem.seqlen_q <= 16384 < (problem.batch + 1) * problem.seqlen_q
            )
    assert {w.name for w in workloads.workloads("all", as_on_hopper)} > models.keys()


def test_captured_inputs_are_real_and_tiled_faithfully(as_on_hopper):
    pytest.importorskip("safetensors")
    captured = {w.name: w for w in workloads.workloads("captured", as_on_hopper)}
    assert len(captured) == 8
    single = captured["captured-minilm-l6-layer0-long"]
    tiled = captured["captured-minilm-l6-layer0-long-tiled"]
    one, many = single.load(CPU), tiled.load(CPU)
    assert one.q.shape == (1, 12, 102, 32)
    assert one.q.stride() == (102 * 384, 32, 384, 1)  # as the model has it, not copied
    assert tiled.problem.batch * 102 <= workloads.TOKENS < (tiled.problem.batch + 1) * 102
    for name in ("q", "k", "v", "do"):
        alone, tile = getattr(one, name), getattr(many, name)
        assert alone.dtype == torch.bfloat16
        assert torch.equal(tile[-1:], alone)
        assert tile.stride(0) == alone[0].numel()  # memory of its own
        assert 0 < alone.float().std() < torch.inf
    s = one.q.double() @ one.k.double().mT / 32**0.5
    assert s.abs().max() > 40  # peaked, as no standard normal input of this size is


def synthetic_record(workload, direction, backend, tflops, **more):
    """A record as a heat on a GPU makes it, its measurements invented."""
    shape = (1, 1, 1, 1)
    inputs = [torch.empty(shape, dtype=torch.bfloat16)] * 5
    info = heat._identity(workload, direction, contenders_module.contender(backend), inputs)
    flops = workloads.flops(workload.problem, direction)
    seconds = [flops / (tflops * 1e12) * f for f in (0.98, 1.0, 1.03)]
    return (
        info
        | heat.figures(seconds, flops, torch.device("cuda"))
        | {"compile_s": 1.2, "max_error": 1e-3, "rel_error": 2e-3, "row_error": 3e-3}
        | {"inputs_mb": 201.3, "peak_mb": 100.0, "host_us": 31.0, "host_grad_us": 44.0}
        | more
    )


@pytest.fixture
def synthetic(as_on_hopper):
    """A whole race of invented numbers: {machine_info, benchmarks, no_number, datetime}."""
    rates = {"triton": 500, "sdpa-default": 600, "sdpa-cudnn": 600, "sdpa-flash": 330}
    records = [
        synthetic_record(
            workload,
            direction,
            backend,
            rate * workload.problem.seqlen_q / (workload.problem.seqlen_q + 300),
            **({"ran": "sdpa-cudnn"} if backend == "sdpa-default" else {}),
        )
        for workload in workloads.workloads("all", as_on_hopper)
        for direction in workloads.DIRECTIONS
        for backend, rate in rates.items()
    ]
    wrong = {key: records[0][key] for key in ("direction", "workload", "problem")}
    return {
        "machine_info": {"card": "Imaginary 9000", "matmul_tflops": 700.0, "torch": "2.13.0"},
        "datetime": "2030-01-02T03:04:05+00:00",
        "benchmarks": [{"name": str(i), "extra_info": r} for i, r in enumerate(records)],
        "no_number": [
            wrong | {"backend": "cute", "verdict": "wrong", "reasons": ["o: row error 0.1"]}
        ],
    }


def test_records_have_what_comparisons_read(synthetic):
    records = [b["extra_info"] for b in synthetic["benchmarks"]]
    needed = {
        "backend": str, "direction": str, "workload": str, "head_dim": int, "seqlen_q": int,
        "seqlen_k": int, "is_causal": bool, "dtype": str, "tflops": float, "max_error": float,
        "peak_mb": float,
    }  # fmt: skip
    for record in records:
        assert {key: type(record[key]) for key in needed} == needed
    points = [
        r
        for r in records
        if (r["workload"], r["backend"], r["direction"], r["dtype"])
        == ("grid", "triton", "forward", "bfloat16")
        and r["head_dim"] in (64, 128)
        and r["seqlen_q"] == r["seqlen_k"]
    ]
    assert len(points) == 16
    shortest = min(points, key=lambda r: r["seqlen_q"])
    assert shortest["tflops"] == pytest.approx(500 * 512 / 812, rel=1e-3)


def test_summary_is_the_geometric_mean(synthetic):
    records = [b["extra_info"] for b in synthetic["benchmarks"]]
    rows = list(report.summary(records))
    assert [row[:3] for row in rows] == [
        ("triton", direction, kind)
        for direction in ("forward", "backward", "forward+backward")
        for kind in ("grid", "models", "captured, tiled", "captured")
    ]
    ratios = rows[0][3]
    assert len(ratios["sdpa-cudnn"]) == 24
    assert report.geometric_mean(ratios["sdpa-cudnn"]) == pytest.approx(500 / 600, rel=1e-3)
    assert ratios["sdpa-math"] == []
    assert "flash-attn-4" not in ratios
    ours = next(r for r in records if (r["workload"], r["backend"]) == ("grid", "triton"))
    theirs = ours | {"backend": "flash-attn-4", "tflops": 250.0}
    ratios = next(report.summary([*records, theirs]))[3]
    assert ratios["flash-attn-4"] == [ours["tflops"] / 250]
    assert report.is_yardstick("flash-attn-4")
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def rendered(*tables):
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(*tables)
    return capture.get()


def test_tables_show_numbers_and_those_without(synthetic):
    records = [b["extra_info"] for b in synthetic["benchmarks"]]
    without = [records[0] | {"backend": "cute", "verdict": "wrong", "reasons": ["o: row error"]}]
    text = rendered(*report.speed_tables(records, without, 700.0))
    heats = text.split("grid d64 n16384 ")[1].split("grid")[0]
    row = next(line for line in heats.splitlines() if line.split()[:1] == ["triton"])
    assert row.split()[2:6] == ["2.5", "491", "83", "152"]  # iqr %, TFLOP/s, % of cudnn, of flash
    assert "sdpa-default (cudnn)" in text
    cute = next(line for line in text.splitlines() if line.split()[:1] == ["cute"])
    assert cute.split() == ["cute", "wrong"]
    assert list(report.notes(without)) == [
        "cute wrong in minilm-l6-layer0-long d32 n102 b1 h12: o: row error"
    ]


def test_support_table_names_every_backend_and_no():
    text = support.support_markdown()
    for name in ("reference", "triton"):
        assert f"| `{name}` |" in text
    assert "fp16 bf16 fp32 fp64, any head_dim" in text
    assert "head_dim 512 is above 256" in text
    assert support._ranges([8, 16, 17, 18]) == "head_dim 8, 16 to 18"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workload", "grid"], "needs a GPU"),
        (["--save"], "needs a GPU"),
        (["--rounds", "1"], "must be at least 2"),
        (["--backend", "tritn"], "got 'tritn'"),
        (["--seqlen", "7"], "no workload of 'captured'"),
    ],
)
def test_bad_options_are_refused_with_a_reason(arguments, complaint, monkeypatch, capsys):
    pytest.importorskip("pytest_benchmark")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


RACE_WITH_A_LIAR = """
    import json, sys
    from flash_rosetta import register, registry
    from flash_rosetta.bench import plugin, race, timing

    reference = registry.get("reference")

    class Liar:
        name = "liar"

        def why_not(self, problem):
            return []

        def forward(self, q, k, v, problem):
            return reference.forward(q, k, v, problem)

        def backward(self, *args):
            dq, dk, dv = reference.backward(*args)
            dq[:, :, dq.shape[2] // 2 :] *= 0.9
            return dq, dk, dv

    register(Liar())
    measured, measure = [], timing.race

    def spy(*args, **options):
        measured.append(measure(*args, **options))
        return measured[-1]

    def name_kernels(self):
        for _, outcome in self.outcomes:
            outcome.info["kernel"] = "named when all was timed"

    timing.race = spy
    plugin.RacePlugin._name_default_kernels = name_kernels
    status = race.main(sys.argv[2:])
    json.dump(measured, open(sys.argv[1], "w"))
    sys.exit(status)
"""


def triton_can_be_interpreted() -> bool:
    """Some releases of Triton's interpreter fail with some releases of NumPy."""
    ask = (
        "import torch, flash_rosetta as fr; print(not fr.registry.why_not('triton', fr.Problem("
        "batch=1, num_heads=1, seqlen_q=1, head_dim=32, dtype=torch.float32)))"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == "True"


def test_a_race_without_a_gpu_end_to_end(tmp_path):
    pytest.importorskip("pytest_benchmark")
    pytest.importorskip("safetensors")
    script, spied, out = tmp_path / "race.py", tmp_path / "spied.json", tmp_path / "out.json"
    script.write_text(textwrap.dedent(RACE_WITH_A_LIAR))
    names = ["--backend", "reference", "--backend", "triton", "--backend", "liar"]
    done = subprocess.run(
        [sys.executable, script, spied, *names, "--against", "sdpa-math", "--against",
         "sdpa-cudnn", "--seqlen", "36", "--out", out],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": "--no-such-option",
                          "COLUMNS": "160"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # because of the liar
    assert "Correctness only" in done.stdout
    assert "TFLOP" not in done.stdout
    assert "[4/4] backward minilm-l6-layer5-short" in done.stdout.replace("captured-", "")
    assert "WRONG: captured-minilm-l6-layer0-short-backward" in done.stdout
    assert "dq: tensor error 0.0" in done.stdout
    assert "sdpa-cudnn skipped in 4 heats: target cpu has no such kernel" in done.stdout

    results = json.loads(out.read_text())
    records = {
        (r["extra_info"]["backend"], r["extra_info"]["direction"], r["extra_info"]["workload"]): r
        for r in results["benchmarks"]
    }
    raced = {"reference", "sdpa-math"} | ({"triton"} if triton_can_be_interpreted() else set())
    assert {(name, d) for name, d, _ in records} == {
        *((name, "forward") for name in raced | {"liar"}),
        *((name, "backward") for name in raced),
    }
    wrong = [r for r in results["no_number"] if r["verdict"] == "wrong"]
    assert {(r["backend"], r["direction"]) for r in wrong} == {("liar", "backward")}
    assert len(wrong) == 2
    for heat_seconds in json.loads(spied.read_text()):
        for name, seconds in heat_seconds.items():
            replayed = [r["stats"]["data"] for key, r in records.items() if key[0] == name]
            assert [heat.significant(s) for s in seconds] in replayed
    for record in records.values():
        assert record["extra_info"]["tflops"] is None
        assert record["extra_info"]["ms"] is None
        assert record["extra_info"]["kernel"] == "named when all was timed"
        assert record["extra_info"]["rel_error"] < 2e-5
        assert record["options"]["timer"] == "flash_rosetta.bench.timing.replay"
    assert results["machine_info"]["device"] == "cpu"
    assert "node" not in results["machine_info"]


def test_the_capture_script_and_its_file_agree():
    safetensors = pytest.importorskip("safetensors")
    from flash_rosetta.bench import capture

    passages = capture.passages()
    assert passages["long"].startswith("Beautiful is better than ugly.")
    with safetensors.safe_open(capture.TARGET, "pt") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert metadata["licence"] == "Apache-2.0"
    assert metadata["package"].startswith(capture.PACKAGE)
    assert names == {
        f"layer{layer}.{passage}.{tensor}"
        for layer in capture.LAYERS
        for passage in passages
        for tensor in ("q", "k", "v", "do")
    }
    assert Path(capture.TARGET).stat().st_size < 2**20


def test_unsupported_inputs_are_a_skip_with_sdpas_own_words(monkeypatch):
    contender = SdpaContender("sdpa-flash", SDPA["sdpa-flash"])
    monkeypatch.setattr(contender, "_refusals", lambda *args: ["head_dim 512 is too large"])
    workload, problem = tiny()
    with pytest.raises(Unsupported, match="head_dim 512 is too large"):
        contender.prepare("forward", workload.load(CPU), problem)


def test_what_pytorch_warns_of_is_the_reason(monkeypatch):
    """The headings, and that the other kernels are switched off, are none."""
    contender = SdpaContender("sdpa-flash", SDPA["sdpa-flash"])
    q = torch.empty(1, 1, 1, 8, device="meta")

    def attend(*arguments):
        for text in (
            "Flash attention kernel not used because: (Triggered internally at sdp.cpp:1.)",
            "Flash attention wants another head_dim (Triggered internally at sdp.cpp:2.)",
            "CuDNN attention has been runtime disabled. (Triggered internally at sdp.cpp:3.)",
        ):
            warnings.warn(text, stacklevel=1)
        raise RuntimeError("No available kernel.")

    monkeypatch.setattr(contender, "attend", attend)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *arguments: None)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: False)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    reasons = contender._refusals(on_gpu, q, q, tiny()[1])
    assert reasons == ["Flash attention wants another head_dim"]
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: True)
    assert contender._refusals(on_gpu, q, q, tiny()[1]) == []


def test_a_terminal_sees_how_many_heats_are_done():
    screen = io.StringIO()
    race = RacePlugin(RaceOptions(), Console(file=screen, force_terminal=True, width=80))
    race.pytest_collection_finish(SimpleNamespace(items=[]))
    race.pytest_sessionfinish()
    assert "heats" in screen.getvalue()
    lines = RacePlugin(RaceOptions(), Console(file=io.StringIO()))
    lines.pytest_collection_finish(SimpleNamespace(items=[]))
    assert lines._progress is None

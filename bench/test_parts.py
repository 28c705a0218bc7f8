"""The parts of a measurement beside the race: what they measure, and the pages made of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from flash_rosetta import Problem, registry
from flash_rosetta.bench import (
    ladder,
    ladder_page,
    profile,
    profile_page,
    repeat,
    roofline,
    roofline_page,
    sweep,
    sweep_page,
)
from flash_rosetta.bench.page import Plot, Section, markdown
from flash_rosetta.bench.parts import PARTS, Lab, as_part, load
from flash_rosetta.bench.warm import Compiled
from flash_rosetta.variants import RUNGS, ForwardTileSize

CPU = torch.device("cpu")
SIZES = [ForwardTileSize(q, k, 4, s) for q in (64, 128) for k in (32, 64) for s in (2, 3)]


class Stepwise:
    """A backend with variants, all of which are the reference; some refuse, one is wrong."""

    name = "stepwise"
    wrong = "mask"
    refused = "specialize"

    def __init__(self, variant: str | None = None):
        self.variant = variant
        if variant:
            self.name = f"stepwise:{variant}"
        self.reference = registry.get("reference")

    def why_not(self, problem):
        if self.variant == self.refused:
            return ["this language has no such thing"]
        if self.variant == str(SIZES[-1]):
            return ["shared memory of it is 999999 bytes, and cpu has none"]
        return self.reference.why_not(problem)

    def forward(self, q, k, v, problem):
        o, lse = self.reference.forward(q, k, v, problem)
        return (o * 1.1 if self.variant == self.wrong else o), lse

    def backward(self, *arguments):
        return self.reference.backward(*arguments)

    def rung(self, name):
        return Stepwise(name)

    def tile_sizes(self, problem):
        return SIZES

    def with_tile(self, size):
        return Stepwise(str(size))

    def shared_bytes(self, size, problem):
        return (size.tile_q + 2 * size.num_stages * size.tile_k) * problem.head_dim * 2


@pytest.fixture
def stepwise(monkeypatch):
    backend = registry.register(Stepwise())
    # What other processes would compile, they would not find registered.
    for module in (ladder, sweep):
        monkeypatch.setattr(
            module, "compile_all", lambda jobs, lab: {job: Compiled(1.5, None) for job in jobs}
        )
    monkeypatch.setattr(sweep, "TOKENS", 64)
    monkeypatch.setattr(sweep, "SEQLEN", 64)
    monkeypatch.setattr(sweep, "HIDDEN", 128)
    yield backend
    registry.unregister("stepwise")


@pytest.fixture
def lab():
    return Lab(CPU, backends=("stepwise",))


def rendered(sections: list[Section], tmp_path) -> str:
    """The sections' Markdown; every plot is drawn as well."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for section in sections:
        for block in section.blocks:
            if isinstance(block, Plot):
                figure = block.draw()
                figure.savefig(tmp_path / f"{block.name}.png")
                assert (tmp_path / f"{block.name}.png").stat().st_size > 2000
                plt.close(figure)
    return markdown(sections, 3, lambda plot: f"{plot.name}.png")


def timed(records, rate):
    """Records of a CPU with the rates that a GPU would have given them."""
    return [r | ({"tflops": rate(r)} if r.get("verdict") == "right" else {}) for r in records]


def test_every_part_measures_and_shows():
    for name in PARTS:
        module = load(name)
        assert callable(module.measure)
        assert callable(module.sections)


def test_the_ladder_judges_every_rung_before_it_times_it(stepwise, lab):
    records = ladder.measure(lab)
    speed = {(r["rung"]): r for r in records if r["kind"] == "speed"}
    assert list(speed) == [rung.name for rung in RUNGS]
    for rung in RUNGS:
        assert speed[rung.name]["direction"] == rung.direction
    assert speed["specialize"]["verdict"] == "skipped"
    assert speed["specialize"]["reasons"] == ["this language has no such thing"]
    assert speed["mask"]["verdict"] == "wrong"
    assert "ms" not in speed["mask"], "a wrong kernel has a time"
    assert {r["verdict"] for r in speed.values()} == {"right", "wrong", "skipped"}
    assert all(r["compile_s"] == 1.5 for r in speed.values() if r["verdict"] == "right")
    exact = [r for r in records if r["kind"] == "accuracy"]
    assert {(r["rung"], r["inputs"]) for r in exact} == {
        (rung, inputs) for rung in ("exp2", "cast") for inputs in ("normal", "peaked")
    }
    assert all(0 < r["rel_error"] < 1e-2 for r in exact)
    errors = {r["inputs"]: r["rel_error"] for r in exact if r["rung"] == "cast"}
    assert errors["peaked"] != errors["normal"], "the peaked inputs are the normal ones"


def test_the_ladders_page_says_what_its_numbers_say(stepwise, lab, tmp_path):
    rates = {rung.name: 100.0 for rung in RUNGS} | {
        "baseline": 10.0, "tiles": 40.0, "skip": 40.2, "exp2": 80.0, "cast": 72.0,
        "tma": 72.0, "overlap": 144.0, "second-pass": 50.0, "atomics": 75.0,
    }  # fmt: skip
    records = timed(ladder.measure(lab), lambda r: rates[r["rung"]])
    text = rendered(ladder_page.sections({"records": records}, {}), tmp_path)
    assert (
        "**stepwise** climbs x 14.4 in all: `tiles` x 4.00, `overlap` x 2.00, `exp2` x 1.99" in text
    )
    assert "Within 2 %: `skip`, `tma`." in text
    assert "Slower with it: `cast` x 0.90." in text
    assert "`stepwise:specialize` skipped in 1 problems: this language has no such thing." in text
    assert "`stepwise:mask` wrong in 1 problems: o: " in text
    assert "x 1.50 in stepwise" in text
    assert "50.0 / 75.0" in text
    assert rendered(ladder_page.sections({"records": []}, {}), tmp_path).count("No rung") == 1


def test_the_ladders_page_says_nothing_of_what_has_no_number(stepwise, lab, tmp_path):
    records = [
        r | {"verdict": "wrong"} if (r["kind"], r["rung"]) == ("accuracy", "cast") else r
        for r in ladder.measure(lab)
        if r["rung"] != "atomics"
    ]
    records = timed(records, lambda r: 100.0)
    text = rendered(ladder_page.sections({"records": records}, {}), tmp_path)
    assert "**stepwise** climbs x 1.0 in all: no rung pays." in text
    assert "of what two passes reach" not in text
    assert "100 / -" in text
    assert "What the cast of P costs" not in text, "a wrong kernel's error stands as the price"


def test_a_sweep_has_every_size_and_what_it_costs(stepwise, lab, tmp_path):
    records = sweep.measure(lab)
    sizes = [r for r in records if r["kind"] == "size" and r["head_dim"] == 64]
    assert [r["size"] for r in sizes] == [str(size) for size in SIZES]
    assert [r["shared_bytes"] for r in sizes[:2]] == [(64 + 4 * 32) * 128, (64 + 6 * 32) * 128]
    assert [r["verdict"] for r in sizes] == ["right"] * 7 + ["skipped"]
    cost = next(r for r in records if r["kind"] == "cost")
    assert cost["sizes"] == 7, "those that were compiled for the sweep; what ships was not"
    assert cost["compile_s"] == 7 * 1.5
    rates = {"128x32w4s3": 500.0, None: 400.0}  # None: what ships
    rated = timed(records, lambda r: rates.get(r["size"], 300.0))
    text = rendered(sweep_page.sections({"records": rated}, {}), tmp_path)
    assert "best of 7 sizes is `128x32w4s3`, 500 TFLOP/s; what ships reached 400" in text
    assert "1 sizes have no rate" in text
    assert "| `stepwise`, head_dim 64 | 7 | 10 | 1.5 |" in text


def test_the_roofline_needs_a_gpu():
    with pytest.raises(ValueError, match="device cpu"):
        roofline.measure(Lab(CPU))


def race_record(backend, direction, **sizes):
    problem = Problem(batch=2, num_heads=16, seqlen_q=8192, head_dim=128, **sizes)
    return {
        "backend": backend, "direction": direction, "workload": "grid", "problem": problem.id,
        "tflops": 600.0, "seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 128, "batch": 2,
        "num_heads": 16, "num_kv_heads": 16, "is_causal": problem.is_causal,
    }  # fmt: skip


def test_the_roofline_places_every_kernel(tmp_path):
    part = {
        "records": [
            {
                "matmul_tflops": 750.0,
                "matmul_size": 8192,
                "copy_gbps": 4000.0,
                "copy_bytes": 1 << 32,
            }
        ]
    }
    records = [
        race_record(name, direction)
        for name in ("triton", "sdpa-cudnn", "sdpa-math")
        for direction in ("forward", "backward")
    ]
    card = {"machine_info": {}, "benchmarks": [{"extra_info": r} for r in records]}
    text = rendered(roofline_page.sections(part, card), tmp_path)
    # 4 n^2 d flops over 4 n d numbers of 2 bytes and n of 4: n / 2, less what lse adds.
    assert "below 188 FLOPs a byte" in text
    assert "| `triton` | forward, d128 n8192 b2 h16 | 4080 | 600 | 80 % |" in text
    # The backward does 2.5 times the FLOPs on twice the bytes: o, do, lse and three gradients too.
    assert "| `triton` | backward, d128 n8192 b2 h16 | 5100 | 600 | 80 % |" in text
    assert "sdpa-math" not in text
    roof = roofline_page.Roof(750e12, 4e12)
    assert roof.at(10) == 4e13
    assert roof.at(1000) == 750e12
    empty = card | {"benchmarks": []}
    assert "below 188" in rendered(roofline_page.sections(part, empty), tmp_path)


CSV = '''==PROF== Connected to process 7
"ID","Kernel Name","thread Domain:Push/Pop_Range","gpu__time_duration.sum","dram__bytes_read.sum",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_cycles_active.max.pct_of_peak_sustained_active","launch__registers_per_thread",\
"launch__shared_mem_per_block_dynamic",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","","nsecond","Mbyte","%","%","register/thread","byte/block","inst","inst","inst"
"0","forward_kernel(int)","""<default domain>:forward:none""","1,015,600","201.4","58.5",\
"99","138","196,608","1.33","1","2.2"
"1","dkdv_kernel","""<default domain>:backward:none""","1631800","272","72",\
"99","240","101376","no data","1","no data"
"2","preprocess_kernel","""<default domain>:backward:none""","35000","135","0.2",\
"99","34","0","0.5","1","no data"
'''


def test_nsight_computes_figures_are_read(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(profile.shutil, "which", lambda name: "/bin/ncu")
    monkeypatch.setattr(
        profile.subprocess,
        "run",
        lambda command, **options: ran.append(command) or SimpleNamespace(stdout=CSV, stderr=""),
    )
    forward, dkdv, preprocess = profile._profile("triton")
    assert ran[0][-1] == "triton"
    assert ran[0][ran[0].index("--clock-control") + 1] == "none", "clocks are not ours to change"
    assert forward["kernel"] == "forward_kernel"
    assert (forward["direction"], dkdv["direction"]) == ("forward", "backward")
    assert forward["time_us"] == pytest.approx(1015.6)
    assert forward["dram_read_mb"] == pytest.approx(201.4)
    assert forward["tensor_pct"] == 58.5, "the mean over multiprocessors, not the highest"
    assert forward["l2_hit_pct"] is None
    assert forward["shared_dynamic_kb"] == 192, "in units of 1024 bytes, as the sweep's"
    assert forward["stalls"] == {"barrier": 1.33, "selected": 1.0, "wait": 2.2}
    assert dkdv["stalls"] == {"selected": 1.0}
    records = [
        forward,
        dkdv,
        preprocess,
        {"backend": "cute", "verdict": "failed", "reasons": ["x"]},
    ]
    text = rendered(profile_page.sections({"records": records}, {}), tmp_path)
    first, folded = text.split("<details>")
    assert "`triton` forward, forward | 1016 | 58.5" in first
    assert "preprocess" in folded
    assert "preprocess" not in first
    assert "| wait 2.20 | barrier 1.33 |" in first
    assert "selected" not in first
    assert "`cute` failed: x" in first


def test_a_machine_without_nsight_compute_says_so(monkeypatch, stepwise):
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    monkeypatch.setattr(profile, "problem_on", lambda device: Problem(
        batch=1, num_heads=1, seqlen_q=8, head_dim=8, dtype=torch.float32))  # fmt: skip
    (record,) = profile.measure(Lab(CPU, backends=("stepwise",)))
    assert record["verdict"] == "failed"
    assert "ncu, Nsight Compute's command, is not on the PATH" in record["reasons"][0]


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("dkdv_kernel", "dkdv"),
        (
            "kernel_cutlass_kernel_flash_rosettacute_implbackwardOnePass_object_at__tensor_0",
            "OnePass",
        ),
        ("kernel_cutlass_kernel_flash_rosettacute_implforwardForward_object_at__0", "Forward"),
        ("main_kernel", "main"),
    ],
)
def test_kernels_are_called_what_their_source_calls_them(kernel, short):
    assert profile_page.short_name(kernel) == short


def test_a_part_says_when_where_and_for_how_long_it_was_measured(monkeypatch):
    monkeypatch.setattr(roofline, "measure", lambda lab: [{"a": 1}])
    part = as_part("roofline", Lab(CPU))
    assert part["records"] == [{"a": 1}]
    assert part["seconds"] >= 0
    assert "torch" in part["machine_info"]
    json.dumps(part)


def test_progress_is_a_line_where_there_is_no_terminal(capsys):
    lab = Lab(CPU)
    assert list(lab.track([1, 2], "things")) == [1, 2]
    assert list(lab.track(iter([3]), "more", total=1)) == [3]
    assert "things: 2 in" in capsys.readouterr().out


def test_what_failed_to_compile_is_not_run(stepwise, lab, monkeypatch):
    hung = Compiled(None, "took longer than 60 s")
    for module in (ladder, sweep):
        monkeypatch.setattr(module, "compile_all", lambda jobs, lab: dict.fromkeys(jobs, hung))
    monkeypatch.setattr(
        Stepwise,
        "forward",
        lambda self, *arguments: (
            self.reference.forward(*arguments) if self.variant is None else pytest.fail("it ran")
        ),
    )
    climbed = [r for r in ladder.measure(lab) if r.get("kind") == "speed" and r["rung"] == "tiles"]
    sizes = [r for r in sweep.measure(lab) if r["kind"] == "size" and r["verdict"] != "skipped"]
    assert {r["verdict"] for r in climbed + sizes} == {"failed"}
    assert {*climbed[0]["reasons"], *sizes[0]["reasons"]} == {"took longer than 60 s"}


def test_a_repetition_says_how_far_medians_moved(tmp_path):
    def record(name, n, ms):
        return race_record(name, "forward") | {
            "seqlen_q": n, "problem": f"n{n}", "ms": ms, "ms_q25": 0.99 * ms, "ms_q75": 1.01 * ms,
        }  # fmt: skip

    raced = [record("triton", n, 1.0) for n in range(20)] + [record("cute", 0, 2.0)]
    again = [record("triton", n, 1.005) for n in range(19)] + [record("triton", 19, 1.2)]
    again += [record("cute", 0, 1.9), record("cute", 77, 5.0)]
    card = {"machine_info": {}, "benchmarks": [{"extra_info": r} for r in raced]}
    text = rendered(repeat.sections({"records": again}, card), tmp_path)
    assert "Of 21 medians of the race" in text
    assert "half moved by 0.5 % or less, 95 % by 5.0 % or less, the furthest by 20.0 %" in text
    assert "19 of them lie between the quartiles" in text
    assert "| `cute` | 1 | 0.950 | 0.950 | 0.950 |" in text
    nothing = rendered(repeat.sections({"records": []}, card), tmp_path)
    assert "too few heats in common" in nothing


def test_a_repetition_races_what_the_race_does(monkeypatch):
    monkeypatch.setattr(repeat, "ROUNDS", 2)
    monkeypatch.setattr(repeat, "RIVALS", ["sdpa-math"])
    records = repeat.measure(Lab(CPU, backends=("reference",)))
    assert {(r["backend"], r["direction"]) for r in records} == {
        (name, direction) for name in ("reference", "sdpa-math") for direction in repeat.DIRECTIONS
    }
    assert all(r["rel_error"] < 1e-2 for r in records)

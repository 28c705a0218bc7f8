"""The suite judged: it must notice planted faults, and nothing in it may vanish unnoticed."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

import hypothesis
import pytest
import torch

import flash_rosetta
from flash_rosetta import Problem, Unsupported
from flash_rosetta.conformance import (
    capabilities,
    cases,
    checks,
    kill_table,
    lost_device,
    test_laws,
)
from flash_rosetta.conformance.kill_table import Kill
from flash_rosetta.conformance.mutants import MUTANTS, forward_on
from flash_rosetta.conformance.nested import registered, run_suite
from flash_rosetta.conformance.planting import UNBROKEN, Edit, InterfaceMutant, Mutant, Test
from flash_rosetta.conformance.poison import poisoned_memory
from flash_rosetta.conformance.tilemap import tile_map
from flash_rosetta.reference import backend as reference

FORWARD = ["test_forward.py"]
SMALL = ["-k", "tiny"]


@pytest.fixture(scope="module")
def kills() -> dict[str, Kill]:
    return {kill.mutant.name: kill for kill in kill_table.hunt()}


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught_by_its_test(kills: dict[str, Kill], mutant: Mutant):
    if reason := mutant.why_not_hunted("cpu"):
        pytest.skip(reason)
    assert kills[mutant.name].is_clean, kill_table.kill_table([kills[mutant.name]])


def test_the_catalogue_is_whole():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.stands_for and mutant.caught_by for mutant in MUTANTS)
    hunted = {type(m) for m in MUTANTS if not m.why_not_hunted("cpu")}
    assert {Mutant, InterfaceMutant} <= hunted


PLAIN_TOLERANCE = 0.07
"""Absolute, on o and gradients whose largest elements are near 4; some suites allow 0.9."""


class Plain:
    """A long causal problem, and the largest absolute errors of mutants on it."""

    def __init__(self) -> None:
        self.problem = Problem(batch=1, num_heads=1, seqlen_q=1024, head_dim=32, is_causal=True)
        self.x = self.problem.inputs()._replace(dlse=torch.zeros(1, 1, 1024))
        self.want = checks.expected(self.x, self.problem, gradients=("dq", "dk", "dv"))

    @lru_cache  # noqa: B019
    def outputs(self, mutant: Mutant) -> checks.Outputs:
        o, lse = mutant.forward(*self.x[:3], self.problem)
        grads = mutant.backward(self.x.do, None, *self.x[:3], o, lse, self.problem)
        return checks.Outputs(o, lse, *grads)

    def largest_error(self, mutant: Mutant, name: str) -> float:
        return float((self.outputs(mutant)[name].double() - self.want[name]).abs().max())


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.passes_max_abs], ids=lambda m: m.name)
def test_a_plain_tolerance_lets_it_through(plain: Plain, mutant: Mutant, name: str):
    """Which is why errors are judged row by row: the largest of a tensor hides them."""
    assert plain.largest_error(mutant, name) < PLAIN_TOLERANCE


def test_a_fault_in_the_interface_goes_when_it_is_taken_out():
    mutant = named("autocast_ignored")
    q = torch.zeros(1, 1, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with mutant.planted():
            assert flash_rosetta.attention(q, q, q, backend="reference").dtype == torch.float32
        assert flash_rosetta.attention(q, q, q, backend="reference").dtype == torch.bfloat16


LAWS = {
    "test_permuting_keys_changes_nothing": "no_rescale",
    "test_shifting_scores_shifts_lse_alone": "base_2_lse",
    "test_o_is_linear_in_v": "o_clamped",
    "test_later_keys_do_not_matter": "one_future_key_in_late_rows",
    "test_groups_equal_heads_repeated": "kv_head_by_modulo",
    "test_parts_merged_by_lse_equal_the_whole": "lse_in_low_precision",
    "test_the_gradient_of_a_sum_in_v_counts_rows": "p_unmasked_in_the_backward",
}
"""Law -> a planted fault that breaks it."""

CLAMPED = Mutant(
    "o_clamped", "nothing", None, [Edit("o_tile = (acc / l)", "o_tile = (acc / l).clamp(-1, 1)")]
)


def named(name: str) -> Mutant:
    return next(mutant for mutant in (*MUTANTS, CLAMPED) if mutant.name == name)


@pytest.mark.thorough
def test_every_law_is_broken_by_a_fault():
    usual = hypothesis.settings.default
    hypothesis.settings.register_profile("hunt", phases=[hypothesis.Phase.generate])  # no shrinking
    hypothesis.settings.load_profile("hunt")
    try:
        kills = kill_table.hunt(
            [replace(named(n), caught_by=Test("test_laws.py", law)) for law, n in LAWS.items()]
        )
    finally:
        hypothesis.settings.register_profile("usual", usual)
        hypothesis.settings.load_profile("usual")
    assert all(kill.is_clean for kill in kills), kill_table.kill_table(kills)
    assert set(LAWS) == {name for name in vars(test_laws) if name.startswith("test_")}


def test_an_edit_that_no_longer_fits_is_an_error():
    edit = Edit("no such line", "")
    with pytest.raises(ValueError, match="must occur 1 times"):
        _ = Mutant("misfit", "nothing", None, [edit])._module


def test_a_mutant_that_crashes_is_not_caught():
    edit = Edit("return o, lse", "return o, lse, no_such_name")
    (kill,) = kill_table.hunt([Mutant("crash", "nothing", forward_on("tiny"), [edit])])
    assert "CRASHES" in kill.verdict
    assert not kill.is_clean
    assert kill.failures_unbroken == 0


def test_a_survivor_shows(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    unharmed = Mutant("unharmed", "nothing", forward_on("tiny"))
    monkeypatch.setattr(kill_table, "hunt", lambda device: [Kill(unharmed, 9, 0, 0, 9, 0)])
    assert kill_table.main() == 1
    assert "SURVIVES" in capsys.readouterr().out
    assert "NO PROOF" in Kill(unharmed, 9, 9, 0, 8, 1).verdict
    assert "NO PROOF" in Kill(unharmed, 9, 9, 0, 0, 0).verdict


@dataclass
class Named:
    """The reference under another name, with an attribute that the suite reads."""

    name: str
    expected_failures: dict[str, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    capabilities: set[str] | None = None

    def why_not(self, problem: Problem) -> list[str]:
        return self.refusals

    forward = reference.forward
    backward = reference.backward


def test_a_backend_without_a_single_test_run_is_an_error():
    status, printed = run_suite([Named("shy", refusals=["never", "ever"])], FORWARD, *SMALL)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "'shy' was to be tested, but no test of it was executed" in printed
    assert "refused: never; ever" in printed
    status, printed = run_suite([Named("keen")], FORWARD, *SMALL)
    assert status == pytest.ExitCode.OK
    assert "ERROR" not in printed


def test_a_backend_deselected_away_is_an_error():
    status, printed = run_suite([Named("keen")], FORWARD, "-k", "no_such_test")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "no test of it was executed" in printed


def test_an_unknown_backend_is_a_usage_error():
    status, _ = run_suite([], FORWARD, "--backend", "fastest")
    assert status == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("expected", "status", "words"),
    [
        ({"test_o_and_lse": "it is right"}, pytest.ExitCode.TESTS_FAILED, "XPASS(strict)"),
        ({"test_no_such": "gone"}, pytest.ExitCode.USAGE_ERROR, ""),
        ({"test_o_and_lse[tiny-nothing]": "gone"}, pytest.ExitCode.USAGE_ERROR, ""),
        ({"test_dq_dk_dv": "not in this file"}, pytest.ExitCode.OK, "passed"),
    ],
)
def test_an_expected_failure_must_exist_and_fail(
    expected: dict[str, str], status: pytest.ExitCode, words: str
):
    got, printed = run_suite([Named("hopeful", expected)], FORWARD, *SMALL)
    assert got == status, printed
    assert words in printed


def test_an_expected_failure_that_fails_is_no_failure():
    broken = named("base_2_lse")

    class Known(Mutant):
        expected_failures = {"test_o_and_lse": "lse is in base 2"}  # noqa: RUF012

    known = Known("known", "nothing", None, broken.edits)
    status, printed = run_suite([known], FORWARD, *SMALL)
    assert status == pytest.ExitCode.OK, printed
    assert "xfailed" in printed


EVERY = set(capabilities.OF_A_PROBLEM)


@pytest.mark.parametrize(
    ("declared", "refusals", "words"),
    [
        (None, [], None),
        (EVERY, [], None),
        (EVERY - {"backward"}, [], "'backward' is accepted and not declared"),
        (EVERY | {"sorcery"}, [], "'sorcery' is no capability"),
        (EVERY, ["never"], "'fp16' is declared and refused: never"),
    ],
)
def test_a_declared_capability_is_held_to(
    declared: set[str] | None, refusals: list[str], words: str | None
):
    backend = Named("keen", refusals=refusals, capabilities=declared)
    with registered([backend]):
        found = capabilities.contradictions("keen", cases.CPU, torch.device("cpu"))
    assert bool(found) == (words is not None)
    assert words is None or any(words in line for line in found)
    status, _ = run_suite([backend], FORWARD, *SMALL)
    is_refused = status == pytest.ExitCode.USAGE_ERROR
    assert is_refused == (words is not None)


@pytest.mark.parametrize("name", sorted(EVERY))
def test_an_example_asks_for_its_capability(name: str):
    problem = replace(cases.CPU.problem(5), **capabilities.OF_A_PROBLEM[name].example)
    assert name in capabilities.asked_by(problem)


def test_reports_for_machines(tmp_path: Path):
    as_json, as_xml = tmp_path / "run.json", tmp_path / "run.xml"
    options = [*SMALL, "--json", str(as_json), "--junitxml", str(as_xml)]
    broken = named("base_2_lse")
    status, printed = run_suite([broken, Named("keen")], FORWARD, *options)
    assert status == pytest.ExitCode.TESTS_FAILED
    report = json.loads(as_json.read_text())
    assert report["exit_status"] == status
    assert report["machine"]["torch"] == torch.__version__
    assert report["backends"]["keen"]["failures"] == []
    tally = report["backends"]["base_2_lse"]
    assert tally["outcomes"]["failed"] == len(tally["failures"]) > 0
    assert "lse: absolute error" in tally["failures"][0]["message"]
    by_capability = tally["by_capability"]
    assert sum(by_capability["bf16"].values()) == sum(tally["outcomes"].values())
    assert re.search(r"capability: .* base_2_lse +keen\n", printed)
    in_xml = {p.get("value") for p in ElementTree.parse(as_xml).findall(".//testcase//property")}
    assert {"base_2_lse", "keen"} <= in_xml


def test_one_problem_alone_runs_what_takes_a_problem():
    problem = "b1_h2_q7_k9_d24_fp16_causal-br"
    files = ["test_forward.py", "test_backward.py", "test_properties.py"]
    status, printed = run_suite([Named("keen")], files, "--problem", problem, "-v")
    assert status == pytest.ExitCode.OK
    assert f"test_o_and_lse[keen-asked-{problem}]" in printed
    assert "2 passed" in printed


def test_quick_leaves_cases_out():
    counts = [
        len(run_suite([Named("keen")], FORWARD, "--collect-only", "-q", *options)[1].splitlines())
        for options in ([], ["--quick"])
    ]
    assert 10 < counts[1] < counts[0] / 2


def test_quick_is_about_backends_alone():
    files = ["test_contract.py", "test_reference.py", "test_packaging.py"]
    _, printed = run_suite([Named("keen")], files, "--collect-only", "-q", "--quick")
    assert "test_contract.py" in printed
    assert "test_reference.py" not in printed
    assert "test_packaging.py" not in printed


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost_device, "device_error", lambda device: "misaligned address")
    status, printed = run_suite([named("base_2_lse")], FORWARD, "-k", "tiny")
    assert status == pytest.ExitCode.INTERRUPTED
    assert "1 failed" in printed
    assert "lost the device (misaligned address)" in printed
    assert "--deselect 'test_forward.py::test_o_and_lse[base_2_lse-" in printed


def test_a_device_is_lost_when_cuda_says_so(monkeypatch: pytest.MonkeyPatch):
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: misaligned address\nSearch for ...")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert lost_device.device_error(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert lost_device.device_error(torch.device("cuda")) == "CUDA error: misaligned address"
    assert lost_device.device_error(torch.device("cpu")) is None


def test_a_gpu_that_is_not_there_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _ = run_suite([Named("keen")], FORWARD, "--collect-only", device="cuda")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda needs a GPU" in capsys.readouterr().err
    assert kill_table.main(["--device", "cuda"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_a_failure_that_leaves_the_device_alone_does_not_end_the_run():
    status, printed = run_suite([named("base_2_lse")], FORWARD, "-k", "tiny")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" not in printed


def test_a_failure_says_what_where_and_how_to_see_it_again():
    status, printed = run_suite(
        [named("base_2_lse")], FORWARD, "-k", "tiny and q5_k5", "--tb=short"
    )
    assert status == pytest.ExitCode.TESTS_FAILED
    problem = "b2_h2_q5_k5_d16_bf16_causal-br"
    for words in (
        f"base_2_lse is wrong on tiny-{problem}",
        "lse: absolute error",
        "over the budget",
        "worst at [",
        "want",
        "wrong in 4 of 4 (batch, head)",
        f"flash-rosetta conformance --backend base_2_lse --problem {problem} -k test_o_and_lse",
    ):
        assert words in printed, f"the failure does not say {words!r}:\n{printed}"


def test_a_hang_ends_the_run():
    program = (
        "import time\n"
        "from flash_rosetta.conformance.watchdog import Watchdog\n"
        "with Watchdog(grace_s=0.2).guard('the test', 0.1): time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert "the test hangs" in done.stderr
    assert "time.sleep(60)" in done.stderr or "line 3" in done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_fresh_memory_is_poisoned(device: torch.device, dtype: torch.dtype):
    like = torch.zeros(3, 4, dtype=dtype, device=device)
    plain = torch.empty
    with poisoned_memory(device):
        fresh = (
            torch.empty(3, 4, dtype=dtype, device=device),
            torch.empty_like(like),
            torch.empty_strided((2, 2), (8, 1), dtype=dtype, device=device),
            like.new_empty(3),
            like.new_empty_strided((2, 2), (8, 1)),
        )
    assert all(t.isnan().all() for t in fresh)
    assert not like.any()
    assert torch.empty is plain


def test_the_map_shows_the_wrong_tiles():
    want = torch.ones(1, 2, 200, 96, dtype=torch.float64)
    got = want.clone()
    got[0, 1, 130, 90] = 2
    got[0, 1, 0, 0] = torch.nan
    text = tile_map("o", got, want, 0.01)
    assert "wrong in 1 of 2 (batch, head): [0, 1]" in text
    assert text.splitlines()[1:] == ["    ?...", "    ..x."]


LANES = (cases.GPU, cases.CPU, cases.INTERPRETER)


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_cases_are_distinct_and_read_back_from_their_ids(lane: cases.Lane):
    listed = cases.case_list(lane)
    assert len({case.id for case in listed}) == len(listed)
    for case in listed:
        assert Problem.parse(case.problem.id) == case.problem


def test_every_purpose_is_met_in_every_lane():
    on_gpu = {case.purpose for case in cases.case_list(cases.GPU)}
    on_cpu = {case.purpose for case in cases.case_list(cases.CPU)}
    interpreted = {case.purpose for case in cases.case_list(cases.INTERPRETER)}
    assert on_gpu == on_cpu
    assert on_gpu - interpreted == {"long", "many"}


def test_the_gpu_lane_has_what_the_contract_demands():
    """What must not silently be dropped from the list."""
    listed = cases.case_list(cases.GPU)
    problems = [case.problem for case in listed]
    square = {(p.seqlen_q, p.head_dim, p.is_causal) for p in problems if p.seqlen_q == p.seqlen_k}
    for n in (63, 64, 65, 127, 128, 129, 255, 256, 257):
        assert {(n, d, c) for d in (64, 128) for c in (False, True)} <= square
    assert {1, 8, 16, 32, 33, 40, 64, 72, 80, 96, 104, 128, 160, 192, 256} <= {
        p.head_dim for p in problems
    }
    assert {1, 2, 3, 4, 8} <= {p.group_size for p in problems}
    assert any(p.num_kv_heads == 1 and p.num_heads > 2 for p in problems)
    for alignment in ("top_left", "bottom_right"):
        causal = [p for p in problems if p.is_causal and p.causal_alignment == alignment]
        assert any(p.seqlen_q < p.seqlen_k for p in causal)
        assert any(p.seqlen_q > p.seqlen_k for p in causal)
    assert any(p.seqlen_q % 128 == 64 and p.seqlen_q > 64 for p in problems)
    assert any(p.seqlen_q * 4 % 16 for p in problems if p.seqlen_q > 128)
    assert {(p.dtype, p.allow_tf32) for p in problems} >= {
        (cases.FP16, False),
        (cases.BF16, False),
        (cases.FP32, False),
        (cases.FP32, True),
    }
    assert any(p.batch * p.num_heads > 65535 for p in problems)
    assert {case.layout for case in listed} == set(cases.LAYOUTS)
    assert {case.values for case in listed} == set(cases.VALUES)


@pytest.mark.parametrize(
    ("name", "is_dense", "outcome"),
    [
        ("toy:64x64w4s2", False, pytest.skip.Exception),
        ("toy:64x64w4s2", True, Unsupported),
        ("toy:skip", False, Unsupported),
        ("toy", False, Unsupported),
    ],
)
def test_only_tile_variants_may_refuse_strides(monkeypatch, name, is_dense, outcome):
    def refuse(q, k, v, *, backend):
        raise Unsupported(backend, ["strides"], checks.problem_of(q, k, v))

    monkeypatch.setattr(checks.registry, "why_not", lambda *_: [])
    monkeypatch.setattr(flash_rosetta, "attention", refuse)
    q = torch.randn(1, 1, 4, 16)[..., :: 1 if is_dense else 2]
    with pytest.raises(outcome, match="strides"):
        checks.attention(name, q, q, q)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts_keep_the_numbers(layout: str):
    """Except the expanded ones, whose point is that numbers repeat."""
    problem = Problem(batch=2, num_heads=2, seqlen_q=5, head_dim=8, dtype=torch.float32)
    x = problem.inputs()
    arranged = cases.LAYOUTS[layout](x)
    for name, t in arranged._asdict().items():
        assert t.shape == getattr(x, name).shape
        if "expanded" not in layout:
            assert torch.equal(t, getattr(x, name))
    assert any(
        t.storage_offset() > 0 and t.untyped_storage().nbytes() > t.numel() * t.itemsize
        for t in arranged
    )


def test_the_unbroken_mutant_is_the_reference():
    problem = Problem(batch=1, num_heads=2, seqlen_q=70, head_dim=8, dtype=torch.float32)
    x = problem.inputs()
    checks.compare("unbroken", checks.Outputs(*UNBROKEN.forward(*x[:3], problem)), x, problem)

"""What is made of results: files, pages, the README, comparisons; and that a browser shows them."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flash_rosetta.bench import card as cards
from flash_rosetta.bench import compare, measure, part, parts, race_page, readme, report_command
from flash_rosetta.bench.chapters import chapters, reports
from flash_rosetta.bench.heat import figures
from flash_rosetta.bench.page import Plot, Section, Table, Text
from flash_rosetta.bench.workloads import HIDDEN, TOKENS, flops
from flash_rosetta.problem import Problem

RATES = {
    "cute": 620.0,
    "triton": 500.0,
    "reference": 3.0,
    "sdpa-default": 600.0,
    "sdpa-cudnn": 600.0,
    "sdpa-flash": 330.0,
    "flash-attn-4": 640.0,
}


def a_record(problem, workload, direction, name, rng, factor=1.0):
    """pytest-benchmark's record of one contender in one heat, its rounds 1 % apart."""
    rate = RATES[name] * problem.seqlen_q / (problem.seqlen_q + 300) * factor
    seconds = flops(problem, direction) / (rate * 1e12) * np.exp(rng.normal(0, 0.01, 20))
    sensed = {"sm_clock_mhz": 1755.0, "temperature_c": 41.0, "power_w": 402.0}
    info = {
        "backend": name, "direction": direction, "workload": workload, "source": "invented",
        "problem": problem.id, "batch": problem.batch, "num_heads": problem.num_heads,
        "num_kv_heads": problem.num_kv_heads, "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k, "head_dim": problem.head_dim, "head_dim_v": problem.head_dim,
        "is_causal": problem.is_causal, "dtype": "bfloat16", "flops": flops(problem, direction),
        "inputs_mb": 201.3, "peak_mb": 100.65, "compile_s": 1.2, "max_error": 1e-3,
        "rel_error": 2e-3, "row_error": 3e-3, "host_us": 31.0, "host_grad_us": 44.0,
        "before": sensed, "after": sensed | {"sm_clock_mhz": 1980.0},
    }  # fmt: skip
    if name == "sdpa-default":
        info["ran"] = "sdpa-cudnn"
    info |= figures(list(seconds), info["flops"], torch.device("cuda"))
    return {"name": f"{direction}-{problem.id}-{name}", "extra_info": info,
            "stats": {"data": list(seconds)}}  # fmt: skip


def a_card(seed=0, factors=None, **machine_info):
    """A race of invented numbers; `factors` makes contenders faster."""
    rng = np.random.default_rng(seed)
    problems = {
        "grid": [
            Problem(batch=TOKENS // n, num_heads=HIDDEN // d, seqlen_q=n, head_dim=d, is_causal=c)
            for d in (64, 128, 256)
            for c in (False, True)
            for n in (512, 2048, 8192, 16384)
        ],
        "gpt2": [Problem(batch=16, num_heads=12, seqlen_q=1024, head_dim=64, is_causal=True)],
        "captured-minilm-l6-layer0-long": [
            Problem(batch=1, num_heads=12, seqlen_q=102, head_dim=32)
        ],
    }
    benchmarks = [
        a_record(problem, workload, direction, name, rng, (factors or {}).get(name, 1.0))
        for workload, posed in problems.items()
        for problem in posed
        for direction in ("forward", "backward")
        for name in RATES
        if name != "reference" or problem.seqlen_q <= 512
    ]
    machine = {"card": "Imaginary 9000", "matmul_tflops": 700.0, "torch": "2.13.0",
               "commit": "0123456789abcdef", "sm_clock_mhz": 1980.0}  # fmt: skip
    wrong = {key: benchmarks[0]["extra_info"][key] for key in ("direction", "workload", "problem")}
    return {
        "machine_info": machine | machine_info,
        "datetime": "2030-01-02T03:04:05+00:00",
        "no_number": [
            wrong | {"backend": "tilelang", "verdict": "wrong", "reasons": ["o: row error 0.1"]}
        ],
        "benchmarks": benchmarks,
        "parts": {},
    }


@pytest.fixture
def fake_parts(monkeypatch):
    """Two parts beside the race, one with all that a page can hold, one that is never measured."""

    class Module:
        @staticmethod
        def measure(lab):
            return [{"x": 1}]

        @staticmethod
        def sections(part, card):
            from matplotlib.figure import Figure

            def draw():
                figure = Figure()
                figure.subplots().imshow([[part["records"][0]["x"], 2]])
                return figure

            plot = Plot("heat", "an <image>", draw, "what it `shows`")
            table = Table(["a", "b"], [["**1 | 2**", "<3>"]], caption="a & b")
            return [
                Section("Found & <shown>", (Text("some `code` & **bold**"), table, plot)),
                Section("Folded away", (Text("at the end"),), is_folded=True),
            ]

    fakes = {"alpha": "the first of them", "omega": "the last of them"}
    monkeypatch.setattr(parts, "PARTS", fakes)
    monkeypatch.setattr("flash_rosetta.bench.chapters.PARTS", fakes)
    monkeypatch.setattr("flash_rosetta.bench.chapters.load", lambda name: Module)
    return {
        "alpha": {
            "datetime": "2030-01-03T03:04:05+00:00",
            "seconds": 12.3,
            "machine_info": {"commit": "fedcba9876543210-dirty"},
            "records": [{"x": 1}],
        }
    }


# Files of results


def test_a_card_is_written_a_record_a_line_and_read_back(tmp_path, fake_parts):
    card = a_card() | {"parts": fake_parts}
    path = tmp_path / "new" / "card.json"
    cards.write(card, path)
    assert cards.read(path) == card
    lines = path.read_text().splitlines()
    assert sum('"extra_info"' in line for line in lines) == len(card["benchmarks"])
    assert '    {"x": 1}' in lines
    assert list(path.parent.iterdir()) == [path]
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"card.json must hold machine_info"):
        cards.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"card.json must hold the JSON of a race"):
        cards.read(path)


@pytest.mark.parametrize(("name", "slug"), [("NVIDIA H200", "nvidia-h200"), (None, "cpu")])
def test_a_card_has_a_name_fit_for_a_file(name, slug):
    assert cards.slug(name) == slug


# Measuring


def test_measuring_keeps_what_it_has_after_each_step(tmp_path, monkeypatch):
    path, seen = tmp_path / "card.json", []
    card = cards.empty({"card": None}, "2030-01-01")

    def take(step):
        seen.append(json.loads(path.read_text())["parts"] if path.exists() else None)
        if step == "race":
            return {key: value for key, value in a_card().items() if key != "parts"}
        if step == "ladder":
            return {"records": [], "error": "ValueError: no rungs"}
        if step == "training":
            raise KeyboardInterrupt
        return {"records": [{"step": step}]}

    failed = measure.measure(card, ["startup", "race", "ladder", "sweep"], take, path)
    assert failed == {"ladder": "ValueError: no rungs"}
    with pytest.raises(KeyboardInterrupt):
        measure.measure(card, ["training"], take, path)
    assert [list(parts or ()) for parts in seen] == [
        [], ["startup"], ["startup"], ["startup", "ladder"], ["startup", "ladder", "sweep"],
    ]  # fmt: skip
    held = cards.read(path)
    assert held["benchmarks"]
    assert held["parts"]["sweep"] == {"records": [{"step": "sweep"}]}
    assert held["parts"]["ladder"]["error"] == "ValueError: no rungs"


def test_resuming_takes_what_is_missing_failed_or_old():
    def held(commit, **more):
        return {"machine_info": {"commit": commit}, "records": []} | more

    card = a_card(commit="abc") | {
        "parts": {
            "startup": held("abc"),
            "ladder": held("old"),
            "sweep": held("abc", error="ValueError: no"),
        }
    }
    steps = list(measure.STEPS)
    left = [step for step in steps if step not in ("race", "startup")]
    assert measure.missing(card, steps, "abc") == left
    assert measure.missing(card | {"benchmarks": []}, steps, "abc") == ["race", *left]
    assert measure.missing(card | {"error": "died"}, steps, "abc") == ["race", *left]
    assert measure.missing(card, ["startup", "ladder"], "abc") == ["ladder"]
    for unknown in (None, "abc-dirty"):
        card["machine_info"]["commit"] = unknown
        assert measure.missing(card, ["race"], unknown) == ["race"]


def test_the_command_measures_what_is_asked_for_and_makes_the_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    path = tmp_path / "card.json"
    monkeypatch.setattr(measure.machine, "describe", lambda: {"card": "Imaginary 9000",
                                                              "commit": "abc"})  # fmt: skip
    taken = []

    def take(step, has_gpu, arguments):
        taken.append((step, has_gpu))
        return {key: value for key, value in a_card(commit="abc").items() if key != "parts"}

    monkeypatch.setattr(measure, "_in_a_process", take)
    arguments = ["--out", str(path), "--only", "race"]
    assert measure.main(arguments) == 1  # because of TileLang
    assert taken == [("race", True)]
    captured = capsys.readouterr()
    assert "[1/1] race: every contender" in captured.out
    assert "the race has 1 backends that were wrong" in captured.err
    assert "Imaginary 9000" in path.with_suffix(".html").read_text()
    assert measure.main([*arguments, "--resume"]) == 1
    assert len(taken) == 1
    cards.write(a_card(card="Another"), path)
    with pytest.raises(SystemExit):
        measure.main(arguments)
    assert "holds results of Another, this is Imaginary 9000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--save"], "--save needs a GPU"),
        (["--save", "--out", "x"], "not allowed with argument"),
        (["--only", "sprint"], "invalid choice: 'sprint'"),
    ],
)
def test_measure_refuses_what_it_cannot_do(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr(measure.machine, "describe", lambda: {"card": None, "commit": "abc"})
    with pytest.raises(SystemExit) as stop:
        measure.main(arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_step_runs_in_a_process_and_an_error_of_its_own_is_kept(tmp_path):
    arguments = measure._parser().parse_args(["--quick", "--backend", "reference"])
    taken = measure._in_a_process("startup", has_gpu=False, arguments=arguments)
    assert [record["backend"] for record in taken["records"]] == ["reference"]
    assert "error" not in taken
    failed = measure._in_a_process("no_such_part", has_gpu=False, arguments=arguments)
    assert failed["error"].startswith("ModuleNotFoundError: No module named")
    assert failed["records"] == []
    assert "commit" in failed["machine_info"]
    assert part.main(["no_such_part", str(tmp_path / "part.json")]) == 1
    arguments = measure._parser().parse_args(["--rounds", "1"])
    died = measure._in_a_process("race", has_gpu=False, arguments=arguments)
    assert died["error"] == "its process ended with status 2"
    assert died["benchmarks"] == []


# The headline and the race's sections


def test_the_headline_is_the_geometric_mean_of_sixteen_heats():
    table, plot = race_page.headline(a_card())
    assert table.header == [
        "backend", "forward / sdpa-cudnn", "forward / sdpa-flash", "forward / flash-attn-4",
        "backward / sdpa-cudnn", "backward / sdpa-flash", "backward / flash-attn-4",
    ]  # fmt: skip
    assert [row[0] for row in table.rows] == ["`triton`", "`cute`"]
    triton, cute = ([float(cell.strip("*")) for cell in row[1:]] for row in table.rows)
    expected = [500 / 600, 500 / 330, 500 / 640]
    assert triton == pytest.approx(expected * 2, rel=5e-3)
    assert cute == pytest.approx([620 / 500 * x for x in expected] * 2, rel=5e-3)
    assert all(cell.startswith("**") for cell in table.rows[1][1:])
    assert "over 16 heats, bf16, head_dim 64 and 128, 512 to 16384 tokens" in table.caption
    assert isinstance(plot, Plot)


def test_the_headline_says_when_a_backend_lacks_heats():
    card = a_card()
    lost = next(
        b for b in card["benchmarks"] if b["extra_info"]["backend"] == "cute"
        and b["extra_info"]["workload"] == "grid"
    )  # fmt: skip
    card["benchmarks"].remove(lost)
    cells = race_page.headline(card)[0].rows[1]
    assert "(15 heats)" in cells[1]
    assert "heats" not in cells[4]
    assert race_page.headline(a_card() | {"benchmarks": []}) == []


def test_each_heat_and_each_figure_is_shown():
    card = a_card()
    shown = {s.title: s for s in (*race_page.sections(card), *race_page.details(card))}
    grid = shown["forward, standard normal inputs, 16k tokens a call: TFLOP/s, and the share of "
                 "sdpa-cudnn"].blocks[0]  # fmt: skip
    assert len(grid.rows) == 24
    assert sum("**" in cell for cell in grid.rows[-1]) == 1
    records = cards.records(card)
    for direction in ("forward", "backward"):
        every = shown[f"{direction}: every figure"].blocks[0]
        assert len(every.rows) == sum(r["direction"] == direction for r in records)
        assert {len(row) for row in every.rows} == {len(every.header)}
    assert shown["Without a number"].blocks[1].rows == [
        ["`tilelang`", "forward", f"grid `{records[0]['problem']}`", "wrong", "o: row error 0.1"]
    ]
    exact = " ".join(block.text for block in shown["How exact the figures are"].blocks)
    assert re.search(r"apart by 1\.\d % of its median in half", exact)
    assert "SM clock 1755 to 1980 MHz" in exact
    assert shown["Memory"].blocks[1].rows[0][:3] == ["forward, d64", "0.50", "0.50"]
    assert shown["Host time"].blocks[1].rows[1][:2] == ["gradients wanted", "44"]


def test_a_card_without_a_race_or_parts_says_so(fake_parts):
    named = {c.name: c for c in chapters(a_card() | {"parts": fake_parts, "benchmarks": []})}
    assert named["race"].note == named["omega"].note == "Not measured on this card."
    assert named["alpha"].note == "Measured on 2030-01-03 at commit `fedcba987654-dirty` in 12 s."
    broken = fake_parts["alpha"] | {"error": "ValueError: no"}
    (_, alpha, _) = chapters(a_card() | {"parts": {"alpha": broken}})
    assert alpha.note.endswith("failed: `ValueError: no`")
    assert alpha.sections == ()
    (race, *_) = chapters(a_card() | {"error": "it died"})
    assert race.note.endswith("failed: `it died`")


def test_cards_of_one_name_have_anchors_of_their_own():
    assert [r.anchor for r in reports([a_card(), a_card(), a_card(card="B 1")])] == [
        "imaginary-9000", "imaginary-9000-2", "b-1",
    ]  # fmt: skip


# Pages


@pytest.fixture
def shown(tmp_path, fake_parts):
    """A file of results and the page made of it, with the parts of `fake_parts`."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    path, page = tmp_path / "card.json", tmp_path / "pages" / "card.html"
    cards.write(a_card() | {"parts": fake_parts}, path)
    assert report_command.main([str(path), "--html", str(page)]) == 0
    return path, page


def test_the_page_has_all_and_needs_nothing(shown):
    path, page = shown
    text = page.read_text(encoding="utf-8")
    for expected in (
        "<h4>Found &amp; &lt;shown&gt;</h4>",
        "<p>some <code>code</code> &amp; <strong>bold</strong></p>",
        '<p class="caption">a &amp; b</p>',
        "The first of them.",
        '<th scope="row"><strong>1 | 2</strong></th><td>&lt;3&gt;</td>',
        'aria-label="an &lt;image&gt;"',
        "<figcaption>what it <code>shows</code></figcaption>",
        "<summary>Folded away</summary>",
        "Not measured on this card.",
        f'content="card.json sha256:{cards.digest(path)}"',
        "<dt>SM clock</dt><dd>1980 MHz</dd>",
    ):
        assert expected in text
    assert text.count("<svg") == text.count("</svg>") == 3
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "<script" not in text
    assert "url(http" not in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    inside = re.findall(r'(?:href="#|url\(#)([^")]*)', text)
    assert inside
    assert not set(inside) - set(ids)


def test_the_page_is_the_same_every_time(shown):
    path, page = shown
    again = page.with_name("again.html")
    assert report_command.main([str(path), "--html", str(again)]) == 0
    assert again.read_bytes() == page.read_bytes()


def test_several_cards_stand_on_one_page_and_in_one_text(tmp_path, shown, capsys):
    path, _ = shown
    other = tmp_path / "other.json"
    cards.write(a_card(card="Another 1"), other)
    folder = tmp_path / "plots"
    page, text = tmp_path / "both.html", tmp_path / "both.md"
    arguments = ["--html", page, "--markdown", text, "--plots", folder]
    assert report_command.main([str(a) for a in (path, other, *arguments)]) == 0
    assert "<title>flash-rosetta: Imaginary 9000, Another 1</title>" in page.read_text()
    assert {p.name for p in folder.iterdir()} == {
        "imaginary-9000-headline.png", "imaginary-9000-grid.png", "imaginary-9000-heat.png",
        "another-1-headline.png", "another-1-grid.png",
    }  # fmt: skip
    written = text.read_text()
    assert f"![an <image>]({folder}/imaginary-9000-heat.png)" in written
    assert "# Another 1\n" in written
    assert "| **1 \\| 2** | <3> |" in written
    assert report_command.main([str(path), "--markdown", "-"]) == 0
    assert "![" not in capsys.readouterr().out


def test_the_report_command_names_files_that_it_cannot_read(tmp_path, capsys):
    pytest.importorskip("jinja2")
    with pytest.raises(SystemExit):
        report_command.main([str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err


# The README


def test_readme_pages_and_plots_come_from_the_results(tmp_path, fake_parts, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    results, file = tmp_path / "bench" / "results", tmp_path / "README.md"
    names = ("headline", "support", "results")
    file.write_text("\n".join(f"<!-- {n}:begin -->\nold\n<!-- {n}:end -->" for n in names))
    arguments = ["--root", str(tmp_path)]

    def old():
        capsys.readouterr()
        status = readme.main([*arguments, "--check"])
        said = re.findall(r"(\S+) is out of date", capsys.readouterr().err)
        assert status == int(bool(said))
        return said

    assert old() == ["README.md"]
    assert readme.main(arguments) == 0
    assert file.read_text().count(readme.NO_RESULTS) == 2
    assert old() == []

    path = results / "imaginary-9000.json"
    cards.write(a_card() | {"parts": fake_parts}, path)
    made = ["results/imaginary-9000.html", "results/imaginary-9000.png"]
    assert old() == ["README.md", *made]
    assert readme.main(arguments) == 0
    assert old() == []
    text = file.read_text()
    for expected in (
        "](bench/results/imaginary-9000.png)\n<!-- headline:end -->",
        "### Imaginary 9000",
        "[`imaginary-9000.html`](bench/results/imaginary-9000.html)",
        "#### Race: every contender",
        "<details><summary>Alpha: the first of them</summary>",
        "| **1 \\| 2** | <3> |",
        "Not measured on this card: omega.",
        "<details><summary>forward, standard normal inputs",
        "`sdpa-default` launched `sdpa-cudnn` in 52 of 52 heats.",
    ):
        assert expected in text
    assert "old" not in text.split()
    assert "forward: every figure" not in text

    page = path.with_suffix(".html")
    page.write_text(page.read_text().replace("Folded away", "Folded in"))
    assert old() == made[:1]
    assert readme.main(arguments) == 0
    cards.write(cards.read(path) | {"datetime": "2031-01-01T00:00:00+00:00"}, path)
    assert old() == ["README.md", *made]


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="<!-- results:begin -->"):
        readme.replace_section("no markers", "results", "text")


# Comparing


@pytest.mark.parametrize("spread", [0.003, 0.01, 0.05])
def test_the_interval_holds_the_ratio_99_times_in_100(spread):
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(1000):
        a, b = np.exp(rng.normal(0, spread, (2, 20)))
        ratio, low, high = compare.interval(1.25 * a, b)
        assert low < ratio < high
        assert compare.interval(b, 1.25 * a) == pytest.approx((1 / ratio, 1 / high, 1 / low))
        held += low <= 1.25 <= high
    assert 975 <= held <= 1000


@pytest.mark.parametrize("rounds", [10, 20, 100])
def test_noise_is_noise_and_a_shift_of_5_percent_is_a_change(rounds):
    rng = np.random.default_rng(2)
    for factor, verdict in ((1.0, "noise"), (1.05, "slower"), (1 / 1.05, "faster")):
        found = [
            compare.verdict_of(
                *compare.interval(*(np.exp(rng.normal(0, 0.01, (2, rounds))) * [[1], [factor]]))[
                    1:
                ],
                drift=0.01,
            )
            for _ in range(200)
        ]
        assert found.count(verdict) >= 0.95 * len(found), (factor, found)


def test_too_few_rounds_say_nothing():
    assert compare.interval([1.0] * 3, [2.0] * 3) == (0.5, 0.0, np.inf)
    assert compare.verdict_of(0.0, np.inf, 0.01) == "too few rounds"


def test_two_commits_are_compared_heat_by_heat(tmp_path, capsys):
    a, b = a_card(1), a_card(2, {"triton": 1.08, "cute": 0.95}, commit="fedcba9876543210")
    for label, card in (("a", a), ("b", b)):
        cards.write(card, tmp_path / f"{label}.json")
    pairs = compare.compare(a, b, "commit")
    assert len(pairs) == len(a["benchmarks"])
    verdicts = {name: [p.verdict for p in pairs if p.a["backend"] == name] for name in RATES}
    assert set(verdicts["triton"]) == {"faster"}
    assert set(verdicts["cute"]) == {"slower"}
    for name in RATES.keys() - {"triton", "cute"}:
        assert verdicts[name].count("noise") >= 0.95 * len(verdicts[name]), name

    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert compare.main(files) == 0
    assert compare.main([*files, "--fail-on-slower"]) == 1
    assert compare.main([*reversed(files), "--fail-on-slower"]) == 1  # Triton, this time
    assert compare.main([files[0], files[0], "--fail-on-slower"]) == 0
    capsys.readouterr()
    assert compare.main([*files, "--markdown"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\| `triton` \| forward \| 26 \| 1\.08\d \| 26 \| 0 \|", text), text
    assert "Heats that changed" in text
    assert "| `sdpa-flash` | forward | 26 |" in text
    assert "commit `0123456789ab`" in text
    with pytest.raises(SystemExit):
        compare.main([files[0], str(tmp_path / "none.json")])


def test_a_long_name_leaves_numbers_whole(capsys):
    numbers = ["12.2069", "11.6651", "1.048", "1.027 to 1.067", "noise"]
    table = Table(["heat", "contender", *"ABCDE"], [["backward " * 9, "cute", *numbers]], left=2)
    compare._print([Section("heats", (table,))])
    printed = capsys.readouterr().out
    assert all(number in printed for number in numbers), printed
    assert printed.count("backward") == 9


def test_what_drifts_alike_in_unchanged_kernels_is_no_change():
    a = a_card(1)
    warmer = a_card(2, dict.fromkeys(RATES, 0.95))
    assert {p.verdict for p in compare.compare(a, warmer, "commit")} == {"noise"}
    drift = compare.drift_between(a, warmer)
    assert drift["grid"] == pytest.approx(0.055, abs=0.01)
    assert drift["captured, tiled"] == compare.LEAST_DRIFT
    other_torch = a_card(2, dict.fromkeys(RATES, 0.95), torch="2.14.0")
    assert "slower" in {p.verdict for p in compare.compare(a, other_torch, "commit")}
    other_rival = a_card(2, dict.fromkeys(RATES, 0.95) | {"flash-attn-4": 0.5})
    other_rival["machine_info"]["flash-attn-4"] = "4.1"
    assert compare.drift_between(a, other_rival)["grid"] < 0.07


def test_two_cards_get_ratios_and_no_verdict(tmp_path, capsys):
    a, b = a_card(1), a_card(2, dict.fromkeys(RATES, 2.0), card="Another 1")
    del b["benchmarks"][-1]
    for label, card in (("a", a), ("b", b)):
        cards.write(card, tmp_path / f"{label}.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert compare.main([*files, "--markdown"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\| `cute` \| forward \| 26 \| (1\.99|2\.00)\d \|", text)
    assert "drift" not in text
    assert "Only in A: `flash-attn-4` in 1 heats." in text
    with pytest.raises(SystemExit):
        compare.main([*files, "--by", "commit"])
    assert "--by commit needs one card, got Imaginary 9000 and Another 1" in capsys.readouterr().err


# In a browser

BROWSER_VARIABLE = "FLASH_ROSETTA_BROWSER"
"""The path of a Chromium, which must then be there: CI sets it, so that nothing is skipped."""

MEASURE_WIDTH = """
<iframe id="narrow" style="width: 400px; height: 800px" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const page = document.getElementById("narrow").contentDocument.documentElement;
  document.body.innerHTML = `<p>${{page.scrollWidth}} of ${{page.clientWidth}}</p>`;
}});
</script>
"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """A function that opens a file in a headless browser: (what it wrote, its errors)."""
    named = os.environ.get(BROWSER_VARIABLE)
    found = named or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if found is None:
        pytest.skip(f"needs Chromium: {BROWSER_VARIABLE} can name it")
    if not Path(found).is_file():
        pytest.fail(f"{BROWSER_VARIABLE} must name a Chromium, got {named!r}")

    def open_file(file, *options):
        profile = tmp_path_factory.mktemp("profile")
        done = subprocess.run(
            [found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
             "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", f"--user-data-dir={profile}", "--enable-logging=stderr",
             "--disable-dev-shm-usage", "--hide-scrollbars", *options, file.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout, re.findall(r"CONSOLE.*", done.stderr)

    return open_file


def committed():
    """The results of this checkout; none in an installed package."""
    return sorted((Path(cards.__file__).parent / "results").glob("*.json"))


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_a_browser_shows_the_page_of_each_card(path, browse, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert report_command.main([str(path), "--html", str(page)]) == 0
    dom, errors = browse(page, "--dump-dom")
    assert errors == []
    (report,) = reports([cards.read(path)])
    seen = html.unescape(re.sub(r"<[^>]*>", "", dom))
    titles = [s.title for c in report.chapters for s in (*c.sections, *c.details)]
    assert len(titles) > 10
    assert not [title for title in titles if title not in seen]
    assert dom.count("<svg") == len(list(report.plots()))
    pictures = {}
    for theme, options in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        file = tmp_path / f"{theme}.png"
        browse(page, f"--screenshot={file}", "--window-size=1200,1400", *options)
        pictures[theme] = picture(file)
    assert pictures["light"].mean() > 200
    assert pictures["dark"].mean() < 60
    for name, pixels in pictures.items():
        colours = {tuple(pixel) for pixel in pixels.reshape(-1, 3)[::7]}
        assert len(colours) > 100, f"{name}: blank, or nearly so"
        assert pixels[700:].std() > 8, f"{name}: nothing below the head"


def test_the_page_fits_a_narrow_screen(shown, browse, tmp_path):
    _, page = shown
    frame = tmp_path / "frame.html"
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frame.write_text(MEASURE_WIDTH.format(page=text), encoding="utf-8")
    dom, errors = browse(frame, "--dump-dom")
    assert errors == []
    wide, there = map(int, re.search(r"<p>(\d+) of (\d+)</p>", dom).groups())
    assert there > 300
    assert wide == there


def test_a_page_with_an_error_is_noticed(browse, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<p>there</p><script>missing();</script>")
    dom, errors = browse(page, "--dump-dom")
    assert "there" in dom
    assert "missing is not defined" in errors[0]


def picture(path):
    """The pixels of a PNG, [height, width, 3]."""
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(path).convert("RGB"))

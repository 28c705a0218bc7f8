"""It trains: the losses of all backends agree, and a backend that is wrong stands out."""

from __future__ import annotations

import json

import pytest
import torch

from flash_rosetta import registry
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench import train as train_module
from flash_rosetta.bench import training, training_page
from flash_rosetta.bench.gpt import GPT, Sizes
from flash_rosetta.bench.page import Plot, markdown
from flash_rosetta.bench.parts import Lab
from flash_rosetta.bench.train import CPU_SIZES, attention_of, batches, main, problem_of, train

CPU = torch.device("cpu")
STEPS = 200


class Planted:
    """The reference with a fault in one function."""

    def __init__(self, name, fault):
        self.name = name
        self.fault = fault
        self.reference = registry.get("reference")

    def why_not(self, problem):
        return self.reference.why_not(problem)

    def forward(self, q, k, v, problem):
        o, lse = self.reference.forward(q, k, v, problem)
        return (o * 0.8, lse) if self.fault == "o" else (o, lse)

    def backward(self, *arguments):
        dq, dk, dv = self.reference.backward(*arguments)
        if self.fault == "dk":
            dk = torch.zeros_like(dk)
        if self.fault == "dv":
            dv = -dv
        return dq, dk, dv


@pytest.fixture(scope="module")
def runs():
    """A run of SDPA's kernels, of the reference, and of three that are wrong."""
    names = ["sdpa-default", "sdpa-math", "reference"]
    for fault in ("o", "dk", "dv"):
        registry.register(Planted(f"planted-{fault}", fault))
        names.append(f"planted-{fault}")
    records = [{"verdict": "trained", "reasons": [], **train(name, CPU, STEPS)} for name in names]
    for fault in ("o", "dk", "dv"):
        registry.unregister(f"planted-{fault}")
    training.judge(records)
    return {record["backend"]: record for record in records}


def test_the_loss_falls(runs):
    losses = runs["reference"]["losses"]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(5.6, abs=0.4), "untrained, each of 256 bytes is as likely"
    assert runs["reference"]["final_loss"] < losses[0] - 0.4
    assert runs["reference"]["tokens_per_s"] > 0


def test_the_curves_of_right_backends_agree_and_wrong_ones_stand_out(runs):
    verdicts = {name: record["verdict"] for name, record in runs.items()}
    right = ("sdpa-default", "sdpa-math", "reference")
    assert {verdicts[name] for name in right} == {"within noise"}, verdicts
    assert {verdicts[f"planted-{fault}"] for fault in ("o", "dk", "dv")} == {"outside"}, verdicts


def test_losses_that_are_no_number_are_outside():
    curve = [1.0] * 40
    records = [
        {"backend": name, "verdict": "trained", "losses": losses}
        for name, losses in (
            ("sdpa-default", curve),
            ("sdpa-math", curve),
            ("mine", [*curve[:30], *[float("nan")] * 10]),
        )
    ]  # fmt: skip
    training.judge(records)
    assert records[2]["verdict"] == "outside"


def test_one_kernel_of_pytorch_alone_gives_no_verdict():
    records = [{"backend": "sdpa-default", "verdict": "trained", "losses": [1.0] * 8}]
    training.judge(records)
    assert records[0]["verdict"] == "trained"


def test_the_page_shows_the_curves_and_the_verdict(runs, tmp_path):
    right = [runs[name] for name in ("sdpa-default", "sdpa-math", "reference")]
    (section,) = training_page.sections({"records": right}, {})
    text = markdown([section], 3, lambda plot: f"{plot.name}.png")
    assert "1 of 1 backends train within the noise" in text
    assert f"{runs['reference']['tokens_per_s']:,}" in text
    (section,) = training_page.sections({"records": list(runs.values())}, {})
    text = markdown([section], 3, lambda plot: f"{plot.name}.png")
    assert "**Outside the noise: `planted-o`, `planted-dk`, `planted-dv`.**" in text
    import matplotlib

    matplotlib.use("Agg")
    (plot,) = (block for block in section.blocks if isinstance(block, Plot))
    plot.draw().savefig(tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 5000


def test_seeds_fix_the_batches_and_the_weights():
    one, again = (list(batches(CPU_SIZES, 2, seed=3)) for _ in range(2))
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], next(batches(CPU_SIZES, 1, seed=4)))
    assert one[0].shape == (CPU_SIZES.batch, CPU_SIZES.seqlen + 1)
    assert train("sdpa-math", CPU, 3)["losses"] == train("sdpa-math", CPU, 3)["losses"]


def test_a_byte_is_predicted_from_those_before_it_alone():
    sizes = Sizes(layers=1, num_heads=2, head_dim=8, seqlen=16, batch=1)
    torch.manual_seed(0)
    model = GPT(sizes, attention_of("reference", problem_of(sizes, CPU)))
    tokens = torch.randint(256, (1, 16))
    other = tokens.clone()
    other[0, 9] += 1
    before, after = model(tokens), model(other % 256)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_the_part_trains_every_kernel_and_says_who_could_not(tmp_path):
    records = training.measure(Lab(CPU, backends=("reference", "cute"), is_quick=True))
    by_name = {record["backend"]: record for record in records}
    assert by_name["reference"]["verdict"] == "within noise"
    assert by_name["cute"]["verdict"] == "skipped"
    assert "target cpu" in by_name["cute"]["reasons"][0]
    assert {"sdpa-default", "sdpa-flash", "sdpa-math"} <= by_name.keys()


def test_the_command_trains_and_writes(tmp_path, capsys):
    out = tmp_path / "run.json"
    assert (
        main(["--backend", "sdpa-math", "--steps", "4", "--device", "cpu", "--out", str(out)]) == 0
    )
    printed = capsys.readouterr().out
    assert "sdpa-math: loss 5." in printed
    record = json.loads(out.read_text())
    assert len(record["losses"]) == 4
    assert len(record["text_sha256"]) == 64


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backend", "nobody"], "--backend must be one of .*got 'nobody'"),
        (["--backend", "cute", "--device", "cpu"], "target cpu"),
        (["--backend", "reference", "--steps", "1"], "must be at least 2, got 1"),
        ([], "--backend"),
    ],
)
def test_bad_usage_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    import re

    assert re.search(complaint, capsys.readouterr().err)


def test_a_backend_that_cannot_run_the_model_is_named():
    with pytest.raises(Unsupported, match=r"'cute' cannot run .* target cpu"):
        attention_of("cute", problem_of(CPU_SIZES, CPU))


def test_the_text_is_what_python_ships():
    text = train_module.text()
    assert len(text) > 300_000
    assert b"lambda" in text

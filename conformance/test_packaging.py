"""The package as it ships: folders, imports, the wheel, the command line, the README's example."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import flash_rosetta
from flash_rosetta import __main__ as command_line
from flash_rosetta import machine

ROOT = Path(flash_rosetta.__file__).parents[1]

ONLY_IN_ONE = {
    "atomic_backward.py",
    "interpreter.py",
    "disk_cache.py",
    "softmax.py",
    "gradients.py",
    "two_pass_backward.py",
    "portable_forward.py",
    "portable_backward.py",
    "portable_tiling.py",
}
"""Files that not all kernel folders have: the backward by atomics, which is CuTe DSL's own already,
probes of Triton's interpreter, which the others lack, what CuTe DSL leaves to us, and where its
kernels for one card and for all are too long for one file."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """pyproject.toml; skips the test where the suite runs from an installed wheel."""
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        pytest.skip("needs the checkout: pyproject.toml is not part of the wheel")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folders(project: dict[str, Any]) -> dict[str, Path]:
    """Import name -> folder, as pyproject.toml says."""
    table = project["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in table.items()}


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run Python with `command`; fails the test with its output if it fails."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"python {' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}")
    return done.stdout


# Folders and files


def test_every_package_folder_is_in_the_package_table(project, folders):
    on_disk = {path.parent for path in ROOT.glob("*/__init__.py")}
    assert on_disk == set(folders.values())
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_package_folders_are_flat(folders):
    """But for packages of their own, which this one's wheel need not have."""
    nested = [
        path
        for folder in folders.values()
        for path in folder.glob("*/**/*.py")
        if not {"__pycache__", "build"} & set(path.parts)
        and not (path.parent / "pyproject.toml").is_file()
    ]
    assert not nested, "a module in a nested folder is missing from the wheel"


def file_names_that_differ(kernel_folders: list[Path]) -> dict[str, list[str]]:
    """Folder -> the files that other folders have and it lacks."""
    names = {
        folder: {path.name for path in folder.glob("*.py")} - ONLY_IN_ONE
        for folder in kernel_folders
    }
    union = set().union(*names.values())
    return {folder.name: sorted(union - own) for folder, own in names.items() if union - own}


def test_kernel_folders_have_the_same_file_names(folders):
    assert not file_names_that_differ([f for f in folders.values() if f.name.endswith("_impl")])


def test_a_missing_kernel_file_is_noticed(tmp_path):
    for name in ("a_impl/forward.py", "a_impl/softmax.py", "b_impl/forward.py", "b_impl/tiles.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    both = [tmp_path / "a_impl", tmp_path / "b_impl"]
    assert file_names_that_differ(both) == {"a_impl": ["tiles.py"]}


# Imports


def imported_modules(source: str) -> set[str]:
    """Every module that an import statement of `source` names, at any depth; "." if relative."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from package import name` may name a module too.
            module = node.module or ""
            found |= {"."} if node.level else {f"{module}.{alias.name}" for alias in node.names}
    return found


def part_of(module: str) -> str | None:
    """The part of the project that a module belongs to, None for anybody else's module."""
    names = module.split(".")
    if names[0] != "flash_rosetta":
        return None
    is_part = len(names) > 1 and (
        names[1] in ("reference", "conformance", "bench") or names[1].endswith("_impl")
    )
    return names[1] if is_part else "interface"


def parts_allowed(part: str) -> set[str]:
    """What a part may import: all may import the interface, the judges the reference as well."""
    if part in ("conformance", "bench"):
        return {part, "interface", "reference"}
    return {part, "interface"}


def forbidden_imports(part: str, source: str) -> list[str]:
    """The imports of `source`, a module of `part`, that break the rule, in order."""
    return sorted(
        module
        for module in imported_modules(source)
        if module == "."
        or ((owner := part_of(module)) is not None and owner not in parts_allowed(part))
    )


def test_parts_import_only_what_they_may(folders):
    wrong = {
        f"{folder.name}/{path.name}": modules
        for name, folder in folders.items()
        for path in folder.glob("*.py")
        if (modules := forbidden_imports(part_of(name) or name, path.read_text(encoding="utf-8")))
    }
    assert not wrong, "reach backends by name; see CONTRIBUTING.md"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("interface", "def main():\n    import flash_rosetta.bench.race"),
        ("reference", "from flash_rosetta import conformance"),
        ("triton_impl", "from flash_rosetta.reference import oracle"),
        ("triton_impl", "from flash_rosetta.cute_impl.forward import forward"),
        ("conformance", "from flash_rosetta import triton_impl as t"),
        ("conformance", "import flash_rosetta.bench.workloads"),
        ("bench", "from flash_rosetta.conformance.checks import compare"),
        ("bench", "from . import timing"),
    ],
)
def test_a_forbidden_import_is_noticed(part, source):
    assert forbidden_imports(part, source)


@pytest.mark.parametrize("part", ["conformance", "bench"])
def test_the_judges_may_import_the_reference(part):
    source = f"import torch, triton\nfrom flash_rosetta.reference import oracle, {part}"
    assert not forbidden_imports(part, source)


def test_listing_backends_imports_no_dsl(tmp_path):
    dsls = ("triton", "tilelang", "cutlass")
    code = (
        "import sys, flash_rosetta\n"
        "assert {'triton', 'tilelang', 'cute'} <= {*flash_rosetta.names()}\n"
        f"loaded = [m for m in sys.modules if m.split('.')[0] in {dsls}]\n"
        "assert not loaded, loaded\n"
    )
    run("-c", code, cwd=tmp_path)


# What is installed


def test_entry_points_are_what_pyproject_says(project):
    declared = project["project"]["entry-points"]["flash_rosetta.backends"]
    installed = {
        point.name: point.value
        for point in entry_points(group="flash_rosetta.backends")
        if point.value.startswith("flash_rosetta.")
    }
    assert installed == declared, "pip install -e . again"


def pins() -> dict[str, Version]:
    """Package -> the release that constraints.txt pins."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    stripped = [line.partition("#")[0].strip() for line in lines]
    pairs = [line.split("==") for line in stripped if line]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_requirement_has_a_pin_that_satisfies_it(project):
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {"triton", "tilelang", "cute", "test", "bench", "models"}
    texts = project["project"]["dependencies"] + [
        text for extra in extras.values() for text in extra
    ]
    pinned = pins()
    unmet = [
        text
        for text in texts
        if (name := canonicalize_name(Requirement(text).name)) not in pinned
        or pinned[name] not in Requirement(text).specifier
    ]
    assert not unmet


def test_the_wheel_has_every_module_and_all_data(project, folders, tmp_path):
    setuptools = machine.package_version("setuptools")
    if setuptools is None or Version(setuptools) < Version("77"):
        pytest.skip(f"building a wheel needs setuptools 77 or later, found {setuptools}")
    tree = tmp_path / "tree"  # a copy: a build leaves files behind that a later build would ship
    for folder in folders.values():
        shutil.copytree(
            folder, tree / folder.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
        "--wheel-dir", str(tmp_path), str(tree), cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"{name.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for pattern in ("*.py", "py.typed", "*.jinja", "data/*", "results/*.json")
        for path in folder.glob(pattern)
    }
    assert not wanted - shipped
    assert not {name for name in shipped - wanted if ".dist-info/" not in name}


# The command line


def test_help_lists_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert command_line.main(arguments) == 0
        printed = capsys.readouterr().out
        for name, (_, summary) in command_line.COMMANDS.items():
            assert re.search(rf"^ +{name} +{re.escape(summary)}$", printed, re.MULTILINE), printed


def test_the_module_of_every_command_exists():
    for module, _ in command_line.COMMANDS.values():
        assert importlib.util.find_spec(module), module


def test_version_is_the_installed_one(capsys):
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flash-rosetta {machine.package_version('flash-rosetta')}\n"


def test_an_unknown_command_names_the_known_ones(capsys):
    assert command_line.main(["sprint"]) == 2
    error = capsys.readouterr().err
    assert "'sprint'" in error
    assert all(name in error for name in command_line.COMMANDS)


def test_arguments_after_a_command_reach_it_untouched(monkeypatch):
    got = []
    race = SimpleNamespace(main=lambda argv: got.append(argv) or 7)
    monkeypatch.setitem(sys.modules, "fake_race", race)
    monkeypatch.setitem(command_line.COMMANDS, "race", ("fake_race", ""))
    assert command_line.main(["race", "--help", "-k", "x y", "--", "info"]) == 7
    assert got == [["--help", "-k", "x y", "--", "info"]]


def test_info_gives_every_backend_and_reason_as_json(capsys):
    assert command_line.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["why_not"]) == flash_rosetta.names()
    for by_dtype in facts["why_not"].values():
        assert list(by_dtype) == ["fp16", "bf16", "fp32", "fp64"]
        assert all(
            set(by_direction) == {"forward", "backward"} for by_direction in by_dtype.values()
        )
    assert facts["why_not"]["reference"]["fp64"] == {"forward": [], "backward": []}
    assert facts["machine"]["torch"] == flash_rosetta.machine.describe()["torch"]


class Picky:
    """Refuses for a reason that rich would take for markup, and breaks in fp64."""

    name = "picky"

    def why_not(self, problem):
        if str(problem.dtype) == "torch.float64":
            raise RuntimeError("no fp64 today")
        return ["needs picky[extra]"]

    def forward(self, q, k, v, problem): ...

    def backward(self, do, dlse, q, k, v, o, lse, problem): ...


def test_info_prints_reasons_as_they_are_and_survives_a_broken_backend(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    flash_rosetta.register(Picky())
    try:
        assert command_line.main(["info"]) == 0
    finally:
        flash_rosetta.registry.unregister("picky")
    printed = capsys.readouterr().out
    assert re.search(r"picky +fp16, bf16, fp32: needs picky\[extra\]", printed), printed
    assert re.search(r"picky +fp64: is broken: RuntimeError: no fp64 today", printed), printed


def test_python_dash_m_runs_the_command_line(tmp_path):
    assert "usage: flash-rosetta" in run("-m", "flash_rosetta", "--help", cwd=tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("arguments", ["--help", "trace"])
def test_a_reader_that_leaves_early_sees_no_traceback(arguments, tmp_path):
    command = f"'{sys.executable}' -m flash_rosetta {arguments} | true"  # leaves before any output
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""


def test_the_machine_is_described_in_plain_json_values():
    described = machine.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_commit_can_be_named_where_there_is_no_history(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
    assert machine.commit() is None
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "0123abc")
    assert machine.commit() == "0123abc"
    monkeypatch.undo()
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "4567def")  # a copy may have another history
    assert machine.commit() == "4567def"


def test_a_card_without_the_compiler_a_backend_needs_is_refused(monkeypatch):
    """Else "auto" would take it, and fail at the first call."""
    pytest.importorskip("tilelang")
    problem = flash_rosetta.Problem(batch=1, num_heads=1, seqlen_q=8, head_dim=64, target="sm_90")
    tilelang = flash_rosetta.registry.get("tilelang")
    module = sys.modules[type(tilelang).__module__]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for nvcc, cxx, reasons in (
        ("/usr/bin/nvcc", "/usr/bin/g++", []),
        (None, "/usr/bin/g++", ["nvcc"]),
        ("/usr/bin/nvcc", None, ["a C++ compiler"]),
    ):
        monkeypatch.setattr(module, "find_nvcc", lambda found=nvcc: found)
        monkeypatch.setattr(module, "get_cplus_compiler", lambda found=cxx: found)
        got = tilelang.why_not(problem)
        assert [reason.split(",")[0] for reason in got] == reasons


# The README


def example_backend() -> str:
    """The backend that the README shows, as Python source."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(
        r"<!-- example:begin -->\s*```python\n(.*?)```\s*<!-- example:end -->", text, re.DOTALL
    )
    return source


def test_the_example_backend_passes_conformance(project, tmp_path):
    source = example_backend()
    assert len(source.splitlines()) <= 32, "the README promises a short one"
    (tmp_path / "conftest.py").write_text(source, encoding="utf-8")
    printed = run(
        "-m", "flash_rosetta", "conformance", "--backend", "plain", "--quick", "-q",
        "-p", "no:cacheprovider", "-k", "test_o_and_lse or test_dq_dk_dv or test_inf_and_nan",
        cwd=tmp_path,
    )  # fmt: skip
    assert re.search(r"plain +[1-9]\d* +0 +0 +[1-9]", printed), printed


# Packages with backends of their own


def install(package: str, into: Path) -> None:
    """Install a package that lies under conformance/, from a copy: a build leaves files behind."""
    tree = into / f"{package}-tree"
    shutil.copytree(
        ROOT / "conformance" / package, tree, ignore=shutil.ignore_patterns("__pycache__")
    )
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    target = str(into / "site")
    run("-m", "pip", "install", "--quiet", *offline, "--target", target, str(tree), cwd=into)


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_a_plug_in_package_is_installed_and_judged(project, device, tmp_path):
    """The recipe of conformance/README.md, word for word but for the tests about no backend."""
    if device.type == "cuda":
        pytest.skip("takes no GPU, and CI runs it without one")
    install("toy", tmp_path)
    printed = run(
        "-m", "pytest", "--pyargs", "flash_rosetta.conformance", "--backend", "toy",
        "--json", "toy.json", "-q", "-p", "no:cacheprovider", "--device", "cpu",
        "-k", "not test_the_suite and not test_packaging and not test_reference "
        "and not test_variants",
        cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"),
    )  # fmt: skip
    assert "causal_bottom_right" in printed
    report = json.loads((tmp_path / "toy.json").read_text())
    assert list(report["backends"]) == ["toy"]
    toy = report["backends"]["toy"]
    assert toy["failures"] == []
    assert len(toy["expected_failures"]) == 5
    assert toy["outcomes"]["passed"] > 200
    assert toy["by_capability"]["backward"]["passed"] > 50
    assert "passed" not in toy["by_capability"]["fp64"]
    assert "refused: causal_alignment bottom_right is not implemented" in toy["reasons"]


@pytest.mark.parametrize("package", ["toy", "third_party"])
def test_a_plug_in_package_declares_what_it_has(project, package):
    folder = ROOT / "conformance" / package
    declared = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    modules = set(declared["tool"]["setuptools"]["py-modules"])
    assert modules == {path.stem for path in folder.glob("*.py")}
    backends = declared["project"]["entry-points"]["flash_rosetta.backends"]
    assert {value.partition(":")[0] for value in backends.values()} <= modules
    assert not set(backends) & set(project["project"]["entry-points"]["flash_rosetta.backends"])


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_third_parties_are_judged_like_anybody(project, device, tmp_path):
    if device.type == "cuda":
        pytest.skip("takes no GPU, and CI runs it without one")
    install("third_party", tmp_path)
    printed = run(
        "-m", "pytest", "--pyargs", "flash_rosetta.conformance", "--device", "cpu", "-q",
        "--backend", "sdpa_math,sdpa_flash", "-p", "no:cacheprovider",
        "-k", "tiny and (test_o_and_lse or test_dq_dk_dv) or test_gradient_of_one_output",
        cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"),
    )  # fmt: skip
    for name in ("sdpa_math", "sdpa_flash"):
        assert re.search(rf"{name} +[1-9]\d* +0 +0 +\d", printed), printed
    code = "import flash_rosetta; print(flash_rosetta.registry.why_not('flash_attn_4', None))"
    if importlib.util.find_spec("flash_attn") is None:
        assert "loading third_party_flash_attn_4:backend failed" in run(
            "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")
        )

"""Options, fixtures and reports of the conformance suite, for pytest.

A plugin and not a conftest, so that `pytest --pyargs flash_rosetta.conformance --backend NAME`
knows the options from any directory.

A backend may have an attribute for the suite's sake: `expected_failures`, a dict from test name to
the reason. A name is "test_o_and_lse", or one case of it in brackets as a failure prints it, less
the backend: "test_o_and_lse[tiny-b2_h3_q1_k1_d64_bf16]". Such a test must fail; to pass, or to name
no test, is an error. `capabilities`, a set of names, is what it can do: see capabilities.py.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import pytest
import torch

from flash_rosetta import Compilable, Problem, Unsupported, registry
from flash_rosetta.conformance import capabilities, cases
from flash_rosetta.conformance.lost_device import LostDevice
from flash_rosetta.conformance.tally import Tallies
from flash_rosetta.conformance.watchdog import Watchdog

HERE = Path(__file__).parent.resolve()

LIMIT_S = 120.0
"""Seconds a test may take before it counts as hung; `@pytest.mark.limit(seconds)` changes it."""

INTERPRETER_WARNINGS = "ignore::RuntimeWarning:triton.runtime.interpreter"
"""NumPy's remarks on infinities, which the interpreter computes with as a GPU would."""

MARKERS = (
    "limit(seconds): how long a conformance test may take before it counts as hung",
    "purposes(*names): run the test on the cases with these purposes only",
    "gradients: leave out the cases that are for the forward only",
    "thorough: a test that --quick leaves out",
    "capability(*names): what a test is about, for the counts by capability",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash-rosetta", "flash-rosetta conformance")
    group.addoption(
        "--backend",
        action="append",
        metavar="NAME",
        help="backend to test; may be repeated or hold a comma list "
        "(default: every registered backend that can do something on this machine)",
    )
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        help="where the tensors live (default: cuda if there is a GPU)",
    )
    group.addoption("--json", metavar="PATH", help="write counts, failures and reasons as JSON")
    group.addoption(
        "--quick",
        action="store_true",
        help="only the cases that find most faults, and nothing about the suite and the package "
        "themselves; on a GPU no kernels are compiled for other cards",
    )
    group.addoption(
        "--problem",
        metavar="ID",
        help="only this problem, by the id that a failure prints; one that is not in the list is "
        "run on standard inputs",
    )


class Suite:
    """One run of the suite: which backends, on which device, before which cases."""

    def __init__(self, config: pytest.Config):
        given = [name for names in config.getoption("--backend") or [] for name in names.split(",")]
        self.named = list(dict.fromkeys(name for name in given if name))
        self.is_quick: bool = config.getoption("--quick")
        self.problem: str | None = config.getoption("--problem")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(config.getoption("--device") or default)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise pytest.UsageError(
                "--device cuda needs a GPU, and PyTorch sees none: leave it out, or say cpu"
            )
        self.watchdog = Watchdog()

    @cached_property
    def backends(self) -> list[str]:
        """The names to test; raises UsageError for a name that nobody registered."""
        known = registry.names()
        for name in self.named:
            if not registry.is_known(name):
                raise pytest.UsageError(
                    f"--backend must name one of {', '.join(known)}; got {name}"
                )
        return self.named or [
            name
            for name in known
            if name not in registry.ONLY_BY_NAME and (self.can_run(name) or self.can_compile(name))
        ]

    def lane(self, name: str) -> cases.Lane:
        """The sizes that this machine has time for with this backend."""
        if self.device.type == "cuda":
            return cases.GPU
        interpreted = "triton" in name and os.environ.get("TRITON_INTERPRET") == "1"
        return cases.INTERPRETER if interpreted else cases.CPU

    def cases(self, name: str) -> list[cases.Case]:
        """What this run puts before a backend."""
        listed = cases.case_list(self.lane(name))
        if self.problem is not None:
            found = [case for case in listed if case.problem.id == self.problem]
            return found or [cases.Case(purpose="asked", problem=Problem.parse(self.problem))]
        return [case for case in listed if case.is_quick or not self.is_quick]

    def can_run(self, name: str) -> bool:
        """Whether the backend takes any problem of its lane on this device."""
        listed = cases.case_list(self.lane(name))
        return any(not registry.why_not(name, case.on(self.device)) for case in listed)

    def contradictions(self, name: str) -> list[str]:
        """Where the backend's declared capabilities are not what it accepts."""
        try:
            return capabilities.contradictions(name, self.lane(name), self.device)
        except Unsupported:
            return []

    def can_compile(self, name: str) -> bool:
        """Whether the backend compiles without a card, which the compile-only tests need."""
        try:
            return isinstance(registry.get(name), Compilable)
        except Unsupported:
            return False


SUITE = pytest.StashKey[Suite]()


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.addinivalue_line("filterwarnings", INTERPRETER_WARNINGS)
    suite = config.stash[SUITE] = Suite(config)
    config.add_cleanup(suite.watchdog.close)
    config.pluginmanager.register(Tallies(must_run=suite.named))
    config.pluginmanager.register(LostDevice(suite.device))
    wanted = suite.named or registry.names()
    if suite.device.type == "cpu":
        _use_one_thread(config)
        if any("triton" in name for name in wanted):
            _interpret_triton(config)


def _use_one_thread(config: pytest.Config) -> None:
    """Problems are small here: more threads only wait for each other, and for other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.add_cleanup(partial(torch.set_num_threads, threads))


def _interpret_triton(config: pytest.Config) -> None:
    """Without a GPU Triton runs in its interpreter, which must be said before kernels load."""
    if "TRITON_INTERPRET" not in os.environ:
        patch = pytest.MonkeyPatch()
        patch.setenv("TRITON_INTERPRET", "1")
        config.add_cleanup(patch.undo)


def pytest_report_header(config: pytest.Config) -> list[str]:
    from flash_rosetta.machine import describe

    suite = config.stash[SUITE]
    machine = describe()
    essentials = ("card", "driver", "cuda", "cudnn", "torch", "triton", "tilelang",
                  "nvidia-cutlass-dsl", "commit")  # fmt: skip
    facts = ", ".join(f"{key} {machine[key]}" for key in essentials if machine[key])
    extent = f"problem {suite.problem}" if suite.problem else "quick" if suite.is_quick else "full"
    chosen = ", ".join(suite.named) or "every backend that can do something here"
    return [
        f"flash-rosetta on {suite.device.type}: {facts}",
        f"flash-rosetta conformance, {extent}: {chosen}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Refuse an unknown backend, now that every conftest had its chance to register one, and one
    that contradicts itself.
    """
    suite = session.config.stash[SUITE]
    for name in suite.backends:
        if found := suite.contradictions(name):
            raise pytest.UsageError(
                "\n".join([f"backend {name!r} contradicts its capabilities:", *found])
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _is_ours(Path(metafunc.module.__file__)):
        return
    suite = metafunc.config.stash[SUITE]
    if "compilable" in metafunc.fixturenames:
        names = [name for name in suite.backends if suite.can_compile(name)]
        metafunc.parametrize("compilable", names, scope="module")
    if "backend" not in metafunc.fixturenames:
        return
    if "case" not in metafunc.fixturenames:
        metafunc.parametrize("backend", suite.backends)
        return
    markers = list(metafunc.definition.iter_markers("purposes"))
    purposes = {purpose for marker in markers for purpose in marker.args} | {"asked"}
    needs_gradients = metafunc.definition.get_closest_marker("gradients") is not None
    pairs = [
        (name, case)
        for name in suite.backends
        for case in suite.cases(name)
        if (not markers or case.purpose in purposes) and not (needs_gradients and case.forward_only)
    ]
    ids = [f"{name}-{case.id}" for name, case in pairs]
    metafunc.parametrize(("backend", "case"), pairs, ids=ids)


@lru_cache
def _is_ours(path: Path) -> bool:
    return path.parent.resolve() == HERE


def _backend_of(item: pytest.Item) -> str | None:
    """The backend that an item of the suite is about."""
    params = item.callspec.params if hasattr(item, "callspec") and _is_ours(item.path) else {}
    name = params.get("backend") or params.get("compilable")
    return name if isinstance(name, str) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = config.stash[SUITE]
    is_partial = suite.is_quick or suite.problem is not None
    about: defaultdict[str | None, list[pytest.Item]] = defaultdict(list)
    for item in items:
        about[_backend_of(item)].append(item)
    for name in suite.backends:
        _expect_failures(name, about[name], is_partial)
    left_out = [item for item in items if _is_left_out(suite, item)]
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]
    for item in items:
        if not _is_ours(item.path):
            continue
        if config.pluginmanager.hasplugin("timeout") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_limit_of(item)))
        if (backend := _backend_of(item)) is not None:
            item.user_properties.append(("backend", backend))
            item.user_properties.append(("capabilities", " ".join(_capabilities_of(item))))


def _capabilities_of(item: pytest.Item) -> list[str]:
    """What a test is about: its markers, and what its case needs."""
    names = [name for marker in item.iter_markers("capability") for name in marker.args]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "case" in params:
        needs_backward = item.get_closest_marker("gradients") is not None
        problem = replace(params["case"].problem, needs_backward=needs_backward)
        names += capabilities.asked_by(problem)
    return names


def _is_left_out(suite: Suite, item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    about_no_backend = _backend_of(item) is None
    if "compilable" in fixtures and about_no_backend:
        # No backend compiles without a card, and pytest would report a skip for it.
        return _is_ours(item.path)
    if suite.problem is not None:
        return "case" not in fixtures
    if not _is_ours(item.path) or not suite.is_quick:
        return False
    for_other_cards = suite.device.type == "cuda" and "compilable" in fixtures
    is_thorough = item.get_closest_marker("thorough") is not None
    return is_thorough or about_no_backend or for_other_cards


def _expect_failures(name: str, items: list[pytest.Item], is_partial: bool) -> None:
    """Mark the tests that a backend says it fails, strictly; refuse a name that fits none.

    A partial run leaves cases out, so that the name of a case may fit none of those collected.
    """
    try:
        expected: dict[str, str] = dict(getattr(registry.get(name), "expected_failures", {}))
    except Unsupported:
        return
    collected = {item.name.partition("[")[0] for item in items}
    not_collected = _test_functions() - collected
    unmatched = {test for test in expected if test.partition("[")[0] not in not_collected}
    for item in items:
        function, _, inside = item.name.partition("[")
        short = f"{function}[{inside.removeprefix(name).removeprefix('-')}"
        for test in {function, short} & expected.keys():
            item.add_marker(pytest.mark.xfail(reason=expected[test], strict=True))
            unmatched.discard(test)
    if is_partial:
        unmatched = {test for test in unmatched if "[" not in test}
    if unmatched:
        raise pytest.UsageError(
            f"backend {name!r} expects failures of tests that do not exist: "
            f"{', '.join(sorted(unmatched))}"
        )


@lru_cache
def _test_functions() -> set[str]:
    """The names of every test function of the suite, collected in this run or not."""
    return {
        node.name
        for file in HERE.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else LIMIT_S


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not _is_ours(item.path):
        return (yield)
    with item.config.stash[SUITE].watchdog.guard(item.nodeid, _limit_of(item)):
        return (yield)


@pytest.fixture
def lane(request: pytest.FixtureRequest, backend: str) -> cases.Lane:
    """The sizes for this backend on this machine."""
    return request.config.stash[SUITE].lane(backend)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors live: the GPU if there is one."""
    return request.config.stash[SUITE].device


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The GPU; skips the test when there is none."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device

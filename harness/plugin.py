"""The pytest plugin: the invariants as test items of a port.

``pytest --pyargs loudfail.invariants --port h3``, ``pytest invariants/sync.py --port h3`` in a checkout and ``loudfail gate h3`` give the same
items under the same ids, since all of them collect the registry of the *installed* package and never import a file by its path.

It is loaded in every pytest run of the environment, so it imports nothing heavy, and it declares its options, whose plain names would collide
with those that projects declare in their ``conftest.py``, only in a run that uses ``--port``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shlex
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from loudfail.harness.gate import Gate
    from loudfail.harness.registry import Invariant
    from loudfail.harness.result import Result

_KEY: pytest.StashKey[Run] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    if config is None or not _wanted(config):
        return
    from loudfail.harness.options import PORT_OPTIONS, RUN_OPTIONS, destination

    group = parser.getgroup("loudfail", "loudfail: verify a port (declared only with --port or --help)")
    group.addoption("--port", dest="loudfail_port", metavar="PORT", help="name of a port, or package.module:Class")
    for flag, keywords in (PORT_OPTIONS | RUN_OPTIONS).items():
        group.addoption(flag, dest=f"loudfail_{destination(flag)}", **keywords)


def _wanted(config: pytest.Config) -> bool:
    """Whether the command line, ``addopts`` or ``PYTEST_ADDOPTS`` has ``--port`` (or asks for help)."""
    given = [*config.invocation_params.args, *config.getini("addopts"), *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    return any(str(one) in ("--port", "--help", "-h") or str(one).startswith("--port=") for one in given)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("loudfail_port", None) is not None:
        config.stash[_KEY] = Run(config)
        config.pluginmanager.register(config.stash[_KEY], "loudfail-run")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Files of `loudfail.invariants` are collected through the registry, and never imported by path."""
    collectors = yield
    if file_path.parent not in _folders():
        return collectors
    run = parent.config.stash.get(_KEY, None)
    if run is None or file_path.stem not in run.links:
        return []
    return [InvariantFile.from_parent(parent, path=file_path, nodeid=f"invariants/{file_path.name}")]


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A plain directory: as a package it would be imported under a second name."""
    return pytest.Dir.from_parent(parent, path=path) if path in _folders() else None


@functools.lru_cache(maxsize=1)
def _folders() -> frozenset[Path]:
    """Where the invariants lie."""
    from importlib.util import find_spec

    from loudfail.harness import registry

    spec = find_spec(registry.INVARIANTS_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return frozenset(path for place in places or () for path in (Path(place), Path(place).resolve()))


@pytest.fixture(scope="session")
def port(request: pytest.FixtureRequest) -> Any:
    """The port of this run, ``--port``; skips without one."""
    run = request.config.stash.get(_KEY, None)
    if run is None:
        pytest.skip("no --port given")  # the fixture is in every pytest run of the environment; without a port there is nothing to give
    if run.gate.port is None:
        pytest.fail("the port cannot be constructed", pytrace=False)
    return run.gate.port


@pytest.fixture
def tp() -> int:
    """Each tensor-parallel degree of this run in turn, ``--tp``; skips without a port."""
    pytest.skip("no --port given")  # as above; with a port, pytest_generate_tests parametrizes this away


def with_invariants(cls: type, *, tp: tuple[int, ...] = (1,), **fields: Any) -> pytest.MarkDecorator:
    """Parametrize a test with every invariant of a port, for suites that would rather not use ``--port``::

        @with_invariants(MyPort, tp=(1, 2))
        def test_my_port(check):
            check()

    Args:
        cls: the port.
        tp: tensor-parallel degrees.
        fields: of `loudfail.harness.options.Options`, such as ``scale``, ``dtype``, ``expect``.

    A call raises `AssertionError` with claim, got, want, bound and where, or skips what the port does not offer.
    """
    from loudfail.harness.gate import Gate
    from loudfail.harness.options import Options
    from loudfail.harness.registry import invariants

    gate = Gate(Options(f"{cls.__module__}:{cls.__qualname__}", degrees=tp, **fields), cls)
    gate.see_expected()

    def bind(invariant: Invariant, degree: int | None) -> Callable[[], None]:
        def check() -> None:
            __tracebackhide__ = True
            if gate.port is None:
                gate.construct()
            _settle(gate.check(invariant, degree))

        return check

    pairs = [(invariant, degree) for invariant in invariants() for degree in gate.degrees_of(invariant)]
    return pytest.mark.parametrize("check", [pytest.param(bind(i, d), id=i.id if d is None else f"{i.id}[tp{d}]") for i, d in pairs])


class NotHeld(AssertionError):
    """A check failed; the text is the whole story."""


def _settle(result: Result) -> None:
    """Turn a result into pytest's outcome."""
    from loudfail.harness.progress import failure_text
    from loudfail.harness.result import FAILING

    if result.status in FAILING:
        raise NotHeld(failure_text(result))
    if result.status == "expected":
        pytest.xfail(result.message)
    if result.status in ("uncovered", "unavailable"):
        pytest.skip(f"{result.status}: {result.message}")  # counted in the record by its own status; --require makes it a failure


class InvariantFile(pytest.File):
    """One link of the chain."""

    def collect(self) -> Iterator[InvariantItem]:
        run = self.config.stash[_KEY]
        for invariant in run.links.get(self.path.stem, ()):
            for degree in run.gate.degrees_of(invariant):
                name = invariant.id.split("::")[1]
                yield InvariantItem.from_parent(self, name=name if degree is None else f"{name}[tp{degree}]", invariant=invariant, degree=degree)


class InvariantItem(pytest.Item):
    """One invariant at one degree."""

    def __init__(self, *, invariant: Invariant, degree: int | None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.invariant, self.degree = invariant, degree
        self.result: Result | None = None
        self.extra_keyword_matches.add(f"{self.path.stem}::{self.name}")
        for seam in invariant.seams:
            self.add_marker(seam)
        if invariant.rolls_out:
            self.add_marker(pytest.mark.xdist_group(self.config.stash[_KEY].group(degree)))

    def runtest(self) -> None:
        run = self.config.stash[_KEY]
        self.result = run.gate.check(self.invariant, self.degree)
        if run.shown_before(self.result):
            pytest.skip("not run: the port failed its first check, see the first failure")  # one failure tells it; the record has an error for each
        _settle(self.result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, NotHeld) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, self.invariant.function.__code__.co_firstlineno, f"{self.path.stem}::{self.name}"


class Run:
    """The hooks of a run with ``--port``: it owns the port, orders the items, and keeps the results."""

    def __init__(self, config: pytest.Config) -> None:
        from loudfail.harness import options
        from loudfail.harness.environment import PeakMemory
        from loudfail.harness.gate import Gate
        from loudfail.harness.port import SEAMS

        for seam in SEAMS:
            config.addinivalue_line("markers", f"{seam}: an invariant that needs this seam of a port")
        config.addinivalue_line("markers", "xdist_group(name): what stays in one worker of pytest-xdist")
        self.config = config
        self.worker = hasattr(config, "workerinput")
        # The controller of pytest-xdist, which runs nothing itself.
        self.spread = not self.worker and config.getoption("dist", "no") != "no" and bool(config.getoption("tx", None))
        if self.spread and config.option.dist == "load":
            config.option.dist = "loadgroup"
        if self.spread and config.option.maxworkerrestart is None:
            config.option.maxworkerrestart = "0"  # pytest-xdist waits for ever for the rest of a group whose worker it has replaced
        if self.worker:
            config.option.loadgroup = True  # the controller's choice above is made too late for pytest-xdist to tell its workers
        self.results: list[Result] = []
        self.declared: dict[str, None] = {}
        self.facts: dict[str, Any] = {}
        self.record: dict[str, Any] | None = None
        self.interrupted = False
        self._shown: set[str] = set()
        try:
            values = {name.removeprefix("loudfail_"): value for name, value in vars(config.option).items() if name.startswith("loudfail_")}
            self.gate: Gate = Gate(options.parse(values))
            if not self.worker and not config.option.collectonly:
                self.gate.prepare()
        except options.UsageProblem as error:
            raise pytest.UsageError(str(error)) from None
        self.memory = None if self.worker else PeakMemory()

    def group(self, degree: int | None) -> str:
        """What stays in one worker of pytest-xdist, so that no rank is built twice: the checks of one degree, or of several where workers are few.

        One worker is left for the checks of the actor alone. The largest degree costs most and shares last.
        """
        degrees = sorted(self.gate.options.degrees, reverse=True)
        place = degrees.index(degree or self.gate.options.degrees[0])
        return f"rollout{min(place, self._groups() - 1)}"

    def _groups(self) -> int:
        """In how many groups the checks are that ask the rollout."""
        workers = self.config.workerinput["workercount"] if self.worker else 1  # type: ignore[attr-defined]
        return max(1, min(len(self.gate.options.degrees), workers - 1))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Deal to the workers by number: pytest-xdist deals to whichever is ready first, and then the rollout's imports that worker 0 has begun are
        another's to begin again."""
        if config.option.dist != "loadgroup":
            return None
        from xdist.scheduler import LoadGroupScheduling

        class ByNumber(LoadGroupScheduling):
            @property
            def nodes(self) -> list[Any]:
                return sorted(super().nodes, key=lambda node: int(node.gateway.id.removeprefix("gw")))

        return ByNumber(config, log)

    def _rolls_out(self) -> bool:
        """Whether this process will ask the rollout: the largest groups are dealt first, one to a worker."""
        return not self.worker or int(self.config.workerinput["workerid"].removeprefix("gw")) < self._groups()  # type: ignore[attr-defined]

    @functools.cached_property
    def links(self) -> dict[str, list[Invariant]]:
        """File stem → its invariants."""
        from loudfail.harness import registry

        found: dict[str, list[Invariant]] = {}
        for invariant in registry.invariants():
            found.setdefault(invariant.link, []).append(invariant)
        return found

    def pytest_sessionstart(self) -> None:
        from loudfail.harness.options import UsageProblem
        from loudfail.harness.world import without_preloading

        try:
            if not self.spread and not self.config.option.collectonly:
                with contextlib.nullcontext() if self._rolls_out() else without_preloading():
                    self.gate.construct()  # before anything else is imported, so that the ranks import meanwhile
            self.gate.see_expected()
        except UsageProblem as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Checks of the actor alone first: they run while the ranks import. Links in data order; items of others stay where they are.

        A large model has room for one engine at a time, so its checks go degree by degree.
        """
        places = [place for place, item in enumerate(items) if isinstance(item, InvariantItem)]
        order = list(self.links)
        large = self.gate.options.scale != "tiny"

        def rank(item: Any) -> tuple[bool, int, int]:
            return item.invariant.rolls_out, (item.degree or 0) if large else 0, order.index(item.path.stem)

        ours = sorted((items[place] for place in places), key=rank)
        for place, item in zip(places, ours, strict=True):
            items[place] = item
        self.declare(item.nodeid for item in ours)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.declare(ids)

    def declare(self, nodeids: Any) -> None:
        for nodeid in nodeids:
            if str(nodeid).startswith("invariants/"):
                self.declared[str(nodeid).removeprefix("invariants/").replace(".py::", "::").partition("@")[0]] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "tp" in metafunc.fixturenames:
            metafunc.parametrize("tp", self.gate.options.degrees, ids=[f"tp{degree}" for degree in self.gate.options.degrees])

    def shown_before(self, result: Result) -> bool:
        """Whether the same problem of the port has been shown; it is shown once, not for each check that it stops."""
        from loudfail.harness.gate import NOT_RUN

        if not result.message.startswith(NOT_RUN):
            return False
        before = result.message in self._shown
        self._shown.add(result.message)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        from loudfail.harness.record import plain

        report: Any = yield
        if call.when == "call" and isinstance(item, InvariantItem) and item.result is not None:
            report.loudfail = plain(item.result.to_dict())  # pytest-xdist carries it to the controller
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from loudfail.harness.gate import revive

        if (record := getattr(report, "loudfail", None)) is not None:
            self.results.append(revive(record))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Keep a worker's facts; what only a worker could find wrong with the command line (a degree) ends the run as it does in one process.

        Raises:
            pytest.UsageError: the worker's own.
        """
        if found := re.search(r"^\S*UsageError: (.*)", str(error or ""), re.DOTALL | re.MULTILINE):
            raise pytest.UsageError(found[1].strip())
        self.facts = _merge(self.facts, getattr(node, "workeroutput", {}).get("loudfail") or {})

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the records, unless the run was interrupted: then nothing is written."""
        if self.worker:
            self.config.workeroutput["loudfail"] = _simple(self.gate.facts())  # type: ignore[attr-defined]
            return
        if (
            self.interrupted
            or self.config.option.collectonly
            or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
            or not self.declared
        ):
            return
        if not self.spread:
            self.facts = self.gate.facts()
        self._complete()
        ran = {result.status for result in self.results} - {"uncovered", "unavailable"}
        total = sum(len(self.gate.degrees_of(invariant)) for group in self.links.values() for invariant in group)
        self.record = self.gate.report(
            self.results, self.facts, peak=self.memory.stop() if self.memory else 0, selection=self._selection(), total=total
        )
        if not ran:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        elif self.record["verdict"] != "holds":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        try:
            self.gate.write(self.record)
        except OSError as error:
            raise pytest.UsageError(f"--out {self.gate.options.out}: {error}") from None

    def _complete(self) -> None:
        """Bring the results into the order in which they were declared; a check without a result is an error, not passed over."""
        from loudfail.harness.gate import NOT_REACHED, split_name
        from loudfail.harness.result import Result

        by_name = {result.name: result for result in self.results}
        for name in self.declared:
            if name not in by_name:
                check, degree = split_name(name)
                by_name[name] = Result(check, check, "error", degree, message=NOT_REACHED, rerun=self.gate.rerun(check, degree))
        self.results = [by_name[name] for name in self.declared]

    def _selection(self) -> str:
        options = (("-k", self.config.option.keyword), ("-m", self.config.option.markexpr), ("--deselect", self.config.option.deselect))
        return " ".join(f"{flag} {value}" for flag, value in options if value)

    def pytest_unconfigure(self) -> None:
        self.gate.close()
        if self.worker:
            from loudfail.harness.environment import skip_teardown

            atexit.register(skip_teardown)
        if self.memory is not None:
            self.memory.stop()


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Facts of two workers: classes and problems of both, everything else of the first that knows it."""
    merged = {key: one.get(key) or other.get(key) for key in {**one, **other}}
    problems = dict.fromkeys([*(one.get("problems") or []), *(other.get("problems") or [])])
    return merged | {"classes": sorted({*(one.get("classes") or []), *(other.get("classes") or [])}), "problems": list(problems)}


def _simple(facts: dict[str, Any]) -> Any:
    from loudfail.harness.record import plain

    return plain(facts)

"""What ``loudfail gate`` and ``loudfail faults`` print while they run, and how a failure reads."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from loudfail.harness.result import FAILING, STATUSES, Result
from loudfail.harness.result import counts as count
from loudfail.harness.violation import show

if TYPE_CHECKING:
    from loudfail.harness.plugin import Run

MARKS = {"holds": "ok", "violated": "VIOLATED", "expected": "expected", "fixed": "FIXED", "error": "ERROR"}


def failure_text(result: Result) -> str:
    """Claim, got, want, bound, where, cause, example, and the command that runs it again; of an error the message and the end of its traceback."""
    lines: list[tuple[str, object]] = []
    if result.violation is not None and result.status != "fixed":
        lines += [(name, result.violation.get(name)) for name in ("claim", "got", "want", "bound", "where")]
        lines += [("cause", result.cause), ("example", result.violation.get("example"))]
    else:
        lines += [("claim", result.claim), (result.status, result.message), ("", "\n".join(result.traceback.splitlines()[-12:]))]
    lines.append(("rerun", result.rerun))
    text = [f"{MARKS.get(result.status, result.status)} {result.name}"]
    for name, value in lines:
        if value not in (None, ""):
            first, *rest = (show(value) if isinstance(value, float) else str(value)).splitlines()
            text += [f"{name:>9}  {first}", *(f"{'':11}{line}" for line in rest)]
    return "\n".join(text)


def summarize(counts: Mapping[str, int]) -> str:
    """``41 holds, 2 violated``: the statuses that occur."""
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts.get(status)) or "nothing ran"


class StatusLine:
    """One line that says where the run is: rewritten in place on a terminal, a new line every few seconds elsewhere. Goes to stderr."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.last = time.monotonic()
        self.shown = False

    def show(self, text: str, *, now: bool = False) -> None:
        """Show the text if the last output is long enough ago."""
        if not now and time.monotonic() - self.last < (0.2 if self.terminal else 2.0):
            return
        self.last = time.monotonic()
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            self.shown = True
        else:
            sys.stderr.write(f"  … {text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.shown = False

    def print(self, text: str = "") -> None:
        """A line that stays, on stdout."""
        self.clear()
        print(text, flush=True)
        self.last = time.monotonic()


class GateTerminal:
    """pytest plugin in place of pytest's own terminal output: one line a link, failures as they come, and a summary."""

    def __init__(self) -> None:
        self.line = StatusLine()
        self.links: dict[str, list[Result]] = {}
        self.done: set[str] = set()
        self.stopped: dict[str, int] = {}
        self.run: Run | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.run = session.config.pluginmanager.get_plugin("loudfail-run")
        if self.run is not None:
            options = self.run.gate.options
            degrees = ",".join(map(str, options.degrees))
            self.line.print(
                f"loudfail gate {options.port} · {options.scale} · {options.dtype} · TP {degrees} · device {options.device} · seed {options.seed}"
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.run is not None:
            name = nodeid.removeprefix("invariants/").replace(".py::", "::").partition("@")[0]
            self.line.show(f"{len(self.run.results)} of {len(self.run.declared)} · {name}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.run is None or getattr(report, "loudfail", None) is None:
            if report.failed:
                self.line.print(f"ERROR {report.nodeid} ({report.when})\n{report.longreprtext}")
            return
        from loudfail.harness.gate import NOT_RUN

        result = self.run.results[-1]
        self.links.setdefault(link := result.id.split("::")[0], []).append(result)
        if result.message.startswith(NOT_RUN):
            self.stopped[result.message] = self.stopped.get(result.message, 0) + 1
            if self.stopped[result.message] == 1:
                self.line.print(f"ERROR the port does not work: {result.message.removeprefix(NOT_RUN)}")
        elif result.status in FAILING:
            self.line.print(failure_text(result) + "\n")
        if len(self.links[link]) == sum(name.split("::")[0] == link for name in self.run.declared):
            self._finish_link(link)

    def _finish_link(self, link: str) -> None:
        results = self.links[link]
        self.line.print(f"  {link:<12} {summarize(count(results)):<44} {sum(result.seconds for result in results):6.1f} s")
        self.done.add(link)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.line.print(f"ERROR {report.nodeid}\n{report.longreprtext}")

    def pytest_keyboard_interrupt(self) -> None:
        self.line.print("interrupted; nothing was written")

    def pytest_unconfigure(self) -> None:
        self.line.clear()
        record = self.run.record if self.run is not None else None
        if self.run is None or record is None:
            return
        from loudfail.harness.gate import NOT_REACHED, uncovered_seams

        if self.stopped:
            self.line.print(f"{sum(self.stopped.values())} checks were not run, since the port does not work")
        elif lost := sum(result.message == NOT_REACHED for result in self.run.results):
            self.line.print(f"checks that were not run, since the session ended before them: {lost}; the first ERROR above says why")
        elif missing := uncovered_seams(record["seams"]):
            self.line.print("seams that this port does not offer, and the methods that are missing:")
            for text in missing:
                self.line.print(f"  {text}")
        for text in record.get("problems") or []:
            self.line.print(f"note: {text}")
        if (record["configuration"] or {}).get("device", "cpu") != "cpu":
            ranks = " · ".join(f"TP {degree}: {talk}" for degree, talk in record["environment"]["collectives"].items())
            self.line.print(f"on {record['environment']['device']} · {ranks}")
        _print_reasons(self.line, self.run.results)
        peak = record["peak_rss_bytes"] / 2**30
        self.line.print(
            f"{record['verdict']}: {summarize(record['counts'])} of {record['declared']} · {record['seconds']:.1f} s · {peak:.1f} GiB peak"
        )
        if self.run.gate.options.out is not None:
            self.line.print(f"written to {self.run.gate.options.out}")


def _print_reasons(line: StatusLine, results: Sequence[Result]) -> None:
    """Why checks were unavailable or expected to fail, each reason once."""
    reasons: dict[tuple[str, str], int] = {}
    for result in results:
        if result.status in ("unavailable", "expected"):
            reasons[result.status, result.message] = reasons.get((result.status, result.message), 0) + 1
    for (status, message), number in reasons.items():
        line.print(f"{number} {status}: {message}")

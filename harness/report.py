"""Views of a run's JSON record for people and for CI: ``summary.md``, ``junit.xml`` and ``report.html``.

The record is the authority; nothing here judges. Numbers may be NaN or infinite, and may be the strings ``"nan"`` and ``"inf"``, which strict JSON
needs. All text is untrusted: it may come from a model, a prompt or a stranger's port.

Record (keys marked ? may be missing):

- ``schema``, ``port`` (name, or the dictionary of `Port.describe`), ``verdict``, ``declared``, ``counts`` (status → number), ``seconds``,
  ``peak_rss_bytes``, ``environment`` (any nesting), ``classes`` (list of names)
- ``results``: list of `Result.to_dict`. Two kinds of key in ``values`` are drawn: ``delta/<projection>`` is the relative error of what LoRA adds at
  that projection, for the heat map; ``replay/<modality>/<sigma>`` is the error of the replayed velocity, for the scatter plot.
- ``complete``? (false: not all checks of the suite were run), ``selection``? (how it was restricted), ``problems``? (list of text), ``seed``?,
  ``required``? (list), ``configuration``? (`Port.describe`, if ``port`` is only the name), ``seams``? (seam → its missing methods)
- ``faults``?: the record of ``faults.json``: ``counts`` (outcome → number), ``false_alarms`` (number or list), ``matrix`` (`Kill.to_dict` of each,
  in a list or by id)
- ``layout``?: list with one dictionary a sample, see `layout_of`: ``title``, ``modality`` (a name per row, ``"text"`` for text), ``given`` (a flag
  per row), ``sigma`` (a number per row, None where the model is told none), ``position`` (coordinates per row), ``axes``? (their names)
- ``goldens``?: list with one dictionary a golden: ``name``, ``outcome`` (``same``, ``drifted``, ``changed``), ``first``? (the first probe that
  differs), ``versions``? (package → [then, now]), ``message``?, ``probes``?: list of ``name``, ``error``, ``tolerance``
"""

from __future__ import annotations

import html
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loudfail.harness.result import FAILING, STATUSES

if TYPE_CHECKING:
    from loudfail.harness.port import RowTable

Record = Mapping[str, Any]

ICONS = {
    "holds": "✓", "violated": "✗", "expected": "≈", "fixed": "★", "uncovered": "–", "unavailable": "∅", "error": "!",
    "caught": "✓", "escaped": "✗", "crashed": "!", "inert": "–", "same": "✓", "drifted": "≈", "changed": "✗",
}  # fmt: skip
#: A fault should lie at least this far above the bound that catches it.
WANTED_MARGIN = 20.0
#: GitHub cuts a job summary at 1 MiB; the page and the record have the rest.
SUMMARY_FAILURES, TEXT_LIMIT = 30, 4000


def write_reports(report: Record, out: Path) -> list[Path]:
    """Write ``summary.md``, ``junit.xml`` and ``report.html`` into ``out``; each appears complete or not at all.

    Args:
        report: the record described above.
        out: folder; made if missing.

    Returns:
        The three files.

    Raises:
        OSError: the folder cannot be made or written.
    """
    from loudfail.harness.report_page import page  # Jinja2 is needed only here

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("summary.md", summary(report)), ("junit.xml", junit(report)), ("report.html", page(report))):
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, out / name)
        written.append(out / name)
    return written


def layout_of(tables: Sequence[RowTable], titles: Sequence[str] = (), axes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The ``layout`` of the record from what `Port.observe` read off the model's input.

    Args:
        tables: one a sample.
        titles: one a table; numbered if left out.
        axes: names of the position coordinates, such as ``("time", "height", "width")``.
    """
    return [
        {
            "title": titles[index] if titles else f"sample {index}",
            "modality": list(table.modality),
            "given": [bool(flag) for flag in table.given.tolist()],
            "sigma": [None if math.isnan(sigma) else sigma for sigma in table.sigma.tolist()],
            "position": table.position.tolist(),
            "axes": list(axes),
        }
        for index, table in enumerate(tables)
    ]


# -- reading the record --------------------------------------------------------------------------------------------------------------------------


def number(value: object) -> float | None:
    """The number that a field of the record holds, None if it holds something else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def margin(result: Record) -> float | None:
    """``got / bound`` of a result: at most 1 is inside. None where nothing was measured or the bound is zero, which is an exact claim."""
    got, bound = number(result.get("got")), number(result.get("bound"))
    return None if got is None or not bound else got / bound


def title(result: Record) -> str:
    """Id with the degree."""
    return str(result["id"]) + (f"[tp{result['degree']}]" if result.get("degree") is not None else "")


def port_name(report: Record) -> str:
    port = report.get("port")
    return str(port.get("port", "port") if isinstance(port, Mapping) else port)


def failures(report: Record) -> list[Record]:
    return [result for result in report.get("results") or [] if result["status"] in FAILING]


def alike(results: Sequence[Record]) -> list[list[Record]]:
    """Errors that say the same together, so that one broken part of a port is not told once for each check; everything else alone."""
    groups: dict[object, list[Record]] = {}
    for place, result in enumerate(results):
        same = (result.get("message"), result.get("traceback")) if result["status"] == "error" and result.get("message") else place
        groups.setdefault(same, []).append(result)
    return list(groups.values())


def kills(report: Record) -> list[Record]:
    matrix = (report.get("faults") or {}).get("matrix") or []
    return list(matrix.values() if isinstance(matrix, Mapping) else matrix)


def false_alarms(report: Record) -> int:
    alarms = (report.get("faults") or {}).get("false_alarms") or 0
    return int(alarms) if isinstance(alarms, int | float) else len(alarms)


def notices(report: Record) -> list[str]:
    """What a reader must know before the verdict: a run of only a part, and trouble while the record was gathered."""
    found = [f"problem: {show(text)}" for text in report.get("problems") or []]
    if report.get("complete") is False:
        found.insert(0, f"only a part of the suite was run: {show(report.get('selection') or 'some checks were left out')}")
    return found


def contradictions(report: Record) -> list[str]:
    """What does not add up in the record, so that a check that was lost on the way is not passed over."""
    results, found = report.get("results") or [], []
    total, declared = sum(int(n) for n in (report.get("counts") or {}).values()), report.get("declared")
    if declared is not None and total != declared:
        found.append(f"{declared} checks were declared, but the counts add up to {total}")
    if len(results) != total:
        found.append(f"the counts add up to {total}, but {len(results)} results are listed")
    broken = [title(result) for result in failures(report)]
    broken += [str(kill["fault"]) for kill in kills(report) if kill["outcome"] != "caught"]
    broken += [str(golden["name"]) for golden in report.get("goldens") or [] if golden["outcome"] == "changed"]
    if report.get("verdict") == "holds" and broken:
        found.append(f"the verdict is holds, but {len(broken)} failed, {broken[0]} first")
    return found


def explain(result: Record) -> list[tuple[str, str]]:
    """Claim, got, want, bound, where, cause, example, message and rerun of a result, as far as there are any."""
    violation = result.get("violation") or {}
    fields = [
        ("claim", violation.get("claim") or result.get("claim")),
        ("got", violation.get("got")),
        ("want", violation.get("want")),
        ("bound", violation.get("bound")),
        ("where", violation.get("where") or result.get("where")),
        ("cause", cause(result)),
        ("example", violation.get("example")),
        ("message", result.get("message")),
        ("rerun", result.get("rerun")),
    ]
    return [(name, show(value)) for name, value in fields if value not in (None, "")]


def diagnoses(report: Record) -> tuple[list[Record], list[Record]]:
    """The caught faults whose cause has a known name, and those among them that were given another or none."""
    asked = [kill for kill in kills(report) if kill.get("cause") and kill["outcome"] == "caught"]
    return asked, [kill for kill in asked if kill.get("named") != kill["cause"]]


def cause(result: Record) -> str:
    """What the diagnosis of a violation says; empty where there is none."""
    diagnosis = result.get("diagnosis") or {}
    return f"{diagnosis['cause']}: {diagnosis['text']}" if diagnosis.get("cause") else str(diagnosis.get("text") or "")


# -- numbers and text ----------------------------------------------------------------------------------------------------------------------------


def show(value: object) -> str:
    """A number with three digits, an integer as it is; other text cut at `TEXT_LIMIT`."""
    if isinstance(value, float):
        return digits(value)
    text = str(value)
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]} … ({len(text)} characters)"


def digits(value: float | None, places: int = 3) -> str:
    """``0.0412``, ``3.1e-7``, ``∞``; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0 or 0.01 <= abs(value) < 10000:
        return f"{value:.{places}g}" if abs(value) < 10**places - 0.5 else f"{value:.0f}"
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{value:.{places - 1}g}")


def times(ratio: float | None) -> str:
    """How far inside or outside its bound: ``480× below``, ``exact``, ``21× above``."""
    if ratio is None or math.isnan(ratio):
        return digits(ratio)
    if ratio == 0:
        return "no error"
    if 0.995 < ratio <= 1:
        return "at the bound"
    return f"{digits(1 / ratio, 2)}× below" if ratio < 1 else f"{digits(ratio, 2)}× above"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return digits(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "<1 ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def size(count: float | None) -> str:
    if not count:
        return "–"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def total(counts: Mapping[str, Any], order: Sequence[str] = STATUSES) -> list[tuple[str, int]]:
    """The statuses that occur, in order; unknown ones last."""
    return [(name, int(counts[name])) for name in [*order, *sorted(set(counts) - set(order))] if counts.get(name)]


# -- Markdown ------------------------------------------------------------------------------------------------------------------------------------


def summary(report: Record) -> str:
    """Markdown for a job summary: verdict, failures, counts, faults, goldens, tightest margins, slowest checks."""
    return "\n".join(_summary(report)) + "\n"


def _summary(report: Record) -> Iterator[str]:
    verdict, results, broken = str(report.get("verdict")), report.get("results") or [], failures(report)
    yield f"# {ICONS.get(verdict, '!')} {_md(port_name(report))}: {_md(verdict)}\n"
    counts = total(report.get("counts") or {})
    added = " + ".join(f"{n} {_md(status)}" for status, n in counts)
    took, peak = duration(number(report.get("seconds"))), size(number(report.get("peak_rss_bytes")))
    yield f"{added or '0'} = **{report.get('declared')} declared** · {took} · {peak} peak\n"
    if not results and not kills(report):
        yield "> **Nothing was checked.**\n"
    for text in contradictions(report):
        yield f"> **This record does not add up:** {_md(text)}.\n"
    for text in notices(report):
        yield f"> {_md(text)}\n"
    if broken:
        yield f"## Failures ({len(broken)})\n"
        groups = alike(broken)
        for result, *others in groups[:SUMMARY_FAILURES]:
            yield f"### {ICONS[result['status']]} {_code(title(result))} {_md(result['status'])}\n"
            if others:
                yield f"and the same in {len(others)} more: {', '.join(_code(title(other)) for other in others)}\n"
            yield _fence("\n".join(f"{name:>7}: {value}" for name, value in explain(result) if name != "rerun"))
            if result.get("rerun"):
                yield _fence(str(result["rerun"]), "sh")
            if result.get("traceback"):
                yield f"<details><summary>traceback</summary>\n\n{_fence(show(result['traceback']))}</details>\n"
        if more := sum(map(len, groups[SUMMARY_FAILURES:])):
            yield f"… and {more} more in `report.html`.\n"
    skipped = [result for result in results if result["status"] in ("expected", "uncovered", "unavailable")]
    if skipped:
        yield f"## Not held to ({len(skipped)})\n"
        yield from _table(
            ("check", "status", "why"), [(_code(title(r)), _md(r["status"]), _md(show(r.get("message") or ""))) for r in skipped[:SUMMARY_FAILURES]]
        )
        if len(skipped) > SUMMARY_FAILURES:
            yield f"… and {len(skipped) - SUMMARY_FAILURES} more in `report.html`.\n"
    if report.get("faults"):
        yield from _summary_faults(report)
    if goldens := report.get("goldens"):
        yield f"## Goldens ({len(goldens)})\n"
        compared = [(_code(str(g["name"])), f"{ICONS.get(g['outcome'], '')} {_md(g['outcome'])}", _code(str(g.get("first") or "–"))) for g in goldens]
        yield from _table(("golden", "outcome", "first probe that differs"), compared)
    held = [(m, r) for r in results if r["status"] == "holds" and (m := margin(r)) is not None]
    if held:
        yield "## Tightest margins of what holds\n"
        rows = [
            (_code(title(r)), digits(number(r["got"])), digits(number(r["bound"])), times(m))
            for m, r in sorted(held, key=lambda pair: -pair[0] if pair[0] == pair[0] else -math.inf)[:5]
        ]
        yield from _table(("check", "got", "bound", "margin"), rows)
    if results:
        yield "## Slowest\n"
        slowest = sorted(results, key=lambda r: -(number(r.get("seconds")) or 0))[:5]
        timed = [(_code(title(r)), duration(number(r.get("seconds"))), str(r.get("examples", 1))) for r in slowest]
        yield from _table(("check", "time", "inputs"), timed)


def _summary_faults(report: Record) -> Iterator[str]:
    faults, matrix = report["faults"], kills(report)
    added = " + ".join(f"{n} {_md(outcome)}" for outcome, n in total(faults.get("counts") or {}, ("caught", "escaped", "crashed", "inert")))
    yield f"## Faults\n\n{added} = **{len(matrix)} faults** · {false_alarms(report)} false alarms on clean ports\n"
    missed = [kill for kill in matrix if kill["outcome"] != "caught"]
    if missed:
        yield from _table(
            ("fault", "outcome", "what is broken", "why"),
            [(_code(str(k["fault"])), f"{ICONS[k['outcome']]} {_md(k['outcome'])}", _md(k["claim"]), _md(show(k["message"]))) for k in missed],
        )
    asked, wrong = diagnoses(report)
    if asked:
        yield f"Diagnosis: **{len(asked) - len(wrong)} of {len(asked)}** faults with a known cause were named rightly\n"
    if wrong:
        named = [(_code(str(k["fault"])), _md(k["cause"]), _md(k.get("named") or "nothing known")) for k in wrong]
        yield from _table(("misdiagnosed", "its cause", "named"), named)
    caught = [(number(kill.get("margin")), str(kill["fault"])) for kill in matrix if kill["outcome"] == "caught"]
    if measured := sorted((m, name) for m, name in caught if m is not None and math.isfinite(m)):
        rows = [(_code(name), times(m) + ("" if m >= WANTED_MARGIN else f" (wanted: {WANTED_MARGIN:.0f}×)")) for m, name in measured[:5]]
        yield from _table(("weakest faults caught", "margin"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    lines = [head, ["---"] * len(head), *rows]
    yield "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _md(text: object) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(" ".join(str(text).split()), quote=False))


def _code(text: str) -> str:
    """A code span that its content cannot end; a table cell may hold it."""
    text = " ".join(text.split()).replace("|", "\\|") or " "
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{text}{ticks}" if ticks == "`" else f"{ticks} {text} {ticks}"


def _fence(text: str, language: str = "") -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}\n"


# -- JUnit ---------------------------------------------------------------------------------------------------------------------------------------


def junit(report: Record) -> str:
    """JUnit XML: a suite for each link of the chain, one for faults, one for goldens, and one case that the record adds up."""
    cases: dict[str, list[ET.Element]] = {}

    def case(suite: str, name: str, seconds: object, kind: str = "", message: str = "", text: str = "") -> None:
        classname = f"{_xml(port_name(report))}.{_xml(suite)}"
        element = ET.Element("testcase", classname=classname, name=_xml(name), time=f"{number(seconds) or 0:.3f}")
        if kind:
            attributes = {"message": _xml(message)} | ({} if kind == "skipped" else {"type": "loudfail"})
            ET.SubElement(element, kind, attributes).text = _xml(text) or None
        cases.setdefault(suite, []).append(element)

    for result in report.get("results") or []:
        status, (link, _, name) = result["status"], title(result).partition("::")
        kind = {"holds": "", "violated": "failure", "fixed": "failure", "error": "error"}.get(status, "skipped")
        text = "\n".join(f"{key:>7}: {value}" for key, value in explain(result))
        text += f"\n\n{show(result['traceback'])}" if result.get("traceback") else ""
        message = f"{status}: {result.get('message') or result.get('claim')}"
        case(link, name or link, result.get("seconds"), kind, show(message), text if kind in ("failure", "error") else "")
    for kill in kills(report):
        kind = {"caught": "", "crashed": "error"}.get(kill["outcome"], "failure")
        case("faults", str(kill["fault"]), kill.get("seconds"), kind, f"{kill['outcome']}: {kill['claim']}", show(kill.get("message") or ""))
        if kind == "" and kill.get("cause"):
            right = kill.get("named") == kill["cause"]
            text = f"named {kill.get('named') or 'nothing known'}, its cause is {kill['cause']}"
            case("diagnosis", str(kill["fault"]), 0, "" if right else "failure", text, show(kill.get("diagnosis") or ""))
    for golden in report.get("goldens") or []:
        kind = "failure" if golden["outcome"] == "changed" else ""
        message = str(golden.get("message") or f"first probe that differs: {golden.get('first')}")
        case("goldens", str(golden["name"]), 0, kind, f"{golden['outcome']}: {message}", message)
    wrong = contradictions(report)
    case("report", "the_record_adds_up", 0, "error" if wrong else "", "; ".join(wrong))

    root = ET.Element("testsuites", name="loudfail")
    for suite, members in cases.items():
        element = ET.SubElement(root, "testsuite", {"name": _xml(suite)} | _tally(members))
        element.extend(members)
    root.attrib.update(_tally([member for members in cases.values() for member in members]))
    del root.attrib["skipped"]  # Jenkins's schema has it for suites only
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False).join(("<?xml version='1.0' encoding='utf-8'?>\n", "\n"))


def _tally(members: Sequence[ET.Element]) -> dict[str, str]:
    def having(tag: str) -> str:
        return str(sum(member.find(tag) is not None for member in members))

    numbers = {"tests": str(len(members)), "failures": having("failure"), "errors": having("error"), "skipped": having("skipped")}
    return numbers | {"time": f"{sum(float(member.get('time') or 0) for member in members):.3f}"}


def _xml(text: object) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(text))

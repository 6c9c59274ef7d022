"""Views of the record of an upgrade for people and for CI: ``upgrade.md`` and ``upgrade.html``. The record is the authority; nothing here judges.

All text in the record is untrusted: exceptions, paths and probes come from other packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loudfail.harness import report as views
from loudfail.harness.registry import CHAIN
from loudfail.harness.report import digits, duration, show, size

Record = Mapping[str, Any]
Row = Mapping[str, Any]

FILES = ("upgrade.json", "upgrade.md", "upgrade.html")
ICONS = {"works": "✓", "drifted": "≈", "changed": "✗", "breaks": "!", "conflict": "∅", "same": "✓"}
#: Class of `style.html.j2` that has the colour of a verdict or of a kind of difference.
TONES = {
    "works": "s-holds", "same": "s-holds", "drifted": "s-drifted", "changed": "s-changed", "breaks": "s-error", "conflict": "s-unavailable",
    "violated": "s-violated", "api": "s-error", "error": "s-error", "unavailable": "s-unavailable", "missing": "s-error", "mended": "s-drifted",
    "other": "s-drifted",
}  # fmt: skip
MEANING = {
    "works": "every check as before, every number that was compared bit for bit",
    "drifted": "every check as before; some numbers differ inside the measured tolerance or bound",
    "changed": "a check is violated that held, or a golden left its tolerance",
    "breaks": "an interface that the port uses is gone or another, or a seam is not available any more",
    "conflict": "the versions do not go together; nothing was run",
}
MOST_ROWS = 12
#: Kinds of difference whose message is not the check's own: what stops one check mostly stops many, in the same words.
STOPPED = ("api", "error", "missing", "unavailable")


def compact(record: Record) -> dict[str, Any]:
    """The record as it is kept on disk: what stops many checks is told once in ``checks.stopped``, with their names, and not in a row of each.

    A record that is compact already stays as it is.
    """
    return {**record, "rows": [{**row, "drift": _compact(row["drift"])} if row["drift"] else row for row in record["rows"]]}


def _compact(drift: Mapping[str, Any]) -> dict[str, Any]:
    checks = drift["checks"]
    stopped: dict[tuple[str, ...], list[str]] = {}
    for one in checks["rows"]:
        if one["kind"] in STOPPED:
            stopped.setdefault(tuple(one[key] for key in ("kind", "before", "after", "message")), []).append(one["name"])
    groups = [{"kind": kind, "before": was, "after": now, "message": said, "checks": names} for (kind, was, now, said), names in stopped.items()]
    rows = [one for one in checks["rows"] if one["kind"] not in STOPPED]
    return {**drift, "checks": {**checks, "rows": rows, "stopped": [*checks.get("stopped", []), *groups]}}


def differing(row: Row) -> list[dict[str, Any]]:
    """Checks that differ and no broken interface accounts for, those first that all share one message: a line of the table each."""
    checks = _compact(row["drift"])["checks"]
    groups = [one for one in checks["stopped"] if one["kind"] not in ("api", "error")]
    return [*({**one, "name": one["checks"][0], "more": len(one["checks"]) - 1} for one in groups), *checks["rows"]]


def write(record: Record, out: Path) -> list[Path]:
    """Write ``upgrade.md`` and ``upgrade.html``, each complete or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    written = []
    for name, text in (("upgrade.md", markdown(record)), ("upgrade.html", page(record))):
        partial = out / f".{name}.partial"
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, out / name)
        written.append(out / name)
    return written


def moves(row: Row) -> str:
    """``diffusers 0.40.0 → 0.42.1``, the requested packages only."""
    said = [f"{one['name']} {one['before'] or 'absent'} → {one['after']}" for one in row["moves"] if one["why"] == "requested"]
    return ", ".join(said) or ", ".join(row["requests"])


def also(row: Row) -> list[str]:
    """The packages that had to move along, and why."""
    return [f"{one['name']} {one['before'] or 'absent'} → {one['after']}: {one['why']}" for one in row["moves"] if one["why"] != "requested"]


def goldens_in_brief(row: Row) -> str:
    """``3 same, 1 changed``; a dash where none was compared."""
    outcomes = [golden["outcome"] for golden in row["drift"]["goldens"]] if row["drift"] else []
    return ", ".join(f"{outcomes.count(one)} {one}" for one in ("same", "drifted", "changed") if one in outcomes) or "–"


def checks_in_brief(row: Row) -> str:
    """``159 as before, 2 violated``; a dash where none was run."""
    counts = row["drift"]["checks"]["counts"] if row["drift"] else {}
    named = {"same": "as before", "api": "broken", "mended": "hold now"}
    return ", ".join(f"{number} {named.get(kind, kind)}" for kind, number in sorted(counts.items(), key=lambda pair: pair[0] != "same")) or "–"


def ratio_in_brief(row: Row) -> str:
    """``gate × 1.02, goldens × 0.98``."""
    timings = row["drift"]["timings"] if row["drift"] else {}
    return ", ".join(f"{what} × {digits(one['ratio'], 2)}" for what, one in timings.items() if one["ratio"]) or "–"


def told_apart(before: object, after: object) -> tuple[str, str]:
    """Two numbers that differ, with as many digits as that takes."""
    return (show(before), show(after)) if show(before) != show(after) else (str(before), str(after))


# -- Markdown ------------------------------------------------------------------------------------------------------------------------------------


def markdown(record: Record) -> str:
    """The drift table for a job summary."""
    return "\n".join(_markdown(record)) + "\n"


def _markdown(record: Record) -> Iterator[str]:
    rows, before = record["rows"], record["before"]
    yield f"# {_text(record['port'])}: what an upgrade changes\n"
    packages = ", ".join(f"{name} {version}" for name, version in before["packages"].items() if name != "loudfail")
    yield f"Before: {_text(packages)} · Python {_text(before['python'])} · {_text(before['cpu'])}\n"
    for note in record["notes"]:
        yield f"> {_text(note)}\n"
    yield "| upgrade | verdict | checks | goldens | first difference | time |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = (moves(row), _verdict(row), checks_in_brief(row), goldens_in_brief(row), _short(row["first"], 600), ratio_in_brief(row))
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""
    for verdict in dict.fromkeys(row["verdict"] for row in rows):
        yield f"- *{verdict}*: {MEANING[verdict]}"
    yield ""
    for row in rows:
        yield from _details(row)
    yield f"Made by\n\n```sh\n{record['command']}\n```"


def _verdict(row: Row) -> str:
    return f"{ICONS[row['verdict']]} **{row['verdict']}**" + (" as expected" if row.get("as_expected") else "")


def _details(row: Row) -> Iterator[str]:
    drift = row["drift"]
    lines = [*also(row), *row["overridden"], *row.get("conflict", [])]
    if row["verdict"] == "works" and not lines and not row.get("because"):
        return
    yield f"## {ICONS[row['verdict']]} {_text(moves(row))}\n"
    if row.get("because"):
        yield f"{row['because']}\n"
    for line in lines:
        yield f"- {_text(line)}"
    if lines:
        yield ""
    if drift is None:
        return
    for one in drift["api"][:MOST_ROWS]:
        yield f"- **{_text(one['exception'] or one['stage'])}** {_text(_short(one['message']))} {_code(one['at'])}: {_stops(one)}"
    if drift["api"]:
        yield ""
    if drift["seams_lost"]:
        yield f"Seams that are not available any more: {', '.join(drift['seams_lost'])}\n"
    if differs := differing(row):
        yield "| check | before | after | what | cause |"
        yield "|---|---|---|---|---|"
        for one in differs[:MOST_ROWS]:
            more = f" and {one['more']} more" if one.get("more") else ""
            said = " | ".join(_cell(_short(one.get(key))) for key in ("message", "cause"))
            yield f"| {_code(one['name'])}{more} | {one['before']} | {one['after']} | {said} |"
        yield f"\n… and {len(differs) - MOST_ROWS} more\n" if len(differs) > MOST_ROWS else ""
    if moved := [golden for golden in drift["goldens"] if golden["outcome"] != "same"]:
        yield "| golden | outcome | probes same, drifted, changed | first that differs | relative error | tolerance | weakest known fault there |"
        yield "|---|---|---|---|---|---|---|"
        for golden in moved:
            first, counts = golden["first"] or {}, golden["counts"]
            numbers = [first.get("note") or digits(first.get("error")), digits(first.get("tolerance")), digits(first.get("weakest"))]
            cells = [
                f"{ICONS[golden['outcome']]} {golden['outcome']}",
                f"{counts['same']}, {counts['drifted']}, {counts['changed']}",
                _code(first.get("name") or golden["message"] or ""),
            ]
            yield f"| {_code(golden['name'])} | {' | '.join([*cells, *map(_cell, numbers)])} |"
        yield ""
    if moved := drift.get("moved"):  # none in records of loudfail.upgrade/1
        yield "| check that holds | measured before | after | bound |"
        yield "|---|---|---|---|"
        for one in moved[:MOST_ROWS]:
            yield f"| {_code(one['name'])} | {' | '.join([*told_apart(one['before'], one['got']), digits(views.number(one['bound']))])} |"
        yield f"\n… and {len(moved) - MOST_ROWS} more\n" if len(moved) > MOST_ROWS else ""
    for one in drift["closer"][:3]:
        yield f"- closer to its bound: {_code(one['name'])} {digits(one['before'])} → {digits(one['got'])}, bound {digits(one['bound'])}"
    if drift["closer"]:
        yield ""


def _stops(one: Mapping[str, Any]) -> str:
    return f"{one['checks']} checks, {_code(one['first'])} first" if one["first"] else f"the {one['stage']} did not run"


def _short(text: object, limit: int = 220) -> str:
    said = show(" ".join(str(text or "").split()))
    return said if len(said) <= limit else f"{said[:limit]} …"


def _text(text: object) -> str:
    """Untrusted text in Markdown: nothing in it is markup."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>#|" else sign for sign in _short(text, 2000))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _code(text: object) -> str:
    return f"`{_short(text).replace('`', chr(39)).replace('|', '¦')}`" if text else ""


# -- HTML ----------------------------------------------------------------------------------------------------------------------------------------


def page(record: Record) -> str:
    """The whole document: the table as a picture first, then each upgrade."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loudfail.harness", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"digits": digits, "duration": duration, "size": size, "show": _short, "num": views.number}
    environment.globals |= {
        "icons": ICONS, "tones": TONES, "meaning": MEANING, "moves": moves, "also": also, "checks_in_brief": checks_in_brief,
        "goldens_in_brief": goldens_in_brief, "heat": _heat, "differing": differing, "told_apart": told_apart,
    }  # fmt: skip
    rows = record["rows"]
    verdicts = [row["verdict"] for row in rows]
    worst = next((one for one in ("breaks", "changed", "conflict", "drifted") if one in verdicts), "works")
    return environment.get_template("upgrade.html.j2").render(
        record=record,
        rows=rows,
        verdict=worst,
        counts=[(one, verdicts.count(one)) for one in MEANING if one in verdicts],
        links=_columns(rows, "links"),
        groups=_columns(rows, "groups"),
        cells=[_cells(row) for row in rows],
    )


def _columns(rows: Sequence[Row], what: str) -> list[str]:
    """Links of the chain, or groups of probes, that occur, in the order of the data."""
    found: dict[str, None] = {}
    for row in rows:
        if what == "links":
            found |= dict.fromkeys(one["link"] for one in (row["drift"]["checks"]["links"] if row["drift"] else []))
        else:
            found |= dict.fromkeys(group["name"] for golden in (row["drift"]["goldens"] if row["drift"] else []) for group in golden["groups"])
    order = {link: place for place, link in enumerate(CHAIN)}
    return sorted(found, key=lambda name: order.get(name, len(order))) if what == "links" else list(found)


def _cells(row: Row) -> dict[str, dict[str, dict[str, Any]]]:
    """What the picture shows of an upgrade: link → its checks, and group of probes → the worst of all goldens."""
    drift = row["drift"]
    if drift is None:
        return {"links": {}, "groups": {}}
    links: dict[str, dict[str, Any]] = {}
    for one in drift["checks"]["links"]:
        differing = {kind: number for kind, number in one["kinds"].items() if kind != "same"}
        worst = next((kind for kind in ("missing", "api", "error", "violated", "unavailable", "other", "mended") if kind in differing), "same")
        links[one["link"]] = {"kind": worst, "count": sum(differing.values()), "of": sum(one["kinds"].values())}
    groups: dict[str, dict[str, Any]] = {}
    severity = ("same", "drifted", "changed")
    for golden in drift["goldens"]:
        for group in golden["groups"]:
            cell = groups.setdefault(group["name"], {"kind": "same", "ratio": None})
            cell["kind"] = max(cell["kind"], group["outcome"], key=severity.index)
            cell["ratio"] = max((ratio for ratio in (cell["ratio"], group["ratio"]) if ratio is not None), default=None)
    return {"links": links, "groups": groups}


def _heat(ratio: float | None) -> int:
    """How dark a drifted group is: 10 at a thousandth of its tolerance and below, 90 at the tolerance."""
    import math

    return 90 if ratio is None else round(10 + 80 * min(max(1 + math.log10(max(ratio, 1e-9)) / 3, 0), 1))

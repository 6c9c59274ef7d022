"""The single-file ``report.html``: turns the record of `report.py` into what ``report.html.j2`` draws. No script, no network, no fonts of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from loudfail.harness import report as views
from loudfail.harness.registry import CHAIN
from loudfail.harness.report import Record, digits, margin, number
from loudfail.harness.result import FAILING

#: Domain of the margin scale, decades of ``got / bound``.
LOW, HIGH = -6.0, 3.0
#: Worst first; a group shows the worst status of its members.
SEVERITY = ("error", "violated", "fixed", "expected", "unavailable", "uncovered", "holds")
#: More rows than this would be narrower than a few pixels; then runs of equal rows are drawn.
MOST_CELLS = 200
GIVEN_LABEL = {True: "given", False: "generated"}


def page(report: Record) -> str:
    """The whole document."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loudfail.harness", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"digits": digits, "duration": views.duration, "size": views.size, "times": views.times, "show": views.show, "num": number}
    environment.globals |= {"icons": views.ICONS, "explain": views.explain, "title": views.title}
    results = report.get("results") or []
    return environment.get_template("report.html.j2").render(
        name=views.port_name(report),
        verdict=str(report.get("verdict")),
        headline=_headline(report),
        declared=report.get("declared"),
        counts=views.total(report.get("counts") or {}),
        contradictions=views.contradictions(report),
        notices=views.notices(report),
        seconds=number(report.get("seconds")),
        peak=number(report.get("peak_rss_bytes")),
        degrees=sorted({result["degree"] for result in results if result.get("degree") is not None}),
        failures=views.alike(views.failures(report)),
        links=_links(results),
        heat=_heat(results),
        matrix=_matrix(report, results),
        layout=[_strip(sample) for sample in report.get("layout") or []],
        modalities=_modalities(report),
        replay=_replay(results),
        goldens=report.get("goldens") or [],
        facts=list(flatten(report.get("environment") or {})),
        port=list(flatten(report["port"] if isinstance(report.get("port"), Mapping) else report.get("configuration") or {})),
        run=list(flatten({key: report[key] for key in ("seed", "required", "seams") if report.get(key) not in (None, [], {})})),
        classes=[str(one) for one in report.get("classes") or []],
        schema=report.get("schema"),
    )


def _headline(report: Record) -> str:
    counts, declared = report.get("counts") or {}, report.get("declared")
    failing = {status: int(counts.get(status) or 0) for status in FAILING}
    says = {"violated": "{} violated", "error": "{} ended in an error", "fixed": "{} expected to fail, but held"}
    parts = [says[status].format(f"{n} check{'s' if n != 1 else ''}") for status, n in failing.items() if n]
    missed = sum(kill["outcome"] != "caught" for kill in views.kills(report))
    parts += [f"{missed} fault{'s' if missed != 1 else ''} not caught"] if missed else []
    changed = sum(golden["outcome"] == "changed" for golden in report.get("goldens") or [])
    parts += [f"{changed} golden{'s' if changed != 1 else ''} changed"] if changed else []
    held = int(counts.get("holds") or 0)
    if not report.get("results"):
        return ", ".join(parts) or ("Every fault was caught." if views.kills(report) else "Nothing was checked.")
    if parts:
        return ", ".join(parts) + f"; {held} hold."
    return f"All {held} checks hold." if held == declared else f"{held} of {declared} checks hold, none is violated."


def _worst(statuses: Iterable[str]) -> str:
    return min(statuses, key=lambda status: SEVERITY.index(status) if status in SEVERITY else -1)


def _bar(result: Record) -> dict[str, Any]:
    """Where a measurement lies on the margin scale, in percent from the left, and how that is said."""
    ratio, got = margin(result), number(result.get("got"))
    bar: dict[str, Any] = {"ratio": ratio, "at": None, "inside": True, "text": ""}
    if ratio is not None:
        decade = HIGH if math.isnan(ratio) or math.isinf(ratio) else (LOW if ratio <= 0 else math.log10(ratio))
        bar |= {"at": _percent(decade), "inside": ratio <= 1, "text": views.times(ratio)}
    elif got is not None and number(result.get("bound")) == 0:
        bar |= {"inside": got == 0, "text": "exact" if got == 0 else "differs"}
    elif result["status"] == "holds":
        bar["text"] = "holds"
    return bar


def _percent(decade: float) -> float:
    return round(100 * (min(max(decade, LOW), HIGH) - LOW) / (HIGH - LOW), 2)


def _links(results: list[Record]) -> list[dict[str, Any]]:
    """Results by link of the chain in data order, then by invariant, its degrees together."""
    links: dict[str, dict[str, list[Record]]] = {}
    for result in results:
        links.setdefault(str(result["id"]).partition("::")[0], {}).setdefault(str(result["id"]), []).append(result)
    order = {link: place for place, link in enumerate(CHAIN)}
    drawn = []
    for link, checks in sorted(links.items(), key=lambda item: order.get(item[0], len(order))):
        rows: list[dict[str, Any]] = [
            {
                "id": name,
                "claim": runs[0].get("claim") or name,
                "status": _worst(run["status"] for run in runs),
                "seconds": sum(number(run.get("seconds")) or 0 for run in runs),
                "runs": [{"result": run, "bar": _bar(run)} for run in sorted(runs, key=lambda run: run.get("degree") or 0)],
            }
            for name, runs in checks.items()
        ]
        members = [result for runs in checks.values() for result in runs]
        held = sum(result["status"] == "holds" for result in members)
        status = _worst(result["status"] for result in members)
        seconds = sum(row["seconds"] for row in rows)
        drawn.append({"name": link, "checks": rows, "held": held, "count": len(members), "status": status, "seconds": seconds})
    return drawn


def _heat(results: list[Record]) -> dict[str, Any] | None:
    """``delta/<projection>`` as a table of layer × projection for each degree; see `_bound`."""
    found: dict[int, dict[tuple[str, str], float]] = {}
    for result in results:
        for key, raw in (result.get("values") or {}).items():
            if result.get("degree") is None or not key.startswith("delta/"):
                continue
            place, value = _layer(key.removeprefix("delta/")), number(raw)
            value = math.nan if value is None else value
            old = found.setdefault(result["degree"], {}).get(place, -1.0)
            found[result["degree"]][place] = value if not value <= old else old
    if not found:
        return None
    places = list(dict.fromkeys(place for values in found.values() for place in values))
    columns = list(dict.fromkeys(projection for _, projection in places))
    bound = _bound(results, "delta/")
    panels = [
        {"degree": degree, "worst": max(values.values(), key=lambda v: math.inf if math.isnan(v) else v), "count": len(values)}
        for degree, values in sorted(found.items())
    ]
    rows = []
    for layer in dict.fromkeys(layer for layer, _ in places):
        row = [(values, (layer, column)) for _, values in sorted(found.items()) for column in columns]
        rows.append((layer, [_heat_cell(values.get(place), place in places, bound) for values, place in row]))
    return {"columns": columns, "panels": panels, "rows": rows, "bound": bound if math.isfinite(bound) else None, "expected": len(places)}


def _bound(results: list[Record], prefix: str) -> float:
    """The bound to draw for values of that prefix. A violated check may report a special bound of its worst place, so those that hold come first."""
    charted = [result for result in results if any(key.startswith(prefix) for key in result.get("values") or {})]
    measured = [(result["status"], bound) for result in charted if (bound := number(result.get("bound")))]
    held = [bound for status, bound in measured if status == "holds"]
    return min(held) if held else max((bound for _, bound in measured), default=math.inf)


def _layer(path: str) -> tuple[str, str]:
    """``blocks.3.attn.to_q`` → ``("blocks.3", "attn.to_q")``: the layer ends with the first number."""
    parts = path.split(".")
    end = next((place + 1 for place, part in enumerate(parts[:-1]) if part.isdigit()), 0)
    return ".".join(parts[:end]) or "model", ".".join(parts[end:])


def _heat_cell(value: float | None, elsewhere: bool, bound: float) -> dict[str, Any]:
    if value is None:
        return {"kind": "missing" if elsewhere else "none", "text": "missing" if elsewhere else "", "heat": 0}
    if not value <= bound:
        return {"kind": "over", "text": digits(value, 2), "heat": 100}
    # Eight decades below the bound (or below 1) are the coldest that is told apart from zero.
    top = math.log10(bound) if 0 < bound < math.inf else 0.0
    heat = 0 if value <= 0 else round(min(max(100 * (1 + (math.log10(value) - top) / 8), 6), 100))
    return {"kind": "heat", "text": digits(value, 2), "heat": heat}


def _matrix(report: Record, results: list[Record]) -> dict[str, Any] | None:
    """Faults × the invariants named for them, at the worst degree."""
    kills = views.kills(report)
    if not kills:
        return None
    order = {link: place for place, link in enumerate(CHAIN)}
    named = dict.fromkeys(str(result["id"]) for kill in kills for result in kill["results"] if str(result["id"]) != str(kill["fault"]))
    columns = sorted(named, key=lambda name: order.get(name.partition("::")[0], len(order)))
    rows: list[dict[str, Any]] = []
    for kill in kills:
        cells = {}
        for name, group in groupby(sorted(kill["results"], key=lambda one: str(one["id"])), key=lambda one: str(one["id"])):
            cells[name] = _kill_cell(list(group))
        value = number(kill.get("margin"))
        rows.append({"kill": kill, "margin": value, "bar": _percent_of_fault(value), "cells": [cells.get(column) for column in columns]})
    finite = [row["margin"] for row in rows if row["margin"] is not None and math.isfinite(row["margin"])]
    heads = [{"name": link, "columns": list(group)} for link, group in groupby(columns, key=lambda name: name.partition("::")[0])]
    ran = dict.fromkeys(str(result["id"]) for result in results if result["status"] == "holds")
    return {
        "rows": rows,
        "heads": heads,
        "counts": views.total((report.get("faults") or {}).get("counts") or {}, ("caught", "escaped", "crashed", "inert")),
        "alarms": views.false_alarms(report),
        "weakest": min(finite) if finite else None,
        "wanted": views.WANTED_MARGIN,
        "wanted_at": _percent_of_fault(views.WANTED_MARGIN),
        "unbroken": [name for name in ran if name not in named],
        "asked": sorted((asked := views.diagnoses(report))[0], key=lambda kill: kill.get("named") == kill["cause"]),
        "misdiagnosed": len(asked[1]),
    }


def _kill_cell(runs: list[Record]) -> dict[str, Any]:
    status = _worst("holds" if run["status"] not in ("violated", "error") else run["status"] for run in runs)
    held = [run for run in runs if run["status"] not in ("violated", "error")]
    if status == "error":
        return {"kind": "error", "text": "ended in an error"}
    if held:
        return {"kind": "held", "text": "not violated: " + ", ".join(f"{views.title(run)} {run['status']}" for run in held)}
    ratios = [ratio for run in runs if (ratio := margin(run)) is not None]
    weakest = min(ratios, default=math.inf)
    return {"kind": "weak" if weakest < views.WANTED_MARGIN else "killed", "text": "violated, " + (views.times(weakest) if ratios else "exact claim")}


def _percent_of_fault(value: float | None) -> float:
    """Length of a fault's margin bar: 1 to 10⁶ times the bound, logarithmic."""
    if value is None or math.isnan(value) or value <= 1:
        return 0.0
    return 100.0 if math.isinf(value) else round(min(100 * math.log10(value) / 6, 100), 1)


def _modalities(report: Record) -> dict[str, int]:
    """Modality → number of its colour; text is 0, which is neutral."""
    names = dict.fromkeys(str(name) for sample in report.get("layout") or [] for name in sample["modality"])
    names |= dict.fromkeys(panel["modality"] for panel in _replay(report.get("results") or [])["panels"])
    return {"text": 0} | {name: 1 + place % 5 for place, name in enumerate(name for name in sorted(names, reverse=True) if name != "text")}


def _strip(sample: Record) -> dict[str, Any]:
    """One sample's rows as cells, its runs of equal rows in words, and its positions as step lines."""
    count = len(sample["modality"])
    position = [row if isinstance(row, list | tuple) else [row] for row in sample.get("position") or []]
    sigmas = [None if (value := number(raw)) is None or math.isnan(value) else value for raw in sample["sigma"]]
    keys = [(str(m), bool(g), s) for m, g, s in zip(sample["modality"], sample["given"], sigmas, strict=True)]
    runs: list[dict[str, Any]] = []
    start = 0
    for (modality, given, sigma), group in groupby(keys):
        length = len(list(group))
        places = position[start : start + length]
        spans = [f"{digits(min(axis))} to {digits(max(axis))}" if min(axis) != max(axis) else digits(min(axis)) for axis in zip(*places, strict=True)]
        run = {"modality": modality, "given": given, "sigma": sigma, "start": start, "end": start + length - 1, "length": length, "spans": spans}
        runs.append(run)
        start += length
    if count <= MOST_CELLS:
        where = [f"row {row}, position ({', '.join(map(digits, position[row]))})" if position else f"row {row}" for row in range(count)]
        cells = [{"modality": m, "given": g, "sigma": s, "length": 1, "where": text} for (m, g, s), text in zip(keys, where, strict=True)]
    else:
        cells = [{**run, "where": f"rows {run['start']} to {run['end']}"} for run in runs]
    names, lines, still = list(sample.get("axes") or []), [], []
    for index, axis in enumerate(zip(*position, strict=True)):
        low, high = min(axis), max(axis)
        if low == high:
            still.append(f"{names[index] if index < len(names) else f'axis {index}'} {digits(low)}")
            continue
        points = " ".join(f"{x},{_height(value, low, high)}" for row, value in enumerate(axis) for x in (row, row + 1))
        lines.append({"name": names[index] if index < len(names) else f"axis {index}", "points": points, "low": low, "high": high})
    return {"title": sample.get("title") or "", "count": count, "cells": cells, "runs": runs, "lines": lines, "still": still, "words": GIVEN_LABEL}


def _height(value: float, low: float, high: float) -> float:
    return 92.0 if high == low else round(92 - 84 * (value - low) / (high - low), 1)


def _replay(results: list[Record]) -> dict[str, Any]:
    """``replay/<modality>/<sigma>`` as points in a plot per modality that share one logarithmic scale."""
    points: dict[str, list[tuple[float, float, int | None]]] = {}
    for result in results:
        for key, raw in (result.get("values") or {}).items():
            parts = key.split("/")
            sigma, value = (number(parts[2]) if len(parts) == 3 else None), number(raw)
            if parts[0] != "replay" or sigma is None:
                continue
            points.setdefault(parts[1], []).append((sigma, math.inf if value is None or math.isnan(value) else value, result.get("degree")))
    bound = _bound(results, "replay/")
    shown = [math.log10(value) for many in points.values() for _, value, _ in many if 0 < value < math.inf]
    shown += [math.log10(bound)] if 0 < bound < math.inf else []
    low, high = (math.floor(min(shown) - 0.2), math.ceil(max(shown) + 0.2)) if shown else (-8, 0)

    def y(value: float) -> float:
        decade = low if value <= 0 else (high if math.isinf(value) else math.log10(value))
        return round(10 + 180 * (high - decade) / (high - low), 1)

    panels = []
    for modality, many in points.items():
        drawn = [{"x": round(44 + 360 * (1 - s), 1), "y": y(value), "sigma": s, "value": value, "degree": degree} for s, value, degree in many]
        panels.append({"modality": modality, "points": drawn, "worst": max(value for _, value, _ in many)})
    step = max(1, math.ceil((high - low) / 6))
    ticks = [{"y": y(10.0**decade), "text": f"1e{decade}"} for decade in range(low, high + 1, step)]
    return {"panels": panels, "ticks": ticks, "bound": bound if math.isfinite(bound) else None, "bound_y": y(bound)}


def flatten(value: object, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as pairs of a dotted name and text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        yield prefix, views.show(", ".join(str(inner) for inner in value))
    else:
        yield prefix, views.show(value) if value is not None else "–"

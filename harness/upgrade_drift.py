"""What differs between the runs of two environments: statuses of checks, goldens probe by probe, interfaces that broke, seams, times.

Everything here is a function of two records of `upgrade_run.measure`; nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from loudfail.harness.report import cause, digits, number, show
from loudfail.harness.result import FAILING
from loudfail.harness.upgrade_report import told_apart

Run = Mapping[str, Any]
#: From best to worst. ``conflict``: the versions do not go together, so nothing was run.
Verdict = Literal["works", "drifted", "changed", "breaks", "conflict"]
VERDICTS: tuple[Verdict, ...] = ("works", "drifted", "changed", "breaks", "conflict")
#: Exceptions that say that an interface is not what it was: something to import, an attribute, an argument.
API = ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError", "NameError", "NotImplementedError")
#: A measurement that comes this many times closer to its bound than before, and within this part of it, is told though the check holds.
CLOSER, NEAR = 10.0, 0.02
#: What a measured number may move by for no reason: the last bits of relative errors depend on which process ran which checks before.
ROUNDING = 1e-5
#: Part of the chain that a probe belongs to, by how its name begins.
PLACES = {
    "inputs.ids": "the tokens of a prompt", "inputs": "what goes in", "port": "the port's schedule",
    "vendor.grid": "the vendor's schedule", "vendor": "the vendor's own loop",
    "embeds": "the trainer's embedding of a prompt", "rows": "the packed rows", "actor": "the actor", "media": "what latents decode to",
    "reward": "the scores of media", "rollout": "the rollout's embedding of a prompt", "tp": "the rollout at tensor parallel ",
}  # fmt: skip
_EXCEPTION = re.compile(r"(?:^|[\s:(])(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception))(?:: ([^\n]*))?")
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_CRASH = re.compile(r"^Fatal Python error: ([^\n]+)", re.MULTILINE)


def compare(before: Run, after: Run) -> dict[str, Any]:
    """The drift between two runs.

    Returns:
        ``verdict``; ``first``: the sentence that decides it; ``checks``: counts by kind and a row for each check that differs; ``api``: broken
        interfaces, each with how many checks it stops; ``goldens``: a row each; ``seams_lost``; ``moved``: checks that hold and measure
        another number, so that something changed, maybe where no golden looks; ``closer``: checks that hold with much less room, however little
        their number moved; ``timings``: seconds before and after; ``notes``: what is wrong before the upgrade already.
    """
    checks, api = _checks(before, after), _interfaces(before, after)
    goldens = _goldens(before, after)
    drift: dict[str, Any] = {
        "checks": checks,
        "api": api,
        "goldens": goldens,
        "seams_lost": sorted({seam for row in checks["rows"] if row["kind"] == "unavailable" for seam in row["seams"]}),
        "moved": _moved(before, after),
        "closer": _closer(before, after),
        "timings": _timings(before, after),
        "notes": list(_notes(before)),
    }
    drift["verdict"], drift["first"] = _judge(drift, before, after)
    return drift


# -- checks --------------------------------------------------------------------------------------------------------------------------------------


def _results(run: Run) -> dict[str, Mapping[str, Any]]:
    found = {}
    for result in (run.get("gate") or {}).get("results") or []:
        found[result["id"] + (f"[tp{result['degree']}]" if result.get("degree") is not None else "")] = result
    return found


def _kind(before: str, after: str | None, result: Mapping[str, Any] | None) -> str:
    """How the status of a check differs."""
    if after is None:
        return "missing"
    if after == before or {after, before} == {"uncovered", "unavailable"}:
        return "same"
    if after == "error":
        return "api" if result is not None and exception_of(result)[0] in API else "error"
    return {"violated": "violated", "unavailable": "unavailable", "uncovered": "unavailable", "holds": "mended"}.get(after, "other")


def _checks(before: Run, after: Run) -> dict[str, Any]:
    old, new = _results(before), _results(after)
    rows: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for name, was in old.items():
        now = new.get(name)
        kind = _kind(was["status"], now["status"] if now else None, now)
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "same" or (now is None and not new):  # a gate that left no record is one broken interface, not as many as it has checks
            continue
        rows.append(
            {
                "name": name,
                "link": name.partition("::")[0],
                "claim": was.get("claim"),
                "kind": kind,
                "before": was["status"],
                "after": now["status"] if now else "missing",
                "got_before": was.get("got"),
                "got": now.get("got") if now else None,
                "bound": now.get("bound") if now else None,
                "where": (now.get("where") if now else "") or "",
                "message": _one_line(now) if now else "",
                "cause": cause(now) if now and (now.get("diagnosis") or {}).get("cause") else "",
                "seams": _seams(name),
            }
        )
    return {"counts": counts, "total": len(old), "rows": rows, "links": _links(old, new)}


def _links(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each link of the chain how many checks it has and how many of each kind."""
    links: dict[str, dict[str, int]] = {}
    for name, was in old.items():
        kinds, now = links.setdefault(name.partition("::")[0], {}), new.get(name)
        kind = _kind(was["status"], now["status"] if now else None, now)
        kinds[kind] = kinds.get(kind, 0) + 1
    return [{"link": link, "kinds": kinds} for link, kinds in links.items()]


def _seams(name: str) -> list[str]:
    from loudfail.harness import registry

    return next((list(one.seams) for one in registry.invariants() if one.id == re.sub(r"\[tp\d+\]$", "", name)), [])


def _one_line(result: Mapping[str, Any]) -> str:
    violation = result.get("violation") or {}
    if violation:
        want, bound = show(violation.get("want")), show(violation.get("bound"))
        limit = f" {bound}" if want.endswith("the bound") else f", bound {bound}" if violation.get("bound") else ""
        return f"got {show(violation.get('got'))}, want {want}{limit}" + (f", at {violation['where']}" if violation.get("where") else "")
    return _portable(next(iter(str(result.get("message") or "").splitlines()), ""))


# -- interfaces ----------------------------------------------------------------------------------------------------------------------------------


def exception_of(result: Mapping[str, Any]) -> tuple[str, str, str]:
    """Class, message and place of the exception that ended a check: the last one of its message, else of its traceback."""
    text = str(result.get("traceback") or "")
    message = str(result.get("message") or "")
    found = [*_EXCEPTION.finditer(text)] or [*_EXCEPTION.finditer(message)]
    return (*_read(found[-1]), _place(text or message)) if found else ("", message, "")


def _read(match: re.Match[str]) -> tuple[str, str]:
    message = _portable(match[2] or "").strip()
    if message.endswith(":"):  # what it is about stands below, such as the weights that are missing
        below = [line.strip()[:200] for line in match.string[match.end() :].splitlines() if line.strip()]
        message = " ".join([message, *below[:2]])
    return match[1], message


def _portable(text: str) -> str:
    """Text with files of packages named as they are wherever the environment lies."""
    return re.sub(r"/\S*?/site-packages/", "", text)


def _place(text: str) -> str:
    """The deepest place in the packages that a traceback names: ``diffusers/models/attention.py:120, in forward``."""
    frames = _FRAME.findall(text)
    if not frames:
        return ""
    file, line, function = frames[-1]
    return f"{file.partition('site-packages/')[2] or '/'.join(file.split('/')[-3:])}:{line}, in {function}"


def _interfaces(before: Run, after: Run) -> list[dict[str, Any]]:
    """Exceptions that are there after and not before, those with one cause together."""
    old = _results(before)
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name, result in _results(after).items():
        if result["status"] != "error" or old.get(name, {}).get("status") == "error":
            continue
        kind, message, place = exception_of(result)
        key = (kind, re.sub(r"0x[0-9a-f]+|rank \d+ of \d+", "…", message), place)
        grouped.setdefault(key, []).append(name)
    found = [
        {"exception": kind, "message": message, "at": place, "api": kind in API, "checks": len(names), "first": names[0], "stage": "gate"}
        for (kind, message, place), names in grouped.items()
    ]
    for stage, there in (("gate", "gate"), ("goldens", "goldens")):
        if after.get(there) is None and before.get(there) is not None:
            kind, message, place = _end(str(after.get(f"{stage}_error") or ""))
            found.append(
                {
                    "exception": kind, "message": message, "at": place, "api": kind in API, "stage": stage,
                    "checks": len(old) if stage == "gate" else 0, "first": "",
                }
            )  # fmt: skip
    return sorted(found, key=lambda one: (not one["api"], -one["checks"]))


def _end(text: str) -> tuple[str, str, str]:
    """What ended a process, from the end of what it said: class and message of an exception or a crash, and its place; else how it ended."""
    if crash := _CRASH.search(text):
        thread = text.find("Current thread", crash.end())  # other threads may be listed before it; the most recent call is first
        frames = _FRAME.search(text, max(thread, crash.end()))
        return "", crash[1], _place(frames[0]) if frames else ""
    # Only what is at the end ended it: a name of an exception in a warning before did not.
    lines, uncaught = text.strip().splitlines(), text.rfind("Traceback (most recent call last)")
    matches = [*_EXCEPTION.finditer(text[uncaught:] if uncaught >= 0 else "\n".join(lines[-3:]))]
    return (*_read(matches[-1]), _place(text)) if matches else ("", "; ".join(_portable(line.strip()) for line in lines[-2:]), "")


# -- goldens -------------------------------------------------------------------------------------------------------------------------------------


def _goldens(before: Run, after: Run) -> list[dict[str, Any]]:
    if after.get("goldens") is None:  # that is one of the interfaces
        return []
    new = {one["name"]: one for one in after["goldens"]}
    return [_golden(one, new.get(one["name"], {"name": one["name"]})) for one in before.get("goldens") or [] if one.get("probes")]


def _golden(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """One golden, probe by probe: bit for bit as before, else by the tolerance of the golden."""
    old = {probe["name"]: probe for probe in before["probes"]}
    probes = [_probe(old.get(probe["name"]), probe) for probe in after.get("probes") or []]
    probes += [{"name": name, "outcome": "changed", "note": "is missing"} for name in old if name not in {one["name"] for one in probes}]
    outcomes = [probe["outcome"] for probe in probes]
    outcome = next((one for one in ("changed", "drifted") if one in outcomes), "same") if probes else "changed"
    compared = bool(after.get("probes"))
    first = next((probe for probe in probes if probe["outcome"] == outcome), None) if compared and outcome != "same" else None
    groups: dict[str, list[dict[str, Any]]] = {}
    for probe in probes:
        groups.setdefault(str(probe["name"]).split(".")[0], []).append(probe)
    return {
        "name": after["name"],
        "outcome": outcome,
        "first": first,
        "message": "" if compared else after.get("message") or "was not compared",
        "counts": {one: outcomes.count(one) for one in ("same", "drifted", "changed")},
        "groups": [_group(name, members) for name, members in groups.items()],
        "differing": [probe for probe in probes if probe["outcome"] != "same"],
    }


def _probe(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, Any]:
    same = before is not None and before["now"] == after["now"]
    tolerance, error, weakest = (number(after.get(key)) for key in ("tolerance", "error", "weakest"))
    return {
        "name": after["name"],
        "outcome": "same" if same else "drifted" if after["outcome"] != "changed" else "changed",
        "error": error,
        "tolerance": tolerance,
        "ratio": error / tolerance if error is not None and tolerance else None,
        "weakest": weakest,
        "to_weakest": weakest / error if weakest and error else None,
        "bias": number(after.get("bias")),
        "note": after.get("note") or "",
        "outside_before": before is not None and before["outcome"] == "changed",
    }


def _group(name: str, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The probes of one part of the chain, in the order of the data."""
    ratios = [ratio for one in members if one["outcome"] != "same" and (ratio := one.get("ratio")) is not None]
    worst = next((kind for kind in ("changed", "drifted") if any(one["outcome"] == kind for one in members)), "same")
    return {"name": name, "outcome": worst, "count": len(members), "ratio": max(ratios, default=None)}


# -- the rest ------------------------------------------------------------------------------------------------------------------------------------


def _moved(before: Run, after: Run) -> list[dict[str, Any]]:
    """Checks that hold in both runs and did not measure the same number, in the order of the data. Two runs on one machine with one seed do, up to
    rounding, unless something that the check runs was changed."""
    old, found = _results(before), []
    for name, now in _results(after).items():
        was = old.get(name)
        if was is None or not was["status"] == now["status"] == "holds":
            continue
        values, others = was.get("values") or {}, now.get("values") or {}
        pairs = [(was.get("got"), now.get("got")), *((values.get(key), others.get(key)) for key in {*values, *others})]
        if any(_differ(*pair) for pair in pairs):
            found.append({"name": name, "before": was.get("got"), "got": now.get("got"), "bound": now.get("bound")})
    return found


def _differ(one: object, other: object) -> bool:
    first, second = number(one), number(other)
    return one != other and (first is None or second is None or not abs(first - second) <= ROUNDING)


def _closer(before: Run, after: Run) -> list[dict[str, Any]]:
    old, found = _results(before), []
    for name, now in _results(after).items():
        was = old.get(name)
        if was is None or not was["status"] == now["status"] == "holds":
            continue
        got, bound, earlier = number(now.get("got")), number(now.get("bound")), number(was.get("got"))
        if got and bound and earlier is not None and got / bound > NEAR and got > CLOSER * earlier:
            found.append({"name": name, "before": earlier, "got": got, "bound": bound})
    return sorted(found, key=lambda row: -row["got"] / row["bound"])


def _timings(before: Run, after: Run) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for what in ("gate", "goldens"):
        was, now = before["seconds"].get(what), after["seconds"].get(what)
        complete = after.get(what) is not None and before.get(what) is not None
        found[what] = {"before": was, "after": now, "ratio": now / was if was and now and complete else None}
    return found


def _notes(before: Run) -> Iterator[str]:
    if before.get("gate") is None:
        yield f"the gate does not run before the upgrade: {str(before.get('gate_error')).splitlines()[-1]}"
    failing = sorted(name for name, result in _results(before).items() if result["status"] in FAILING)
    if failing:
        yield f"{len(failing)} checks fail before the upgrade already, {failing[0]} first; compare from a state that holds"
    outside = [one["name"] for one in before.get("goldens") or [] if one["outcome"] == "changed" and one.get("probes")]
    if outside:
        yield f"{', '.join(outside)}: outside the recorded tolerance before the upgrade already; record the goldens again"
    if before.get("goldens") is None:
        yield f"no goldens were compared: {next(iter(str(before.get('goldens_error')).strip().splitlines()[-1:]), '')}"


def _judge(drift: Mapping[str, Any], before: Run, after: Run) -> tuple[Verdict, str]:
    """The verdict, and the sentence that gives the first reason for it."""
    if api := drift["api"]:
        one = api[0]
        stopped = f" stops {one['checks']} checks" if one["checks"] else ""
        place = f" ({one['at']})" if one["at"] else ""
        return "breaks", f"{one['exception'] or one['stage']}: {one['message']}{place}{stopped}"
    rows = drift["checks"]["rows"]
    for kind in ("missing", "error", "unavailable"):
        if some := [row for row in rows if row["kind"] == kind]:
            return "breaks", f"{some[0]['name']} is {some[0]['after']}: {some[0]['message']} ({len(some)} checks)"
    changed = [golden for golden in drift["goldens"] if golden["outcome"] == "changed"]
    said = []
    if violated := [row for row in rows if row["kind"] in ("violated", "other")]:
        why = next((f" (cause: {row['cause']})" for row in violated if row["cause"]), "")
        said.append(f"{len(violated)} checks violated, {violated[0]['name']} first: {violated[0]['message']}{why}")
    if changed:
        said.append(f"golden {changed[0]['name']}: {_say(changed[0]['first']) if changed[0]['first'] else changed[0]['message']}")
    if said:
        return "changed", "; ".join(said)
    if moved := drift["moved"]:
        one = moved[0]
        said.append(
            f"{len(moved)} checks that hold measure other numbers, {one['name']} first: {' → '.join(told_apart(one['before'], one['got']))}"
            + (f", bound {show(one['bound'])}" if one["bound"] else "")
        )
    if drifted := [golden for golden in drift["goldens"] if golden["outcome"] == "drifted"]:
        equal = [golden["name"] for golden in drift["goldens"] if golden["outcome"] == "same"]
        said.append(f"golden {drifted[0]['name']}: {_say(drifted[0]['first'])}" + (f"; bit for bit: {', '.join(equal)}" if equal else ""))
    if said:
        return "drifted", "; ".join(said)
    same = sum(golden["counts"]["same"] for golden in drift["goldens"])
    counts = drift["checks"]["counts"]
    mended = f", {counts['mended']} hold now" if counts.get("mended") else ""
    return "works", f"{counts.get('same', 0)} checks as before{mended}" + (f", {same} probes bit for bit" if same else ", no probe was compared")


def _place_of(probe: str) -> str:
    """`` (the rollout at tensor parallel 2)`` for ``tp2.base.video``."""
    degree = re.match(r"tp(\d+)\.", probe)
    place = next((text for start, text in PLACES.items() if probe.startswith(f"{start}.")), "") if not degree else f"{PLACES['tp']}{degree[1]}"
    return f" ({place})" if place else ""


def _say(probe: Mapping[str, Any]) -> str:
    """``actor.base.video (the actor) is off by 3e-7, 0.2 of its tolerance; the weakest known fault here is 900 times that``."""
    error, ratio, distance = (probe.get(key) for key in ("error", "ratio", "to_weakest"))
    name = f"{probe['name']}{_place_of(str(probe['name']))}"
    if error is None:
        return f"{name} {probe.get('note')}"
    text = f"{name} is off by {digits(error)}"
    if ratio is not None:
        text += f", {digits(ratio)} {'of' if ratio <= 1 else 'times'} its tolerance"
    elif error:
        text += ", and was the same in every run"
    if not distance:
        return text
    if distance > 1:
        return f"{text}; the weakest known fault here is {digits(distance)} times that"
    blind = ", so this probe cannot tell the two apart" if probe["outcome"] == "drifted" else ""
    return f"{text}; that is {digits(1 / distance)} times the weakest known fault here{blind}"

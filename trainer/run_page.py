"""``report.html`` of a run: what was logged against what is true, every sub-score, monitors, the reward-hacking alarm, and samples to look at.

Made from the files of the run alone, so it can be made again, also of a run that was killed. No script, no network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loudfail.harness import report as views
from loudfail.harness.report_page import flatten
from loudfail.trainer.logs import MONITOR, SCORES, find_alarms

Points = list[tuple[float, float]]

#: Monitors that compare the rollout with the trainer in numbers, not by yes or no.
HAND_OVER = ("velocity_replay", "adapter_delta", "reward_recomputed")

WIDTH, HEIGHT, LEFT, BOTTOM = 420, 200, 58, 24
#: Decades of a reading as a share of its bound that are drawn; what is below, and 0, lies on the lower edge.
LOWEST, HIGHEST = -8, 1


def write(out: Path) -> Path:
    """Write the page of the run in ``out``; its path.

    Raises:
        FileNotFoundError: no ``run.json``: not the folder of a run.
    """
    path = out / "report.html"
    part = path.with_suffix(".part")
    part.write_text(page(read(out)), encoding="utf-8")
    part.replace(path)
    return path


def read(out: Path) -> dict[str, Any]:
    """The files of a run. A line that a kill cut off is left out; without ``summary.json`` the run did not end by itself, or is still on its way."""
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    run |= {"status": "unfinished", "message": "", "seconds": None, "peak_rss_bytes": None, "monitors": {}, "timing": {}, "classes": []}
    if (summary := out / "summary.json").is_file():
        run |= json.loads(summary.read_text(encoding="utf-8"))
    history = []
    for text in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if (out / "metrics.jsonl").is_file() else ():
        try:
            history.append(json.loads(text))
        except ValueError:
            break
    validations = []
    for file in sorted(out.glob(f"validation/step-*/{SCORES}")):
        record = json.loads(file.read_text(encoding="utf-8"))
        record["means"] = {name: float(value) for name, value in record["means"].items()}  # one that is no number is written as text
        samples = [
            json.loads(one.read_text(encoding="utf-8"))
            | {"picture": f"{file.parent.relative_to(out)}/{one.stem}.png", "film": f"{file.parent.relative_to(out)}/{one.stem}.mp4"}
            for one in sorted(file.parent.glob("prompt-*.json"))
        ]
        validations.append(record | {"samples": samples})
    return run | {"name": out.name, "history": history, "validations": validations}


def page(run: Mapping[str, Any]) -> str:
    """The document of what `read` returns."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("loudfail.trainer", "."), jinja2.PackageLoader("loudfail.harness", ".")]),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"digits": views.digits, "duration": views.duration, "size": views.size, "show": views.show, "num": views.number}
    history, validations = run["history"], run["validations"]
    means = [record["means"] for record in validations]
    return environment.get_template("run.html.j2").render(
        run=run,
        hacking=run.get("reward_hacking") or find_alarms(history, means),
        really=[means[0]["total"], means[-1]["total"]] if means else None,
        logged=[history[0]["logged_reward"], history[-1]["logged_reward"]] if history else None,
        monitors=(monitors := monitors_of(run)),
        fired=[row["name"] for row in monitors if row["fired"]],
        rewards=_rewards(history, validations),
        sub_scores=_sub_scores(history, validations),
        gradients=_gradients(history),
        hand_over=[plot(name, {"share of its bound": points}, of_bound=True) for name in HAND_OVER if (points := _shares(history, name))],
        media=_media(validations),
        shown=[record for record in (validations[:1] + validations[-1:] if len(validations) > 1 else validations) if record["samples"]],
        config=list(flatten(run["config"])),
    )


def _rewards(history: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    logged, true = _series(history, "logged_reward"), _series(history, "true_reward")
    series = {"logged by the loop": logged, "true, by a second scorer": true}
    gap = [(step, value - other) for (step, value), (_, other) in zip(logged, true, strict=True)]
    reward = plot("reward", series | {"true, fixed prompts": [(one["step"], one["means"]["total"]) for one in validations]})
    return [reward, plot("logged − true, of the same samples", {"logged − true": gap})] if gap else [reward]


def _sub_scores(history: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [name for name in (history[0] if history else {}) if name.startswith("score/") and name != "score/total"]
    return [
        plot(
            name[6:],
            {
                "in training": _series(history, name),
                "fixed prompts": [(one["step"], one["means"][name[6:]]) for one in validations if name[6:] in one["means"]],
            },
        )
        for name in names
    ]


def _gradients(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = ["gradient_norm", *(name for name in (history[0] if history else {}) if name.startswith("prediction_gradient/"))]
    return [plot(name.replace("prediction_gradient/", "of predictions, "), {name: _series(history, name)}, log=True) for name in names if history]


def monitors_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the summary counted; without one, what the steps say, which do not have the readings that could say nothing."""
    shares = {name: _shares(run["history"], name) for name in dict.fromkeys(name for record in run["history"] for name in record["shares"])}
    counts = run["monitors"] or {
        name: {"ran": len(points), "fired": sum(not y <= 1 for _, y in points), "vacuous": None, "worst": max(y for _, y in points)}
        for name, points in shares.items()
    }
    return [{"name": name, **count, "plot": plot(name, {name: shares.get(name, [])}, of_bound=True)} for name, count in counts.items()]


def _shares(history: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(record["step"] + 1, value) for record in history if (value := views.number(record["shares"].get(name))) is not None]


def _media(validations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [name for name in (validations[0]["means"] if validations else {}) if name.startswith(MONITOR)]
    found = {name: [(one["step"], one["means"][name]) for one in validations if name in one["means"]] for name in names}
    return [plot(name.removeprefix(MONITOR), {name: points}) for name, points in found.items()]


def _series(history: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(record["step"] + 1, value) for record in history if (value := views.number(record.get(name))) is not None]


def plot(title: str, series: Mapping[str, Points], *, log: bool = False, of_bound: bool = False) -> dict[str, Any]:
    """Curves over steps in the coordinates of an SVG of `WIDTH` × `HEIGHT`.

    Args:
        title: shown.
        series: name → points; those that are not finite, or not above 0 on a logarithmic axis, are left out.
        log: logarithmic axis.
        of_bound: they are shares of a bound, which is drawn: a logarithmic axis of fixed range, on whose edges lies what is beyond it.
    """
    ends = {name: points[-1][1] if points else None for name, points in series.items()}
    if of_bound:
        series = {
            name: [(x, min(max(y, 10.0**LOWEST), 10.0**HIGHEST) if y == y else 10.0**HIGHEST) for x, y in points] for name, points in series.items()
        }
    log = of_bound or (log and any(y > 0 for points in series.values() for _, y in points))  # nothing but zeros is a line at zero
    usable = {
        name: [(x, math.log10(y) if log else y) for x, y in points if math.isfinite(y) and (y > 0 or not log)] for name, points in series.items()
    }
    xs = [x for points in usable.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in usable.values() for _, y in points] or [0.0, 1.0]
    low, high = min(ys), max(ys)
    margin = max((high - low) * 0.08, 0.5 if log else 1e-3 * max(abs(high), abs(low)) or 1e-3)
    low, high = (LOWEST, HIGHEST) if of_bound else (low - margin, high + margin)
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + (WIDTH - LEFT - 8) * (x - first) / (last - first), 1), round(8 + (HEIGHT - BOTTOM - 8) * (high - y) / (high - low), 1)

    drawn = [{"name": name, "points": [place(*point) for point in points], "last": ends[name]} for name, points in usable.items()]
    levels = [(LOWEST, "0"), (LOWEST / 2, f"1e{LOWEST // 2}")] if of_bound else []
    levels = levels or [(level, views.digits(10**level if log else level, 2)) for level in (low + (high - low) * part for part in (0.08, 0.5, 0.92))]
    ticks = [{"y": place(first, level)[1], "text": text} for level, text in levels]
    limit = place(first, 0)[1] if of_bound else None
    return {"title": title, "curves": drawn, "ticks": ticks, "limit": limit, "first": int(first), "last": int(last)}

"""Every view says what the record says, whatever text and numbers are in it, and the page is drawn by a real browser."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loudfail.harness.killmatrix import OUTCOMES, Kill
from loudfail.harness.report import contradictions, digits, duration, junit, layout_of, summary, times, write_reports
from loudfail.harness.result import STATUSES, Result, Status

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)> & | `tick` \" ' \x00\x1b[31m naïve 🎬 \ud800 {{ 7*7 }}"
DELTA, REPLAY = "sync::every_projection_reaches_the_rollout", "rollout::velocity_replay"
PROJECTIONS = [f"transformer_blocks.{layer}.{name}" for layer in range(3) for name in ("attn.to_q", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")]


def result(id: str, status: Status = "holds", degree: int | None = None, **fields: Any) -> Result:
    measured = {"got": 2e-7, "bound": 5e-6, "where": "video", "seconds": 0.3, "examples": 12, "rerun": f"loudfail gate h3 -k {id}"}
    return Result(id, f"The claim of {id}", status, degree, **(measured | fields))


def violation(got: object, bound: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "got": got,
        "want": "what the oracle says",
        "bound": bound,
        "where": "TP 2, rank 1",
        "example": "rank=64\nseed=3",
        "claim": "It is so",
    } | fields


def record(**changes: Any) -> dict[str, Any]:
    """A run with every status, every kind of number and text that must not be believed."""
    results = [
        result("schedule::grid_is_the_vendors", got=0.0, bound=0.0),
        result("packing::rows_keep_their_place", "violated", got=float("nan"), violation=violation(EVIL, 0, where=EVIL)),
        result("prompts::ids_arrive", "error", got=None, bound=None, message=EVIL, traceback=f"Traceback\n{EVIL}"),
        result("conventions::sign", "uncovered", got=None, bound=None, message="port 'h3' does not offer trained"),
        result("conventions::" + "very_long_name_" * 20, got=float("inf"), bound=1.0, status="expected", message="known " * 900),
        result("conditions::given_rows_stay", "fixed", got=None, bound=None, message="expected to fail, but holds"),
        result("rewards::heard", "unavailable", got=None, bound=None, message="no GPU"),
        result(f"stranger::{EVIL}"),
    ]
    for degree in (1, 2, 4):
        values = {f"delta/{name}": 0.0 if degree == 1 else 2.7e-7 for name in PROJECTIONS}
        results.append(result(DELTA, degree=degree, values=values))
        if degree == 2:
            values[f"delta/{PROJECTIONS[2]}"] = 0.58
            del values[f"delta/{PROJECTIONS[6]}"]
            results[-1] = result(DELTA, "violated", degree, values=values, got=0.58, violation=violation(0.58, 5e-6))
        errors = {f"replay/{modality}/{sigma}": 1e-6 * (1 + sigma) for modality in ("video", "audio") for sigma in (1.0, 0.75, 0.5, 0.25)}
        results.append(result(REPLAY, degree=degree, values=errors | {"replay/audio/0.25": float("nan")} if degree == 4 else errors, bound=3e-5))
    tally = Counter(one.status for one in results)
    kills = [
        Kill("sync::fc1_skipped", "The parallel layer of fc1 is skipped", "own", "caught", 1.0, 7, 1.2e5, "", [results[10]]),
        Kill("packing::shifted", "Rows are cut one place late", "own", "caught", 1.0, 7, float("inf"), "", [results[1]]),
        Kill(
            "packing::weak",
            "Rows are off by little",
            "own",
            "caught",
            1.0,
            7,
            3.0,
            "",
            [result("packing::rows_keep_their_place", "violated", got=3.0, bound=1.0)],
        ),
        Kill("rollout::stale", EVIL, EVIL, "escaped", 1.0, 7, None, EVIL, [result(REPLAY, degree=2)]),
        Kill("prompts::detour", "Prompts take a detour", "own", "crashed", 1.0, 7, None, "KeyError", [results[2]]),
        Kill(
            "conditions::mask",
            "The mask is inverted",
            "own",
            "inert",
            1.0,
            0,
            None,
            "the broken code never ran",
            [result("conditions::given_rows_stay")],
        ),
    ]
    text, given, audio, video = 8, 4, 10, 20
    modality = ["text"] * text + ["video"] * given + ["audio"] * audio + ["video"] * video
    flags = [text <= row < text + given for row in range(len(modality))]
    sigma = [None if name == "text" else 0.001 if flag else {"audio": 0.64, "video": 0.88}[name] for name, flag in zip(modality, flags, strict=True)]
    layout = {"title": EVIL, "modality": modality, "given": flags, "sigma": sigma, "position": [[row, row % 4, 0] for row in range(len(modality))]}
    long = {
        "title": "long",
        "modality": ["text", "video"] * 300,
        "given": [False] * 600,
        "sigma": [0.5] * 600,
        "position": [[0.0]] * 600,
        "axes": ["time"],
    }
    goldens = [
        {"name": "h3/tp1", "outcome": "same"},
        {
            "name": "h3/tp2",
            "outcome": "drifted",
            "first": "step3",
            "probes": [{"name": "step3", "error": 2e-7, "tolerance": 5e-6}],
            "versions": {"torch": ["2.12", "2.13"]},
        },
        {"name": "h3/tp4", "outcome": "changed", "first": EVIL, "message": EVIL},
    ]
    return {
        "schema": "loudfail.report/1",
        "port": "h3",
        "verdict": "error",
        "declared": len(results),
        "counts": {status: tally[status] for status in STATUSES},
        "seconds": 52.31234,
        "peak_rss_bytes": 4_123_456_789,
        "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "commit": None},
        "classes": ["diffusers.MiniMaxH3Transformer3DModel"],
        "results": [one.to_dict() for one in results],
        "faults": {
            "counts": {outcome: sum(one.outcome == outcome for one in kills) for outcome in OUTCOMES},
            "false_alarms": 0,
            "matrix": [one.to_dict() for one in kills],
        },
        "layout": [layout, long],
        "goldens": goldens,
    } | changes


def clean() -> dict[str, Any]:
    results = [result("schedule::grid_is_the_vendors", got=0.0, bound=0.0), result(DELTA, degree=1), result(DELTA, degree=2)]
    counts = {status: 3 if status == "holds" else 0 for status in STATUSES}
    return {
        "schema": "1",
        "port": "h3",
        "verdict": "holds",
        "declared": 3,
        "counts": counts,
        "seconds": 3.0,
        "peak_rss_bytes": 1,
        "environment": {},
        "classes": [],
    } | {"results": [one.to_dict() for one in results]}


# -- text ----------------------------------------------------------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    numbers = [3.14159e-7, 5e-6, 0.0, 0.58, 0.041234, 999.9, 1234.5, 123456.0, float("inf"), float("-inf"), float("nan"), None]
    assert [digits(one) for one in numbers] == ["3.1e-7", "5e-6", "0", "0.58", "0.0412", "1000", "1234", "1.2e5", "∞", "-∞", "NaN", "–"]
    assert [digits(one, 2) for one in (3.14159e-7, 21.4, 480.0)] == ["3e-7", "21", "480"]


def test_margins_and_durations_are_said_in_words() -> None:
    assert [times(ratio) for ratio in (0.0, 0.05, 1.0, 21.4, float("inf"), float("nan"))] == [
        "no error",
        "20× below",
        "at the bound",
        "21× above",
        "∞× above",
        "NaN",
    ]
    assert [duration(s) for s in (0.0001, 0.25, 0.9996, 52.3, 125, None)] == ["<1 ms", "250 ms", "1.0 s", "52.3 s", "2 min 5 s", "–"]


def test_summary_begins_with_the_verdict_and_shows_each_failure_with_its_rerun() -> None:
    text = summary(record())
    assert text.startswith("# ! h3: error\n")
    assert "= **14 declared**" in text
    for name in ("packing::rows_keep_their_place", "prompts::ids_arrive", "conditions::given_rows_stay", f"{DELTA}[tp2]"):
        assert f"`{name}`" in text
        assert f"loudfail gate h3 -k {name.removesuffix('[tp2]')}" in text
    assert "    got: 0.58\n   want: what the oracle says\n  bound: 5e-6\n  where: TP 2, rank 1" in text
    assert "1 escaped" in text and "(wanted: 20×)" in text and "0 false alarms" in text


def test_summary_lets_no_text_out_of_its_place() -> None:
    fence, cells = "", 0
    for line in summary(record()).splitlines():
        ticks = re.match("`{3,}", line)
        if ticks and (not fence or line == fence):
            fence = "" if fence else ticks[0]
        elif not fence:
            outside = re.sub(r"(`+).*?(?<!`)\1(?!`)", "", line)
            assert "<script" not in outside and "<img" not in outside, line
            if line.startswith("|"):
                bars = len(re.findall(r"(?<!\\)\|", line))
                cells = cells or bars
                assert bars == cells, line
            else:
                cells = 0
    assert not fence


def test_a_clean_run_lists_no_failures() -> None:
    text = summary(clean())
    assert text.startswith("# ✓ h3: holds\n")
    assert "Failures" not in text and "does not add up" not in text


def test_junit_has_one_case_a_check_and_sums_that_are_right() -> None:
    report = record()
    root = ET.fromstring(junit(report))
    cases = list(root.iter("testcase"))
    assert len(cases) == len(report["results"]) + 6 + 3 + 1 == int(root.attrib["tests"])
    for suite in root.findall("testsuite"):
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{tag}"))
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    kinds = {f"{case.attrib['classname']}::{case.attrib['name']}": next((child.tag for child in case), "passed") for case in cases}
    assert kinds["h3.packing::rows_keep_their_place"] == kinds["h3.conditions::given_rows_stay"] == "failure"
    assert kinds["h3.prompts::ids_arrive"] == "error"
    assert kinds["h3.conventions::sign"] == kinds["h3.rewards::heard"] == "skipped"
    assert kinds["h3.faults::rollout::stale"] == kinds["h3.faults::conditions::mask"] == "failure" and kinds["h3.faults::prompts::detour"] == "error"
    assert kinds["h3.goldens::h3/tp4"] == "failure" and kinds["h3.goldens::h3/tp2"] == "passed"
    failure = next(case.find("failure") for case in cases if case.attrib["name"].startswith("every_projection") and case.find("failure") is not None)
    assert failure is not None and "got: 0.58" in (failure.text or "") and "rerun: loudfail gate" in (failure.text or "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"declared": 15}, "15 checks were declared, but the counts add up to 14"),
        ({"verdict": "holds"}, "the verdict is holds, but 4 failed"),
        ({"results": []}, "the counts add up to 14, but 0 results are listed"),
    ],
)
def test_a_record_that_does_not_add_up_is_said_in_every_view(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    report = record(**changes)
    if "verdict" in changes:  # escaped faults and changed goldens count too
        report |= {"faults": None, "goldens": []}
    assert any(said in text for text in contradictions(report))
    for path in write_reports(report, tmp_path):
        assert said in path.read_text(encoding="utf-8"), path
    case = next(case for case in ET.fromstring(junit(report)).iter("testcase") if case.attrib["name"] == "the_record_adds_up")
    assert case.find("error") is not None


def test_errors_of_one_cause_are_told_once(tmp_path: Path) -> None:
    broken = [
        result(f"sync::check_{index}", "error", got=None, bound=None, message="the port does not work", traceback="Traceback A").to_dict()
        for index in range(60)
    ]
    broken.append(result("sync::other", "error", got=None, bound=None, message="another cause", traceback="Traceback B").to_dict())
    changes = {"verdict": "error", "declared": 61, "counts": {"error": 61}, "results": broken}
    text, xml, page = (path.read_text(encoding="utf-8") for path in write_reports(clean() | changes, tmp_path))
    assert text.count("message: the port does not work") == page.count('<article class="fail">') - 1 == 1
    assert "and the same in 59 more" in text and "and the same in 59 more" in page
    assert all(f"sync::check_{index}`" in text for index in range(60)) and text.count("another cause") == 1
    assert len(list(ET.fromstring(xml.encode()).iter("error"))) == 61


def test_a_partial_run_is_said(tmp_path: Path) -> None:
    for path in write_reports(clean() | {"complete": False, "selection": "-k packing"}, tmp_path):
        if path.suffix != ".xml":
            assert "only a part of the suite was run" in path.read_text(encoding="utf-8")


def test_strict_json_gives_the_same_views(tmp_path: Path) -> None:
    from loudfail.harness.record import write_json

    write_json(tmp_path / "report.json", record())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["results"][4]["got"] == "inf"
    page = write_reports(report, tmp_path)[2].read_text(encoding="utf-8")
    assert "∞× above" in page and "NaN" in page
    assert not list(tmp_path.glob(".*"))


def test_a_record_of_nothing_is_drawn(tmp_path: Path) -> None:
    bare = {
        "schema": "1",
        "port": "h3",
        "verdict": "error",
        "declared": 0,
        "counts": {},
        "seconds": 0.0,
        "peak_rss_bytes": 0,
        "environment": {},
        "classes": [],
        "results": [],
    }
    text, xml, page = (path.read_text(encoding="utf-8") for path in write_reports(bare, tmp_path / "new" / "folder"))
    assert "Nothing was checked" in text and "Nothing was checked" in page and "holds" not in text
    assert [case.attrib["name"] for case in ET.fromstring(xml.encode()).iter("testcase")] == ["the_record_adds_up"]


def test_layout_is_read_off_row_tables() -> None:
    import torch

    from loudfail.harness.port import RowTable

    table = RowTable(("text", "video"), torch.tensor([False, True]), torch.tensor([float("nan"), 0.5]), torch.tensor([[0.0, 1.0], [2.0, 3.0]]), {})
    assert layout_of([table], axes=("time", "height")) == [
        {
            "title": "sample 0",
            "modality": ["text", "video"],
            "given": [False, True],
            "sigma": [None, 0.5],
            "position": [[0, 1], [2, 3]],
            "axes": ["time", "height"],
        }
    ]


def test_the_page_is_one_file_without_scripts_or_network(tmp_path: Path) -> None:
    write_reports(record(), tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text and "<img" not in text and "<iframe" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text) and "@import" not in text and not re.findall(r"url\((?!data:)", text)
    assert "default-src 'none'" in text
    assert "{{" not in text.replace("{{ 7*7 }}", "")


def test_the_reports_cost_nothing_until_they_are_written() -> None:
    code = "import sys, loudfail.harness.report; print([name for name in ('torch', 'jinja2', 'hypothesis') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# -- in a browser --------------------------------------------------------------------------------------------------------------------------------

#: Measures the page in a frame of a given width: what overflows, what is drawn, and the contrast of all text against what is behind it.
MEASURE = r"""
<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body style="margin:0"><pre id="measured">nothing</pre><script>
const frame = document.createElement('iframe');
frame.style = 'border:0;height:3000px;width:WIDTHpx';
frame.srcdoc = PAGE;
document.body.prepend(frame);
function channels(text) {
  const found = text.match(/^rgba?\(([\d.]+), ([\d.]+), ([\d.]+)(?:, ([\d.]+))?\)$/);
  return found && found.slice(1).map(x => x === undefined ? 1 : +x);
}
function luminance(rgb) {
  const linear = rgb.slice(0, 3).map(x => x / 255).map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
  return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2];
}
frame.onload = () => {
  const page = frame.contentDocument, style = one => frame.contentWindow.getComputedStyle(one);
  const all = selector => [...page.querySelectorAll(selector)];
  const visible = one => { const box = one.getBoundingClientRect(); return box.width > .4 && box.height > .4; };
  const shown = selector => all(selector).filter(visible).length;
  let texts = 0;
  const low = [];
  for (const one of all('body *')) {
    const own = [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.textContent).join('').trim();
    if (!own || !visible(one) || one.closest('svg')) continue;
    let behind = one;
    while (behind && style(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    const back = behind && channels(style(behind).backgroundColor), ink = channels(style(one).color);
    if (!back || !ink) continue;
    const [a, b] = [luminance(ink), luminance(back)].sort((x, y) => y - x), contrast = (a + .05) / (b + .05);
    texts += 1;
    if (contrast < 4.5) low.push([one.className, own.slice(0, 30), +contrast.toFixed(2)]);
  }
  const result = {
    width: page.documentElement.scrollWidth, title: page.title, scripts: page.scripts.length, images: page.images.length, low, texts,
    checks: shown('tr.check'), cells: shown('.rows i'), lanes: shown('svg.lane polyline'), dots: shown('.plot circle'),
    heat: shown('.heat tbody td:not(.h-none)'), marks: shown('.kills .dot'), ids: all('.claim div > code').map(one => one.textContent),
    headline: page.querySelector('h1').textContent, sum: all('.addition b').map(one => +one.textContent),
    unreachable: all('.scroll').filter(one => one.scrollWidth > one.clientWidth && one.tabIndex !== 0).length,
  };
  for (const name of ['fail', 'skip', 'hold']) {
    const filter = page.getElementById('f-' + name);
    if (filter) filter.checked = true;
    result[name] = shown('tr.check');
  }
  document.getElementById('measured').textContent = JSON.stringify(result);
};
</script>
"""


def drive(browser: str, tmp_path: Path, page: Path, *action: str, dark: bool = False, size: str = "1280,3000") -> subprocess.CompletedProcess[str]:
    """One run of the headless browser; what the page logs, such as a script error or a blocked resource, is a failure."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *flags, *scheme, f"--window-size={size}", "--virtual-time-budget=4000", *action, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done


def measure(browser: str, tmp_path: Path, text: str, width: int, *, dark: bool = False) -> dict[str, Any]:
    frame = tmp_path / f"measure{width}{dark}.html"
    frame.write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGE", json.dumps(text).replace("</", "<\\/")), encoding="utf-8")
    dom = drive(browser, tmp_path, frame, "--dump-dom", dark=dark).stdout
    measured: dict[str, Any] = json.loads(html.unescape(dom.split('<pre id="measured">')[1].split("</pre>")[0]))
    return measured


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reports(record(), tmp_path_factory.mktemp("report"))[2]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_everything_is_drawn_and_can_be_read(browser: str, page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    report = record()
    seen = measure(browser, tmp_path, page.read_text(encoding="utf-8"), width, dark=dark)
    assert seen["width"] <= width, "the page must not scroll sideways; only its wide tables may"
    assert seen["unreachable"] == 0, "what scrolls must take the keyboard's focus"
    assert seen["scripts"] == seen["images"] == 0 and seen["title"].startswith("h3: error")
    assert "h3" in seen["headline"] and sum(seen["sum"][:-1]) == seen["sum"][-1] == report["declared"]
    names = {one["id"] for one in report["results"]}
    assert len(seen["ids"]) == seen["checks"] == len(names)
    assert names - set(seen["ids"]) == {f"stranger::{EVIL}"}, "all but the one whose control characters a browser replaces"
    assert seen["fail"] + seen["skip"] + seen["hold"] == len(names) and seen["fail"] == 4
    # 42 cells and 4 runs of the first sample; the second has too many rows for cells, so its 600 runs are drawn twice.
    assert seen["cells"] == 42 + 4 + 600 + 600
    assert seen["lanes"] == 2 and seen["dots"] == 24 and seen["heat"] == 3 * len(PROJECTIONS) and seen["marks"] >= 6
    assert seen["texts"] > 200 and seen["low"] == [], "text against its background, at least 4.5 to 1"


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_is_not_blank(browser: str, page: Path, tmp_path: Path, dark: bool) -> None:
    from PIL import Image

    shot = tmp_path / "shot.png"
    drive(browser, tmp_path, page, f"--screenshot={shot}", dark=dark)
    image = Image.open(shot).convert("RGB")
    pixels: list[tuple[int, Any]] = image.getcolors(1 << 24) or []
    colours = {colour: count for count, colour in pixels}
    paper = max(colours, key=lambda colour: colours[colour])
    assert (sum(paper) < 200) is dark, f"most of the page is {paper}"
    style = page.read_text(encoding="utf-8").split("prefers-color-scheme: dark")[dark]
    for name in ("m0", "m1", "m2", "good", "bad"):
        value = re.search(rf"--{name}: #(\w{{6}})", style)
        assert value and colours.get(tuple(bytes.fromhex(value[1])), 0) > 100, f"colour {name} is not in the picture"
    assert all(len(image.crop((0, top, 1280, top + 500)).getcolors(1 << 24) or []) > 20 for top in range(0, 2500, 500))

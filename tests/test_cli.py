"""The command line: verbs, exit codes, and what bad input gets."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_world import gone, wait_for

from conftest import Ran
from loudfail.harness import cli, registry

HERE = Path(__file__).parent
Loudfail = Callable[..., Ran]
RECORDS = {"report.json", "gate.json", "summary.md", "junit.xml", "report.html"}


def environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"} | {"HF_HUB_OFFLINE": "1"} | more


# -- gate ----------------------------------------------------------------------------------------------------------------------------------------


def test_a_right_port_holds_and_its_records_add_up(loudfail: Loudfail, tmp_path: Path) -> None:
    ran = loudfail("gate", "toyports:Toy", "--tp", "1,2", "--out", "out")
    assert ran.code == 0, ran.text
    assert {path.name for path in (tmp_path / "out").iterdir()} == RECORDS
    for name in ("report.json", "gate.json"):
        record = json.loads((tmp_path / "out" / name).read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not strict JSON"))
        assert record["schema"] == f"loudfail.{name.removesuffix('.json')}/1"
        assert record["port"] == "toy" and record["verdict"] == "holds"
        assert sum(record["counts"].values()) == record["declared"] == 5
        assert record["counts"]["holds"] == 2 and record["counts"]["uncovered"] == 3
        assert record["seconds"] > 0 and record["peak_rss_bytes"] > 50e6 and record["classes"] == []
        assert record["environment"]["packages"]["loudfail"]
    assert "vendor: vendor_rollout, vendor_grid" in ran.out  # seam by seam, what is missing


def test_a_wrong_port_is_violated_with_a_line_that_reruns_it(loudfail: Loudfail) -> None:
    ran = loudfail("gate", "toyports:Bent")
    assert ran.code == 1
    line = re.search(r"rerun  loudfail (gate toyports:Bent -k '(.*)')", ran.out)
    assert line is not None
    again = loudfail("gate", "toyports:Bent", "-k", line[2])
    assert again.code == 1 and "1 violated of 1" in again.out


def test_the_line_that_reruns_keeps_what_was_chosen(loudfail: Loudfail) -> None:
    ran = loudfail("gate", "toyports:Bent", "--dtype", "bf16", "--seed", "5", "--examples", "2")
    assert "rerun  loudfail gate toyports:Bent --dtype bfloat16 --examples 2 --loudfail-seed 5 -k 'schedule::grid_is_uniform'" in ran.out


def test_ranks_answer_at_each_degree_and_are_gone_afterwards(loudfail: Loudfail) -> None:
    ran = loudfail("gate", "toyports:Ranked", "--tp", "2", "-n", "0")
    assert ran.code == 0 and "3 holds" in ran.out, ran.text


def in_processes(folder: Path, port: str) -> subprocess.CompletedProcess[str]:
    """A gate as it is by default: as many processes as there are processors, up to three for two degrees."""
    command = [sys.executable, "-m", "toygate", "gate", port, "--tp", "1,2", "--out", "out"]
    variables = environment(PYTEST_PLUGINS="toyselect", PYTHONPATH=str(HERE))
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)


def test_a_gate_with_an_engine_runs_in_several_processes(tmp_path: Path, loudfail: Loudfail) -> None:
    done = in_processes(tmp_path, "toyports:Ranked")
    assert done.returncode == 0 and "4 holds, 1 uncovered of 5" in done.stdout, done.stdout + done.stderr
    spread = json.loads((tmp_path / "out" / "gate.json").read_text())
    assert loudfail("gate", "toyports:Ranked", "--tp", "1,2", "-n", "0", "--out", "alone").code == 0
    alone = json.loads((tmp_path / "alone" / "gate.json").read_text())
    assert spread["fingerprint"] == alone["fingerprint"] and spread["counts"] == alone["counts"]


def test_what_a_process_took_with_it_is_an_error(tmp_path: Path) -> None:
    done = in_processes(tmp_path, "toyports:Dies")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"] != "holds" and report["declared"] == 5
    lost = sum(one["message"] == "not run: the session ended before it" for one in report["results"])
    assert lost and f"the session ended before them: {lost};" in done.stdout
    status = {(one["id"].split("::")[1], one["degree"]): one["status"] for one in report["results"]}
    assert status["every_rank_answers", 2] == "error" and status["every_rank_answers", 1] == "holds"


def test_a_degree_that_a_process_refuses_is_a_usage_error(tmp_path: Path) -> None:
    done = in_processes(tmp_path, "toyports:OddOnly")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "ERROR: --tp: 3 heads cannot be divided over 2 ranks" in done.stderr and not (tmp_path / "out" / "gate.json").exists()


def test_a_gate_that_cannot_say_what_ran_does_not_hold(loudfail: Loudfail, tmp_path: Path) -> None:
    ran = loudfail("gate", "toyports:ForgetsWhatRan", "--out", tmp_path / "out")
    assert ran.code == 1 and "note: classes: RuntimeError: rank 0 of 1 died" in ran.out, ran.text
    assert json.loads((tmp_path / "out" / "gate.json").read_text())["verdict"] == "error"


def test_known_failures_need_a_reason_and_must_still_fail(loudfail: Loudfail, tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text('"schedule::grid_is_uniform" = "shifted on purpose"\n')
    ran = loudfail("gate", "toyports:Bent", "--expect", file)
    assert ran.code == 0 and "1 expected" in ran.out and "shifted on purpose" in ran.out
    ran = loudfail("gate", "toyports:Toy", "--expect", file)
    assert ran.code == 1 and "1 fixed" in ran.out and "take it out of the list" in ran.out
    file.write_text('"schedule::grid_is_unform" = "a typing error"\n')
    ran = loudfail("gate", "toyports:Bent", "--expect", file)
    assert ran.code == 4 and "nearest: schedule::grid_is_uniform" in ran.text
    file.write_text('"schedule::grid_is_uniform" = ""\n')
    assert "needs a reason" in loudfail("gate", "toyports:Bent", "--expect", file).text


@pytest.mark.parametrize("seam", ["vendor", "all"])
def test_required_seams_must_be_covered(loudfail: Loudfail, seam: str) -> None:
    ran = loudfail("gate", "toyports:Toy", "--require", seam)
    assert ran.code == 1 and "required, but uncovered" in ran.out
    assert loudfail("gate", "toyports:Toy", "--require", "objective").code == 0


def test_a_run_in_which_nothing_ran_fails(loudfail: Loudfail) -> None:
    assert loudfail("gate", "toyports:Toy", "-k", "vendor_agrees").code == 5
    assert loudfail("gate", "toyports:Toy", "-k", "no_such_check").code == 5


# -- what bad input gets -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "message"),
    [
        ("Constructs", "Constructs() raised OSError: no weights here"),
        ("Empty", "Empty offers no seam; the objective lacks shapes, conditions, grid, predict_velocity"),
        ("WrongKeys", "grid() lacks audio"),
        ("WrongShape", "predict_velocity()['video'] has shape (2, 2, 1); want (2, 2, 2)"),
        ("WrongDtype", "predict_velocity()['video'] is torch.float64; want torch.float32"),
        ("WrongDevice", "predict_velocity()['video'] is on meta; want cpu"),
        ("NotFinite", "predict_velocity()['video'] has 8 of 8 values that are not finite"),
        ("Raises", "predict_velocity() raised KeyError: 'time_embed'"),
    ],
)
def test_a_broken_port_gets_one_short_message(loudfail: Loudfail, tmp_path: Path, port: str, message: str) -> None:
    ran = loudfail("gate", f"toyports:{port}", "--tp", "1", "--out", "out")
    assert ran.code == 1
    assert f"ERROR the port does not work: {message}" in ran.out and "4 checks were not run" in ran.out, ran.text
    assert ran.out.count("ERROR") == 1 and "Traceback" not in ran.text
    record = json.loads((tmp_path / "out" / "gate.json").read_text())
    assert record["verdict"] == "error" and record["counts"]["error"] == record["declared"] == 4
    assert loudfail("require", "out/gate.json", "--port", "toyports:Toy").code == 1


def test_a_port_that_lacks_a_method_is_told_which(loudfail: Loudfail) -> None:
    ran = loudfail("gate", "toyports:Lacking")
    assert ran.code == 1
    assert "offers no seam; the objective lacks predict_velocity" in ran.out


def test_a_misspelt_method_is_pointed_at(loudfail: Loudfail, tmp_path: Path) -> None:
    (tmp_path / "slip.py").write_text(
        "from toyports import Toy\n\nclass Slip(Toy):\n    def vender_grid(self, calls, case=None):\n        return {}\n"
    )
    ran = loudfail("gate", "slip:Slip", "--tp", "1")
    assert "note: Slip has vender_grid, which no check calls, and lacks vendor_grid" in ran.out, ran.text
    assert "which no check calls" not in loudfail("gate", "toyports:Toy", "--tp", "1").out


def test_a_degree_that_does_not_divide_the_heads(loudfail: Loudfail) -> None:
    ran = loudfail("gate", "toyports:DoesNotDivide", "--tp", "1,2", "-n", "0")
    assert ran.code == 1
    assert "ERROR the port does not work: engine(2) raised ValueError: 3 heads cannot be divided over 2 ranks" in ran.out
    assert "3 holds, 1 uncovered, 1 error of 5" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gate", "h4"), "nearest: h3"),
        (("gate", "no.such.module:Port"), "cannot import no.such.module: ModuleNotFoundError: No module named 'no'"),
        (("gate", "toyports:Tou"), "toyports has no Tou; nearest: Toy"),
        (("gate", "toyports.Toy"), "a port of your own is package.module:Class"),
        (("gate", "./toyports.py:Toy"), "name the module, toyports:Toy, from the folder that holds it"),
        (("gate", "toyports:number"), "number is not a subclass of loudfail.harness.port.Port"),
        (("gate", "toyports:Toy", "--tp", "1,x"), "--tp 1,x: want different positive degrees"),
        (("gate", "toyports:Toy", "--tp", "2,2"), "--tp 2,2: want different positive degrees"),
        (("gate", "toyports:Toy", "--weights", "nowhere"), "--weights nowhere: no such folder"),
        (("gate", "toyports:Toy", "--require", "vendors"), "--require vendors: no such seam"),
        (("gate", "toyports:Toy", "--examples", "0"), "at least 1 input"),
        (("gate", "toyports:Toy", "--expect", "nowhere.toml"), "--expect nowhere.toml"),
        (("gate", "toyports:Toy", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("gate", "toyports:Toy", "-n", "-1"), "'-1' is no number of processes"),
        (("gate",), "the following arguments are required: PORT"),
        (("gate", "toyports:Toy", "--out", "/proc/nowhere"), "--out /proc/nowhere: cannot be used"),
        (("faults", "toyports:Toy", "schedule::squared_gird"), "nearest: schedule::squared_grid"),
        (("faults", "toyports:Toy", "-k", "zzz"), "no fault's id contains 'zzz'"),
        (("list", "schedule::grid_descend"), "nearest: schedule::grid_descends"),
        (("require", "nowhere.json"), "cannot be read: No such file or directory"),
        (("new", "3d-model"), "gives no module name"),
        (("new", "torch"), "would hide the module torch that is installed"),
        (("new", "../somewhere/else"), "gives no module name"),
        (("frobnicate",), "invalid choice: 'frobnicate'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors_are_one_message_and_exit_4(loudfail: Loudfail, arguments: tuple[str, ...], message: str) -> None:
    ran = loudfail(*arguments)
    assert ran.code == 4, ran.text
    assert message in ran.err and "Traceback" not in ran.text


def test_a_port_that_fails_to_import_says_why(loudfail: Loudfail, tmp_path: Path) -> None:
    (tmp_path / "half_written.py").write_text("def shapes(:\n")
    ran = loudfail("gate", "half_written:Port")
    assert ran.code == 4 and "cannot import half_written: SyntaxError" in ran.err


def test_the_folder_of_a_port_is_not_its_module(loudfail: Loudfail, tmp_path: Path) -> None:
    (tmp_path / "stray_port").mkdir()
    assert "stray_port is a folder here, no module; run this inside it" in loudfail("gate", "stray_port:Port").err


# Permissions stop everybody but root, so as root there is nothing to refuse.
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes read-only folders too")
def test_a_read_only_folder_is_found_before_the_run(loudfail: Loudfail, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    ran = loudfail("gate", "toyports:Toy", "--out", "out")
    assert ran.code == 4 and "Permission denied" in ran.err


def test_a_file_in_the_place_of_the_folder_is_found_before_the_run(loudfail: Loudfail, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    ran = loudfail("gate", "toyports:Toy", "--out", "out")
    assert ran.code == 4 and "--out out: cannot be used: File exists" in ran.err and ran.out == ""


def test_an_interrupt_leaves_neither_records_nor_ranks(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gate.json").write_text("{}")  # of an earlier run: must not outlive this one
    variables = environment(PYTEST_PLUGINS="toyselect", PYTHONPATH=str(HERE), TOY_PIDS=str(tmp_path / "pids"))
    command = [sys.executable, "-m", "toygate", "gate", "toyports:Slow", "--out", "out"]
    run = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 2, out
    assert "interrupted" in out and "Traceback" not in out
    assert list((tmp_path / "out").iterdir()) == []
    assert gone(pids)


# -- faults, list, env, new ----------------------------------------------------------------------------------------------------------------------


def test_faults_tells_the_four_outcomes_apart(loudfail: Loudfail, tmp_path: Path) -> None:
    ran = loudfail("faults", "toyports:Toy", "--out", "out")
    assert ran.code == 1
    record = json.loads((tmp_path / "out" / "faults.json").read_text())
    assert record["schema"] == "loudfail.faults/1" and record["counts"] == {"caught": 1, "crashed": 1, "escaped": 1, "inert": 1}
    assert record["false_alarms"] == 0 and record["not_applicable"] == 1
    outcomes = {kill["fault"].split("::")[1]: kill["outcome"] for kill in record["matrix"]}
    assert outcomes == {"squared_grid": "caught", "unnoticed": "escaped", "never_fires": "inert", "raises": "crashed"}
    assert record["margins"]["schedule::squared_grid"] == record["weakest_margin"] > 1000
    assert record["unbroken"] == ["rollout::every_rank_answers"]


def test_faults_that_are_all_caught_exit_0(loudfail: Loudfail) -> None:
    assert loudfail("faults", "toyports:Toy", "schedule::squared_grid").code == 0
    assert loudfail("faults", "toyports:Toy", "--tp", "1", "schedule::squared_grid").code == 0, "options may stand before the faults"


def test_a_false_alarm_fails_the_matrix(loudfail: Loudfail) -> None:
    ran = loudfail("faults", "toyports:Bent", "-k", "squared_grid")
    assert ran.code == 1 and "FALSE ALARM" in ran.out and "1 false alarms" in ran.out


def test_faults_that_do_not_apply_are_not_a_success(loudfail: Loudfail) -> None:
    assert loudfail("faults", "toyports:Toy", "schedule::not_for_this_port").code == 5


def test_list_for_machines_and_in_full(loudfail: Loudfail) -> None:
    record = json.loads(loudfail("list", "--json").out)
    assert {one["id"] for one in record["invariants"]} == {
        "schedule::grid_descends",
        "schedule::grid_is_uniform",
        "schedule::vendor_agrees",
        "rollout::every_rank_answers",
    }
    uniform = next(one for one in record["invariants"] if one["id"] == "schedule::grid_is_uniform")
    assert uniform["claim"] == "The grid is uniform" and uniform["seams"] == ["objective"] and uniform["broken_by"] == ["schedule::squared_grid"]
    fault = next(one for one in record["faults"] if one["id"] == "schedule::squared_grid")
    assert fault["catches"] == ["schedule::grid_is_uniform"] and fault["source"] == "own" and fault["claim"] == "The grid is squared"
    assert "The grid is uniform." in loudfail("list", "schedule::grid_is_uniform").out


def test_a_claim_of_two_lines_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the real suite, whose longest claims do not fit a line."""
    claims = {one.id: " ".join(one.doc.split("\n\n")[0].split()).rstrip(".") for one in (*registry.invariants(), *registry.faults())}
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {f"      {claim}" for claim in claims.values()} <= set(shown)
    assert any(len(claim) > 150 for claim in claims.values())


def test_env_for_machines(loudfail: Loudfail) -> None:
    record = json.loads(loudfail("env", "--json").out)
    assert record["python"] == ".".join(map(str, sys.version_info[:3])) and "torch" in record["packages"] and record["device"]


def test_verbs_of_other_packages_say_when_they_are_missing(loudfail: Loudfail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.ELSEWHERE, "train", "loudfail.trainer.not_there")
    ran = loudfail("train", "recipe.toml")
    assert ran.code == 4 and "not part of this installation" in ran.err


def test_the_scaffold_runs_at_once_and_says_what_is_missing(loudfail: Loudfail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loudfail("new", "my-model").code == 0
    assert loudfail("new", "my-model").code == 4  # nothing is overwritten
    folder = tmp_path / "my-model"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "my_model.py", "test_my_model.py", "README.md", ".github/workflows/loudfail.yml",
    }  # fmt: skip
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    ran = loudfail("gate", "my_model:MyModel")
    assert ran.code == 0, ran.text
    assert "engine: engine" in ran.out and "vendor: vendor_rollout, vendor_grid" in ran.out
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(folder)]) == 0


def test_a_strangers_port_is_gated_from_another_folder_by_the_real_suite(tmp_path: Path) -> None:
    """No checkout, no toy suite: the scaffold's port in a folder of its own, and the command that is installed."""
    command = Path(sys.executable).parent / "loudfail"
    subprocess.run([command, "new", "stranger"], cwd=tmp_path, env=environment(), check=True, capture_output=True)
    done = subprocess.run(
        [command, "gate", "stranger:Stranger", "--tp", "1", "--examples", "2", "--out", "out"],
        cwd=tmp_path / "stranger", env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    record = json.loads((tmp_path / "stranger" / "out" / "report.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert record["verdict"] == "holds" and sum(record["counts"].values()) == record["declared"] == len(record["results"])
    assert record["counts"]["holds"] > 0 and record["counts"]["uncovered"] > record["counts"]["holds"]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, io\nfrom loudfail.harness.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['--help'])\n"
        "print(*sorted({'torch', 'hypothesis', 'pytest', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    started = time.process_time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "" and time.process_time() - started < 1


def test_without_a_verb_the_help_is_shown(loudfail: Loudfail) -> None:
    ran = loudfail()
    assert ran.code == 4 and "VERB" in ran.out

"""Goldens: what is written is read back, what is bad is refused, tolerances follow from measurements, H3 computes what was recorded."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loudfail.golden import cases, cli, record, store
from loudfail.golden.diff import compare, table
from loudfail.golden.store import FACTOR, RATIO, TRACES, Detection, Golden, GoldenError, load, save
from loudfail.golden.verify import verify, verify_case
from loudfail.harness import environment
from loudfail.harness.ports.h3 import H3

Tensors = dict[str, torch.Tensor]


def toy_trace(seed: int | None = None, fault: float = 0.0) -> Tensors:
    """A trace of three links; ``seed`` rounds it another way, ``fault`` bends the second link and what follows."""
    x = torch.randn(32, generator=torch.Generator().manual_seed(0))
    if seed is not None:
        x = x * (1 + 1e-6 * torch.randn(32, generator=torch.Generator().manual_seed(seed)))
    bent = x.clone()
    bent[0] += fault
    return {"inputs.x": x, "rows.place": torch.arange(4), "actor.y": bent * 2, "tp1.z": bent + 1, "tp2.z": bent + 1}


def frozen(**changes: Any) -> Golden:
    """A sound golden of `toy_trace`."""
    reference = toy_trace()
    probes, faults = record.derive(
        reference, {"again": toy_trace(1), "more": toy_trace(2)}, {"bent": toy_trace(fault=1.0)}, {"bent": "one number is off"}
    )
    case = {"seed": 0}
    golden = Golden(
        "toy/plain-float32", "toys stay", "first recording", "0" * 40, (), "2026-01-01", {"torch": "1"}, "cpu", {"port": "toy"}, (1, 2), case,
        store.case_hash(case), FACTOR, RATIO, {}, faults, probes, reference,
    )  # fmt: skip
    return replace(golden, **changes)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Path of a saved toy golden."""
    return save(frozen(), tmp_path)


def test_what_is_saved_is_read_back(golden: Path) -> None:
    before, after = frozen(), load(golden)
    assert after == before
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    assert [probe.name for probe in after.probes] == list(before.tensors)
    assert json.loads(golden.with_suffix(".json").read_text()) == before.record()
    assert sorted(path.name for path in golden.parent.iterdir()) == ["plain-float32.json", "plain-float32.safetensors"]


# ------------------------------------------------------------------------------------------------------------------------------ bad files


def _header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the record in the header and the one beside it alike, as somebody would who wants the file to pass."""
    text = path.read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    values = json.loads(header["__metadata__"]["loudfail"])
    edit(values)
    save_file(load_file(path), path, metadata={"loudfail": json.dumps(values)})
    path.with_suffix(".json").write_text(json.dumps(values))


def _tensors(path: Path, edit: Callable[[Tensors], None]) -> None:
    """Edit the tensors and leave the record as it is."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata=metadata)


class Runs:
    """A pickle that would run a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def _not_finite(path: Path) -> None:
    """A NaN whose hash is in the record."""

    def put(tensors: Tensors) -> None:
        tensors["actor.y"][3] = float("nan")

    _tensors(path, put)
    value = store.fingerprint(load_file(path)["actor.y"])
    _header(path, lambda values: values["probes"][2].update(sha256=value))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "truncated tensors": (lambda path: path.write_bytes(path.read_bytes()[:-7]), "truncated"),
    "truncated header": (lambda path: path.write_bytes(path.read_bytes()[:100]), "truncated"),
    "one bit of a tensor": (lambda path: _flip(path, -1), "recorded hash"),
    "one bit of the header": (lambda path: _flip(path, 20), "corrupted|record|schema|Loudfail"),
    "huge header": (lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]), "truncated or no safetensors"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Runs(path.with_name("ran")))), "pickle"),
    "torch.save": (lambda path: torch.save({"x": torch.zeros(2)}, path), "pickle"),
    "text": (lambda path: path.write_text("not tensors, and long enough to have a header length"), "no safetensors"),
    "foreign": (lambda path: save_file({"x": torch.zeros(2)}, path), "no golden"),
    "not finite": (_not_finite, "actor.y is not finite"),
    "missing tensor": (lambda path: _tensors(path, lambda tensors: tensors.pop("tp1.z")), "missing: ..tp1.z"),
    "extra tensor": (lambda path: _tensors(path, lambda tensors: tensors.update(more=torch.zeros(1))), "not listed: ..more"),
    "other shape": (lambda path: _tensors(path, lambda tensors: tensors.update({"tp1.z": torch.zeros(3)})), r"tp1.z is .*\(3,\)"),
    "other dtype": (lambda path: _tensors(path, lambda tensors: tensors.update({"tp1.z": torch.zeros(32).double()})), "float64"),
    "other value": (lambda path: _tensors(path, lambda tensors: tensors["tp1.z"].add_(1)), "tp1.z does not have the recorded hash"),
    "typed tolerance": (lambda path: _header(path, lambda values: values["probes"][2].update(tolerance=0.5)), "not typed"),
    "wide factor": (lambda path: _header(path, _widen), "looser"),
    "no faults": (lambda path: _header(path, lambda values: values.update(faults=[])), "no fault"),
    "weak fault": (lambda path: _header(path, lambda values: values["faults"][0].update(margin=2.0)), "tolerances away"),
    "edited case": (lambda path: _header(path, lambda values: values["case"].update(seed=1)), "hash"),
    "other schema": (lambda path: _header(path, lambda values: values.update(schema="loudfail.golden/9")), "schema"),
    "lost field": (lambda path: _header(path, lambda values: values.pop("reason")), "missing or unknown: reason"),
    "unknown field": (lambda path: _header(path, lambda values: values.update(hook="os.system")), "missing or unknown: hook"),
    "wrong kind": (lambda path: _header(path, lambda values: values.update(degrees="124")), "degrees is not a list"),
    "infinite number": (lambda path: _header(path, lambda values: values.update(factor=float("inf"))), "strict JSON"),
    "climbing name": (lambda path: _header(path, lambda values: values.update(name="../../etc/passwd")), "is not <port>/<case>"),
    "climbing probe": (lambda path: _header(path, lambda values: values["probes"][0].update(name="../x")), "not allowed"),
    "record beside it": (
        lambda path: path.with_suffix(".json").write_text(path.with_suffix(".json").read_text().replace("first", "last")),
        "not the record",
    ),
    "no record beside it": (lambda path: path.with_suffix(".json").unlink(), "no such file"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "no such file"),
    "deep record": (lambda path: path.with_suffix(".json").write_text("[" * 100_000), "strict JSON"),
}


def _widen(values: dict[str, Any]) -> None:
    values["factor"] = 100.0
    for probe in values["probes"]:
        probe["tolerance"] = 100.0 * probe["spread"]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_with_a_short_reason(kind: str, golden: Path) -> None:
    damage, expected = BAD[kind]
    damage(golden)
    with pytest.raises(GoldenError, match=expected) as refusal:
        load(golden)
    assert golden.name in str(refusal.value) or golden.with_suffix(".json").name in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert not golden.with_name("ran").exists(), "code from a golden was run"


@pytest.mark.parametrize("name", ["../x", "h3/../../x", "/etc/passwd", "h3", "h3/a/b", "h3/..", "h3/a\0b", ""])
def test_a_name_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="no name of a golden"):
        store.path_of(name, tmp_path)


def test_a_write_that_fails_leaves_the_old_golden(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = golden.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(GoldenError, match="No space left"):
        save(frozen(reason="second"), golden.parent.parent)
    assert golden.read_bytes() == before
    assert len(list(golden.parent.iterdir())) == 2


# ----------------------------------------------------------------------------------------------------------------------------- tolerances


def test_a_tolerance_is_the_largest_spread_times_the_factor() -> None:
    reference = {"actor.y": torch.tensor([3.0, 4.0]), "tp1.z": torch.tensor([1.0, 0.0]), "tp2.z": torch.tensor([1.0, 1e-3])}
    near = {"actor.y": torch.tensor([3.0, 4.0 + 5e-4]), "tp1.z": reference["tp1.z"], "tp2.z": reference["tp2.z"]}
    nearer = {"actor.y": torch.tensor([3.0, 4.0 + 5e-5]), "tp1.z": reference["tp1.z"], "tp2.z": reference["tp2.z"]}
    wrong = {"actor.y": torch.tensor([3.0, 5.0]), "tp1.z": torch.tensor([1.0, 0.5]), "tp2.z": torch.tensor([1.0, 0.5])}
    probes, faults = record.derive(reference, {"near": near, "nearer": nearer}, {"wrong": wrong}, {"wrong": "is wrong"})
    y, z, _ = probes
    assert y.spread == pytest.approx(1e-4, rel=1e-3)
    assert y.spread_from == "near"
    assert y.tolerance == FACTOR * y.spread
    assert y.weakest == pytest.approx(0.2)
    assert z.spread == pytest.approx(1e-3, rel=1e-3)
    assert z.spread_from == "degrees"  # the same number at another degree is a measurement too
    assert faults == (Detection("wrong", "is wrong", "actor.y", faults[0].effect, faults[0].effect / y.tolerance),)
    assert faults[0].margin == pytest.approx(0.2 / (FACTOR * 1e-4), rel=1e-2)


def test_the_samples_of_a_batch_share_a_spread() -> None:
    reference = {"embeds.0": torch.ones(2), "embeds.1": torch.ones(2)}
    other = {"embeds.0": torch.tensor([1.0, 1.001]), "embeds.1": torch.ones(2)}
    probes, _ = record.derive(reference, {"other": other}, {"f": {"embeds.0": torch.zeros(2), "embeds.1": torch.zeros(2)}}, {})
    assert probes[0].spread == probes[1].spread > 0


UNSOUND: dict[str, tuple[Callable[[Tensors, Tensors, Tensors], object], str]] = {
    "not finite": (lambda reference, run, fault: reference["actor.y"].fill_(float("inf")), "not finite in the recorded run"),
    "not finite in a run": (lambda reference, run, fault: run["actor.y"].fill_(float("nan")), "not finite in again"),
    "whole numbers that move": (lambda reference, run, fault: run["rows.place"].add_(1), "whole numbers have no tolerance"),
    "noise like a fault": (lambda reference, run, fault: [run[name].mul_(1.05) for name in ("actor.y", "tp1.z", "tp2.z")], "at least 20 are needed"),
    "a fault in the inputs only": (
        lambda reference, run, fault: fault.update(reference | {"inputs.x": fault["inputs.x"] + 1}),
        "seen nowhere",
    ),
    "another shape": (lambda reference, run, fault: run.update({"actor.y": torch.zeros(3)}), "another shape"),
    "other probes": (lambda reference, run, fault: run.pop("tp2.z"), "other probes"),
}


@pytest.mark.parametrize("kind", UNSOUND)
def test_what_gives_no_sound_tolerance_is_not_recorded(kind: str) -> None:
    reference, run, fault = toy_trace(), toy_trace(1), toy_trace(fault=1.0)
    change, expected = UNSOUND[kind]
    change(reference, run, fault)
    with pytest.raises(record.Unsound, match=expected):
        record.derive(reference, {"again": run}, {"bent": fault}, {})


# ------------------------------------------------------------------------------------------------------------------------------- outcomes


def test_the_three_outcomes_and_the_first_probe_that_decides() -> None:
    golden = frozen()
    same = compare(golden, toy_trace(), {"torch": "1"})
    assert (same.outcome, same.first, same.versions) == ("same", None, {})

    drifted = compare(golden, toy_trace(1), {"torch": "2", "numpy": "3"})
    assert drifted.outcome == "drifted"
    assert drifted.first is not None and drifted.first.name == "inputs.x"
    assert drifted.versions == {"torch": ("1", "2"), "numpy": (None, "3")}

    changed = compare(golden, toy_trace(1, fault=1e-3), {"torch": "1"})
    assert changed.outcome == "changed"
    first = changed.first
    assert first is not None and first.name == "actor.y"  # inputs.x drifted before it, but inside its tolerance
    assert first.error is not None and first.error > first.tolerance > 0
    assert first.max_abs == pytest.approx(2e-3, rel=0.1)
    assert first.cosine == pytest.approx(1, abs=1e-5)
    assert first.bias == pytest.approx(2e-3 / 32 / (toy_trace()["actor.y"].norm().item() / 32**0.5), rel=0.2)
    assert changed.to_dict()["first"] == "actor.y"
    assert json.dumps(changed.to_dict(), allow_nan=False)
    assert "actor.y" in table(changed) and "rows.place" not in table(changed)


def test_a_bias_is_told_with_its_sign() -> None:
    lower = {name: tensor - 0.5 if name == "actor.y" else tensor for name, tensor in toy_trace().items()}
    row = compare(frozen(), lower, {}).first
    assert row is not None and row.bias is not None and row.bias < 0 and row.max_abs == pytest.approx(0.5)


MISFITS: dict[str, tuple[Callable[[Tensors], object], str, str]] = {
    "missing": (lambda trace: trace.pop("tp1.z"), "tp1.z", "is missing"),
    "unexpected": (lambda trace: trace.update(new=torch.zeros(1)), "new", "not in the golden"),
    "shape": (lambda trace: trace.update({"actor.y": torch.zeros(2)}), "actor.y", r"\(2,\)"),
    "dtype": (lambda trace: trace.update({"actor.y": trace["actor.y"].double()}), "actor.y", "float64"),
    "not finite": (lambda trace: trace["actor.y"].__setitem__(0, float("nan")), "actor.y", "not finite"),
    "whole numbers": (lambda trace: trace["rows.place"].add_(1), "rows.place", ""),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_changed(kind: str) -> None:
    trace = toy_trace()
    change, name, note = MISFITS[kind]
    change(trace)
    result = compare(frozen(), trace, {})
    assert result.outcome == "changed"
    assert result.first is not None and result.first.name == name
    assert re.search(note, result.first.note)


def test_probes_of_degrees_that_are_not_run_are_left_out_and_counted() -> None:
    trace = toy_trace()
    del trace["tp2.z"]
    result = compare(frozen(), trace, {}, degrees=[1])
    assert (result.outcome, result.left_out, len(result.rows)) == ("same", 1, 4)


def test_scores_of_a_scorer_that_one_side_lacks_are_left_out() -> None:
    """A package that brings a scorer, installed or not, changes no golden; a scorer that both have is compared."""
    scored = toy_trace() | {"reward.a": torch.ones(2)}
    assert compare(frozen(), scored, {}).outcome == "same"
    again = toy_trace(1) | {"reward.a": torch.ones(2)}
    probes, _ = record.derive(scored, {"again": again}, {"bent": toy_trace(fault=1.0) | {"reward.a": torch.zeros(2)}}, {})
    golden = frozen(probes=probes, tensors=scored)
    assert (compare(golden, toy_trace(), {}).outcome, compare(golden, toy_trace(), {}).left_out) == ("same", 1)
    result = compare(golden, toy_trace() | {"reward.a": torch.full((2,), 0.5)}, {})
    assert result.outcome == "changed" and result.first is not None and result.first.name == "reward.a"


def test_a_probe_that_is_not_in_the_golden_is_told_apart_from_another_run() -> None:
    """An upgrade compares two runs, also where a golden is older than the suite."""
    one, other = (compare(frozen(), toy_trace() | {"new": torch.full((2,), value)}, {}).rows[-1] for value in (1.0, 2.0))
    assert one.name == "new" and one.outcome == "changed" and one.now and one.now != other.now


def test_what_the_rollout_encodes_is_compared_at_any_degree_and_not_without_one() -> None:
    assert cases.runs_at("rollout.embeds.0", [2]) and not cases.runs_at("rollout.embeds.0", [])
    assert cases.runs_at("actor.y", []) and cases.runs_at("tp2.z", [1, 2]) and not cases.runs_at("tp2.z", [1])


# --------------------------------------------------------------------------------------------------------------------------- command line


def test_usage_is_4_and_tells_why(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["record", "h3"], "--reason"),
        (["record", "h3", "--reason", " "], "--reason is empty"),
        (["verify", "h4"], "h3"),
        (["verify", "h3", "--tp", "0"], "--tp"),
        (["verify", "h3", "--dtype", "int4"], "int4"),
        (["diff", "x.safetensors"], "no such file"),
        ([], "VERB"),
    ):
        code = cli.main(arguments)
        assert code == (1 if arguments[:1] == ["diff"] else 4)
        assert expected in capsys.readouterr().err


def test_diff_of_two_files(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = toy_trace(1)
    near = save(_with(moved, name="toy/near-float32", versions={"torch": "2"}), tmp_path)
    far = save(_with(toy_trace(fault=0.5), name="toy/far-float32"), tmp_path)
    assert cli.main(["diff", str(golden), str(golden)]) == 0
    assert "same" in capsys.readouterr().out
    assert cli.main(["diff", str(golden), str(near), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["goldens"][0]
    assert (shown["outcome"], shown["versions"]) == ("drifted", {"torch": ["1", "2"]})
    assert cli.main(["diff", str(golden), str(far)]) == 1
    assert "first: actor.y: relative" in capsys.readouterr().out


def _with(tensors: Mapping[str, torch.Tensor], **changes: Any) -> Golden:
    golden = frozen()
    probes = tuple(replace(probe, sha256=store.fingerprint(tensors[probe.name])) for probe in golden.probes)
    return replace(golden, tensors=tensors, probes=probes, **changes)


def test_which_code_runs_is_never_said_by_a_file(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(golden)]) == 4
    assert "--port" in capsys.readouterr().err


def test_list_shows_the_basis_and_refuses_what_is_bad(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--folder", str(golden.parent.parent)]
    assert cli.main(["list", *folder]) == 0
    shown = capsys.readouterr().out
    assert "toy/plain-float32: toys stay" in shown and "first recording" in shown and "weakest fault bent" in shown
    golden.write_bytes(b"")
    assert cli.main(["list", *folder]) == 1
    assert "refused" in capsys.readouterr().out


def test_a_dirty_tree_is_refused_unless_told_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments], check=True, capture_output=True
        )

    port = tmp_path / "port.py"
    port.write_text("class Port: pass\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "port")
    monkeypatch.setattr(record.inspect, "getsourcefile", lambda cls: str(port))
    goldens = tmp_path / "goldens" / "toy"
    goldens.mkdir(parents=True)
    (goldens / "new.json").write_text("{}")  # what recording itself writes does not count
    commit, dirty = record.source_state(object(), goldens, ())  # type: ignore[arg-type]
    assert commit is not None and len(commit) == 40 and dirty == ()
    port.write_text("class Port: x = 1\n")
    (tmp_path / "other.py").write_text("")
    with pytest.raises(GoldenError, match=r"other\.py, port\.py.*--allow-dirty"):
        record.source_state(object(), goldens, ())  # type: ignore[arg-type]
    with pytest.raises(GoldenError, match=r"in port\.py"):
        record.source_state(object(), goldens, ["other.py"])  # type: ignore[arg-type]
    assert record.source_state(object(), goldens, ["*.py"])[1] == ("other.py", "port.py")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------------------------------- H3


@pytest.fixture(scope="module")
def h3() -> Iterator[H3]:
    port = H3()
    yield port
    port.close()


def test_h3_computes_what_was_recorded(h3: H3) -> None:
    results = verify(h3, degrees=[1])
    assert [result.name for result in results] == ["h3/t2va-float32", "h3/fl2va-float32"]
    for result in results:
        assert result.outcome in ("same", "drifted"), f"{result.name}: {result.message}\n{table(result)}"
        assert {row.name.split(".")[0] for row in result.rows} >= {
            "inputs",
            "port",
            "vendor",
            "embeds",
            "rows",
            "actor",
            "media",
            "reward",
            "rollout",
            "tp1",
        }
        assert result.left_out > 0


def test_a_fault_in_h3_is_changed_and_named(h3: H3) -> None:
    case = cases.cases_of(h3)[0]
    golden = load(store.path_of("h3/t2va-float32"))
    first = {"one_projection_unbound": "actor.velocity.video", "fc1_halves_swapped": "actor.velocity.video", "two_tokens_swapped": "embeds.0"}
    for fault, expected in first.items():
        with cases.threads(1):
            trace = cases.record_trace(h3, case, [], change=case.changes[fault])
        rows = compare(golden, trace, {}, degrees=[]).rows
        changed = [row.name for row in rows if row.outcome == "changed" and not row.name.startswith("inputs.")]
        assert changed[0] == expected, fault


def test_a_missing_golden_is_a_failure_and_stays_missing(h3: H3, tmp_path: Path) -> None:
    result = verify_case(h3, cases.cases_of(h3)[0], degrees=[1], folder=tmp_path)
    assert result.outcome == "changed"
    assert "no such file" in result.message and "record" in result.message
    assert list(tmp_path.iterdir()) == []


def test_a_golden_of_another_case_is_refused(h3: H3, tmp_path: Path) -> None:
    golden = load(store.path_of("h3/t2va-float32"))
    case = golden.case | {"calls": 7}
    save(replace(golden, case=case, case_hash=store.case_hash(case)), tmp_path)
    result = verify_case(h3, cases.cases_of(h3)[0], degrees=[1], folder=tmp_path)
    assert result.outcome == "changed" and "another case: calls" in result.message


def test_every_committed_golden_is_sound_small_and_says_why() -> None:
    found = sorted(TRACES.rglob("*.safetensors"))
    modes = {"h3": ("fl2va", "t2va"), "ltx2": ("i2v", "t2v")}
    assert [f"{path.parent.name}/{path.stem}" for path in found] == [
        f"{port}/{case}-{dtype}" for port, names in modes.items() for case in names for dtype in ("bfloat16", "float32")
    ]
    for path in found:
        golden = load(path)
        assert golden.degrees == (1, 2, 4)
        assert {"torch", "diffusers", "peft", "transformers", "vllm-omni"} <= set(golden.versions) & set(environment.PACKAGES)
        assert len(golden.reason) > 10 and golden.commit
        halves = {"fc1_halves_swapped"} if path.parent.name == "h3" else set()  # LTX-2's feed-forward has no gate
        assert {one.fault for one in golden.faults} == {"alpha_over_r_missing", "one_projection_unbound", "two_tokens_swapped"} | halves
        assert min(one.margin for one in golden.faults) >= RATIO
        floats = [probe for probe in golden.probes if probe.dtype.startswith("float") and probe.name.startswith(("actor.", "tp"))]
        assert all(probe.tolerance > 0 for probe in floats if "grid" not in probe.name)
        assert path.stat().st_size + path.with_suffix(".json").stat().st_size < 300_000

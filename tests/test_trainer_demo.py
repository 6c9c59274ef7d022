"""`loudfail demo`: each fault shows in what the gate and a monitor say, the right run shows nothing, and finished runs are not trained again."""

import json
from pathlib import Path

import pytest

from loudfail.harness import registry
from loudfail.trainer import demo


def test_every_faulty_run_has_its_fault_in_the_catalogue() -> None:
    known = {fault.id for fault in registry.faults()}
    assert {variant.fault for variant in demo.VARIANTS if variant.name != demo.RIGHT} <= known
    assert [variant.name for variant in demo.VARIANTS if not variant.fault] == [demo.RIGHT]
    assert len(demo.VARIANTS) >= 6


def test_gate_and_monitors_tell_faulty_runs_from_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert demo.main(["--steps", "2", "--only", "right,sign,loss", "--out", str(out)]) == 0
    right, sign, loss = (json.loads((out / f"{name}.json").read_text()) for name in ("right", "sign", "loss"))
    assert right["gate"]["verdict"] == "holds" and right["gate"]["checks"] > 10 and right["fired"] is None
    assert sign["gate"]["verdict"] == loss["gate"]["verdict"] == "violated"
    assert sign["fired"][0] == 1 and sign["fired"][1].startswith("reward_recomputed")
    assert loss["fired"][0] == 1 and loss["fired"][1].startswith("every_modality_trains")
    assert sign["logged"][0] < 0 < sign["true"][0]
    assert all(len(record[curve]) == 2 for record in (right, sign, loss) for curve in ("logged", "true"))

    before = {file.name: file.stat().st_mtime_ns for file in out.glob("*.json")}
    assert demo.main(["--steps", "2", "--only", "right,sign,loss", "--out", str(out)]) == 0
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("*.json")} == before
    assert "monitors silent" in capsys.readouterr().out


def test_bad_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--only", "right,nope", "--out", str(tmp_path)]) == 4
    assert "no run 'nope'" in capsys.readouterr().err
    assert demo.main(["--steps", "1", "--out", str(tmp_path)]) == 4
    assert not list(tmp_path.iterdir())


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is an optional extra")
    record = {"logged": [0.5, 0.6], "true": [0.5, 0.4], "fired": [1, "velocity_replay: got 1"], "gate": {"verdict": "violated", "check": "a::b_c"}}
    demo.draw(demo.VARIANTS[:1] * 5, [record | {"gate": {"verdict": "holds", "checks": 3}, "fired": None}] + [record] * 4, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"

"""The certificate: made by a run that holds, accepted for the same thing only, refused when edited, and never code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toyports import Bent, Toy

from conftest import Ran
from loudfail.harness import certificate

Loudfail = Callable[..., Ran]


@pytest.fixture
def identity() -> dict[str, Any]:
    return certificate.fingerprint(Toy(), (2, 1))


@pytest.fixture
def path(tmp_path: Path, identity: dict[str, Any]) -> Path:
    report = {
        "port": "toy",
        "verdict": "holds",
        "declared": 2,
        "counts": {"holds": 2},
        "complete": True,
        "seconds": 1.5,
        "environment": {"cpu": "größer"},
    }
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(certificate.make(report, identity)))
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool) -> None:
    content = json.loads(path.read_text())
    change(content)
    if seal:
        content["sha256"] = certificate.checksum(content)
    path.write_text(json.dumps(content))


def reasons(path: Path, identity: dict[str, Any]) -> list[str]:
    with pytest.raises(certificate.Refused) as refused:
        certificate.require(path, identity)
    return refused.value.reasons


def test_it_fits_what_it_was_made_for(path: Path, identity: dict[str, Any]) -> None:
    assert certificate.require(path, identity)["verdict"] == "holds"
    assert certificate.require(path, certificate.fingerprint(Toy(), (1, 2)))["port"] == "toy"


@pytest.mark.parametrize(
    "change", [lambda c: c.update(verdict="holds!"), lambda c: c["counts"].update(holds=3), lambda c: c["fingerprint"].update(python="3")]
)
def test_an_edited_file_is_refused(path: Path, identity: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    rewrite(path, change, seal=False)
    assert reasons(path, identity) == ["was edited after the run: its checksum does not fit its content"]


def test_layout_of_the_file_does_not_matter(path: Path, identity: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    certificate.require(path, identity)


def test_each_difference_is_one_line(path: Path) -> None:
    class Other(Toy):
        name = "other"

    now = certificate.fingerprint(Other(dtype="bfloat16"), (1, 4))
    now["packages"] = now["packages"] | {"torch": "9.9"}
    found = reasons(path, now)
    assert "port.port: certified toy, here other" in found
    assert "port.dtype: certified float32, here bfloat16" in found
    assert "degrees: certified [1, 2], here [1, 4]" in found
    assert any(line.startswith("packages.torch: certified ") and line.endswith("here 9.9") for line in found)
    assert any(line.startswith("port_source: the code was changed since") for line in found)
    assert len(found) == 6  # and the class


def test_the_adapter_configuration_is_compared(path: Path) -> None:
    from loudfail.harness.port import AdapterConfig

    port = Toy()
    port.adapter = AdapterConfig(rank=32, alpha=128.0, targets=("to_q",))
    assert reasons(path, certificate.fingerprint(port, (1, 2))) == [
        "port.adapter.rank: certified 64, here 32",
        "port.adapter.targets: certified [], here ['to_q']",
    ]


def test_a_package_that_came_or_went_is_a_difference(path: Path, identity: dict[str, Any]) -> None:
    identity["packages"] = {name: version for name, version in identity["packages"].items() if name != "peft"} | {"vllm": "1.0"}
    found = reasons(path, identity)
    assert any(line.startswith("packages.peft: certified ") and line.endswith("here nothing") for line in found)
    assert "packages.vllm: certified nothing, here 1.0" in found


def test_a_run_that_does_not_hold_or_was_restricted_does_not_count(path: Path, identity: dict[str, Any]) -> None:
    rewrite(path, lambda c: c.update(verdict="violated", counts={"holds": 1, "violated": 1}, complete=False, selection="-k x"), seal=True)
    assert reasons(path, identity) == ["verdict is violated (1 holds, 1 violated)", "the run was restricted: -k x"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1, 2]", "schema is 'list'"),
        (b'{"schema": "loudfail.report/1"}', "schema is 'loudfail.report/1'"),
        (b'{"schema": "loudfail.gate/1", "verdict": NaN}', "was edited"),
        (pickle.dumps({"schema": "loudfail.gate/1"}), "is not JSON"),
    ],
    ids=["empty", "binary", "deep", "list", "report", "bare", "pickle"],
)
def test_what_is_no_certificate_is_refused(path: Path, identity: dict[str, Any], content: bytes, reason: str) -> None:
    path.write_bytes(content)
    assert reason in reasons(path, identity)[0]


def test_from_gate_to_require(loudfail: Loudfail) -> None:
    assert loudfail("gate", "toyports:Toy", "--tp", "1,2", "--out", "out").code == 0
    fits = loudfail("require", "out/gate.json", "--port", "toyports:Toy")
    assert fits.code == 0 and "out/gate.json fits: toy, TP 1, 2, float32, 2 holds" in fits.out

    other = loudfail("require", "out/gate.json", "--port", "toyports:Toy", "--tp", "1,4", "--dtype", "bf16")
    assert other.code == 1
    assert "degrees: certified [1, 2], here [1, 4]" in other.err and "port.dtype: certified float32, here bfloat16" in other.err
    bent = loudfail("require", "out/gate.json", "--port", "toyports:Bent")
    assert bent.code == 1 and "port.class: certified toyports:Toy, here toyports:Bent" in bent.err

    nameless = loudfail("require", "out/gate.json")  # the class that a certificate names is not imported
    assert nameless.code == 4 and "--port" in nameless.err


def test_no_certificate_of_a_violated_or_restricted_run_is_accepted(loudfail: Loudfail) -> None:
    assert loudfail("gate", "toyports:Bent", "--out", "bent").code == 1
    refused = loudfail("require", "bent/gate.json", "--port", "toyports:Bent")
    assert refused.code == 1 and "verdict is violated (1 holds, 1 violated, 4 uncovered)" in refused.err
    assert loudfail("gate", "toyports:Toy", "-k", "uniform", "--out", "part").code == 0
    refused = loudfail("require", "part/gate.json", "--port", "toyports:Toy")
    assert refused.code == 1 and "the run was restricted: -k uniform" in refused.err


def test_source_hashes_tell_ports_and_edits_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificate.source_hash(Toy) == certificate.source_hash(Toy)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_port.py"
    file.write_text("from loudfail.harness.port import Port\nclass Mine(Port):\n    name = 'a'\n")
    import edited_port  # type: ignore[import-not-found]

    before = certificate.source_hash(edited_port.Mine)
    file.write_text(file.read_text().replace("'a'", "'b'"))
    assert certificate.source_hash(edited_port.Mine) != before
    assert certificate.source_hash(Bent) != before

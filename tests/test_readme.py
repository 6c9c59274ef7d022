"""The README promises only what exists: its cheap commands run, every option in it is real, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
#: A block of commands; those under the comment are cheap enough to be run here.
BLOCK = re.compile(r"(?P<runs><!-- runs -->\n)?```console\n(?P<body>.*?)```", re.DOTALL)


def commands(*, cheap: bool) -> list[str]:
    """The lines of the README that start with ``$``, comments left out."""
    blocks = [match["body"] for match in BLOCK.finditer(TEXT) if not cheap or match["runs"]]
    return [line[2:].split("#")[0].strip() for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a reader would who has the environment active."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHONPATH"))}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("command", commands(cheap=True))
def test_a_cheap_command_runs(command: str, tmp_path: Path) -> None:
    done = shell(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def options_of(command: str, tmp_path: Path) -> str:
    """The help text that must list a command's options."""
    program, *arguments = shlex.split(command)
    help_of = f"{program} {arguments[0]} --help" if program == "loudfail" and not arguments[0].startswith("-") else f"{program} --help"
    done = shell(help_of, tmp_path)
    assert done.returncode == 0, f"{help_of}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("command", [command for command in commands(cheap=False) if command.startswith(("loudfail ", "pytest "))])
def test_the_options_of_a_command_exist(command: str, tmp_path: Path) -> None:
    text = options_of(command, tmp_path)
    used = [word.split("=")[0] for word in shlex.split(command)[1:] if word.startswith("-")]
    assert [option for option in used if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)] == []


@pytest.mark.parametrize(
    "script", sorted({command.split()[0] for command in commands(cheap=False) if command.startswith("ci/")} | {"ci/bench", "ci/setup"})
)
def test_a_script_exists_and_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


def test_every_verb_that_the_readme_names_exists(tmp_path: Path) -> None:
    verbs = set(re.findall(r"`loudfail ([a-z]+)", TEXT))
    shown = shell("loudfail --help", tmp_path).stdout
    assert len(verbs) >= 6
    assert [verb for verb in sorted(verbs) if not re.search(rf"^\s+{verb}\s", shown, re.MULTILINE)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    here = (ROOT / document).parent
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()) if "://" not in link]
    assert [link for link in links if link and not (here / link).exists()] == []


def test_the_violation_that_is_shown_is_one_of_the_suite() -> None:
    from loudfail.harness.registry import invariants

    shown = re.search(r"^VIOLATED (\S+?)\[tp2\]\n +claim  (.*)$", TEXT, re.MULTILINE)
    assert shown is not None
    assert {one.id: one.claim for one in invariants()}.get(shown[1]) == shown[2]


def test_the_counts_of_a_new_port_are_those_that_the_page_shows() -> None:
    from loudfail.harness.options import Options
    from loudfail.harness.registry import invariants

    shown = re.search(r"^holds: (\d+) holds, (\d+) uncovered of (\d+) ", (ROOT / "docs" / "porting.md").read_text(), re.MULTILINE)
    assert shown is not None
    holds, uncovered, total = map(int, shown.groups())
    assert total == holds + uncovered == sum(len(Options("any").degrees) if one.per_degree else 1 for one in invariants())


def test_the_records_are_documented_as_they_are() -> None:
    from loudfail.harness import certificate, faultrun, gate, killmatrix, result

    text = (ROOT / "docs" / "records.md").read_text()
    for name, schema in {"report.json": gate.SCHEMA, "gate.json": certificate.SCHEMA, "faults.json": faultrun.SCHEMA}.items():
        assert f"## {name}: `{schema}`" in text
    table = re.findall(r"^\| `([a-z]+)` \|.*\|(.*)\|$", text, re.MULTILINE)
    assert {status: "yes" in fails for status, fails in table if status in result.STATUSES} == {s: s in result.FAILING for s in result.STATUSES}
    assert all(f"`{outcome}`" in text for outcome in killmatrix.OUTCOMES)
    assert [field for field in certificate.SHARED if f"`{field}`" not in text] == []

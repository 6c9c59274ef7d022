"""The wheel holds the tree, and every way to install the project works: wheel, editable, strict editable."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("harness", "invariants", "golden", "trainer")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*", "build", "dist", "out")
#: Printed by an installed copy: where each package is, and every file that it can read beside its modules.
REPORT = """
import importlib, os
for name in ('harness', 'invariants', 'golden', 'trainer'):
    top = os.path.dirname(importlib.import_module(f'loudfail.{name}').__file__)
    print('AT', name, os.path.realpath(os.path.join(top, '__init__.py')))
    for folder, _, files in os.walk(top):
        for file in files:
            if '__pycache__' not in folder:
                print('HAS', os.path.relpath(os.path.join(folder, file), os.path.dirname(top)))
"""


def shipped(root: Path) -> set[str]:
    """All files of the four packages, relative to the root, caches left out: what an installation must have."""
    files = (path for name in PACKAGES for path in (root / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix() for path in files}


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Output of a command in a clean environment; fails the test with that output on any other exit code."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHONPATH", "LOUDFAIL_"))}
    line = [str(part) for part in command]
    done = subprocess.run(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert done.returncode == code, f"{command}: exit code {done.returncode}, expected {code}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("source") / "loudfail-tree"
    shutil.copytree(ROOT, copy, ignore=LEFTOVERS)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, tree, cwd=folder)
    return next(folder.glob("loudfail-*.whl"))


@dataclass
class Installation:
    """The project in an environment of its own, which sees the dependencies of this one but not the `loudfail` that is installed here."""

    bin: Path
    elsewhere: Path
    mode: str


def install(mode: str, source: Path, folder: Path) -> Installation:
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    # A folder named in a .pth file is searched, but .pth files inside it are not obeyed: an editable loudfail of this environment stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    flags = {"wheel": [], "editable": ["--editable"], "strict": ["--config-settings", "editable_mode=strict", "--editable"]}[mode]
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", *flags, source, cwd=folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return Installation(python.parent, elsewhere, mode)


@pytest.fixture(scope="module", params=["wheel", "editable", "strict"])
def installation(request: pytest.FixtureRequest, tree: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(request.param, wheel if request.param == "wheel" else tree, tmp_path_factory.mktemp(request.param))


def test_the_wheel_holds_the_tree_and_nothing_else(tree: Path, wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"loudfail/{name}" for name in shipped(tree)}


def test_every_package_of_the_tree_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"loudfail." + ".".join(path.parent.relative_to(ROOT).parts) for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")}
    assert declared == found


def test_no_test_file_is_inside_the_packages() -> None:
    """pytest would import such a file a second time, under another name."""
    assert [name for name in shipped(ROOT) if name.rsplit("/", 1)[-1].startswith(("test_", "conftest")) and name.endswith(".py")] == []


def test_every_package_is_typed() -> None:
    assert {f"{name}/py.typed" for name in PACKAGES} <= shipped(ROOT)


def test_the_wheel_states_its_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    licence = next(name for name in archive.namelist() if name.endswith("/LICENSE"))
    assert archive.read(licence).decode() == (ROOT / "LICENSE").read_text()


def test_entry_points_name_modules_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    declared = configparser.ConfigParser()
    declared.read_string(archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode())
    assert {"console_scripts", "pytest11", "vllm_omni.platform_plugins", "loudfail.ports"} <= set(declared.sections())
    targets = [target for section in declared.sections() for target in declared[section].values()]
    assert [target for target in targets if target.split(":")[0].replace(".", "/") + ".py" not in names] == []


def test_an_installation_has_every_file(installation: Installation, tree: Path) -> None:
    lines = run(installation.bin / "python", "-c", REPORT, cwd=installation.elsewhere).splitlines()
    assert {line.split(maxsplit=1)[1] for line in lines if line.startswith("HAS ")} == shipped(tree)
    places = {line.split()[1]: Path(line.split()[2]) for line in lines if line.startswith("AT ")}
    home = installation.bin.parent if installation.mode == "wheel" else tree
    assert set(places) == set(PACKAGES)
    assert all(place.is_relative_to(home.resolve()) for place in places.values()), places


def test_an_installation_has_the_command(installation: Installation) -> None:
    text = run(installation.bin / "loudfail", "--help", cwd=installation.elsewhere)
    assert all(verb in text for verb in ("gate", "faults", "golden", "require", "list", "env", "new"))


def test_pytest_in_a_checkout_tests_that_checkout(installation: Installation, tree: Path) -> None:
    """An installed wheel would be tested instead of the checkout, or nothing would be, so that is a usage error."""
    command = (installation.bin / "python", "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "tests/test_import_rule.py")
    if installation.mode == "wheel":
        assert "not from this checkout" in run(*command, cwd=tree, code=pytest.ExitCode.USAGE_ERROR)
    else:
        assert "test_import_rule.py" in run(*command, cwd=tree)

"""What may import what, and what the front doors may load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Package → the packages of this project that it may import, itself included.
ALLOWED = {
    "harness": {"harness"},
    "golden": {"golden", "harness"},
    "invariants": {"invariants", "harness"},
    "trainer": {"trainer", "harness"},
}
#: The front doors find suites, goldens and recipes by name, as pytest finds its plugins; a name in a call is no import there.
FIND_BY_NAME = {"harness/registry.py", "harness/plugin.py", "harness/cli.py"}
#: Too slow, or too much, for `loudfail --help` and for every pytest run of somebody who only has the package installed.
HEAVY = {"torch", "hypothesis", "numpy", "transformers", "diffusers", "peft", "vllm", "vllm_omni", "jinja2", "safetensors"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_in_call(node: ast.Call) -> str | None:
    """The module that a call such as ``importlib.import_module("...")`` names literally."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    first = node.args[0] if node.args else None
    if called in {"import_module", "__import__", "resolve_name"} and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def imported(path: Path) -> set[str]:
    """Absolute names of what a file imports anywhere in it, in functions and under TYPE_CHECKING too, as far as names are written out."""
    file = path.relative_to(ROOT)
    package = ("loudfail", *file.parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and file.as_posix() not in FIND_BY_NAME and (name := name_in_call(node)):
            names.add(name)
    return names


def forbidden(package: str, names: set[str]) -> set[str]:
    """The project's own names that a package may not import."""
    own = {name for name in names if name == "loudfail" or name.startswith("loudfail.")}
    return {name for name in own if len(parts := name.split(".")) < 2 or parts[1] not in ALLOWED[package]}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_the_rule_allows(package: str) -> None:
    found = {str(path.relative_to(ROOT)): bad for path in modules(package) if (bad := forbidden(package, imported(path)))}
    assert modules(package), f"no modules in {package}/"
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import loudfail.trainer.loop",
        "from loudfail import trainer",
        "from loudfail.invariants import sync",
        "from ..golden import store",
        "def f():\n    from loudfail.golden.store import read",
        "import importlib\nimportlib.import_module('loudfail.invariants')",
    ],
)
def test_the_rule_sees_every_way_to_import(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harness").mkdir()
    file = tmp_path / "harness" / "bad.py"
    file.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert forbidden("harness", imported(file))


def loaded_by(code: str) -> set[str]:
    """Top-level packages in memory after some code ran in a process of its own, away from the checkout."""
    script = f"{code}\nimport sys; print('LOADED', *sorted({{name.split('.')[0] for name in sys.modules}}))"
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTEST_ADDOPTS"}}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", env=env, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert lines, f"no answer (exit code {done.returncode}):\n{done.stdout}\n{done.stderr}"
    return set(lines[-1].split()[1:])


HELP = """
import sys
from loudfail.harness.cli import main
sys.argv = ['loudfail', '--help']
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""

EMPTY_RUN = """
import os, pytest
os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # plugins of other distributions may load what they like
assert pytest.main(['-q', '-p', 'loudfail.harness.plugin', '-p', 'no:cacheprovider', '--rootdir', FOLDER, FOLDER]) == 0
"""


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_by(HELP)
    assert "loudfail" in loaded
    assert not loaded & HEAVY


def test_the_pytest_plugin_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    loaded = loaded_by(f"FOLDER = {str(tmp_path)!r}\n{EMPTY_RUN}")
    assert "loudfail" in loaded
    assert not loaded & HEAVY

"""`ci/gpu` on a machine that cannot run it: it says why and what would do, and runs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

COMMAND = Path(__file__).parents[1] / "ci" / "gpu"


def call(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(COMMAND)], env=os.environ | {"PATH": path}, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_names_the_cause_and_runs_nothing(tmp_path: Path) -> None:
    done = call(tmp_path, f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 4
    assert "sees no GPU" in done.stderr or "not installed" in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_loudfail_it_says_how_to_install_it(tmp_path: Path) -> None:
    done = call(tmp_path, "/usr/bin:/bin")
    assert done.returncode == 4
    assert "pip install 'loudfail[gpu]'" in done.stderr

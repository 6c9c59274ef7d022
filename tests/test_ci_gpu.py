"""`ci/gpu` and `ci/multigpu` on a machine that cannot run them: they say why and what would do, and run nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CI = Path(__file__).parents[1] / "ci"


def call(folder: Path, path: str, command: str = "gpu", *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CI / command), *arguments], env=os.environ | {"PATH": path}, cwd=folder, capture_output=True, text=True, check=False
    )


# With a GPU the script would do its work, minutes of it, instead of refusing.
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


# As above, with several.
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has several GPUs")
def test_without_several_gpus_nothing_is_run_on_them(tmp_path: Path) -> None:
    done = call(tmp_path, os.environ["PATH"], "multigpu")
    assert done.returncode == 4
    assert re.search(r"2 GPUs are wanted, torch \S+ sees \d; --device cpu tries the script", done.stderr)
    done = call(tmp_path, os.environ["PATH"], "multigpu", "--device", "cpu", "--only", "gates")
    assert done.returncode == 4 and "no step 'gates'; there are gate, verdicts, faults" in done.stderr
    assert not list(tmp_path.iterdir())

"""Run a case as another processor would: one with fewer instructions, or the GPU in place of the CPU and the other way round. Random numbers,
products and exponentials then differ in their last bits.

Which instructions are used is decided when torch is loaded, hence a process of its own, which `trace_elsewhere` starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from loudfail.golden.cases import GoldenCase, cases_of, record_trace, threads, without_tiles
from loudfail.golden.store import GoldenError
from loudfail.harness import environment, inject
from loudfail.harness.port import offers
from loudfail.harness.registry import find_port

if TYPE_CHECKING:
    import torch

    from loudfail.harness.port import Port

#: torch's own kernels, Intel's BLAS and oneDNN without AVX-512, the first two without AVX2 as well; names that a build does not know change nothing.
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
#: Seconds until the process is given up.
TIMEOUT = 900


def trace_elsewhere(port: Port, golden: GoldenCase, degrees: Sequence[int], device: str | None = None) -> dict[str, torch.Tensor]:
    """The trace of a case in a process of its own.

    Args:
        port: its class has to be importable; an equal port is made in the process.
        golden: one of `cases_of` the port.
        degrees: tensor-parallel degrees of the rollout.
        device: ``cpu`` or ``cuda``; None for the port's own with another instruction set. vLLM serves one device an installation, so that on
            the other one there is no rollout.

    Raises:
        GoldenError: the process failed; its last lines are in the message.
    """
    from safetensors.torch import load_file

    task = {
        "port": f"{type(port).__module__}:{type(port).__qualname__}",
        "arguments": port.arguments() | ({"device": device} if device else {}),
        "case": golden.name,
        "degrees": [] if device else list(degrees),
        "narrow": device is None,
    }
    with tempfile.TemporaryDirectory(prefix="loudfail-golden-") as folder:
        target = Path(folder) / "trace.safetensors"
        environment = os.environ | ({} if device else ENVIRONMENT) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        what = f"the run on {device}" if device else "the run with another instruction set"
        command = [sys.executable, "-m", "loudfail.golden.elsewhere", json.dumps(task), str(target)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise GoldenError(f"{what} took longer than {TIMEOUT} s") from None
        if done.returncode:
            raise GoldenError(f"{what} failed:\n" + "\n".join(done.stderr.splitlines()[-5:]))
        tensors = load_file(target)
        return {name: tensors[name] for name in json.loads(target.with_suffix(".json").read_text())}


def main(task: str, target: str) -> None:
    """What the process does: run the case and write its tensors and their order."""
    from safetensors.torch import save_file

    wanted = json.loads(task)
    environment.use_exact_float32()
    port = find_port(wanted["port"])(**wanted["arguments"])
    try:
        case = next(case for case in cases_of(port) if case.name == wanted["case"])
        with ExitStack() as stack:
            stack.enter_context(threads(1))
            if wanted["narrow"]:
                stack.enter_context(without_tiles())
            if wanted["narrow"] and offers(port, "engine"):
                stack.enter_context(inject.in_ranks(port, without_tiles, rebuild=True))
            trace = record_trace(port, case, wanted["degrees"])
    finally:
        port.close()
    save_file(dict(trace), target)
    Path(target).with_suffix(".json").write_text(json.dumps(list(trace)))


if __name__ == "__main__":
    main(*sys.argv[1:])

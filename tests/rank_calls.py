"""What ranks are asked to do in tests. A module of its own that imports nothing heavy, since every rank imports it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from loudfail.harness.world import Rank


def number(rank: Rank) -> int:
    return rank.rank


def number_slowly(rank: Rank) -> int:
    """Later ranks answer first."""
    time.sleep(0.1 * (rank.size - rank.rank))
    return rank.rank


def remember(rank: Rank, value: int) -> None:
    rank.state["value"] = value + rank.rank


def recall(rank: Rank) -> int:
    return rank.state["value"]


def fail_in(rank: Rank, which: int) -> int:
    if rank.rank == which:
        raise ValueError(f"rank {which} has no such projection")
    return rank.rank


def fail_while_others_wait(rank: Rank, which: int) -> None:
    if rank.rank == which:
        raise ValueError("left the collective")
    time.sleep(60)


def kill_self(rank: Rank, which: int) -> None:
    if rank.rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang_in_a_named_function(rank: Rank, which: int) -> None:
    if rank.rank == which:
        time.sleep(60)


def unpicklable(rank: Rank) -> Any:
    return threading.Lock()


def environment(rank: Rank, name: str) -> str | None:
    return os.environ.get(name)

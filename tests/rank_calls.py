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


def add_up(rank: Rank, size: int, dtype: str, members: list[int]) -> Any:
    """The sum, whether the argument stayed as it was, and the sum in double precision; None outside of ``members``."""
    import torch

    from loudfail.harness.engines.vllm_omni import sum_through_pipes

    if rank.rank not in members:
        return None
    of = {one: (torch.arange(size) * (one + 1) % 97 + one / 7).to(getattr(torch, dtype)) for one in members}
    mine = of[rank.rank].clone()
    total = sum_through_pipes(rank, mine, members)
    return total.tolist(), total.dtype == mine.dtype and torch.equal(mine, of[rank.rank]), torch.stack(list(of.values())).double().sum(0).tolist()


def add_up_sizes(rank: Rank, sizes: list[int]) -> None:
    add_up(rank, sizes[rank.rank], "float32", list(range(rank.size)))


def add_up_without(rank: Rank, which: int) -> None:
    """Rank ``which`` dies before a sum that the others begin."""
    if rank.rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    add_up(rank, 4, "float32", list(range(rank.size)))


def add_up_another_time(rank: Rank, which: int) -> None:
    """Rank ``which`` is a sum ahead of the others."""
    if rank.rank == which:
        rank.state["sums"] = 7
    add_up(rank, 4, "float32", list(range(rank.size)))

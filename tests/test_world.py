"""A world of ranks: answers, failures of every kind, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import rank_calls

from loudfail.harness.world import RankError, World


@pytest.fixture
def world() -> Iterator[World]:
    with World(3, timeout=60) as world:
        yield world


def gone(pids: list[int], within: float = 10.0) -> bool:
    """Whether all processes have ended; a zombie that nobody waits for counts as ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_results_come_back_in_rank_order(world: World) -> None:
    assert world.call(rank_calls.number_slowly) == [0, 1, 2]


def test_ranks_keep_state_between_calls(world: World) -> None:
    world.call(rank_calls.remember, 10)
    assert world.call(rank_calls.recall) == [10, 11, 12]


def test_environment_reaches_the_ranks() -> None:
    with World(1, timeout=60, environment={"LOUDFAIL_TEST_WORD": "bell"}) as world:
        assert world.call(rank_calls.environment, "LOUDFAIL_TEST_WORD") == ["bell"]
    assert "LOUDFAIL_TEST_WORD" not in os.environ


def test_a_rank_that_raises_is_named_with_its_traceback(world: World) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 raised in rank_calls\.fail_in") as error:
        world.call(rank_calls.fail_in, 1)
    assert error.value.kind == "raised"
    assert "ValueError: rank 1 has no such projection" in error.value.details
    assert "in fail_in" in error.value.details


def test_a_rank_that_raises_does_not_wait_for_those_in_a_collective(world: World) -> None:
    pids = world.pids
    world.call(rank_calls.number)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 2 of 3 raised"):
        world.call(rank_calls.fail_while_others_wait, 2)
    assert time.monotonic() - started < 20
    assert gone(pids)


def test_all_ranks_raising_leaves_the_world_usable(world: World) -> None:
    with pytest.raises(RankError, match="raised"):
        world.call(rank_calls.recall)
    assert world.call(rank_calls.number) == [0, 1, 2]


def test_a_killed_rank_is_reported_and_takes_the_world_down(world: World) -> None:
    pids = world.pids
    world.call(rank_calls.number)
    with pytest.raises(RankError, match=r"rank 1 of 3 died in rank_calls.kill_self\nkilled by signal SIGKILL"):
        world.call(rank_calls.kill_self, 1)
    assert gone(pids) and not world.alive
    with pytest.raises(RankError, match="this world is closed"):
        world.call(rank_calls.number)


def test_a_rank_killed_between_calls_is_reported(world: World) -> None:
    world.call(rank_calls.number)
    os.kill(world.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 of 3 died"):
        world.call(rank_calls.number)


def test_a_hung_rank_ends_within_the_time_limit_and_shows_its_stack(world: World) -> None:
    world.call(rank_calls.number)
    pids, world.timeout, started = world.pids, 1.0, time.monotonic()
    with pytest.raises(RankError, match="rank 2 of 3 hung") as error:
        world.call(rank_calls.hang_in_a_named_function, 2)
    assert time.monotonic() - started < 15
    assert "hang_in_a_named_function" in error.value.details and "no answer within 1 s" in error.value.details
    assert gone(pids)


def test_the_time_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOUDFAIL_RANK_TIMEOUT", "7.5")
    with World(1) as world:
        assert world.timeout == 7.5


def test_a_result_that_cannot_be_sent_is_an_error_of_that_call(world: World) -> None:
    with pytest.raises(RankError, match=r"raised in rank_calls\.unpicklable") as error:
        world.call(rank_calls.unpicklable)
    assert "pickle" in error.value.details
    assert world.call(rank_calls.number) == [0, 1, 2]


def test_closing_leaves_no_process(world: World) -> None:
    pids = world.pids
    assert all(psutil.pid_exists(pid) for pid in pids) and world.alive
    world.close()
    world.close()
    assert gone(pids) and not world.alive


@pytest.mark.parametrize("members", [[0, 1, 2], [2, 0]], ids=["all", "two"])
@pytest.mark.parametrize("size", [0, 1, 362, 100_003], ids=["nothing", "one", "small", "several-messages"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_sum_through_the_pipes_is_that_of_its_members_in_every_one_of_them(world: World, dtype: str, size: int, members: list[int]) -> None:
    found = [one for one in world.call(rank_calls.add_up, size, dtype, members) if one is not None]
    assert len(found) == len(members)
    for total, untouched, exact in found:
        assert untouched and len(total) == size and total == found[0][0]
        assert total == pytest.approx(exact, rel={"float32": 1e-6, "bfloat16": 2**-8, "int32": 0}[dtype], abs=1e-6 * (dtype == "float32"))


def test_ranks_that_add_different_things_are_told_apart(world: World) -> None:
    with pytest.raises(RankError, match=r"rank \d adds (16|20) bytes in sum 1, rank \d (16|20)"):
        world.call(rank_calls.add_up_sizes, [4, 4, 5])
    with World(2, timeout=20) as ahead, pytest.raises(RankError, match=r"rank \d is at sum [18], rank \d at sum [18]"):
        ahead.call(rank_calls.add_up_another_time, 1)


def test_a_rank_that_dies_in_a_sum_is_named(world: World) -> None:
    world.call(rank_calls.number)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 3 died in rank_calls.add_up_without\nkilled by signal SIGKILL"):
        world.call(rank_calls.add_up_without, 1)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("call", ["world.call(rank_calls.number)", "world.call(rank_calls.hang_in_a_named_function, 0)"], ids=["idle", "busy"])
def test_killing_the_parent_leaves_no_rank(tmp_path: Path, call: str) -> None:
    script = f"""
        import time, rank_calls
        from loudfail.harness.world import World
        world = World(2)
        world.call(rank_calls.number)
        open({str(tmp_path / "part")!r}, "w").write(" ".join(map(str, world.pids)))
        import os; os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "pids")!r})
        {call}
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parent)
    wait_for((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    assert gone(pids)


def wait_for(condition: Callable[[], bool], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)

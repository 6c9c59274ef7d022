"""The sigma grid: what training replays is what the rollout walks, point by point and per modality."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loudfail.harness.case import Case, cases
from loudfail.harness.compare import require, require_close
from loudfail.harness.port import Port
from loudfail.harness.registry import BOTH, invariant
from loudfail.harness.violation import Uncovered

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

#: Absolute error of a grid. Clean: 0 against the vendor and the engine, 6e-8 against float64.
GRID = 2e-6


def calls_between(least: int, most: int) -> Callable[[Port], SearchStrategy[int]]:
    """Strategy of numbers of model calls that the schedule has."""

    def build(port: Port) -> SearchStrategy[int]:
        from hypothesis import strategies as st

        return st.integers(max(least, port.least_calls), most)

    return build


def call_sequences(port: Port) -> SearchStrategy[list[int]]:
    """Several numbers of model calls in the order in which grids of them are asked for."""
    from hypothesis import strategies as st

    return st.lists(st.integers(port.least_calls, 50), min_size=2, max_size=4, unique=True)


def require_same_grid(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], where: str) -> None:
    """Same modalities, same number of points, same values within `GRID`."""
    require(sorted(got) == sorted(want), got=sorted(got), want=sorted(want), where=where)
    for modality, levels in want.items():
        require_close(got[modality].float(), levels.float(), bound=GRID, scale=1.0, where=f"{where}, {modality}")


@invariant("objective", "vendor", scales=BOTH, examples=12, calls=calls_between(1, 50), case=cases(batch=(1, 1)))
def the_grid_is_the_vendors(port: Port, calls: int, case: Case) -> None:
    """For any number of model calls, each modality's grid is that of the vendor's own scheduler, with the same number of points.

    A rollout of N calls and a replay of N ± 1 calls disagree at every level, by little, and the loss stays smooth. Sees grids that are a point
    short or long, shifted twice, built by another scheduler, or shared by modalities that have two. Does not see a vendor scheduler that is itself
    wrong: `the_grid_is_one_shift_of_an_even_grid` and the rollout's own grid do.
    """
    require_same_grid(port.grid(calls, case), port.vendor_grid(calls, case), f"{calls} calls, {dict(case.extent)}, given {case.given}")


@invariant("objective", "engine", scales=BOTH, examples=8, calls=calls_between(1, 50), case=cases(batch=(1, 1)))
def the_grid_is_the_rollouts(port: Port, tp: int, calls: int, case: Case) -> None:
    """For any number of model calls, each modality's grid is the one that the rollout engine builds, at every degree.

    Trainer and rollout come from two frameworks, which count steps differently (grid points here, model calls there). Oracle: the other framework.
    Does not see a loop that ignores the grid it built: `the_rollout_steps_along_the_grid` does.
    """
    where = f"tp {tp}, {calls} calls, {dict(case.extent)}, given {case.given}"
    require_same_grid(port.grid(calls, case), port.engine(tp).grid(calls, case), where)


@invariant("objective", scales=BOTH, examples=12, calls=calls_between(1, 50))
def the_grid_descends_from_pure_noise_to_clean(port: Port, calls: int) -> None:
    """Each grid holds one more point than there are model calls, starts at exactly 1, descends strictly, and ends at exactly 0.

    The initial latents are pure noise, so a first level below 1 mislabels them; a level that repeats is a call that does nothing; a last level
    above 0 leaves noise in the result. The oracle is the definition. Does not see wrong values in between.
    """
    for modality, levels in port.grid(calls).items():
        where = f"{modality}, {calls} calls"
        require(levels.numel() == calls + 1, got=f"{levels.numel()} points", want=f"{calls + 1} points", where=where)
        require(levels.dtype == torch.float32, got=levels.dtype, want=torch.float32, where=where)
        require(float(levels[0]) == 1.0, got=float(levels[0]), want=1.0, where=where)
        require(float(levels[-1]) == 0.0, got=float(levels[-1]), want=0.0, where=where)
        require(bool((levels[1:] < levels[:-1]).all()), got=levels.tolist(), want="strictly descending", where=where)


@invariant("objective", "vendor", examples=3, case=cases(batch=(1, 1)), calls=calls_between(2, 5))
def the_vendors_loop_calls_the_model_once_at_each_level_but_the_last(port: Port, case: Case, calls: int) -> None:
    """The vendor's loop calls the model exactly at the levels of the grid but the terminal 0, in order, so that every replayed level was visited.

    A terminal level that is appended twice is one wasted call at sigma 0, and a level that the trainer replays but no rollout visits is off-policy.
    The levels are those at which the vendor's loop really stepped. Does not see what the model was told at them: the conventions do.
    """
    trajectory = port.vendor_rollout(case.normal("noise", port.shapes(case)), calls, port.conditions(case))
    grid = port.grid(calls, case)
    for modality in port.modalities:
        visited = torch.stack([step.sigmas[modality][0] for step in trajectory.steps]).float().cpu()
        require(float(visited.min()) > 0, got=float(visited.min()), want="no call at sigma 0", where=modality)
        require_close(visited, grid[modality][:-1].float(), bound=GRID, scale=1.0, where=f"{modality}, {calls} calls")


@invariant("objective", "engine", examples=2, case=cases(batch=(1, 1)), calls=calls_between(2, 4))
def the_rollout_steps_along_the_grid(port: Port, tp: int, case: Case, calls: int) -> None:
    """The rollout makes as many model calls as the grid has steps, and each moves the latents by its velocity times that step of the grid.

    What the loop walked is read off its latents, not off the grid that it reports: a model object patched to one shift and levels taken from
    another copy look alike from outside. Does not see a wrong velocity.
    """
    engine = port.engine(tp)
    engine.remove_adapter()
    trajectory = engine.rollout(case.normal("noise", port.shapes(case)), calls, port.conditions(case))
    require(len(trajectory.steps) == calls, got=f"{len(trajectory.steps)} model calls", want=f"{calls} model calls", where=f"tp {tp}")
    for modality, levels in port.grid(calls, case).items():
        for index, step in enumerate(trajectory.steps):
            moved = step.latents[modality] - step.after[modality]
            want = (levels[index] - levels[index + 1]) * step.velocity[modality]
            bound = 1e-5 + rounding_of_kept(port, step.after[modality], float(want.norm()))  # measured 8e-7: the difference of two latents
            require_close(moved, want, bound=bound, where=f"tp {tp}, {modality}, call {index} of {calls}")


def rounding_of_kept(port: Port, after: torch.Tensor, moved: float) -> float:
    """What rounding latents to bfloat16 after a step adds to the error of the step: half a unit in the last place, with eight bits, of every element,
    relative to what the step had to move. Not to what it did move: a loop that hardly moves must not widen its own bound.

    Args:
        port: what is judged.
        after: latents after the step.
        moved: norm of the movement that is due.

    Returns:
        0 where the loop keeps its latents in float32, or the port is in float32.
    """
    kept = port.dtype == "bfloat16" and torch.equal(after, after.bfloat16().float())
    return 2**-8 * float(after.norm()) / moved if kept else 0.0


@invariant("objective", scales=BOTH, examples=8, calls=calls_between(1, 50))
def the_grid_is_one_shift_of_an_even_grid(port: Port, calls: int) -> None:
    """Each grid is the even grid from 1 to 0 under the published shift s, ``s·u / (1 + (s − 1)·u)``, once, in float64, for any number of calls.

    Applied twice, the shift becomes its square; built from end points that are shifted already, the grid keeps a floor that no number of calls
    removes. Oracle: the formula, with the shift that was published with the weights. Uncovered for models whose schedule is of another kind.
    """
    if not port.shift:
        raise Uncovered(f"port {port.name!r} states no shift; its schedule is of another kind")
    grid = port.grid(calls)
    for modality, shift in port.shift.items():
        even = torch.linspace(1, 0, calls + 1, dtype=torch.float64)
        want = shift * even / (1 + (shift - 1) * even)
        require_close(grid[modality].double(), want, bound=GRID, scale=1.0, where=f"{modality}, shift {shift}, {calls} calls")


@invariant("objective", "vendor", examples=4, sequence=call_sequences)
def the_grid_does_not_remember_earlier_grids(port: Port, sequence: list[int]) -> None:
    """A grid depends on its number of calls alone: not on grids asked for before, not on what was done to their tensors, not on a rollout.

    Schedulers keep state. A replay that reads the schedule of the last rollout, or the default one because no rollout set it up, is smooth and wrong.
    """
    for calls in sequence:
        for levels in port.grid(calls).values():
            levels.fill_(0.5)  # a caller may do with its grid what it likes
    case = Case(extent={axis: min(sizes) for axis, sizes in port.extents.items()})
    port.vendor_rollout(case.normal("noise", port.shapes(case)), 2, port.conditions(case))
    for calls in reversed(sequence):
        got = port.grid(calls)
        for modality, levels in port.vendor_grid(calls).items():
            require_close(got[modality].float(), levels.float(), bound=GRID, scale=1.0, where=f"{modality}, {calls} calls after {sequence}")

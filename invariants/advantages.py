"""From rewards to the optimality probability: compared within a draw, in standard deviations, clipped on both sides.

Oracle: the formulas of DiffusionNFT (arXiv 2509.16117), in float64 and written here again. The functions are the trainer's own (`Port.update`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loudfail.harness.compare import note, require, require_close, require_equal
from loudfail.harness.port import Port, Update
from loudfail.harness.registry import BOTH, invariant
from loudfail.harness.violation import Uncovered, Violation

#: A constant may be added to the standard deviation; rewards below have one of at least 0.5, and published trainers add at most 1e-4.
TOLERANCE = 5e-4


@dataclass(frozen=True)
class Rewards:
    """Rewards of several draws, interleaved.

    Attributes:
        seed: the values and the order.
        sizes: samples of each draw.
        shift, stretch: ``shift + stretch · normal``, and each draw with an offset of its own as large as its spread.
    """

    seed: int
    sizes: tuple[int, ...]
    shift: float = 0.0
    stretch: float = 1.0

    @property
    def draws(self) -> list[int]:
        """The draw of each sample, by numbers that are neither dense nor in order."""
        numbers = [7 * (len(self.sizes) - index) + 3 for index, size in enumerate(self.sizes) for _ in range(size)]
        return [numbers[i] for i in self.order]

    @property
    def order(self) -> list[int]:
        return torch.randperm(sum(self.sizes), generator=torch.Generator().manual_seed(self.seed + 1)).tolist()

    @property
    def values(self) -> torch.Tensor:
        """``(B,)`` float64; in every draw the population standard deviation is ``stretch`` or more."""
        generator, parts = torch.Generator().manual_seed(self.seed), []
        for size in self.sizes:
            one = torch.randn(size, generator=generator, dtype=torch.float64)
            one = (one - one.mean()) / one.std(correction=0).clamp_min(1e-3) * (1 + torch.rand(1, generator=generator, dtype=torch.float64))
            parts.append(one + torch.randn(1, generator=generator, dtype=torch.float64))
        return self.shift + self.stretch * torch.cat(parts)[self.order]


def rewards(port: Port) -> Any:
    """Draws of unequal sizes, two of them at least, rewards of several scales."""
    from hypothesis import strategies as st

    return st.builds(
        Rewards,
        seed=st.integers(0, 2**31 - 1),
        sizes=st.lists(st.integers(2, 5), min_size=2, max_size=4).map(tuple),
        shift=st.sampled_from([0.0, -3.0, 40.0]),
        stretch=st.sampled_from([0.5, 1.0, 25.0]),
    )


def deviations(values: torch.Tensor, draws: Sequence[int]) -> torch.Tensor:
    """Reward minus the mean of its draw, ``(B,)`` float64."""
    values = values.detach().double().cpu()
    result = torch.zeros_like(values)
    for index, draw in enumerate(draws):
        mates = [j for j, other in enumerate(draws) if other == draw]
        result[index] = values[index] - sum(float(values[j]) for j in mates) / len(mates)
    return result


def advantages(values: torch.Tensor, draws: Sequence[int]) -> torch.Tensor:
    """Deviation from the draw's mean in population standard deviations of that draw; 0 where all are equal."""
    centred = deviations(values, draws)
    result = torch.zeros_like(centred)
    for index, draw in enumerate(draws):
        mates = [float(centred[j]) for j, other in enumerate(draws) if other == draw]
        spread = math.sqrt(sum(x * x for x in mates) / len(mates))
        result[index] = centred[index] / spread if spread > 0 else 0.0
    return result


def optimality(values: torch.Tensor, clip: float) -> torch.Tensor:
    """``½ + ½·clip(A / Z, −1, 1)``."""
    return torch.tensor([0.5 + 0.5 * max(-1.0, min(1.0, float(a) / clip)) for a in values], dtype=torch.float64)


def asked(update: Update, values: torch.Tensor, draws: Sequence[int], spread: str = "group", prompts: Sequence[str] | None = None) -> torch.Tensor:
    """The trainer's advantages, ``(B,)`` float64 on the CPU."""
    got = update.advantages(values, list(draws), list(prompts or [f"prompt {draw}" for draw in draws]), spread)
    require(tuple(got.shape) == tuple(values.shape), got=f"shape {tuple(got.shape)}", want=f"shape {tuple(values.shape)}", where="advantages")
    return got.detach().double().cpu()


@invariant("update", scales=BOTH, examples=12, case=rewards)
def an_advantage_is_the_deviation_from_its_draw_in_standard_deviations(port: Port, case: Rewards) -> None:
    """Each advantage is the reward minus the mean of its draw, divided by the population standard deviation of that draw.

    A baseline over the whole batch rewards easy prompts, a missing or other divisor changes the step from draw to draw. Not covered: how little
    is added to the divisor.
    """
    want = advantages(case.values, case.draws)
    require_close(asked(port.update(), case.values, case.draws), want, bound=TOLERANCE, where=f"draws of {case.sizes}")


@invariant("update", scales=BOTH, examples=6, case=rewards)
def a_global_spread_divides_every_deviation_by_one_number(port: Port, case: Rewards) -> None:
    """With a global spread, advantages are the deviations from each draw's mean divided by one positive number, which is a spread of the batch.

    That number lies between the standard deviation of the centred rewards and that of all of them, as published trainers take the one or the other.
    """
    centred = deviations(case.values, case.draws)
    got = asked(port.update(), case.values, case.draws, "global")
    factor = float((got * centred).sum() / centred.square().sum())
    require_close(got, factor * centred, bound=1e-6, where="one factor for all")
    low, high = float(centred.square().mean().sqrt()), float(case.values.std(correction=0))
    spread = 1 / factor if factor else math.inf
    outside = max(low / spread, spread / high) - 1 if spread > 0 else math.inf
    note(max(outside, 0.0), TOLERANCE, "spread")
    if not outside <= TOLERANCE:
        raise Violation(spread, f"between {low:.4g} and {high:.4g}", TOLERANCE, "spread of the batch")


@invariant("update", scales=BOTH, examples=6, case=rewards)
def a_prompt_drawn_twice_makes_two_groups(port: Port, case: Rewards) -> None:
    """Samples are compared within their draw, whatever their prompts say: one text for all draws, or another for each sample, changes nothing.

    Groups keyed by text merge a prompt that was drawn twice, and split a draw whose prompts were rewritten.
    """
    update = port.update()
    want = advantages(case.values, case.draws)
    for what, prompts in (("one text", ["rain"] * len(want)), ("a text a sample", [f"rain {i}" for i in range(len(want))])):
        require_close(asked(update, case.values, case.draws, "group", prompts), want, bound=TOLERANCE, where=what)


@invariant("update", scales=BOTH, examples=6, case=rewards)
def advantages_go_with_their_samples(port: Port, case: Rewards) -> None:
    """Exchanging samples exchanges their advantages; nothing depends on the order, nor on how many others there are.

    A reshape to (prompts, K) of samples that came back in another order gives every sample a stranger's advantage (R1-V #67).
    """
    update, values, draws = port.update(), case.values, case.draws
    got = asked(update, values, draws)
    order = torch.randperm(len(draws), generator=torch.Generator().manual_seed(case.seed + 2)).tolist()
    require_close(asked(update, values[order], [draws[i] for i in order]), got[order], bound=1e-9, where="another order")
    first = [i for i, draw in enumerate(draws) if draw == draws[0]]
    require_close(asked(update, values[first], [draws[0]] * len(first)), got[first], bound=1e-9, where="a draw alone")


@invariant("update", scales=BOTH, examples=6, case=rewards)
def better_samples_have_larger_advantages(port: Port, case: Rewards) -> None:
    """Within a draw, advantages are in the order of the rewards, those above the mean are positive, and negated rewards have negated advantages.

    A reward that is a loss, or a sign lost on the way, trains away from what is wanted, and every curve of the loss looks the same.
    """
    update, centred = port.update(), deviations(case.values, case.draws)
    for spread in ("group", "global"):
        got = asked(update, case.values, case.draws, spread)
        wrong = int((got * centred < 0).sum())
        require(wrong == 0, got=f"{wrong} of {len(got)} with the other sign", want="the sign of the deviation", where=f"spread {spread}")
        require_close(asked(update, -case.values, case.draws, spread), -got, bound=1e-6, where=f"spread {spread}, rewards negated")


@invariant("update", scales=BOTH, examples=6, case=rewards)
def equal_rewards_give_no_advantage(port: Port, case: Rewards) -> None:
    """A draw whose rewards are all equal has advantages of exactly 0, finite, and leaves the other draws as they were.

    Divided by its own spread it is 0 / 0, or rounding noise blown up to ±1.
    """
    update, values, draws = port.update(), case.values.clone(), case.draws
    flat = torch.tensor([draw == draws[0] for draw in draws])
    values[flat] = 0.1  # no power of two, so that a mean of equal numbers may differ from them in the last bit
    got = asked(update, values, draws)
    largest = float(got[flat].abs().max())
    require(math.isfinite(largest) and largest < 1e-9, got=largest, want="0", where="the draw of equal rewards")
    require_close(got[~flat], advantages(values, draws)[~flat], bound=TOLERANCE, where="the other draws")


@invariant("update", scales=BOTH, examples=4, case=rewards)
def rewards_that_cannot_be_compared_are_refused(port: Port, case: Rewards) -> None:
    """A reward that is NaN or infinite, a draw of a single sample, and draws of another number than rewards each raise; none becomes a number.

    A failed scorer that turns into 0, or a group that is filled up, trains on what nobody measured (trl #6804).
    """
    update, values, draws = port.update(), case.values, case.draws
    place = case.seed % len(draws)
    for spread in ("group", "global"):
        for what, bad in (("NaN", math.nan), ("infinity", math.inf), ("-infinity", -math.inf)):
            spoiled = values.clone()
            spoiled[place] = bad
            refused(update, spoiled, draws, spread, f"a reward that is {what}, spread {spread}")
        refused(update, torch.cat([values, values[:1]]), [*draws, 10**6], spread, f"a draw of one sample, spread {spread}")
        refused(update, values, draws[1:], spread, f"one draw too few, spread {spread}")


def refused(update: Update, values: torch.Tensor, draws: Sequence[int], spread: str, where: str) -> None:
    """See that it raises."""
    try:
        got = update.advantages(values, list(draws), [f"prompt {draw}" for draw in draws], spread)
    except Uncovered:
        raise
    except Exception:
        require(True, got="", want="", where=where)
        return
    require(False, got=got.tolist(), want="an error", where=where)


def clips(port: Port) -> Any:
    from hypothesis import strategies as st

    return st.sampled_from([0.5, 1.0, 1.7, 5.0])


@invariant("update", scales=BOTH, examples=4, clip=clips)
def optimality_is_a_half_plus_half_the_advantage_clipped_on_both_sides(port: Port, clip: float) -> None:
    """r is ½ + ½·A / Z up to ±Z and exactly 1 and 0 beyond: a probability, monotone, and ½ for the average sample.

    Sees the raw reward in the place of r, 1 − r, a clip on one side only, and another divisor than the clip.
    """
    grid = torch.cat(
        [torch.linspace(-3 * clip, 3 * clip, 61, dtype=torch.float64), torch.tensor([-50.0, 0.0, 50.0, clip, -clip], dtype=torch.float64)]
    )
    got = port.update().optimality(grid, clip).detach().double().cpu()
    require_close(got, optimality(grid, clip), bound=1e-7, where=f"clip {clip:g}")
    beyond = grid.abs() >= clip
    require_equal(got[beyond], (grid[beyond] > 0).double(), where=f"clip {clip:g}, beyond it")

"""Advantages broken on purpose, in the functions that the trainer runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port
from loudfail.harness.registry import fault

FORMULA = "advantages::an_advantage_is_the_deviation_from_its_draw_in_standard_deviations"
GLOBAL = "advantages::a_global_spread_divides_every_deviation_by_one_number"
TWICE = "advantages::a_prompt_drawn_twice_makes_two_groups"
ORDER = "advantages::advantages_go_with_their_samples"
BETTER = "advantages::better_samples_have_larger_advantages"
EQUAL = "advantages::equal_rewards_give_no_advantage"
REFUSED = "advantages::rewards_that_cannot_be_compared_are_refused"
OPTIMALITY = "advantages::optimality_is_a_half_plus_half_the_advantage_clipped_on_both_sides"
STEP = "update::a_whole_step_trains_on_what_it_sampled_and_scored"
LEARNS = "update::a_few_steps_raise_the_reward_of_the_rollout"

#: The wrapper of the trainer whose parts are broken here.
REFERENCE = "loudfail.trainer.update:make"


def another_trainer(port: Port) -> str:
    """Why faults of the reference trainer cannot be injected: the port has another one."""
    return "" if port.trainer == REFERENCE else f"it breaks the reference trainer; this port is trained by {port.trainer or 'none'}"


Advantages = Callable[[torch.Tensor, Sequence[int], str], torch.Tensor]


def code(port: Port) -> ModuleType:
    """The module of the trainer's wrapper, found through the port, since nothing here imports it; it holds the modules that train."""
    return sys.modules[type(port.update()).__module__]


def _advantages(port: Port, change: Callable[[Advantages], Callable[..., torch.Tensor]]) -> AbstractContextManager[Any]:
    """Replace the trainer's group advantages, wherever it calls them."""
    return inject.replace(code(port).nft, "group_advantages", change)


@fault("update", catches=[FORMULA, BETTER, STEP], unless=another_trainer, cause="advantages negated")
def advantages_are_negated(port: Port) -> Iterator[None]:
    """Higher rewards have lower advantages."""
    with _advantages(port, lambda original: lambda *arguments: -original(*arguments)):
        yield


@fault("update", catches=[FORMULA, ORDER, STEP], source="StarsfieldAI/R1-V #67; grpo-flat #2", unless=another_trainer, cause="baseline of the batch")
def the_baseline_is_the_mean_of_the_batch(port: Port) -> Iterator[None]:
    """All samples of a step are one group, so that easy prompts are rewarded."""
    with _advantages(port, lambda original: lambda rewards, draws, spread: original(rewards, [0] * len(draws), spread)):
        yield


@fault("update", catches=[FORMULA, ORDER], source="StarsfieldAI/R1-V #67", unless=another_trainer, cause="groups by position")
def groups_are_cut_by_position(port: Port) -> Iterator[None]:
    """Groups are neighbours in the batch, whatever the draws say, as after a reshape to (prompts, K)."""
    with _advantages(port, lambda original: lambda rewards, draws, spread: original(rewards, _pairs(len(draws)), spread)):
        yield


def _pairs(count: int) -> list[int]:
    return [min(index // 2, count // 2 - 1) for index in range(count)]


@fault("update", catches=[FORMULA, ORDER], source="grpo-flat #2", unless=another_trainer, cause="advantages in another order")
def advantages_are_returned_by_group(port: Port) -> Iterator[None]:
    """Advantages come back sorted by draw and are read in the order of the batch."""

    def make(original: Advantages) -> Advantages:
        def group_advantages(rewards: torch.Tensor, draws: Sequence[int], spread: str) -> torch.Tensor:
            order = sorted(range(len(draws)), key=lambda index: (draws[index], index))
            return original(rewards, draws, spread)[order]

        return group_advantages

    with _advantages(port, make):
        yield


@fault("update", catches=[TWICE], source="yifan123/flow_grpo #106", unless=another_trainer, cause="groups by text")
def groups_are_keyed_by_text(port: Port) -> Iterator[None]:
    """Samples of equal prompts are one group, though the prompt was drawn twice."""

    def make(original: Any) -> Any:
        def advantages(self: Any, rewards: torch.Tensor, draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
            return original(self, rewards, [sorted(set(prompts)).index(prompt) for prompt in prompts], prompts, spread)

        return advantages

    with inject.replace(type(port.update()), "advantages", make):
        yield


@fault("update", catches=[FORMULA, EQUAL], unless=another_trainer, cause="spread left out")
def the_spread_is_left_out(port: Port) -> Iterator[None]:
    """Advantages are deviations, not divided by anything."""
    with _advantages(port, lambda original: lambda rewards, draws, spread: _centred(rewards, draws)):
        yield


@fault("update", catches=[FORMULA, EQUAL, TWICE], unless=another_trainer, cause="spread unbiased")
def the_spread_is_the_samples_unbiased_one(port: Port) -> Iterator[None]:
    """Divided by the standard deviation with K − 1, which for small groups is another step size in every group."""

    def group_advantages(rewards: torch.Tensor, draws: Sequence[int], spread: str) -> torch.Tensor:
        centred = _centred(rewards, draws)
        result = torch.empty_like(centred)
        for draw in set(draws):
            member = torch.tensor([other == draw for other in draws])
            result[member] = centred[member] / (centred[member].std() + 1e-4)
        return result

    with _advantages(port, lambda original: group_advantages):
        yield


@fault("update", catches=[FORMULA], unless=another_trainer, cause="spread of the batch")
def the_spread_of_the_batch_is_used_for_every_group(port: Port) -> Iterator[None]:
    """The recipe asks for the spread of the group and gets that of the batch."""
    with _advantages(port, lambda original: lambda rewards, draws, spread: original(rewards, draws, "global")):
        yield


@fault("update", catches=[GLOBAL], unless=another_trainer, cause="spread of the group")
def the_spread_of_the_group_is_used_for_the_batch(port: Port) -> Iterator[None]:
    """The recipe asks for the spread of the batch and gets that of each group."""
    with _advantages(port, lambda original: lambda rewards, draws, spread: original(rewards, draws, "group")):
        yield


@fault("update", catches=[REFUSED], source="huggingface/trl #6804, #6821", unless=another_trainer)
def a_reward_that_is_not_a_number_counts_as_zero(port: Port) -> Iterator[None]:
    """What a scorer could not score is the reward 0."""
    with _advantages(port, lambda original: lambda rewards, draws, spread: original(torch.nan_to_num(rewards), draws, spread)):
        yield


@fault("update", catches=[REFUSED], source="verl-omni 6f8f830c (#358)", unless=another_trainer)
def a_draw_of_one_sample_gets_no_advantage(port: Port) -> Iterator[None]:
    """A group whose other samples were lost counts as average."""

    def make(original: Advantages) -> Advantages:
        def group_advantages(rewards: torch.Tensor, draws: Sequence[int], spread: str) -> torch.Tensor:
            alone = torch.tensor([draws.count(draw) == 1 for draw in draws])
            if len(alone) != len(rewards) or not bool(alone.any()):
                return original(rewards, draws, spread)
            result = torch.zeros_like(rewards)
            result[~alone] = original(rewards[~alone], [draw for draw in draws if draws.count(draw) > 1], spread)
            return result

        return group_advantages

    with _advantages(port, make):
        yield


@fault("update", catches=[EQUAL], source="huggingface/trl #6804", unless=another_trainer)
def equal_rewards_are_divided_by_their_spread(port: Port) -> Iterator[None]:
    """Nothing is added to the standard deviation, so that a group of equal rewards is 0 / 0, or the last bits of their mean."""
    with inject.assign(code(port).nft, "EPSILON", 0.0):
        yield


def _centred(rewards: torch.Tensor, draws: Sequence[int]) -> torch.Tensor:
    values = rewards.double()
    means = {draw: values[[index for index, other in enumerate(draws) if other == draw]].mean() for draw in set(draws)}
    return values - torch.stack([means[draw] for draw in draws])


def _optimality(port: Port, change: Callable[[torch.Tensor, float], torch.Tensor]) -> AbstractContextManager[Any]:
    return inject.replace(code(port).nft, "optimality", lambda original: change)


@fault("update", catches=[OPTIMALITY, STEP], unless=another_trainer, cause="optimality reversed")
def the_probability_is_of_being_bad(port: Port) -> Iterator[None]:
    """1 − r in the place of r."""
    with _optimality(port, lambda a, clip: 0.5 - 0.5 * (a / clip).clamp(-1, 1)):
        yield


@fault("update", catches=[OPTIMALITY, STEP], unless=another_trainer, cause="optimality is the advantage")
def the_probability_is_the_advantage_itself(port: Port) -> Iterator[None]:
    """r is the advantage cut to [0, 1], so that everything below average counts as equally bad and the average as worst."""
    with _optimality(port, lambda a, clip: a.clamp(0, 1)):
        yield


@fault("update", catches=[OPTIMALITY, STEP], source="Flow-Factory commit 49e589a", unless=another_trainer, cause="advantage not clipped")
def the_advantage_is_not_clipped(port: Port) -> Iterator[None]:
    """Outliers have a probability above 1 or below 0."""
    with _optimality(port, lambda a, clip: 0.5 + 0.5 * a / clip):
        yield


@fault("update", catches=[OPTIMALITY], source="Flow-Factory commit 49e589a", unless=another_trainer, cause="advantage clipped above only")
def the_advantage_is_clipped_above_only(port: Port) -> Iterator[None]:
    """Bad outliers have a negative probability."""
    with _optimality(port, lambda a, clip: 0.5 + 0.5 * (a / clip).clamp(max=1)):
        yield


@fault("update", catches=[OPTIMALITY], unless=another_trainer, cause="clipped before it is divided")
def the_advantage_is_clipped_before_it_is_divided(port: Port) -> Iterator[None]:
    """Clipped to ±1 and then divided by Z: r stays in the middle, or never reaches Z."""
    with _optimality(port, lambda a, clip: 0.5 + 0.5 * a.clamp(-1, 1) / clip):
        yield


@fault("update", catches=[OPTIMALITY, STEP], source="NVlabs/DiffusionNFT #18", unless=another_trainer, cause="clip ignored")
def the_clip_is_always_five(port: Port) -> Iterator[None]:
    """The recipe's clip is ignored: with advantages around ±1 every r lies between 0.4 and 0.6."""
    with _optimality(port, lambda a, clip: 0.5 + 0.5 * (a / 5).clamp(-1, 1)):
        yield

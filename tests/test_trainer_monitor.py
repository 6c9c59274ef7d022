"""Single monitors, where a whole run would not reach the case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from toyactor import TEXT, ToyActor

from loudfail.harness.case import Case
from loudfail.trainer import monitor, nft
from loudfail.trainer.monitor import MonitorFired, Reading, Watch


class Speaking(ToyActor):
    """With a prompt seam."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_prompt(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.randn(len(ids), TEXT, generator=torch.Generator().manual_seed(sum(ids)))

    def rollout_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], torch.Tensor]:
        return (*ids[:2], *ids[3:]), self.encode_prompt(ids)


def test_what_is_not_a_number_fires() -> None:
    assert Reading("a", math.nan, 1.0).fires
    assert Reading("a", math.nan, 1.0, at_least=True).fires
    assert not Reading("a", math.nan, 1.0, vacuous="nothing to see").fires


def test_the_first_of_many_readings_does_not_hide_the_others() -> None:
    with pytest.raises(MonitorFired) as stop:
        Watch().judge(Reading("one", 2.0, 1.0), Reading("two", 0.5, 1.0), Reading("three", 0.5, 1.0, at_least=True))
    assert [reading.monitor for reading in stop.value.readings] == ["one", "three"]


def test_prompts_are_compared_by_id_and_embedding_at_both_encoders() -> None:
    port, prompts = Speaking(), ("rain", "wind")
    conditions = port.conditions(Case(prompts=prompts))
    assert monitor.prompt_ids(port, prompts, conditions, [0, 1]).got == 0
    other = [conditions[0], replace(conditions[1], prompt_ids=conditions[1].prompt_ids[:-1])]
    assert "sample 1: other ids" in monitor.prompt_ids(port, prompts, other, [0, 1]).where
    other = [replace(conditions[0], embeds=conditions[0].embeds * 1.001), conditions[1]]
    assert "sample 0: other embedding" in monitor.prompt_ids(port, prompts, other, [0, 1]).where
    assert "rollout's encoder" in monitor.prompt_ids(port, prompts, conditions, [0], through_rollout=True).where
    assert monitor.prompt_ids(ToyActor(), prompts, conditions, [0, 1]).vacuous


def test_the_old_policy_is_held_to_its_average() -> None:
    draw = torch.Generator().manual_seed(3)
    before, current = ({"w": torch.randn(50, generator=draw)} for _ in range(2))
    after = nft.refreshed(before, current, 0.9)
    assert not monitor.old_policy_law(before, current, after, 0.9).fires
    assert monitor.old_policy_law(before, current, before, 0.9).fires  # never refreshed
    assert monitor.old_policy_law(before, current, current, 0.9).fires  # copied instead
    assert monitor.old_policy_law(before, current, nft.refreshed(before, current, 0.1), 0.9).fires  # the other way round
    assert monitor.old_policy_law(before, current, after, None).fires  # refreshed when none was due
    assert not monitor.old_policy_law(before, current, before, None).fires


def test_equal_rewards_say_nothing_about_order() -> None:
    r = torch.full((4,), 0.5, dtype=torch.float64)
    assert monitor.advantages_follow_rewards(r, torch.ones(4), [0, 0, 1, 1]).vacuous
    assert monitor.advantages_follow_rewards(r, torch.arange(4.0), [0, 0, 1, 1]).fires  # rewards differ, r does not
    assert not monitor.advantages_follow_rewards(torch.tensor([0.1, 0.9, 0.0, 0.3]), torch.arange(4.0), [0, 0, 1, 1]).fires


def test_the_noise_of_training_is_judged_by_its_own_spread() -> None:
    draw = torch.Generator().manual_seed(8)
    x0, noise, sigma = torch.randn(8, 40, generator=draw), torch.randn(8, 40, generator=draw), torch.full((8,), 0.85)
    latents = 0.15 * x0 + 0.85 * noise
    assert not monitor.training_noise(monitor.Call({"video": latents}, {"video": sigma}), {"video": x0}).fires
    assert monitor.training_noise(monitor.Call({"video": latents}, {"video": 1 - sigma}), {"video": x0}).fires
    assert monitor.training_noise(monitor.Call({"video": latents}, {"video": torch.full((8,), 0.5)}), {"video": x0}).fires

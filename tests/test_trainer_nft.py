"""The algorithm against its formulas, in float64."""

from __future__ import annotations

import pytest
import torch

from loudfail.trainer import nft

BATCH, SHAPE = 5, (3, 4)


def draw(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(velocity: torch.Tensor, *arguments: object, **keywords: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each sample and the gradient of their sum in the velocity."""
    v = velocity.clone().requires_grad_()
    loss = nft.nft_loss(v, *arguments, **keywords)  # type: ignore[arg-type]
    (result,) = torch.autograd.grad(loss.sum(), v)
    return loss.detach(), result


OLD, TARGET, CURRENT = draw(1), draw(2), draw(3)
R = torch.tensor([1.0, 0.5, 0.0, 0.83, 0.21], dtype=torch.float64)
SIGMA = torch.tensor([0.9, 0.3, 0.55, 0.12, 1.0], dtype=torch.float64)
COUNT = TARGET[0].numel()


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0])
def test_on_policy_the_gradient_is_that_of_the_formula(beta: float) -> None:
    loss, got = gradient(OLD, OLD, TARGET, R, beta)
    want = 2 * beta * (2 * R - 1).view(-1, 1, 1) * (OLD - TARGET) / COUNT
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(loss, (OLD - TARGET).square().mean((1, 2)), rtol=1e-13, atol=0)  # the same number, whatever r


def test_on_policy_r_1_is_flow_matching_r_0_its_opposite_and_a_half_nothing() -> None:
    v = OLD.clone().requires_grad_()
    (matching,) = torch.autograd.grad((v - TARGET).square().flatten(1).mean(1).sum(), v)
    for r, factor in ((1.0, 1.0), (0.0, -1.0), (0.5, 0.0)):
        _, got = gradient(OLD, OLD, TARGET, torch.full((BATCH,), r, dtype=torch.float64), 1.0)
        torch.testing.assert_close(got, factor * matching, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", [0.2, 1.0])
@pytest.mark.parametrize("weighting", ["none", "adaptive"])
def test_off_policy_value_and_gradient_are_those_of_the_formula(beta: float, weighting: nft.Weighting) -> None:
    """The oracle is written out sample by sample, in x0 for adaptive weighting, as it is published."""
    loss, got = gradient(CURRENT, OLD, TARGET, R, beta, SIGMA, weighting)
    for i in range(BATCH):
        r, s, value, slope = float(R[i]), float(SIGMA[i]), 0.0, torch.zeros(SHAPE, dtype=torch.float64)
        for share, sign in ((r, 1.0), (1 - r, -1.0)):
            policy = OLD[i] + sign * beta * (CURRENT[i] - OLD[i])
            error = policy - TARGET[i]
            factor = 1.0 if weighting == "none" else s**2 / (s * float(error.abs().mean()))
            value += share * factor * float(error.pow(2).sum()) / COUNT
            slope += share * factor * 2 * error * sign * beta / COUNT
        assert float(loss[i]) == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(got[i], slope, rtol=1e-11, atol=1e-15)


def test_no_gradient_goes_through_old_target_or_the_adaptive_weight() -> None:
    old, target = OLD.clone().requires_grad_(), TARGET.clone().requires_grad_()
    v = CURRENT.clone().requires_grad_()
    nft.nft_loss(v, old, target, R, 0.5, SIGMA, "adaptive").sum().backward()
    assert old.grad is None
    assert target.grad is None
    assert v.grad is not None


def test_beta_and_clip_cancel_on_policy_and_only_there() -> None:
    advantages = torch.tensor([0.4, -1.0, 0.9, 0.0, -0.3], dtype=torch.float64)

    def slope(velocity: torch.Tensor, beta: float, clip: float) -> torch.Tensor:
        v = velocity.clone().requires_grad_()
        settings = nft.Settings(beta, clip, "none", 0.0, {"video": 1.0})
        total, _ = nft.objective({"video": v}, {"video": OLD}, {"video": TARGET}, {"video": SIGMA}, nft.optimality(advantages, clip), settings)
        return torch.autograd.grad(total.sum(), v)[0]

    torch.testing.assert_close(slope(OLD, 0.1, 2.0), slope(OLD, 1.5, 7.0), rtol=1e-11, atol=1e-14)
    assert not torch.allclose(slope(CURRENT, 0.1, 2.0), slope(CURRENT, 1.5, 2.0), rtol=1e-2)


def test_each_modality_counts_as_configured_and_is_reported_apart() -> None:
    velocity, old, target = ({"video": draw(i), "audio": 2 * draw(i + 10)} for i in (4, 5, 6))
    reference, sigmas = {"video": draw(7), "audio": draw(8)}, {"video": SIGMA, "audio": SIGMA.flip(0)}
    settings = nft.Settings(0.5, 5.0, "adaptive", 0.01, {"video": 0.25, "audio": 2.0})
    total, parts = nft.objective(velocity, old, target, sigmas, R, settings, reference)
    want = torch.zeros(BATCH, dtype=torch.float64)
    for m, weight in settings.modalities.items():
        policy = nft.nft_loss(velocity[m], old[m], target[m], R, 0.5, sigmas[m], "adaptive")
        distance = (velocity[m] - reference[m]).square().mean((1, 2))
        want += weight * (10.0 * policy + 0.01 * distance)
        assert parts[f"policy/{m}"] == pytest.approx(float(policy.mean()))
        assert parts[f"reference/{m}"] == pytest.approx(float(distance.mean()))
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)


def test_what_is_missing_is_named() -> None:
    settings = nft.Settings(0.5, 5.0, "none", 0.01, {"video": 1.0})
    one = {"video": CURRENT}
    with pytest.raises(ValueError, match="no reference"):
        nft.objective(one, one, one, {"video": SIGMA}, R, settings)
    with pytest.raises(ValueError, match="audio"):
        nft.objective({"audio": CURRENT}, one, one, {"video": SIGMA}, R, settings)
    with pytest.raises(ValueError, match="needs sigma"):
        nft.nft_loss(CURRENT, OLD, TARGET, R, 0.5, weighting="adaptive")


def test_advantages_are_centred_and_scaled_in_each_group() -> None:
    rewards = torch.tensor([0.1, 0.9, 0.5, 10.0, 10.2, 9.9])
    groups = [4, 4, 4, 7, 7, 7]
    got = nft.group_advantages(rewards, groups)
    for g in (4, 7):
        values = rewards.double()[torch.tensor(groups) == g]
        want = (values - values.mean()) / (values.std(correction=0) + 1e-4)
        torch.testing.assert_close(got[torch.tensor(groups) == g], want)
    shared = nft.group_advantages(rewards, groups, "global")
    assert float(shared[:3].mean().abs()) < 1e-12
    assert float(shared.square().mean().sqrt()) == pytest.approx(1.0, abs=1e-3)
    assert float(shared[:3].std() / shared[3:].std()) == pytest.approx(float(rewards[:3].std() / rewards[3:].std()), rel=1e-4)


def test_a_prompt_that_is_drawn_twice_makes_two_groups() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0, 6.0])
    together, apart = nft.group_advantages(rewards, [0, 0, 0, 0]), nft.group_advantages(rewards, [0, 0, 1, 1])
    assert together[1] < 0 < apart[1]


def test_equal_rewards_teach_nothing() -> None:
    advantages = nft.group_advantages(torch.full((4,), 0.3), [0, 0, 1, 1])
    assert advantages.tolist() == [0.0] * 4
    assert nft.optimality(advantages, 5.0).tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [([0.1, 0.2, 0.3], [0, 0, 1], "group 1 has one sample"), ([0.1, float("nan")], [0, 0], "not finite"), ([0.1, 0.2], [0], "1 group numbers")],
)
def test_bad_rewards_are_refused(rewards: list[float], groups: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nft.group_advantages(torch.tensor(rewards), groups)


def test_optimality_is_a_clipped_line() -> None:
    advantages = torch.tensor([-9.0, -2.0, 0.0, 1.0, 9.0], dtype=torch.float64)
    assert nft.optimality(advantages, 2.0).tolist() == [0.0, 0.0, 0.5, 0.75, 1.0]
    with pytest.raises(ValueError, match="above 0"):
        nft.optimality(advantages, 0.0)


def test_the_old_policy_follows_its_schedule() -> None:
    assert [nft.old_decay("copy", step) for step in (0, 500)] == [0.0, 0.0]
    assert [nft.old_decay("linear_to_0_5", step) for step in (0, 100, 500, 9000)] == pytest.approx([0.0, 0.1, 0.5, 0.5])
    assert [nft.old_decay("delayed_linear_to_0_999", step) for step in (0, 75, 95, 9000)] == pytest.approx([0.0, 0.0, 0.15, 0.999])
    old, new = {"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([1.0, 8.0])}
    assert nft.refreshed(old, new, 0.75)["w"].tolist() == [0.25, 5.0]
    copied = nft.refreshed(old, new, 0.0)
    assert torch.equal(copied["w"], new["w"])
    assert copied["w"] is not new["w"]
    with pytest.raises(ValueError, match="linear_to_0_5"):
        nft.old_decay("linear", 1)  # type: ignore[arg-type]

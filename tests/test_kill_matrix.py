"""The suite on MiniMax H3: silent on the clean port, loud on every fault, and no invariant that nothing can break."""

from __future__ import annotations

from typing import Any

import pytest

from loudfail.harness import killmatrix, registry, runner

DEGREES = (1, 2, 4)
INVARIANTS = registry.invariants()
FAULTS = registry.faults()
#: How far above its bound a caught fault must lie. Two of the rewards' checks bound a share (of frames, of pixels) that is near 1 when all is right.
WEAKEST = {"rewards": 3.0}


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda i: i.id)
@pytest.mark.parametrize("seed", [11, 12])
def test_a_clean_port_raises_no_alarm(h3: Any, invariant: registry.Invariant, seed: int) -> None:
    for degree in DEGREES if invariant.per_degree else (None,):
        result = runner.run(invariant, h3, degree, seed=seed)
        assert result.status in ("holds", "uncovered", "unavailable"), f"{result.name}: {result.violation or result.message}\n{result.traceback}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_a_fault_is_caught_by_name(h3: Any, fault: registry.Fault) -> None:
    assert killmatrix.applicable(fault, h3), f"{fault.id} cannot be injected into H3; nothing here proves that it is caught"
    kill = killmatrix.kill(fault, h3, INVARIANTS, DEGREES)
    assert kill.outcome == "caught", f"{kill.outcome}: {kill.message}"
    least = WEAKEST.get(fault.id.split("::")[0], 20.0)
    assert kill.margin is None or kill.margin >= least, f"caught by {kill.margin:.3g} times its bound only"


def test_every_invariant_can_be_broken() -> None:
    named = {name for fault in FAULTS for name in fault.catches}
    assert sorted(i.id for i in INVARIANTS if i.id not in named) == []


def test_the_catalogue_is_as_large_as_promised() -> None:
    assert len(INVARIANTS) >= 40
    assert len(FAULTS) >= 36
    assert {i.link for i in INVARIANTS} >= set(registry.CHAIN)


def test_a_fault_leaves_the_port_as_it_was(h3: Any) -> None:
    """After all faults of this file have come and gone, the clean port still holds."""
    for invariant in INVARIANTS:
        if invariant.link in ("sync", "rollout", "adapters", "conventions"):
            for degree in DEGREES if invariant.per_degree else (None,):
                result = runner.run(invariant, h3, degree)
                assert result.status in ("holds", "uncovered", "unavailable"), f"{result.name}: {result.violation or result.message}"

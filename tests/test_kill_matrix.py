"""The suite on MiniMax H3 and LTX-2: silent on clean ports, loud on every fault, and no invariant that nothing can break."""

from __future__ import annotations

from typing import Any

import pytest

from loudfail.harness import killmatrix, registry, runner

DEGREES = (1, 2, 4)
INVARIANTS = registry.invariants()
FAULTS = registry.faults()
#: How far above its bound a caught fault must lie. Two of the rewards' checks bound a share (of frames, of pixels) that is near 1 when all is right.
WEAKEST = {"rewards": 3.0}
#: Links that check the trainer's own code, which is the same whatever the model.
TRAINERS = ("advantages", "objective", "update", "resume")


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda i: i.id)
@pytest.mark.parametrize("seed", [11, 12])
def test_a_clean_port_raises_no_alarm(h3: Any, invariant: registry.Invariant, seed: int) -> None:
    for degree in DEGREES if invariant.per_degree else (None,):
        result = runner.run(invariant, h3, degree, seed=seed)
        assert result.status in ("holds", "uncovered", "unavailable"), f"{result.name}: {result.violation or result.message}\n{result.traceback}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_a_fault_is_caught_by_name(h3: Any, fault: registry.Fault) -> None:
    if why := killmatrix.obstacle(fault, h3):
        pytest.skip(f"no fault of H3: {why}")  # proven elsewhere: a test below fails for a fault that applies to neither port
    require_caught(fault, h3, DEGREES)


@pytest.mark.parametrize("invariant", [i for i in INVARIANTS if i.link not in TRAINERS], ids=lambda i: i.id)
def test_clean_ltx2_raises_no_alarm(ltx2: Any, invariant: registry.Invariant) -> None:
    for degree in (1, 2) if invariant.per_degree else (None,):
        result = runner.run(invariant, ltx2, degree, seed=11)
        assert result.status in ("holds", "uncovered", "unavailable"), f"{result.name}: {result.violation or result.message}\n{result.traceback}"


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.id.split("::")[0] not in TRAINERS], ids=lambda f: f.id)
def test_a_fault_of_ltx2_is_caught_by_name(ltx2: Any, fault: registry.Fault) -> None:
    if why := killmatrix.obstacle(fault, ltx2):
        pytest.skip(f"no fault of LTX-2: {why}")  # as above
    require_caught(fault, ltx2, (1, 2))


def require_caught(fault: registry.Fault, port: Any, degrees: tuple[int, ...]) -> None:
    kill = killmatrix.kill(fault, port, INVARIANTS, degrees)
    assert kill.outcome == "caught", f"{kill.outcome}: {kill.message}"
    least = WEAKEST.get(fault.id.split("::")[0], 20.0)
    assert kill.margin is None or kill.margin >= least, f"caught by {kill.margin:.3g} times its bound only"
    assert not kill.misdiagnosed, f"{kill.cause} is named {kill.named or 'nothing known'}: {kill.diagnosis}"


def test_every_fault_applies_to_one_of_our_ports_and_says_why_not_to_the_other(h3: Any, ltx2: Any) -> None:
    for fault in FAULTS:
        obstacles = [killmatrix.obstacle(fault, port) for port in (h3, ltx2)]
        assert not all(obstacles), f"{fault.id}: nothing here proves that it is caught: {obstacles}"


def test_every_invariant_can_be_broken_on_each_port(h3: Any, ltx2: Any) -> None:
    for port in (h3, ltx2):
        named = {name for fault in FAULTS if killmatrix.applicable(fault, port) for name in fault.catches}
        left = [invariant for invariant in INVARIANTS if invariant.id not in named]
        statuses = {invariant.id: runner.run(invariant, port, 1 if invariant.per_degree else None).status for invariant in left}
        assert {name for name, status in statuses.items() if status != "uncovered"} == set(), port.name


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

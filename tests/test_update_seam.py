"""The update seam: a stranger's trainer and the reference trainer under the same invariants, on a port that is no H3; mistakes planted in both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plaintrainer import PlainPort
from toyports import Toy

from loudfail.harness import killmatrix, portcheck, registry, runner
from loudfail.harness.port import Plan, Update, find_trainer, offers
from loudfail.harness.result import Result
from loudfail.harness.violation import Unavailable, Uncovered
from loudfail.invariants.objective import brightness

LINKS = ("advantages", "objective", "update", "resume")
INVARIANTS = [one for one in registry.invariants() if one.link in LINKS and "update" in one.seams]
#: Faults that reach into the reference trainer and not into a model of a certain kind.
OF_THE_TRAINER = [one for one in registry.faults() if one.id.split("::")[0] in LINKS and one.id.split("::")[1] not in (
    "given_rows_are_in_the_loss", "given_frames_are_left_out_in_training", "the_optimizer_also_holds_the_old_policy",
    "the_optimizer_also_holds_the_base", "a_base_weight_decays", "evaluation_leaves_old_trainable", "evaluation_freezes_the_adapter",
    "evaluation_ends_in_another_mode",
        "moments_belong_to_other_tensors",
) and "processes" not in one.id and "memory" not in one.id]  # fmt: skip


class ReferencePort(PlainPort):
    """The toy actor, trained by the reference trainer."""

    name = "toy-reference"
    trainer = "loudfail.trainer.update:make"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[PlainPort, ReferencePort], ids=lambda kind: kind.name)
def port(request: pytest.FixtureRequest) -> Any:
    return request.param()


def run(port: Any, name: str) -> Result:
    """The result of one invariant, given as ``link::start of its name``."""
    return runner.run(next(one for one in INVARIANTS if one.id.startswith(name)), port, shrink=False)


def reason(result: Result) -> Any:
    return result.violation or result.traceback or result.message


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda one: one.id)
def test_a_right_trainer_holds(port: Any, invariant: registry.Invariant) -> None:
    result = runner.run(invariant, port, shrink=False)
    lacking = {"given_frames_have"} | ({"adaptive_weighting"} if isinstance(port, PlainPort) and port.name == "toy-plain" else set())
    expected = "uncovered" if any(part in invariant.id for part in lacking) else "holds"
    assert result.status == expected, reason(result)


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        ("OneBaseline", "advantages::an_advantage_is"),
        ("OneBaseline", "update::a_whole_step"),
        ("OneLevel", "objective::training_levels"),
        ("ForgetsItsGenerator", "resume::a_resumed_run"),
        ("ForgetsItsGenerator", "resume::a_fresh_process"),
        ("AddsUp", "update::two_processes"),
        ("MovesTheWrongWay", "update::the_old_policy_follows"),
        ("SamplesWhatItTrains", "update::the_rollout_samples"),
    ],
)
def test_a_mistake_in_a_strangers_trainer_is_named(trainer: str, name: str) -> None:
    port: Any = PlainPort()
    port.trainer = f"plaintrainer:{trainer}"
    result = run(port, name)
    assert result.status == "violated", reason(result)


@pytest.mark.parametrize("fault", OF_THE_TRAINER, ids=lambda one: one.id)
def test_a_fault_of_the_reference_trainer_is_caught_on_another_port(fault: registry.Fault) -> None:
    kill = killmatrix.kill(fault, ReferencePort(), [one for one in INVARIANTS if "fresh_process" not in one.id], ())
    assert kill.outcome == "caught", f"{kill.outcome}: {kill.message}"


def test_what_a_trainer_does_not_give_is_uncovered() -> None:
    port: Any = PlainPort()
    port.trainer = "plaintrainer:KnowsNoOld"
    portcheck.check_port(port)
    assert run(port, "advantages::an_advantage_is").status == "holds"
    for name in ("advantages::optimality", "objective::off_policy", "update::two_processes", "resume::loading"):
        result = run(port, name)
        assert result.status == "uncovered" and "KnowsNoOld does not offer" in result.message, reason(result)


def test_a_port_without_a_trainer_is_uncovered() -> None:
    assert offers(PlainPort, "update") and not offers(Toy, "update")
    assert run(Toy(), "advantages::an_advantage_is").status == "uncovered"


def test_a_trainer_that_is_not_installed_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no trainer loudfail_nowhere:make"):
        find_trainer("loudfail_nowhere:make")


def test_the_first_check_names_a_trainer_that_is_none() -> None:
    class Wrong(PlainPort):
        def update(self) -> Any:
            return object()

    with pytest.raises(portcheck.PortProblem, match=r"update\(\) gave a object; want a loudfail\.harness\.port\.Update"):
        portcheck.check_port(Wrong())


def test_a_plan_that_a_trainer_cannot_follow_is_uncovered() -> None:
    port = ReferencePort()
    plan = Plan(("rain",), brightness, {"video": 1.0}, {axis: min(sizes) for axis, sizes in port.extents.items()})
    with pytest.raises(Uncovered, match=r"the plan weighs \['video'\], the port has \['audio', 'video'\]"):
        port.update().begin(plan)
    with pytest.raises(Uncovered, match="does not offer begin"):
        Update().begin(plan)


def test_the_certificate_names_the_trainer() -> None:
    assert PlainPort().describe()["trainer"] == "plaintrainer:PlainTrainer"

"""Ports that no one here has in mind: an odd model of three modalities, a trainer's own stack that is wrapped without being moved, and a new port
that is made wrong in the ways in which new ports are wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oddport import OddPort
from packedport import PackedPort
from toyactor import ToyActor
from wrapped_stack import Existing

from loudfail.harness import faultrun, killmatrix, portcheck, registry, runner
from loudfail.harness.case import smallest
from loudfail.harness.options import Options

INVARIANTS = registry.invariants()
#: One of each kind that has to do with there being several modalities, with their levels, signs and places, and with who scores them.
ODD_FAULTS = (
    "schedule::both_modalities_walk_the_videos_schedule",
    "conventions::sigma_is_passed_as_the_data_fraction",
    "conventions::the_audios_velocity_is_not_negated",
    "conventions::audio_rows_are_told_the_videos_level",
    "packing::rows_are_rolled_by_one_when_packed",
    "adapters::the_old_policy_is_the_training_one",
    "rewards::the_total_is_the_videos_only",
    "objective::one_modality_is_left_out",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def odd() -> OddPort:
    return OddPort()


def require_clean(port: Any, degrees: tuple[int, ...] = (1, 2)) -> dict[str, int]:
    """Every invariant holds or is not covered; how many of each."""
    portcheck.check_port(port)
    counts: dict[str, int] = {}
    for invariant in INVARIANTS:
        for degree in degrees if invariant.per_degree else (None,):
            result = runner.run(invariant, port, degree, shrink=False)
            assert result.status in ("holds", "uncovered", "unavailable"), f"{result.name}: {result.violation or result.message}\n{result.traceback}"
            counts[result.status] = counts.get(result.status, 0) + 1
    return counts


def test_three_interleaved_modalities_hold_every_invariant(odd: OddPort) -> None:
    counts = require_clean(odd)
    assert counts["holds"] >= 120


@pytest.mark.parametrize("name", ODD_FAULTS)
def test_a_fault_is_caught_on_three_modalities(odd: OddPort, name: str) -> None:
    fault = next(one for one in registry.faults() if one.id == name)
    kill = killmatrix.kill(fault, odd, INVARIANTS, (1, 2))
    assert kill.outcome == "caught", f"{kill.outcome}: {kill.message}"


def test_a_packed_sequence_with_a_worker_of_its_own_holds_every_invariant() -> None:
    counts = require_clean(PackedPort(), degrees=(1, 2, 4))
    assert counts["holds"] >= 140


@pytest.mark.parametrize(
    "name",
    [
        "packing::packing_rounds_values",
        "prompts::the_trainers_embedding_is_reversed",
        "adapters::a_base_weight_trains_too",
        "conditions::given_frames_are_held_at_a_level_of_their_own",
        "conditions::given_frames_belong_to_the_next_sample",
        "sync::the_scale_is_merged_into_the_trainers_tensors",
        "update::the_optimizer_also_holds_the_base",
        "update::the_optimizer_also_holds_the_old_policy",
        "update::a_base_weight_decays",
        "update::evaluation_ends_in_another_mode",
    ],
)
def test_a_fault_is_caught_whatever_the_factors_of_an_adapter_are_called(name: str) -> None:
    port = PackedPort()
    assert not any("lora" in n for n, _ in port.actor.named_parameters())
    fault = next(one for one in registry.faults() if one.id == name)
    kill = killmatrix.kill(fault, port, INVARIANTS, (1, 2))
    assert kill.outcome == "caught" and not kill.misdiagnosed, f"{kill.outcome}: {kill.message} {kill.named}"


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        (PackedPort, "adapters::one_target_gets_no_adapter", "it configures no targets"),
        (OddPort, "adapters::one_target_gets_no_adapter", "whatever targets are configured"),
        (OddPort, "adapters::a_base_weight_trains_too", "names adapters only"),
        (ToyActor, "adapters::loading_swaps_key_and_value", "no two of its projections have one shape"),
        (ToyActor, "adapters::a_base_weight_trains_too", "no module that trains"),
    ],
)
def test_a_fault_that_a_port_cannot_have_says_why(kind: Any, name: str, why: str) -> None:
    port = kind()
    fault = next(one for one in registry.faults() if one.id == name)
    assert why in killmatrix.obstacle(fault, port)
    assert list(port.trainable()) == list(kind().trainable()) and not any(p.requires_grad for p in port.base_state().values())


def test_in_bfloat16_one_check_must_see_a_fault_and_in_float32_all(odd: OddPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding may hide a fault from a check, which is said; what it hides from all of them is not injected."""
    deaf = "packing::unpacking_restores_every_value"
    fault = next(one for one in registry.faults() if one.id == "rewards::the_total_is_the_videos_only")
    more = replace(fault, catches=(*fault.catches, deaf))
    assert killmatrix.kill(more, odd, INVARIANTS, (1,)).outcome == "escaped" and not killmatrix.obstacle(replace(fault, exact=True), odd)
    monkeypatch.setattr(odd, "dtype", "bfloat16")
    kill = killmatrix.kill(more, odd, INVARIANTS, (1,))
    assert kill.outcome == "caught" and kill.margin is not None and kill.message == f"{deaf} holds"
    assert killmatrix.kill(replace(fault, catches=(deaf,)), odd, INVARIANTS, (1,)).outcome != "caught"
    assert "bfloat16 rounds away" in killmatrix.obstacle(replace(fault, exact=True), odd)


def test_a_fault_that_nothing_here_could_see_is_not_applicable(odd: OddPort, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its scorers have no model whose input is known: the tone that would tell arrives nowhere, on the clean port either."""
    exchanged, blind = "rewards::channels_and_samples_are_exchanged", "rewards::the_reward_is_blind_to_the_prompt"
    options = Options("oddport:OddPort", degrees=(1,), out=tmp_path)
    assert faultrun.run(options, [exchanged]) == 5 and "no audio model among the scorers" in capsys.readouterr().out
    assert faultrun.run(options, [exchanged, blind]) == 0
    record = json.loads((tmp_path / "faults.json").read_text(encoding="utf-8"))
    assert record["counts"]["caught"] == 1 and record["not_applicable"] == 1 and "is unavailable" in record["obstacles"][exchanged]
    ids = {result["id"] for result in record["matrix"][0]["results"]}
    assert ids and "rewards::different_prompts_arrive_as_different_ids" not in ids
    fault = next(one for one in registry.faults() if one.id == blind)
    assert killmatrix.kill(fault, odd, INVARIANTS, (1,)).outcome == "escaped", "where it is not known to be idle, what does not run has not seen it"


class Titled(OddPort):
    """Its tables have the text in front, which is told no level."""

    def observe(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        velocity, tables = super().observe(latents, sigmas, conditions)
        for table, condition in zip(tables, conditions, strict=True):
            count = len(condition.embeds)
            table.modality = ("text",) * count + table.modality
            table.given = torch.cat([torch.zeros(count, dtype=torch.bool), table.given])
            table.sigma = torch.cat([torch.full((count,), math.nan), table.sigma])
            table.position = torch.cat([table.position.new_zeros(count, table.position.shape[1]), table.position])
        return velocity, tables


class Late(Titled):
    """In a batch the last row of the second sample is told none either."""

    def observe(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        velocity, tables = super().observe(latents, sigmas, conditions)
        for table in tables[1:]:
            table.sigma[-1] = math.nan
        return velocity, tables


class Sliced(PackedPort):
    """Hands on slices of the output, of which the velocity is not made."""

    def observe(self, *call: Any) -> Any:
        velocity, tables = super().observe(*call)
        for table in tables:
            table.output = {m: rows[:] for m, rows in table.output.items()}
        return velocity, tables


class Batched(PackedPort):
    """Hands on the output of the whole batch and not which sample is which."""

    def observe(self, *call: Any) -> Any:
        velocity, tables = super().observe(*call)
        whole = {m: torch.stack([table.output[m] for table in tables]) for m in self.modalities}
        for output in whole.values():
            if output.requires_grad:
                output.retain_grad()
        for table in tables:
            table.output = whole
        return {m: v.detach() + whole[m][:, ~tables[0].given_of(m)].mean() for m, v in velocity.items()}, tables


@pytest.mark.parametrize(("port", "want"), [(Sliced, "not on a slice"), (Batched, 'RowTable.output["sample"]')])
def test_an_output_that_no_gradient_can_be_read_off_says_what_is_wanted(port: type[PackedPort], want: str) -> None:
    invariant = next(one for one in INVARIANTS if one.id == "conditions::the_loss_reaches_generated_rows_and_no_given_row")
    result = runner.run(invariant, port(), shrink=False)
    assert result.violation is not None and want in result.violation["want"], result


def test_rows_that_are_told_no_level_have_the_same_layout_in_a_batch() -> None:
    invariant = next(one for one in registry.invariants() if one.id == "packing::a_samples_layout_does_not_depend_on_its_neighbours")
    assert runner.run(invariant, Titled(), None).status == "holds"
    assert runner.run(invariant, Late(), None).status == "violated"


@pytest.mark.parametrize("slip", [{"trainable": "lora_A"}, {"decode": "want a dataclass"}, {"observe": "RowTable.values"}])
def test_a_slip_is_found_before_any_check(slip: dict[str, str]) -> None:
    class Wrong(OddPort):
        def trainable(self) -> dict[str, torch.nn.Parameter]:
            names = super().trainable()
            return {n.replace("lora_", ""): p for n, p in names.items()} if "trainable" in slip else names

        def decode(self, latents: Any) -> list[Any]:
            media = super().decode(latents)
            return [SimpleNamespace(**vars(one)) for one in media] if "decode" in slip else media

        def observe(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
            velocity, tables = super().observe(latents, sigmas, conditions)
            for table in tables if "observe" in slip else ():
                table.values = {m: rows[1:] for m, rows in table.values.items()}
            return velocity, tables

    with pytest.raises(portcheck.PortProblem, match=next(iter(slip.values()))):
        portcheck.check_port(Wrong())


@pytest.mark.parametrize("deaf", OddPort.modalities)
def test_each_modality_must_reach_its_scorer(odd: OddPort, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scorers are given one and the same part for every sample, one modality at a time: whichever it is, it is named."""
    right, same = odd.judged.score, odd.decode({m: torch.zeros(1, *s) for m, s in odd.shapes(smallest(odd)).items()})[0]
    monkeypatch.setattr(odd.judged, "score", lambda media, prompts: right([replace(m, **{deaf: getattr(same, deaf)}) for m in media], prompts))
    invariant = next(i for i in INVARIANTS if i.id == "rewards::every_modality_and_the_prompt_reach_the_total")
    result = runner.run(invariant, odd, shrink=False)
    assert result.status == "violated" and result.violation is not None and f"{deaf} exchanged" in result.violation["where"]


# -- an existing stack -------------------------------------------------------------------------------------------------------------------------
class PassesSigma(Existing):
    """Its batch wants a data fraction and gets sigma."""

    def batch(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        return super().batch(latents, {m: 1 - s for m, s in sigmas.items()}, conditions)


class HandsOnTheirSign(Existing):
    """Their output is handed on as it is."""

    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        return {m: -v for m, v in super().predict_velocity(latents, sigmas, conditions).items()}


class LosesAlpha(Existing):
    """The worker is told no scale."""

    def engine(self, degree: int) -> Any:
        engine = super().engine(degree)
        load, engine.worker.load_lora = type(engine.worker).load_lora, lambda tensors, scale: load(engine.worker, tensors, 1.0)
        return engine


class JudgesSilence(Existing):
    """The wrapper looks for the sound where there is none."""

    def reward(self) -> Any:
        reward = super().reward()
        score, still = reward.score, self.decode({m: torch.zeros(1, *s) for m, s in self.shapes(smallest(self)).items()})[0].audio
        reward.score = lambda media, prompts: score([replace(m, audio=still) for m in media], prompts)
        return reward


def test_an_existing_stack_is_wrapped_and_holds() -> None:
    counts = require_clean(Existing(), degrees=(1,))
    assert counts["holds"] >= 60


@pytest.mark.parametrize(
    ("wrong", "claim", "cause"),
    [
        (PassesSigma, "conventions::the_velocity_is_that_of_the_vendors_loop", "time flipped"),
        (HandsOnTheirSign, "conventions::the_velocity_is_that_of_the_vendors_loop", "velocity sign flipped"),
        (LosesAlpha, "sync::every_projection_reaches_the_rollout", "LoRA scale missing"),
        (JudgesSilence, "rewards::every_modality_and_the_prompt_reach_the_total", "modality missing"),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
def test_a_mistake_in_wrapping_is_named(wrong: type[Existing], claim: str, cause: str) -> None:
    invariant = next(i for i in INVARIANTS if i.id == claim)
    result = runner.run(invariant, wrong(), 1 if invariant.per_degree else None, shrink=False, explain=True)
    assert result.status == "violated" and result.diagnosis is not None
    assert result.diagnosis["cause"] == cause, result.diagnosis


# -- the page that leads through it ------------------------------------------------------------------------------------------------------------
PAGE = Path(__file__).parent.parent / "docs" / "porting.md"


def test_what_the_page_quotes_is_in_the_files() -> None:
    """Python on the page that names its file is part of that file, line after line; every fault and claim of the page exists."""
    text = PAGE.read_text(encoding="utf-8")
    quotes = re.findall(r"^( *)```python\n\1# (\S+)\n(.*?)\n\1```", text, re.S | re.M)
    assert len(quotes) == 5
    for _, name, code in quotes:
        source = (PAGE.parent.parent / name).read_text(encoding="utf-8")
        for part in code.split("\n\n"):
            assert dedent(part) in _without_margin(source), f"{name} has no such lines:\n{part}"
    known = {one.id for one in (*INVARIANTS, *registry.faults())}
    named = set(re.findall(r"\b(?:" + "|".join(registry.CHAIN) + r")::\w+", text))
    assert len(named) >= 20 and named <= known, named - known


def _without_margin(source: str) -> str:
    """A file with every indented block also at the margin, so that a quoted method is found as it is quoted."""
    return "\n".join((source, *(re.sub(rf"^ {{{n}}}", "", source, flags=re.M) for n in (4, 8))))

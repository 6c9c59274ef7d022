"""Diagnosis: silent on clean ports, names mistakes that no catalogue holds, says so where nothing fits, and never touches a verdict."""

from __future__ import annotations

import math
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from oddport import OddPort
from packedport import PackedPort
from toyactor import ToyActor

from loudfail.harness import causes_rewards, causes_velocity, diagnose, registry, report, runner
from loudfail.harness.case import Case
from loudfail.harness.diagnose import EXPERIMENTS, Diagnosis, Mistake, OutOfTime, Trial
from loudfail.harness.port import random_adapter
from loudfail.harness.progress import failure_text
from loudfail.harness.result import Result

NAMES = sorted({name for names in EXPERIMENTS.values() for name in names})
FAULTS = registry.faults()
ATTEMPTS = {f"{one.__module__.rsplit('.', 1)[-1]}:{one.__name__}": one for link in registry.CHAIN for one in diagnose.experiments(link)}
VELOCITY = "conventions::the_velocity_is_that_of_the_vendors_loop"


@pytest.fixture(scope="module")
def odd() -> Iterator[OddPort]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield OddPort()
    torch.set_num_threads(threads)


def run(name: str, port: Any, degree: int | None = None) -> Result:
    """One invariant with a diagnosis."""
    invariant = next(one for one in registry.invariants() if one.id == name)
    return runner.run(invariant, port, degree, shrink=False, explain=True, patience=30)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_experiment_finds_a_mistake_in_a_clean_port(h3: Any, ltx2: Any, odd: OddPort, name: str) -> None:
    for port in (h3, ltx2, odd, PackedPort()):
        with diagnose._restored(port):
            trial = Trial(port, 2, time.perf_counter() + 60)
            assert ATTEMPTS[name](trial) is None, port.name


def test_every_link_has_experiments_that_exist() -> None:
    assert set(EXPERIMENTS) <= set(registry.CHAIN)
    for name in NAMES:
        module, function = name.split(":")
        assert callable(getattr(import_module(f"loudfail.harness.{module}"), function))


def test_the_catalogue_marks_many_causes_of_many_kinds() -> None:
    marked = [fault for fault in FAULTS if fault.cause]
    assert len(marked) >= 40 and len({fault.cause for fault in marked}) >= 8
    assert all(any(diagnose.experiments(fault.id.split("::")[0])) for fault in marked)


# -- mistakes of no catalogue --------------------------------------------------------------------------------------------------------------------
class FlippedInDepth(OddPort):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        return super().predict_velocity(latents, {**sigmas, "depth": 1 - sigmas["depth"]}, conditions)


class FlippedAndNegated(OddPort):
    """Time of one modality and sign of another."""

    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        velocity = super().predict_velocity(latents, {**sigmas, "audio": 1 - sigmas["audio"]}, conditions)
        return {**velocity, "video": -velocity["video"]}


class Thousandfold(OddPort):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        return super().predict_velocity(latents, {m: 1000 * s for m, s in sigmas.items()}, conditions)


class Exchanged(OddPort):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
        return super().predict_velocity(latents, {**sigmas, "audio": sigmas["depth"], "depth": sigmas["audio"]}, conditions)


@pytest.mark.parametrize(
    ("wrong", "cause", "where"),
    [
        (FlippedInDepth, "time flipped", "in depth"),
        (FlippedAndNegated, "time and velocity sign flipped", "−v in video"),
        (Thousandfold, "sigma 1000 times too large", "sigma / 1000"),
        (Exchanged, "levels exchanged", "between audio and depth"),
    ],
)
def test_a_mistake_is_named_with_its_modality(odd: OddPort, wrong: type[OddPort], cause: str, where: str) -> None:
    result = run(VELOCITY, wrong())
    assert result.status == "violated" and result.diagnosis is not None
    assert result.diagnosis["cause"] == cause and where in result.diagnosis["text"], result.diagnosis
    assert 0 <= result.diagnosis["residual"] <= 2e-5


@pytest.mark.parametrize(("factor", "modality"), [(2.0, "audio"), (0.25, "video"), (-0.5, "depth")])
def test_a_scaled_velocity_says_how_much(factor: float, modality: str) -> None:
    class Scaled(OddPort):
        def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
            velocity = super().predict_velocity(latents, sigmas, conditions)
            return {**velocity, modality: factor * velocity[modality]}

    found = run(VELOCITY, Scaled()).diagnosis
    assert found is not None and found["cause"] == "velocity scaled" and f"{modality} {factor:.4g} times" in found["text"], found


@pytest.mark.parametrize(
    ("wrong", "cause", "text"),
    [
        (lambda v, x, s, o: x - s * v, "another prediction type", "x0 is handed on as the velocity"),
        (lambda v, x, s, o: -v * s / (1 - s), "another prediction type", "an output that is x0 is converted as noise"),
        (lambda v, x, s, o: (x - v) / s, "another prediction type", "an output that is the velocity is converted as x0"),
        (lambda v, x, s, o: v * s / o, "one modality at another's level", "depth is converted with the level of video"),
    ],
)
def test_an_output_that_is_taken_for_something_else(wrong: Any, cause: str, text: str) -> None:
    class Mistaken(OddPort):
        def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
            velocity, x = super().predict_velocity(latents, sigmas, conditions), latents["depth"]
            s, o = (sigmas[m].view(-1, *[1] * (x.ndim - 1)) for m in ("depth", "video"))
            return {**velocity, "depth": wrong(velocity["depth"], x, s, o)}

    found = run(VELOCITY, Mistaken()).diagnosis
    assert found is not None and found["cause"] == cause and f"{text}" in found["text"] and "depth" in found["text"], found


def test_advantages_of_other_samples_are_told_from_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    port = OddPort()
    update = port.update()
    right = update.advantages
    monkeypatch.setattr(port, "update", lambda: update)
    for move, text in ((lambda x: x.roll(2), "the one 2 before it"), (lambda x: x[[3, 0, 1, 2, 8, 4, 7, 5, 6]], "of other samples")):
        monkeypatch.setattr(update, "advantages", lambda *a, move=move: move(right(*a)))
        found = causes_rewards.advantages(Trial(port, 1, time.perf_counter() + 30))
        assert found is not None and found.cause == "advantages in another order" and text in found.text, found


def test_a_level_in_another_unit_is_read_off_the_input() -> None:
    class Percent(OddPort):
        def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
            return super().predict_velocity(latents, {**sigmas, "audio": 1 - (1 - sigmas["audio"]) / 10}, conditions)

    found = run("conventions::every_generated_row_is_told_the_level_it_is_at", Percent()).diagnosis
    assert found is not None and found["cause"] == "level in another unit" and "audio 0.1 · (1 − sigma)" in found["text"], found


def test_a_mistake_that_leaves_a_trained_model_blind_is_not_called_a_flip() -> None:
    class Blind(OddPort):
        """Its checkpoint predicts nothing; turned round it predicts nothing a little better."""

        def trained_batch(self, seed: int, count: int) -> Any:
            case = Case(seed=seed, extent={axis: min(sizes) for axis, sizes in self.extents.items()}, prompts=("rain",) * count)
            return case.normal("clean", self.shapes(case)), self.conditions(case)

        def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
            return {m: -3 * x for m, x in latents.items()}

    assert causes_velocity.trained(Trial(Blind(), 1, time.perf_counter() + 30)) is None


def test_rows_in_another_order_are_a_layout() -> None:
    class Reversed(OddPort):
        def pack(self, latents: Any) -> Any:
            return {m: rows.flip(1) if m == "audio" else rows for m, rows in super().pack(latents).items()}

    result = run("packing::unpacking_restores_every_value", Reversed())
    assert result.diagnosis is not None and result.diagnosis["cause"] == "layout" and "audio" in result.diagnosis["text"], result.diagnosis


def test_a_shift_that_nobody_has_thought_of_is_estimated(odd: OddPort) -> None:
    class Shifted(OddPort):
        def grid(self, calls: int, case: Any = None) -> Any:
            u = super().grid(calls, case)
            return {m: 2.5 * g / (1 + 1.5 * g) if m == "depth" else g for m, g in u.items()}

    result = run("schedule::the_grid_is_the_vendors", Shifted())
    assert result.diagnosis is not None and result.diagnosis["cause"] == "another shift", result.diagnosis
    factor = 2.5 * odd.shift.get("depth", 1.0)
    assert f"{factor:.4g} instead of" in result.diagnosis["text"]


def test_where_nothing_fits_it_says_so_and_what_comes_nearest(odd: OddPort) -> None:
    class Stretched(OddPort):
        def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> Any:
            return {m: v * (1 + 0.3 * torch.sin(v)) for m, v in super().predict_velocity(latents, sigmas, conditions).items()}

    result = run(VELOCITY, Stretched())
    assert result.status == "violated" and result.diagnosis is not None
    assert result.diagnosis["cause"] == "" and result.diagnosis["residual"] is None
    assert result.diagnosis["text"].startswith("no known cause fits") and len(result.diagnosis["tried"]) >= 5


def engine_with(change: Any) -> OddPort:
    """A port whose rollout answers `base_response` and `delta_response` after a change of the tensors that it acts with."""
    port = OddPort()
    engine, made = port.engine, {}

    class Changed:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def load_base(self, state: Any) -> None:
            self.inner.load_base(change(dict(state)))

        def set_adapter(self, state: Any, config: Any, version: int) -> Any:
            return self.inner.set_adapter(change(dict(state)), config, version)

    def build(degree: int) -> Any:
        if degree not in made:
            made[degree] = Changed(engine(degree))
            made[degree].load_base(port.base_state())
        return made[degree]

    port.engine = build  # type: ignore[method-assign]
    return port


def exchanged(state: dict[str, Any]) -> dict[str, Any]:
    one, other = "blocks.0.up.weight", "blocks.1.up.weight"
    return state | ({one: state[other], other: state[one]} if one in state else {})


def half_exchanged(state: dict[str, Any]) -> dict[str, Any]:
    one, other = "blocks.0.up.weight", "blocks.1.up.weight"
    if one not in state:
        return state
    n = len(state[one]) // 2
    return state | {one: torch.cat([state[one][:n], state[other][:n]]), other: torch.cat([state[one][n:], state[other][n:]])}


def turned(state: dict[str, Any]) -> dict[str, Any]:
    return {n: v.reshape(v.T.shape).T.contiguous() if "lora_B" in n else v for n, v in state.items()}


@pytest.mark.parametrize(
    ("change", "degree", "claim", "cause"),
    [
        (exchanged, 1, "sync::every_base_weight_arrives", "another parameter's weights"),
        (half_exchanged, 2, "sync::every_base_weight_arrives", "fused rows cut as one block"),
        (turned, 1, "sync::every_projection_reaches_the_rollout", "LoRA factor transposed"),
    ],
)
def test_weights_that_arrive_in_another_place_or_turned(change: Any, degree: int, claim: str, cause: str) -> None:
    found = run(claim, engine_with(change), degree).diagnosis
    assert found is not None and found["cause"] == cause, found


def kept(*endings: str) -> Any:
    """A worker that goes on with the first adapter tensors that it got where their names end so."""
    first: dict[str, torch.Tensor] = {}

    def change(state: dict[str, Any]) -> dict[str, Any]:
        mine = {n: first.setdefault(n, v) for n, v in state.items() if n.endswith(endings)}
        return state | {n: v for n, v in mine.items() if v.shape == state[n].shape}

    return change


@pytest.mark.parametrize(
    ("endings", "text"),
    [
        (("lora_B.weight",), "only A arrives in"),
        (("lora_A.weight",), "only B arrives in"),
        (("0.up.lora_A.weight", "0.up.lora_B.weight"), "1 of 4 projections keep an earlier adapter: blocks.0.up"),
    ],
)
def test_an_adapter_that_arrives_in_part(endings: tuple[str, ...], text: str) -> None:
    port = engine_with(kept(*endings))
    port.engine(2).set_adapter(random_adapter(port, port.adapter, 1), port.adapter, 999)
    found = run("sync::every_projection_reaches_the_rollout", port, 2).diagnosis
    assert found is not None and found["cause"] == "adapter bound in part" and text in found["text"], found
    assert 0 <= found["residual"] <= 1e-4


def without_first(calls: int) -> tuple[int, slice]:
    return calls, slice(1, None)


def from_the_second(calls: int) -> tuple[int, slice]:
    return calls + 1, slice(1, None)


@pytest.mark.parametrize("cut", [without_first, from_the_second])
@pytest.mark.parametrize("kind", [OddPort, ToyActor])
def test_a_grid_without_its_first_level(kind: Any, cut: Any) -> None:
    class Late(kind):  # type: ignore[misc]
        def grid(self, calls: int, case: Any = None) -> Any:
            wider, points = cut(calls)
            return {m: g[points] for m, g in super().grid(wider, case).items()}

    found = run("schedule::the_grid_descends_from_pure_noise_to_clean", Late()).diagnosis
    alike = kind is ToyActor and cut is from_the_second  # nothing outside the port says what its grid should be
    assert found is not None and found["cause"] == ("grid starts below pure noise" if alike else "first level missing"), found
    assert 0 <= found["residual"] <= 2e-6


class Degrees(PackedPort):
    """A quarter turn is 90."""

    def ask(self, model: Any, latents: Any, sigmas: Any, conditions: Any) -> Any:
        def told(rows: Any, kinds: Any, places: Any, angles: Any) -> Any:
            return model(rows, kinds, places, angles * 180 / math.pi)

        return super().ask(told if model is self.actor else model, latents, sigmas, conditions)


class Mirrored(PackedPort):
    """The angle is that of the data; what is made of x0 knows the noise."""

    def ask(self, model: Any, latents: Any, sigmas: Any, conditions: Any) -> Any:
        def told(rows: Any, kinds: Any, places: Any, angles: Any) -> Any:
            return model(rows, kinds, places, torch.where(angles == 0, angles, math.pi / 2 - angles))

        return super().ask(told if model is self.actor else model, latents, sigmas, conditions)


@pytest.mark.parametrize(("wrong", "cause"), [(Degrees, "degrees for radians"), (Mirrored, "time flipped")])
def test_a_level_that_only_the_network_hears_wrongly(wrong: type[PackedPort], cause: str) -> None:
    found = run(VELOCITY, wrong()).diagnosis
    assert found is not None and found["cause"] == cause, found
    assert 0 <= found["residual"] <= 2e-5


def test_each_angle_is_undone() -> None:
    sigma = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)
    angles = (lambda s: s * math.pi / 2, lambda s: (1 - s) * math.pi / 2, lambda s: torch.atan2(s, 1 - s))
    for undo, angle in zip(causes_velocity.ANGLES, angles, strict=True):
        assert torch.allclose(180 / math.pi * angle(undo(sigma)), angle(sigma), rtol=1e-12)


def test_given_frames_that_are_mixed_with_noise() -> None:
    class Noisy(PackedPort):
        def sequence(self, packed: Any, i: int, condition: Any, kinds: Any, given: Any) -> Any:
            rows = super().sequence(packed, i, condition, kinds, given)
            draw = torch.Generator().manual_seed(int(rows[given].abs().sum() * 1000))
            return torch.where(given[:, None], 0.7 * rows + 0.3 * torch.randn(rows.shape, generator=draw), rows)

    found = run("conditions::given_rows_hold_the_clean_frames_of_their_own_sample", Noisy()).diagnosis
    assert found is not None and found["cause"] == "given frames noised", found
    share = float(found["text"].split(" of the clean frames")[0].split()[-1])
    assert abs(share - 0.7) <= 0.05 and 0 <= found["residual"] <= 0.05


class Ungiven(PackedPort):
    """Its rollout forgets what is given."""

    def engine(self, degree: int) -> Any:
        engine = super().engine(degree)
        loop = type(engine).rollout
        engine.rollout = lambda noise, calls, conditions: loop(engine, noise, calls, [replace(one, given={}) for one in conditions])
        return engine


def test_a_rollout_without_what_is_given() -> None:
    found = run("rollout::velocity_replay_agrees_at_every_step", Ungiven(), 2).diagnosis
    assert found is not None and found["cause"] == "given frames dropped" and "as if still had not been given" in found["text"], found
    assert 0 <= found["residual"] <= 2e-5
    assert causes_velocity.without_given(Trial(PackedPort(), 2, math.inf)) is None


def test_weights_that_were_never_trained() -> None:
    class Untrained(OddPort):
        """What its random weights are said to have learned."""

        def trained_batch(self, seed: int, count: int) -> Any:
            case = Case(seed=seed, extent={axis: min(sizes) for axis, sizes in self.extents.items()}, prompts=("rain",) * count)
            return case.normal("clean", self.shapes(case)), self.conditions(case)

    found = run("conventions::a_trained_velocity_points_from_data_to_noise", Untrained()).diagnosis
    assert found is not None and found["cause"] == "checkpoint not trained", found
    assert 0 <= found["residual"] <= 0.1


@pytest.mark.parametrize(
    ("refresh", "cause", "text"),
    [
        (lambda port, right: lambda step: None, "old policy never refreshed", "as it was, whatever the schedule"),
        (lambda port, right: lambda step: port.load_adapter("old", port.adapter_state("default")), "old policy is a copy", "not told the step"),
        (lambda port, right: lambda step: right(0), "old policy is a copy", "not told the step"),
    ],
)
def test_an_old_policy_that_does_not_follow(refresh: Any, cause: str, text: str) -> None:
    port = OddPort()
    update = port.update()
    update.refresh = refresh(port, update.refresh)  # type: ignore[method-assign]
    port.update = lambda: update  # type: ignore[method-assign]
    found = run("update::the_old_policy_follows_its_schedule", port).diagnosis
    assert found is not None and found["cause"] == cause and text in found["text"], found
    assert 0 <= found["residual"] <= 1e-5


# -- how it goes about it ------------------------------------------------------------------------------------------------------------------------
def test_it_runs_only_after_a_violation(odd: OddPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "diagnose", lambda *_, **__: pytest.fail("there is nothing to explain"))
    assert run(VELOCITY, odd).status == "holds"


def test_an_experiment_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from loudfail.harness import causes_velocity

    def broken(trial: Trial) -> None:
        raise RuntimeError("a broken port breaks experiments too")

    monkeypatch.setitem(EXPERIMENTS, "conventions", ("causes_velocity:broken", "causes_velocity:vendor"))
    monkeypatch.setattr(causes_velocity, "broken", broken, raising=False)
    result = run(VELOCITY, FlippedInDepth())
    assert result.status == "violated" and result.diagnosis is not None and result.diagnosis["cause"] == "time flipped"
    monkeypatch.setitem(EXPERIMENTS, "conventions", ("causes_velocity:broken",))
    result = run(VELOCITY, FlippedInDepth())
    assert result.status == "violated" and result.diagnosis is not None and result.diagnosis["cause"] == ""


def test_it_stops_when_the_time_is_over(odd: OddPort) -> None:
    found = diagnose.diagnose(FlippedInDepth(), Result(VELOCITY, "", "violated"), seconds=0.0)
    assert found.cause == "" and len(found.tried) <= 1
    trial = Trial(odd, 1, time.perf_counter() - 1)
    with pytest.raises(OutOfTime):
        trial.fits("anything", 0.0)


def test_the_policies_are_afterwards_as_they_were(odd: OddPort) -> None:
    odd.add_adapter("old", odd.adapter)
    states = {name: random_adapter(odd, odd.adapter, seed) for seed, name in enumerate(("default", "old"))}
    for name, state in states.items():
        odd.load_adapter(name, state)
    for link in registry.CHAIN:
        diagnose.diagnose(odd, Result(f"{link}::x", "", "violated", 1), seconds=30)
    for name, state in states.items():
        back = odd.adapter_state(name)
        assert all(torch.equal(back[key], value) for key, value in state.items()), name


def test_causes_that_fit_equally_are_all_named(odd: OddPort) -> None:
    trial = Trial(odd, 1, math.inf)
    mistakes = [Mistake(name, f"it is {name}", lambda left=left: left) for name, left in (("a", 3.0), ("b", 1e-7), ("c", 2e-7), ("d", 1e-5))]  # type: ignore[misc]
    found = trial.first(mistakes)
    assert found is not None and (found.cause, found.also) == ("b", ("c",)) and "as well explained by: c" in found.text
    assert trial.first(mistakes[:1]) is None
    assert trial.first(mistakes[1:], plain=5e-7) is None, "what leaves a fifth of the error explains nothing"


# -- where it is shown ---------------------------------------------------------------------------------------------------------------------------
def test_it_is_part_of_every_view(odd: OddPort) -> None:
    result = run(VELOCITY, FlippedInDepth())
    assert "    cause  time flipped: with t = 1 − sigma in depth it holds" in failure_text(result)
    record: dict[str, Any] = {"port": "odd", "verdict": "violated", "results": [result.to_dict()], "counts": {"violated": 1}, "declared": 1}
    record["faults"] = {"counts": {"caught": 2}, "false_alarms": 0, "matrix": [_kill("right", "time flipped"), _kill("wrong", "layout")]}
    text = "".join(element.text or "" for element in ET.fromstring(report.junit(record)).iter("failure"))
    assert "cause: time flipped: with t = 1 − sigma in depth it holds" in text
    assert [e.get("name") for e in ET.fromstring(report.junit(record)).iter("testcase") if e.find("failure") is not None][1:] == ["wrong"]
    summary = report.summary(record)
    assert "time flipped: with t" in summary and "**1 of 2** faults with a known cause" in summary and "| nothing known |" not in summary
    from loudfail.harness.report_page import page

    shown = page(record)
    assert "time flipped: with t = 1 − sigma in depth it holds" in shown
    assert "1 of 2 faults with a known cause were named rightly" in shown


def _kill(name: str, named: str) -> dict[str, Any]:
    kill = {"fault": name, "claim": "c", "source": "own", "outcome": "caught", "seconds": 0.1, "fired": 1, "margin": 30.0, "message": ""}
    return kill | {"results": [], "cause": "time flipped", "named": named, "diagnosis": "it is so"}


def test_a_diagnosis_is_plain_data() -> None:
    assert set(asdict(Diagnosis("a", "b"))) == {"cause", "text", "residual", "also", "tried", "seconds"}

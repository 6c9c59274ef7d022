"""The trainer on the real actor: MiniMax H3 with the tiny trained checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loudfail.harness import registry
from loudfail.harness.port import Conditions
from loudfail.harness.ports.h3 import H3
from loudfail.trainer import checkpoint, loop, train
from loudfail.trainer.config import Config, parse, read_recipe
from loudfail.trainer.monitor import MonitorFired


@pytest.fixture(scope="module")
def port() -> H3:
    return H3()


def short(steps: int = 2) -> Config:
    values = {"steps": steps, "threads": 0, "algorithm.prompts": 2, "algorithm.samples": 2, "rollout.calls": 4, "validation.samples": 1}
    return read_recipe("h3_tiny", [f"{key}={value}" for key, value in values.items()])


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(port: H3, tmp_path: Path) -> None:
    assert train.train(short(), tmp_path / "whole", port=port) == train.DONE
    assert train.train(short(1), tmp_path / "parts", port=port) == train.DONE
    assert train.train(short(), tmp_path / "parts", resume="", port=port) == train.DONE
    one, other = (checkpoint.load(tmp_path / name / "checkpoints" / "step-000002").tensors for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert {name: count["fired"] for name, count in summary["monitors"].items() if count["fired"]} == {}
    assert summary["monitors"]["velocity_replay"]["ran"] == 2
    assert summary["monitors"]["adapter_delta"]["ran"] == 2
    assert "diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3Transformer3DModel" in summary["classes"]


def test_a_feed_forward_that_never_reaches_the_rollout_stops_the_run(port: H3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward of such a run still rises (0.71 → 0.95 in a measured one); both monitors of the hand-over see it."""
    run = train.set_up(short(), port)
    load = port.load_adapter

    def without(name: str, state: dict[str, torch.Tensor]) -> None:
        lost = name == "rollout"
        load(name, {key: torch.zeros_like(value) if lost and "ff.net.0.proj.lora_B" in key else value for key, value in state.items()})

    monkeypatch.setattr(port, "load_adapter", without)
    with pytest.raises(MonitorFired, match=r"adapter_delta.*ff\.net\.0\.proj"):
        loop.train_step(run)
    run.watch.policy, run.watch.warn = "warn", lambda _: None
    loop.train_step(run)
    assert run.watch.counts["velocity_replay"]["fired"] == 1


def test_bfloat16_adapters_learn_in_float32_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """At this learning rate bfloat16 weights alone would not move: each update is far below their spacing."""
    values = {
        "steps": 3,
        "model": {"device": "cpu", "dtype": "bfloat16"},
        "rollout": {"calls": 2},
        "algorithm": {"prompts": 2, "samples": 2, "sigmas": 1, "old": "linear_to_0_5"},
        "optimizer": {"learning_rate": 1e-6},
        "validation": {"samples": 1, "calls": 2},
        "checkpoints": {"every": 1},
    }
    assert train.train(parse(values), tmp_path / "whole") == train.DONE
    assert train.train(parse(values | {"steps": 2}), tmp_path / "parts") == train.DONE
    assert train.train(parse(values), tmp_path / "parts", resume="") == train.DONE
    one, two = (checkpoint.load(tmp_path / "whole" / "checkpoints" / f"step-{step:06d}").tensors for step in (2, 3))
    again = checkpoint.load(tmp_path / "parts" / "checkpoints" / "step-000003").tensors
    assert [name for name in two if not torch.equal(two[name], again[name])] == []
    masters = [name for name in two if name.startswith("master/") and "lora_A" in name]
    assert all(two[name].dtype == torch.float32 and not torch.equal(one[name], two[name]) for name in masters)
    stored = [name for name in two if name.startswith("adapter/default/") and "lora_A" in name]
    assert sum(int((one[name] != two[name]).sum()) for name in stored) < 0.02 * sum(two[name].numel() for name in stored)
    assert len(masters) == len(stored) > 0


# -- first frame given (FL2VA) -------------------------------------------------------------------------------------------------------------------


def first_frame(port: H3) -> loop.Run:
    config = read_recipe("h3_tiny", ["threads=0", "algorithm.prompts=2", "algorithm.samples=2", "rollout.calls=4", 'data.given=["first"]'])
    return train.set_up(config, port, warn=lambda _: None)


def two_steps(run: loop.Run) -> None:
    for _ in range(2):
        loop.train_step(run)


def test_a_run_with_a_given_first_frame_trains_and_no_monitor_fires(port: H3) -> None:
    run = first_frame(port)
    two_steps(run)
    counts = {name: run.watch.counts[f"given_rows_{name}"] for name in ("clean", "told", "out_of_loss")}
    assert {name: (count["ran"], count["fired"], count["vacuous"]) for name, count in counts.items()} == dict.fromkeys(counts, (2, 0, 0))
    assert 0 < counts["clean"]["worst"] < 0.5, "given rows are held at upstream's small level, well inside the bound"
    assert any(float(value.abs().max()) > 0 for name, value in port.adapter_state("default").items() if "lora_B" in name)


def test_without_given_frames_their_monitor_says_so(port: H3) -> None:
    run = train.set_up(short(), port)
    loop.train_step(run)
    assert run.watch.counts["given_rows_clean"]["vacuous"] == 1 and run.watch.counts["given_rows_clean"]["ran"] == 0


def with_given(condition: Conditions, change: Callable[[torch.Tensor], torch.Tensor]) -> Conditions:
    """The same with other given frames, as latents and as the rows that are packed."""
    given = {name: change(x) for name, x in condition.given.items()}
    return replace(condition, given=given, extra=condition.extra | {"given_rows": change(condition.extra["given_rows"])})


def in_training(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[[loop.Run, pytest.MonkeyPatch], None]:
    """Training sees other given frames than the rollout did."""

    def inject(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
        pieces = loop.draw_pieces

        def wrong(run: loop.Run, *arguments: Any) -> Iterator[loop.Piece]:
            for piece in pieces(run, *arguments):
                sigma = float(piece.sigmas["video"][0])
                piece.conditions = [with_given(condition, partial(change, sigma=sigma)) for condition in piece.conditions]
                yield piece

        patch.setattr(loop, "draw_pieces", wrong)

    return inject


def noised_in_the_rollout(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    rollout = run.rollout.rollout

    def wrong(noise: Any, calls: int, conditions: Any) -> Any:
        return rollout(noise, calls, [with_given(condition, lambda x: x + 0.5 * torch.randn(x.shape)) for condition in conditions])

    patch.setattr(run.rollout, "rollout", wrong)


@pytest.mark.parametrize(
    ("fault", "monitor"),
    [
        (in_training(lambda x, sigma: (1 - sigma) * x + sigma * torch.randn(x.shape)), "given_rows_clean"),
        (in_training(lambda x, sigma: x * 0), "given_rows_clean"),
        (noised_in_the_rollout, "velocity_replay"),
        ("conditions::given_rows_are_told_the_level_of_generated_rows", "given_rows_told"),
        ("conditions::the_loss_includes_given_rows", "given_rows_out_of_loss"),
    ],
    ids=("noised in training", "black in training", "noised in the rollout", "told the generated level", "in the loss"),
)
def test_given_frames_that_are_mistreated_are_seen_within_two_steps(port: H3, monkeypatch: pytest.MonkeyPatch, fault: Any, monitor: str) -> None:
    run = first_frame(port)
    run.watch.policy = "warn"
    with ExitStack() as stack:
        if isinstance(fault, str):
            stack.enter_context(next(one for one in registry.faults() if one.id == fault).inject(port))
        else:
            fault(run, monkeypatch)
        two_steps(run)
    assert run.watch.counts[monitor]["fired"] >= 1

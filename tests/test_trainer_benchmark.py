"""What the benchmark counts is what the update does, and its ways do the same update."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loudfail.harness.port import random_adapter
from loudfail.trainer import benchmark, loop


@pytest.fixture(scope="module")
def run() -> loop.Run:
    return benchmark.make_run(argparse.Namespace(size="tiny", samples=2, prompts=2, calls=2), "cpu", "float32")


def test_operations_counted_by_hand_are_those_that_torch_counts(run: loop.Run) -> None:
    state = random_adapter(run.port, run.port.adapter, 7)
    update, _ = benchmark.make_updates(run)
    benchmark.begin_again(run, state)
    work = benchmark.operations(run)
    with FlopCounterMode(display=False) as counter:
        update()
    counted = {str(name): value for name, value in counter.get_flop_counts()["Global"].items()}
    hidden, outputs = run.port.actor.config.hidden_size, 96 + 32
    heads = 4 * 2 * work["rows"] * hidden * outputs  # their input gradients, which the hand count leaves out
    assert counted["aten.mm"] == work["operations"] - work["attention"] + heads  # torch counts no attention on a CPU


def test_the_straightforward_way_gives_the_same_gradient(run: loop.Run) -> None:
    state = random_adapter(run.port, run.port.adapter, 7)
    update, plain = benchmark.make_updates(run)
    ours = benchmark.gradient_of(run, update, state)
    with benchmark.going(run, benchmark.Way("plain", 1, plain=True, compiled=False)):
        theirs = benchmark.gradient_of(run, plain, state)
    assert float(ours.norm()) > 0
    assert benchmark.relative(ours, theirs) < 1e-5


def test_the_float32_gradient_is_of_the_same_weights(run: loop.Run) -> None:
    state = random_adapter(run.port, run.port.adapter, 7)
    update, _ = benchmark.make_updates(run)
    options = argparse.Namespace(size="tiny", samples=2, prompts=2, calls=2)
    exact = benchmark.exact_gradient(options, "cpu", run, state)
    assert benchmark.relative(benchmark.gradient_of(run, update, state), exact) < 1e-5
    with torch.no_grad():
        next(value for name, value in run.port.actor.named_parameters() if ".lora_" not in name and value.ndim == 2).mul_(1.1)
    assert benchmark.relative(benchmark.gradient_of(run, update, state), exact) > 1e-4

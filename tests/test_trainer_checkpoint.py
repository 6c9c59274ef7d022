"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from loudfail.trainer import checkpoint
from loudfail.trainer.checkpoint import BrokenCheckpoint, Checkpoint


def make(step: int) -> Checkpoint:
    return Checkpoint(step, {"adapter/default/a": torch.full((3,), float(step)), "optimizer/a/step": torch.tensor(float(step))}, {"version": step})


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make(7), keep=2)
    back = checkpoint.load(path)
    assert back.step == 7
    assert back.record["version"] == 7
    assert back.tensors.keys() == make(7).tensors.keys()
    assert all(torch.equal(back.tensors[name], value) for name, value in make(7).tensors.items())


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100):
        checkpoint.save(tmp_path, make(step), keep=2)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-000003", "step-000100"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "no json", "other schema", "missing"])
def test_a_broken_one_is_refused_and_the_last_good_one_named(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, make(step), keep=3)
    state, record = (tmp_path / "step-000002" / name for name in ("state.safetensors", "state.json"))
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-4])
    elif damage == "flipped":
        content = bytearray(state.read_bytes())
        content[-1] ^= 1
        state.write_bytes(content)
    elif damage == "no json":
        record.write_text("{")
    elif damage == "other schema":
        record.write_text(record.read_text().replace(checkpoint.SCHEMA, "loudfail.checkpoint/0"))
    else:
        state.unlink()
    with pytest.raises(BrokenCheckpoint, match=f"the last good one is {tmp_path / 'step-000001'}"):
        checkpoint.load(tmp_path / "step-000002")


def test_a_full_disk_leaves_the_earlier_one_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, make(1), keep=1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, make(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load(tmp_path / "step-000001").step == 1


def test_an_optimizer_comes_back_by_name() -> None:
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(2, 3)) for name in ("one", "two")}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    saved = checkpoint.optimizer_state(optimizer, parameters)
    assert len(saved) == 6
    fresh = torch.optim.AdamW([parameters["two"], parameters["one"]], lr=0.1)  # another order
    checkpoint.restore_optimizer(fresh, parameters, saved)
    for parameter in parameters.values():
        assert all(torch.equal(fresh.state[parameter][what], value) for what, value in optimizer.state[parameter].items())
    with pytest.raises(BrokenCheckpoint, match="fits no parameter"):
        checkpoint.restore_optimizer(fresh, parameters, {"optimizer/three/exp_avg": torch.zeros(2, 3)})

"""Checkpoints that are whole or not there: a folder with ``state.safetensors`` and ``state.json``, renamed into place when both are on the disk.

Tensors only, no code: adapters, old policy, optimizer moments. All randomness of a run is a function of its seed and step, so the step
*is* the state of the random generators and of the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SCHEMA = "loudfail.checkpoint/1"
NAME = "step-{:06d}"


class BrokenCheckpoint(RuntimeError):
    """A checkpoint cannot be used; the message says why, and which one can."""


@dataclass
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Attributes:
        step: steps that were finished.
        tensors: name → tensor.
        record: plain data: configuration, gate, first values of the summary, version of the adapter.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    record: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``folder/step-NNNNNN`` and delete all but the last ``keep``.

    Raises:
        OSError: it could not be written (a full disk); what was there before is untouched.
    """
    from safetensors.torch import save as serialize

    folder.mkdir(parents=True, exist_ok=True)
    final = folder / NAME.format(checkpoint.step)
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    content = serialize({name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()})
    record = {"schema": SCHEMA, "step": checkpoint.step, "sha256": hashlib.sha256(content).hexdigest(), **checkpoint.record}
    try:
        temporary.mkdir()
        _write(temporary / "state.safetensors", content)
        _write(temporary / "state.json", json.dumps(record, indent=1, ensure_ascii=False).encode())
        if final.exists():  # of an earlier run in this folder, or of the same step
            shutil.rmtree(final)
        os.replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder)
    for old in listed(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first; unfinished ones are not among them."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and see that it is whole.

    Raises:
        BrokenCheckpoint: it is not there, was cut or edited, or is of another schema.
    """
    try:
        record, content = json.loads((path / "state.json").read_bytes()), (path / "state.safetensors").read_bytes()
    except OSError as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error.strerror or error}{_last_good(path)}") from None
    except ValueError:
        raise BrokenCheckpoint(f"{path}: state.json is not JSON{_last_good(path)}") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise BrokenCheckpoint(f"{path} is no {SCHEMA}{_last_good(path)}")
    if hashlib.sha256(content).hexdigest() != record.get("sha256"):
        raise BrokenCheckpoint(f"{path}: state.safetensors is not what was written ({len(content)} bytes){_last_good(path)}")
    from safetensors.torch import load as deserialize

    return Checkpoint(int(record["step"]), deserialize(content), record)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be read and its content is what was written."""
    try:
        record = json.loads((path / "state.json").read_bytes())
        digest = hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("sha256") == digest


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors as ``optimizer/<parameter>/<what>``."""
    return {
        f"optimizer/{name}/{what}": value
        for name, parameter in parameters.items()
        for what, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `optimizer_state`.

    Raises:
        BrokenCheckpoint: a tensor belongs to no parameter, or has another shape.
    """
    # Fused kernels count their steps on the device, the others on the CPU.
    counts_there = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for key, value in tensors.items():
        if not key.startswith("optimizer/"):
            continue
        name, _, what = key.removeprefix("optimizer/").rpartition("/")
        if name not in parameters or (value.ndim and value.shape != parameters[name].shape):
            raise BrokenCheckpoint(f"{key} of shape {tuple(value.shape)} fits no parameter that trains")
        parameter = parameters[name]
        optimizer.state[parameter][what] = (
            value.to(parameter.device if counts_there else "cpu", copy=True)
            if what == "step"
            else value.to(parameter.device, parameter.dtype, copy=True)
        )


def restore_masters(own: Mapping[str, torch.nn.Parameter], parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put back the float32 copies of what a model stores narrower, saved as ``master/<parameter>``.

    Args:
        own: parameter → what the optimizer updates; see `loudfail.trainer.adapters.masters`.
        parameters: of the model.
        tensors: of the checkpoint.

    Raises:
        BrokenCheckpoint: one is missing or has another shape.
    """
    for name, master in own.items():
        if master is parameters[name]:
            continue
        value = tensors.get(f"master/{name}")
        if value is None or value.shape != master.shape:
            raise BrokenCheckpoint(f"master/{name} is {'missing' if value is None else f'of shape {tuple(value.shape)}'}; want {tuple(master.shape)}")
        master.data.copy_(value)


def _last_good(broken: Path) -> str:
    good = [path for path in listed(broken.parent) if path != broken and is_whole(path)]
    return f"; the last good one is {good[-1]}: use --resume {good[-1]}" if good else "; there is no other good one beside it"


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

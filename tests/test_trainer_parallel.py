"""Runs of two processes: they end together whatever happens to one, go on from checkpoints, and sharding changes no bit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from loudfail.trainer import checkpoint, train
from loudfail.trainer.monitor import Reading, worst

RECIPE = """
steps = 4
seed = 5
[model]
port = "toyactor:ToyActor"
device = "cpu"
[rollout]
calls = 3
[algorithm]
prompts = 4
samples = 4
[validation]
samples = 2
calls = 2
[checkpoints]
every = 1
keep = 9
"""
#: A run in which one of the processes does something at a step.
DRIVER = """
import os, signal, sys
from loudfail.trainer import checkpoint, loop, nft, train
refresh = loop.refresh_old
def at(step, act):
    def changed(run, number, before):
        if number == step:
            act(run)
        return refresh(run, number, before)
    loop.refresh_old = changed
mine = int(os.environ["RANK"])
{change}
sys.exit(train.main(sys.argv[1:]))
"""


def launch(folder: Path, *arguments: str, change: str = "", code: str = "") -> list[tuple[int, str]]:
    """Run two processes to their end; exit code and output of each."""
    (folder / "toy.toml").write_text(RECIPE)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", code or DRIVER.format(change=change), *arguments]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=Path(__file__).parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def run(folder: Path, out: str, *more: str, change: str = "") -> list[tuple[int, str]]:
    return launch(folder, str(folder / "toy.toml"), "--ungated", "--out", str(folder / out), *more, change=change)


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoints" / f"step-{step:06d}").tensors


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.listed(folder / "checkpoints")]


def test_a_killed_process_ends_the_other_and_the_run_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole")
    assert [code for code, _ in whole] == [0, 0], whole
    killed = run(tmp_path, "killed", change="mine and at(2, lambda run: os.kill(os.getpid(), signal.SIGKILL))")
    assert [code for code, _ in killed] == [train.STOPPED, -9], killed
    assert "another process of this run is gone" in killed[0][1]
    assert "step-000002, is whole: go on with --resume" in killed[0][1]
    assert names(tmp_path / "killed") == ["step-000001", "step-000002"]

    resumed = run(tmp_path, "killed", "--resume")
    assert [code for code, _ in resumed] == [0, 0], resumed
    want, got = tensors(tmp_path / "whole", 4), tensors(tmp_path / "killed", 4)
    assert [name for name in want if not torch.equal(want[name], got[name])] == []

    # One process goes on from a checkpoint of two, to the same adapter up to the order in which gradients are summed.
    checkpoint_of_two = tmp_path / "whole" / "checkpoints" / "step-000003"
    assert train.main([str(tmp_path / "toy.toml"), "--resume", str(checkpoint_of_two), "--out", str(tmp_path / "alone")]) == train.DONE
    alone = tensors(tmp_path / "alone", 4)
    for name in want:
        torch.testing.assert_close(alone[name], want[name], rtol=1e-4, atol=1e-6)


def test_sigterm_to_one_process_saves_and_ends_both(tmp_path: Path) -> None:
    ended = run(tmp_path, "out", "--set", "checkpoints.every=0", change="mine and at(1, lambda run: os.kill(os.getpid(), signal.SIGTERM))")
    assert [code for code, _ in ended] == [train.INTERRUPTED, train.INTERRUPTED], ended
    assert names(tmp_path / "out") == ["step-000002"]


def test_a_full_disk_ends_both_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    full = "at(1, lambda run: setattr(os, 'fsync', lambda _: (_ for _ in ()).throw(OSError(28, 'No space left on device'))))"
    ended = run(tmp_path, "out", change=full)
    assert [code for code, _ in ended] == [train.STOPPED, train.STOPPED], ended
    assert "No space left on device" in ended[0][1]
    assert "the first process could not write a checkpoint" in ended[1][1]
    assert names(tmp_path / "out") == ["step-000001"]
    assert checkpoint.is_whole(tmp_path / "out" / "checkpoints" / "step-000001")


def test_a_monitor_that_fires_in_one_process_stops_both(tmp_path: Path) -> None:
    flipped = "proper = nft.optimality\nif mine: nft.optimality = lambda advantages, clip: proper(-advantages, clip)"
    ended = run(tmp_path, "out", change=flipped)
    assert [code for code, _ in ended] == [train.STOPPED, train.STOPPED], ended
    message = json.loads((tmp_path / "out" / "summary.json").read_text())["message"]
    assert "advantages_follow_rewards" in message
    assert "process 1" in message


def test_without_a_certificate_every_process_is_refused_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = launch(tmp_path, str(tmp_path / "toy.toml"), "--out", str(tmp_path / "out"), code="import sys; from loudfail.trainer import train; "
                   "code = train.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)")  # fmt: skip
    assert [code for code, _ in ended] == [train.USAGE, train.USAGE], ended
    assert all("a run of 2 processes needs a certificate: make one with `loudfail gate" in output for _, output in ended)
    assert time.monotonic() - start < 60
    assert not (tmp_path / "out").exists()


def test_of_several_processes_the_worst_reading_is_judged() -> None:
    good, bad, broken = Reading("a", 0.1, 1.0), Reading("a", 0.2, 1.0, "here"), Reading("a", float("nan"), 1.0)
    vacuous = Reading("a", 0.0, 0.0, vacuous="nothing to see")
    assert worst([[good]]) == [good]
    assert [reading.got for reading in worst([[good], [bad], [vacuous]])] == [0.2]
    assert worst([[good], [bad]])[0].where == "here, process 1"
    assert worst([[good], [broken], [bad]])[0].fires
    least = [Reading("b", value, 0.5, at_least=True) for value in (0.9, 0.6)]
    assert worst([[least[0]], [least[1]]])[0].got == 0.6


SHARDED = """
import sys, torch
from loudfail.harness.world import without_preloading
from loudfail.trainer import adapters, config, loop, train
def values_in(dtype): return {
    "micro_batch": 3, "rollout": {"calls": 2}, "validation": {"samples": 1, "calls": 2}, "monitors": {"policy": "warn"},
    "algorithm": {"prompts": 4, "samples": 3, "sigmas": 1}, "model": {"device": "cpu", "dtype": dtype},
}
def two_steps(values):
    with without_preloading():
        run = train.set_up(config.parse(values), warn=lambda _: None)
    run.prompts = ["rain", "rain", "rain", "a bell rings"]  # the first process's two share a layout, the second's do not
    loop.validate(run)
    records = [loop.train_step(run) for _ in range(2)]
    state = {f"{name}/{key}": value for name in (adapters.TRAINED, adapters.OLD) for key, value in run.port.adapter_state(name).items()}
    return run, state, [{k: v for k, v in record.items() if k != "seconds"} for record in records]
results = {}
for dtype in ("float32", "bfloat16"):
    values = values_in(dtype)
    _, plain, log = two_steps(values)
    run, sharded, sharded_log = two_steps(values | {"parallel": {"shard": "fsdp"}, "model": values["model"] | {"gradient_checkpointing": True}})
    kinds = {name: type(value).__name__ for name, value in run.port.actor.named_parameters()}
    base = run.port.base_state()
    float32 = sum(value.dtype == torch.float32 for value in base.values())
    results[dtype] = [plain, sharded, log == sharded_log, kinds, float32, len(base), {n: tuple(v.shape) for n, v in base.items()}]
if run.ranks.rank == 0:
    torch.save(results, sys.argv[1])
run.ranks.close()
"""


def test_a_sharded_base_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    ended = launch(tmp_path, str(tmp_path / "state.pt"), code=SHARDED)
    assert [code for code, _ in ended] == [0, 0], ended
    for dtype, (plain, sharded, same_log, kinds, in_float32, count, shapes) in torch.load(tmp_path / "state.pt").items():
        assert [name for name in plain if not torch.equal(plain[name], sharded[name])] == []
        assert same_log
        assert any(float(value.abs().max()) > 0 for name, value in sharded.items() if "lora_B" in name)
        assert {kind for name, kind in kinds.items() if ".lora_" in name} == {"Parameter"}
        assert {kind for name, kind in kinds.items() if ".lora_" not in name} == {"DTensor"}
        assert shapes["transformer_blocks.0.attn.to_q.weight"] == (128, 112)
        # Upstream keeps input and output projections and the time embedding in float32 beside bfloat16: weight and bias of six linear layers.
        assert in_float32 == (count if dtype == "float32" else 12)


def test_two_sharded_processes_share_an_engine_of_degree_2(tmp_path: Path) -> None:
    """Every process gets the samples of its own prompts back: the scores are those of the rollout on the actor itself."""
    settings = [
        "steps=1", "algorithm.prompts=2", "algorithm.samples=2", "algorithm.sigmas=1", "rollout.calls=2", "validation.samples=1",
        "validation.calls=2", "parallel.shard=fsdp",
    ]  # fmt: skip
    arguments = ["h3_tiny", "--ungated", *(part for setting in settings for part in ("--set", setting))]
    code = "import sys; from loudfail.trainer import train; sys.exit(train.main(sys.argv[1:]))"
    summaries = {}
    for engine in (["--set", "rollout.engine=vllm_omni", "--set", "rollout.tp=2"], []):
        out = tmp_path / (engine[1] if engine else "local")
        ended = launch(tmp_path, *arguments, *engine, "--out", str(out), code=code)
        assert [code for code, _ in ended] == [0, 0], ended
        summaries[bool(engine)] = json.loads((out / "summary.json").read_text())
    assert summaries[True]["monitors"]["velocity_replay"]["ran"] == 1
    assert summaries[True]["monitors"]["velocity_replay"]["fired"] == 0
    assert any("vllm" in name for name in summaries[True]["classes"])
    for name, pair in summaries[False]["scores"].items():
        assert summaries[True]["scores"][name] == pytest.approx(pair, abs=1e-3)

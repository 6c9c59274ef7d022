"""Whole runs on a small port: they resume bit for bit, and every fault makes the monitor fire that is meant for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toyactor import ToyActor

from loudfail.harness.port import Step, Trajectory
from loudfail.trainer import adapters, checkpoint, loop, nft, train
from loudfail.trainer.config import Config, parse
from loudfail.trainer.monitor import MonitorFired

SMALL = {
    "steps": 3,
    "seed": 5,
    "model": {"port": "toyactor:ToyActor", "device": "cpu"},
    "rollout": {"calls": 4},
    "algorithm": {"prompts": 4, "samples": 4},
    "validation": {"samples": 2, "calls": 3},
    "checkpoints": {"every": 1, "keep": 9},
}


def small(**sections: Any) -> Config:
    values = dict(SMALL)
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section  # type: ignore[dict-item]
    return parse(values)


def tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(out / "checkpoints" / f"step-{step:06d}").tensors


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def records(out: Path) -> list[dict[str, Any]]:
    """The log without what a clock decides."""
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_summary_log_and_checkpoints(tmp_path: Path) -> None:
    assert train.train(small(), tmp_path, port=ToyActor()) == train.DONE
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["steps"] == 3
    assert summary["gated"] == "not required"
    assert set(summary["scores"]) == {"synthetic_text_audio", "synthetic_audio_video"}
    assert all(len(pair) == 2 for pair in (summary["true_reward"], summary["logged_reward"], *summary["scores"].values()))
    assert summary["true_reward"][0] != summary["true_reward"][1]
    assert summary["seconds"] > 0
    assert summary["peak_rss_bytes"] > 0
    assert len(summary["monitors"]) >= 15
    for name, count in summary["monitors"].items():
        assert (count["fired"], count["ran"] + count["vacuous"]) == (0, 3), name
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]
    assert [path.name for path in checkpoint.listed(tmp_path / "checkpoints")] == ["step-000001", "step-000002", "step-000003"]


@pytest.mark.parametrize("old", ["copy", "delayed_linear_to_0_999"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, old: str) -> None:
    config = small(algorithm={"old": old, "old_every": 2, "epochs": 2})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(config, whole, port=ToyActor())
    train.train(small(algorithm={"old": old, "old_every": 2, "epochs": 2}, steps=1), parts, port=ToyActor())
    torch.rand(5)  # what others draw from the global generator must not matter
    train.train(config, parts, resume="", port=ToyActor())
    assert_same(tensors(whole, 3), tensors(parts, 3))
    assert records(whole) == records(parts)


def test_resuming_an_earlier_step_replaces_what_came_after(tmp_path: Path) -> None:
    train.train(small(), tmp_path, port=ToyActor())
    want, log = tensors(tmp_path, 3), records(tmp_path)
    assert train.train(small(), tmp_path, resume=str(tmp_path / "checkpoints" / "step-000001"), port=ToyActor()) == train.DONE
    assert_same(tensors(tmp_path, 3), want)
    assert records(tmp_path) == log


def test_a_run_is_not_resumed_under_another_configuration(tmp_path: Path) -> None:
    train.train(small(), tmp_path, port=ToyActor())
    with pytest.raises(train.Refused, match=r"another optimizer\.learning_rate"):
        train.train(small(optimizer={"learning_rate": 2e-4}), tmp_path, resume="", port=ToyActor())
    with pytest.raises(train.Refused, match="earlier run"):
        train.train(small(), tmp_path, port=ToyActor())
    with pytest.raises(train.Refused, match="no checkpoint"):
        train.train(small(), tmp_path / "empty", resume="", port=ToyActor())


def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.train(small(checkpoints={"every": 0}), whole, port=ToyActor())
    refresh = loop.refresh_old

    def killed(run: loop.Run, step: int, before: Any) -> float | None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return refresh(run, step, before)

    monkeypatch.setattr(loop, "refresh_old", killed)
    assert train.train(small(checkpoints={"every": 0}), cut, port=ToyActor()) == train.INTERRUPTED
    assert json.loads((cut / "summary.json").read_text())["status"] == "interrupted"
    assert [path.name for path in checkpoint.listed(cut / "checkpoints")] == ["step-000002"]
    monkeypatch.undo()
    assert train.train(small(checkpoints={"every": 0}), cut, resume="", port=ToyActor()) == train.DONE
    assert_same(tensors(whole, 3), tensors(cut, 3))


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "toy.toml"
    recipe.write_text('steps = 2\n[model]\nport = "toyactor:ToyActor"\ndevice = "cpu"\n[checkpoints]\nevery = 1\n')
    save = checkpoint.save

    def full(folder: Path, saved: checkpoint.Checkpoint, keep: int) -> Path:
        if saved.step == 2:
            monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        return save(folder, saved, keep)

    monkeypatch.setattr(checkpoint, "save", full)
    assert train.main([str(recipe), "--out", str(tmp_path / "out")]) == train.STOPPED
    assert "No space left on device" in (said := capsys.readouterr().err)
    assert "--resume" in said
    assert [path.name for path in checkpoint.listed(tmp_path / "out" / "checkpoints")] == ["step-000001"]
    assert checkpoint.is_whole(tmp_path / "out" / "checkpoints" / "step-000001")


def test_micro_batches_give_the_gradient_of_the_batch(tmp_path: Path) -> None:
    for name, size in (("one", 64), ("many", 3)):
        train.train(small(steps=2, micro_batch=size), tmp_path / name, port=ToyActor())
    one, many = tensors(tmp_path / "one", 1), tensors(tmp_path / "many", 1)
    for name in one:
        if name.endswith("exp_avg"):  # after one step, a tenth of the gradient
            torch.testing.assert_close(one[name], many[name], rtol=1e-4, atol=1e-7)
    assert any(float(value.abs().max()) > 0 for name, value in one.items() if name.endswith("exp_avg"))


def test_the_update_moves_only_the_trained_adapter(tmp_path: Path) -> None:
    port = ToyActor()
    before = {name: value.clone() for name, value in port.base_state().items()}
    train.train(small(algorithm={"old_every": 9}), tmp_path, port=port)
    assert all(torch.equal(value, before[name]) for name, value in port.base_state().items())
    assert adapters.same(port.adapter_state("old"), adapters.initial_state(port, 5))  # no refresh was due
    assert not adapters.same(port.adapter_state("default"), port.adapter_state("old"))
    assert {name.split("/")[0] for name in port.trainable()} == {"default"}


# -- faults --------------------------------------------------------------------------------------------------------------------------------------

Inject = Callable[[loop.Run, pytest.MonkeyPatch], None]


def sampled_with(change: Callable[[Trajectory], Trajectory]) -> Inject:
    def inject(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
        rollout = run.rollout.rollout
        patch.setattr(run.rollout, "rollout", lambda noise, calls, conditions: change(rollout(noise, calls, conditions)))

    return inject


def handed_over(change: Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]) -> Inject:
    """The rollout gets something else than the adapter that was handed over."""

    def inject(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
        set_adapter = run.rollout.set_adapter
        patch.setattr(run.rollout, "set_adapter", lambda state, config, version: set_adapter(change(dict(state), version), config, version))

    return inject


def scored(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None, silent: bool = False) -> Inject:
    def inject(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
        score = run.score

        def wrong(latents: Any, prompts: Any) -> dict[str, torch.Tensor]:
            latents = latents | {"audio": torch.full_like(latents["audio"], 1e-3)} if silent else latents
            result = score(latents, prompts)
            return change(result) if change else result

        run.score = wrong

    return inject


def negated(trajectory: Trajectory) -> Trajectory:
    return Trajectory([Step(s.latents, s.sigmas, {m: -v for m, v in s.velocity.items()}, s.after) for s in trajectory.steps])


def other_time(trajectory: Trajectory) -> Trajectory:
    return Trajectory([Step(s.latents, {m: 1 - sigma for m, sigma in s.sigmas.items()}, s.velocity, s.after) for s in trajectory.steps])


def video_only(scores: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return scores | {"total": torch.zeros_like(scores["total"]) + 0.5}


def stale(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in state.items()}


def half(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 if "lora_B" in name else value for name, value in state.items()}


def without_one(state: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    return state | {"net.up.lora_B.weight": torch.zeros_like(state["net.up.lora_B.weight"])}


def wrong_prompts(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    rollout = run.rollout.rollout

    def other(noise: Any, calls: int, conditions: Any) -> Trajectory:
        count = len(conditions) // 2
        return rollout(noise, calls, [*conditions[count:], *conditions[count:]])

    patch.setattr(run.rollout, "rollout", other)


def binds_half(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    set_adapter = run.rollout.set_adapter
    patch.setattr(run.rollout, "set_adapter", lambda *arguments: replace(set_adapter(*arguments), bound=1))


def wrong_version(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run.rollout, "adapter_version", lambda: 1)


def one_seed(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    fresh = loop.noise_of
    patch.setattr(loop, "noise_of", lambda run, purpose, count: {m: x[:1].expand_as(x).clone() for m, x in fresh(run, purpose, count).items()})


def data_fraction(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    """Training mixes at ``1 − sigma`` what it calls sigma."""
    proper = loop.noised
    patch.setattr(loop, "noised", lambda x0, noise, sigmas: proper(x0, noise, {m: 1 - s for m, s in sigmas.items()}))


def other_grid(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    """Training draws its levels from another grid than the one that the rollout walks: the video's, for both modalities."""
    improve = loop.improve

    def wrong(run: loop.Run, batch: Any, trajectory: Trajectory, x0: Any, probability: Any) -> Any:
        steps = [Step(s.latents, dict.fromkeys(s.sigmas, s.sigmas["video"]), s.velocity, s.after) for s in trajectory.steps]
        return improve(run, batch, Trajectory(steps), x0, probability)

    patch.setattr(loop, "improve", wrong)


def advantages_across_prompts(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    proper = nft.group_advantages
    patch.setattr(nft, "group_advantages", lambda rewards, groups, spread: proper(rewards, [0] * len(groups), spread))


def shuffled(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    proper = nft.optimality
    patch.setattr(nft, "optimality", lambda advantages, clip: proper(advantages, clip).flip(0))


def flipped_sign(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    proper = nft.optimality
    patch.setattr(nft, "optimality", lambda advantages, clip: proper(-advantages, clip))


def audio_left_out(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    proper = nft.objective

    def wrong(velocity: Any, *arguments: Any) -> Any:
        return proper(velocity | {"audio": velocity["audio"].detach()}, *arguments)

    patch.setattr(nft, "objective", wrong)


def never_refreshed(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "refresh_old", lambda run, step, before: 0.0)


def not_finite(run: loop.Run, patch: pytest.MonkeyPatch) -> None:
    proper = nft.objective

    def wrong(*arguments: Any) -> Any:
        total, parts = proper(*arguments)
        return total * float("nan"), parts

    patch.setattr(nft, "objective", wrong)


FAULTS: dict[str, tuple[Inject, set[str]]] = {
    "velocity recorded with the other sign": (sampled_with(negated), {"velocity_replay"}),
    "time recorded as data fraction": (sampled_with(other_time), {"velocity_replay", "walked_grid"}),
    "adapter never arrives": (handed_over(stale), {"adapter_delta"}),
    "alpha / r forgotten": (handed_over(half), {"adapter_delta"}),
    "one projection not synced": (handed_over(without_one), {"adapter_delta"}),
    "half of the adapter is bound": (binds_half, {"adapter_bound"}),
    "rollout keeps the first version": (wrong_version, {"adapter_version"}),
    "other prompts in the rollout": (wrong_prompts, {"velocity_replay"}),
    "one noise for a whole group": (one_seed, {"group_spread"}),
    "reward negated": (scored(lambda s: s | {"total": -s["total"]}), {"reward_recomputed"}),
    "reward of silent audio": (scored(silent=True), {"reward_recomputed", "hears_audio"}),
    "reward hears nothing": (scored(video_only), {"reward_recomputed", "hears_audio", "hears_video"}),
    "training sigma as data fraction": (data_fraction, {"training_noise"}),
    "training on another grid": (other_grid, {"training_grid"}),
    "advantages across prompts": (advantages_across_prompts, {"group_mean_advantage"}),
    "probabilities shuffled": (shuffled, {"advantages_follow_rewards"}),
    "probabilities upside down": (flipped_sign, {"advantages_follow_rewards"}),
    "audio left out of the loss": (audio_left_out, {"every_modality_trains"}),
    "old policy never refreshed": (never_refreshed, {"old_policy_law"}),
    "loss not finite": (not_finite, {"finite_gradient"}),
}


def two_steps(run: loop.Run) -> None:
    loop.train_step(run)
    loop.train_step(run)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stops_the_run_within_two_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, expected = FAULTS[name]
    run = train.set_up(small(), ToyActor())
    inject(run, monkeypatch)
    with pytest.raises(MonitorFired) as stop:
        two_steps(run)
    assert {reading.monitor for reading in stop.value.readings} >= expected


def test_a_warning_goes_on_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run = train.set_up(small(monitors={"policy": "warn"}), ToyActor(), warn=said.append)
    sampled_with(negated)(run, monkeypatch)
    loop.train_step(run)
    assert run.step == 1
    assert run.watch.counts["velocity_replay"]["fired"] == 1
    assert [text for text in said if "velocity_replay: got 2, want ≤ 1e-05" in text]


def test_a_stopped_run_says_so_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flipped_sign(None, monkeypatch)  # type: ignore[arg-type]
    assert train.train(small(), tmp_path, port=ToyActor()) == train.STOPPED
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert "advantages_follow_rewards" in summary["message"]
    assert checkpoint.listed(tmp_path / "checkpoints") == []
    assert "stopped after 0 steps" in capsys.readouterr().out


# -- more than one process -----------------------------------------------------------------------------------------------------------------------


def test_several_processes_need_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(train.Refused, match=r"2 processes needs a certificate.*loudfail gate toyactor:ToyActor"):
        train.train(small(), tmp_path / "out", port=ToyActor())
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(train.Refused, match="does not vouch"):
        train.train(small(), tmp_path / "out", certificate=tmp_path / "gate.json", port=ToyActor())
    assert not (tmp_path / "out").exists()


def test_a_certificate_that_fits_lets_a_run_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loudfail.harness import certificate

    monkeypatch.setenv("WORLD_SIZE", "2")
    port, path = ToyActor(), tmp_path / "gate.json"
    report = {"port": "toy-actor", "verdict": "holds", "complete": True, "counts": {"holds": 1}}
    path.write_text(json.dumps(certificate.make(report, certificate.fingerprint(port, [1, 2]))))
    assert train.check_gate(small(), path, False, port) == "certified"
    with pytest.raises(train.Refused, match=r"degrees \[1, 2\], this run has 4"):
        train.check_gate(small(rollout={"engine": "vllm_omni", "tp": 4}), path, False, port)
    other = ToyActor(dtype="bfloat16")
    with pytest.raises(train.Refused, match=r"port\.dtype: certified float32, here bfloat16"):
        train.check_gate(small(), path, False, other)


def test_two_ungated_processes_train_as_one(tmp_path: Path) -> None:
    recipe = tmp_path / "toy.toml"
    recipe.write_text(
        'steps = 1\nseed = 5\n[model]\nport = "toyactor:ToyActor"\ndevice = "cpu"\n[rollout]\ncalls = 4\n'
        "[algorithm]\nprompts = 4\nsamples = 4\n[validation]\nsamples = 2\ncalls = 3\n"
    )
    train.train(small(steps=1), tmp_path / "one", port=ToyActor())
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "loudfail.harness.cli", "train", str(recipe), "--ungated", "--out", str(tmp_path / "two")]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank)}, cwd=Path(__file__).parent, **output) for rank in range(2)]  # type: ignore[call-overload]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "UNGATED" in outputs[0]
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["gated"] == "ungated"
    saved = checkpoint.load(tmp_path / "two" / "checkpoints" / "step-000001")
    assert saved.record["gated"] == "ungated"
    want = tensors(tmp_path / "one", 1)
    for name in want:
        if name.endswith("exp_avg"):
            torch.testing.assert_close(saved.tensors[name], want[name], rtol=1e-4, atol=1e-7)


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""Train the tiny MiniMax H3 checkpoint on the synthetic world: ``python -m loudfail.golden.train_tiny``.

Writes ``h3_tiny.safetensors`` (the transformer's own state dict, float32) and ``h3_tiny.json`` (how it was made and how good it is).

Convention checks need a model that has learned something, and that was taught by somebody else than the port under test. So nothing here goes
through the port's velocity: inputs come from diffusers' own layout, timestep and patch functions, the target is the vendor's (time ``1 − sigma``,
raw output ``x0 − noise``), and the result is judged by samples of the vendor's own loop. Of the port, only prompts and given frames are used.

One thread, fixed seeds, deterministic kernels: the same machine and versions give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loudfail.harness import synthetic
from loudfail.harness.ports.h3 import CHECKPOINT, GIVEN_TIME, H3, PATCH, SCALES, SHIFT, STEREO

if TYPE_CHECKING:
    from loudfail.harness.port import Conditions

#: What most batches are trained on: the size at which `H3.trained_batch` draws.
EXTENT = {axis: sizes[0] for axis, sizes in H3.extents.items()}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the weights, given the code and the versions.

    Attributes:
        steps: optimizer steps; each sees every prompt once, in a batch of its own (one packed layout serves one call).
        batch: samples a prompt and step.
        learning_rate: peak of the one-cycle schedule.
        given_every: every so many batches, the clean first frame is given.
        vary_every: every so many batches, the extent is drawn from the port's list instead of `EXTENT`.
    """

    steps: int = 1000
    batch: int = 12
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    warmup: float = 0.1
    clip: float = 1.0
    given_every: int = 4
    vary_every: int = 7
    seed: int = 20260101


@dataclass
class Batch:
    """Clean latents of one prompt with their conditions, and the noise levels ``(video, audio)`` at which they are trained."""

    latents: dict[str, torch.Tensor]
    conditions: list[Conditions]
    sigmas: dict[str, float]


def train(settings: Settings, report: Callable[[int, float, float], None] | None = None) -> tuple[Any, list[dict[str, float]]]:
    """Train from scratch.

    Args:
        settings: see `Settings`.
        report: called after every step with its number and the video and audio loss.

    Returns:
        The model (``MiniMaxH3Transformer3DModel``, eval mode) and the losses, averaged over twentieths of the run.
    """
    from diffusers import MiniMaxH3Transformer3DModel

    with reproducible():
        torch.manual_seed(settings.seed)
        model = MiniMaxH3Transformer3DModel(**SCALES["tiny"]).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=settings.warmup, cycle_momentum=False
        )
        noise = torch.Generator().manual_seed(settings.seed + 1)
        history: list[tuple[float, float]] = []
        for step, batches in enumerate(draw_batches(H3(), settings)):
            optimizer.zero_grad()
            losses = torch.zeros(2)
            for batch in batches:
                errors = velocity_errors(model, batch, noise)
                ((errors["video"] + errors["audio"]) / len(batches)).backward()
                losses += torch.tensor([errors["video"].item(), errors["audio"].item()]) / len(batches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            history.append((losses[0].item(), losses[1].item()))
            if report is not None:
                report(step, *history[-1])
    return model.eval().requires_grad_(False), _averages(history, 20)


def draw_batches(port: H3, settings: Settings) -> Iterator[list[Batch]]:
    """The batches of each step, one a prompt."""
    generator = torch.Generator().manual_seed(settings.seed + 2)
    count, prompts = 0, [port.tokenize(prompt) for prompt in synthetic.PROMPTS]
    for _ in range(settings.steps):
        batches = []
        for (index, ids), stratum in zip(enumerate(prompts), torch.randperm(len(prompts), generator=generator).tolist(), strict=True):
            extent = EXTENT
            if count % settings.vary_every == settings.vary_every - 1:
                extent = {axis: sizes[int(torch.randint(len(sizes), (), generator=generator))] for axis, sizes in port.extents.items()}
            latents = synthetic.sample(shapes(extent), [index] * settings.batch, seed=settings.seed + count)
            if count % settings.given_every == settings.given_every - 1:
                frames = synthetic.first_frame(latents)
                conditions = [port.condition(ids, {"first": frame}, seed=count * settings.batch + place) for place, frame in enumerate(frames)]
            else:
                conditions = [port.condition(ids)] * settings.batch
            # Stratified over the batches of a step: sigma decides the size of the loss far more than anything else.
            level = (stratum + float(torch.rand((), generator=generator))) / len(prompts)
            batches.append(Batch(latents, conditions, draw_sigmas(level, generator)))
            count += 1
        yield batches


def draw_sigmas(level: float, generator: torch.Generator) -> dict[str, float]:
    """Noise levels of both modalities: mostly where H3's two schedules are at one moment, but everywhere else too.

    ``level`` in [0, 1] is the unshifted level of the moment, 1 = noise. Checks ask the model about any pair, so it must have seen any pair.
    """
    kind, free = torch.rand(2, generator=generator).tolist()
    if kind < 0.5:
        pair = (_shift(level, SHIFT["video"]), _shift(level, SHIFT["audio"]))
    elif kind < 0.7:
        pair = (_shift(level, 3.0), _shift(level, 1.5))
    elif kind < 0.85:
        pair = (level, level)
    else:
        pair = (level, free)
    return {modality: min(max(sigma, 1e-3), 1.0) for modality, sigma in zip(("video", "audio"), pair, strict=True)}


def velocity_errors(
    model: Any, batch: Batch, noise: torch.Generator, told: Mapping[str, float] | None = None, sign: float = 1.0
) -> dict[str, torch.Tensor]:
    """Mean squared error of the model's raw output against ``x0 − noise``, per modality, given rows left out.

    Args:
        model: the transformer.
        batch: what to noise.
        noise: draws the noise.
        told: noise levels that the model is *told*, if not the true ones (to measure how much the time label matters).
        sign: factor on the model's output (to measure how much the sign matters).
    """
    from diffusers import MiniMaxH3Scheduler

    drawn = {modality: torch.randn(clean.shape, generator=noise) for modality, clean in batch.latents.items()}
    scheduler = MiniMaxH3Scheduler()  # its forward process is t·x0 + (1 − t)·noise, whatever the shift
    mixed = {m: scheduler.scale_noise(clean, 1.0 - batch.sigmas[m], drawn[m]) for m, clean in batch.latents.items()}
    given = batch.conditions[0].extra["given_rows"].shape[0]
    video, audio = model(**model_inputs(mixed, batch.conditions, told or batch.sigmas), return_dict=False)
    target = to_rows({m: clean - drawn[m] for m, clean in batch.latents.items()})
    return {
        "video": torch.nn.functional.mse_loss(sign * video[:, given:], target["video"]),
        "audio": torch.nn.functional.mse_loss(sign * audio, target["audio"]),
    }


def model_inputs(latents: Mapping[str, torch.Tensor], conditions: Sequence[Conditions], sigmas: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """The transformer's arguments for samples of one layout, by diffusers' own builders."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep

    first = conditions[0]
    positions, tags, video, audio, text, given_video, given_audio = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        first.extra["tags"], *latents["video"].shape[2:], latents["audio"].shape[-1], PATCH, STEREO, 2, 0, tuple(first.given)
    )
    time_video, time_audio = 1.0 - sigmas["video"], 1.0 - sigmas["audio"]
    timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, given_video, given_audio, text.numel(), time_video, time_audio, max(time_video, GIVEN_TIME), 1.0
    )
    rows, given = to_rows(latents), torch.stack([condition.extra["given_rows"] for condition in conditions])
    return {
        "hidden_states": torch.cat([given, rows["video"]], dim=1),
        "audio_hidden_states": rows["audio"],
        "encoder_hidden_states": torch.stack([condition.embeds for condition in conditions]),
        "timestep": timestep,
        "timestep_indices": indices,
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def to_rows(latents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Latents as H3's rows ``(B, rows, width)``: diffusers' patches for video, channel after channel for audio (as its latent step lays them out)."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

    video, audio = latents["video"], latents["audio"]
    patches = patchify_video_latents(video, PATCH)
    return {"video": patches.view(video.shape[0], -1, patches.shape[-1]), "audio": audio.transpose(-2, -1).flatten(1, 2)}


def from_rows(rows: Mapping[str, torch.Tensor], sizes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Inverse of `to_rows` for latent ``sizes`` of one sample, found by sending the numbers 0, 1, 2, … through it."""
    numbers = {m: torch.arange(torch.Size(size).numel()).double().view(1, *size) for m, size in sizes.items()}
    latents = {}
    for modality, order in to_rows(numbers).items():
        flat = torch.empty_like(rows[modality]).flatten(1)
        flat[:, order.flatten().long()] = rows[modality].flatten(1)
        latents[modality] = flat.view(-1, *sizes[modality])
    return latents


def sample_by_vendor(
    model: Any, port: H3, classes: Sequence[int], calls: int, seed: int, given: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Samples of the vendor's own loop, one prompt each: modality → ``(B, *shape)``; ``given`` holds clean first frames ``(B, 24, 1, h, w)``."""
    from loudfail.harness.ports import h3_vendor

    generator = torch.Generator().manual_seed(seed)
    finals: dict[str, list[torch.Tensor]] = {"video": [], "audio": []}
    with torch.no_grad():
        for index, kind in enumerate(classes):
            frames = None if given is None else {"first": given[index]}
            condition = port.condition(port.tokenize(synthetic.PROMPTS[kind]), frames, seed=seed + index)
            noise = {modality: torch.randn(size, generator=generator) for modality, size in shapes(EXTENT).items()}
            last = h3_vendor.denoise(model, noise, calls, condition)[-1].after
            for modality, rows in last.items():
                finals[modality].append(rows)
    return from_rows({modality: torch.stack(rows) for modality, rows in finals.items()}, shapes(EXTENT))


def measure(model: Any, port: H3, count: int = 240) -> dict[str, Any]:
    """How good the model is: rewards of data, of the vendor's samples and of noise, and what a wrong time label or sign costs."""
    with reproducible():
        classes = [index % len(synthetic.PROMPTS) for index in range(count)]
        data = synthetic.sample(shapes(EXTENT), classes, seed=1)
        noise = {m: torch.randn(clean.shape, generator=torch.Generator().manual_seed(2)) for m, clean in data.items()}
        rewards = {"data": _scores(data, classes), "noise": _scores(noise, classes)}
        for calls in (8, 16):
            rewards[f"samples of {calls} calls"] = _scores(sample_by_vendor(model, port, classes, calls, seed=3), classes)
        given = synthetic.first_frame(data)
        led = sample_by_vendor(model, port, classes, 8, seed=4, given=given)
        rewards["samples of 8 calls, first frame given"] = _scores(led, classes)
        follows = torch.corrcoef(torch.stack([led["video"][:, :, 1:].flatten(1).mean(1), given.flatten(1).mean(1)]))[0, 1].item()
        return {"samples": count, "reward": rewards, "brightness_follows_first_frame": follows, "velocity_error": _velocity_errors(model, port)}


def _velocity_errors(model: Any, port: H3) -> dict[str, dict[str, float]]:
    """Mean squared velocity error per modality on fresh data: as trained, and with a wrong time label or sign."""
    totals: dict[str, dict[str, float]] = {}
    variants: dict[str, tuple[Callable[[dict[str, float]], dict[str, float]], float]] = {
        "right": (lambda s: s, 1.0),
        "time label flipped": (lambda s: {m: 1.0 - value for m, value in s.items()}, 1.0),
        "time labels of video and audio swapped": (lambda s: {"video": s["audio"], "audio": s["video"]}, 1.0),
        "other sign": (lambda s: s, -1.0),
    }
    pairs = [(a, b) for a in (0.1, 0.3, 0.6, 0.9) for b in (0.2, 0.45, 0.75)]
    with torch.no_grad():
        for name, (told, sign) in variants.items():
            sums = {"video": 0.0, "audio": 0.0}
            for place, (video, audio) in enumerate(pairs):
                index = place % len(synthetic.PROMPTS)
                latents = synthetic.sample(shapes(EXTENT), [index] * 16, seed=100 + place)
                conditions = [port.condition(port.tokenize(synthetic.PROMPTS[index]))] * 16
                sigmas = {"video": video, "audio": audio}
                errors = velocity_errors(model, Batch(latents, conditions, sigmas), torch.Generator().manual_seed(place), told(sigmas), sign)
                sums = {m: sums[m] + errors[m].item() / len(pairs) for m in sums}
            totals[name] = sums
    return totals


def shapes(extent: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """H3's latent shapes of one sample."""
    return {"video": (24, extent["frames"], extent["height"], extent["width"]), "audio": (STEREO, 32, extent["audio"])}


@contextmanager
def reproducible() -> Iterator[None]:
    """One thread and deterministic kernels, global random state kept; all of it put back afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict)


def save(model: Any, record: dict[str, Any], path: Path) -> None:
    """Write the weights and, next to them, the record with their hash; each through a temporary name."""
    from safetensors.torch import save as serialize

    path.parent.mkdir(parents=True, exist_ok=True)
    content = serialize({name: value.contiguous() for name, value in model.state_dict().items()})
    weights = path.with_suffix(".safetensors.part")
    weights.write_bytes(content)
    record = {"schema": 1, "file": path.name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), **record}
    text = path.with_suffix(".json.part")
    text.write_text(json.dumps(_rounded(record), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(weights, path)
    os.replace(text, path.with_suffix(".json"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; `Settings` has the defaults."""
    parser = argparse.ArgumentParser(prog="python -m loudfail.golden.train_tiny", description="Train the tiny H3 checkpoint on the synthetic world.")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=CHECKPOINT, help="file to write, .safetensors; a .json is put next to it (default: the package's own)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.out.suffix != ".safetensors" or chosen.steps < 20:
        parser.error("--out must end in .safetensors, and --steps be 20 or more")
    settings, start = Settings(steps=chosen.steps), time.monotonic()

    def report(step: int, video: float, audio: float) -> None:
        if step % 50 == 49 or step + 1 == settings.steps:
            print(
                f"step {step + 1:5d} of {settings.steps}  loss video {video:.4f} audio {audio:.4f}  {time.monotonic() - start:5.0f} s",
                file=sys.stderr,
            )

    model, losses = train(settings, report)
    seconds = time.monotonic() - start
    quality = measure(model, H3())
    record = {
        "claim": "MiniMaxH3Transformer3DModel, trained by flow matching on the synthetic world of loudfail.harness.synthetic",
        "command": f"python -m loudfail.golden.train_tiny --steps {settings.steps}",
        "architecture": SCALES["tiny"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "extent": EXTENT,
        "settings": asdict(settings),
        "losses": losses,
        "quality": quality,
        "training_seconds": seconds,
        "threads": 1,
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            **{package: version(package) for package in ("torch", "diffusers", "transformers", "safetensors")},
        },
    }
    save(model, record, chosen.out)
    print(json.dumps(_rounded(quality), indent=2))


def _scores(latents: Mapping[str, torch.Tensor], classes: Sequence[int]) -> dict[str, float]:
    scores = synthetic.score(latents, classes)
    return {"reward": synthetic.reward(scores).mean().item(), **{name: value.mean().item() for name, value in scores.items()}}


def _shift(level: float, shift: float) -> float:
    return shift * level / (1 + (shift - 1) * level)


def _averages(history: Sequence[tuple[float, float]], parts: int) -> list[dict[str, float]]:
    size = max(1, len(history) // parts)
    chunks = [history[start : start + size] for start in range(0, len(history), size)]
    return [{"video": sum(v for v, _ in chunk) / len(chunk), "audio": sum(a for _, a in chunk) / len(chunk)} for chunk in chunks]


def _rounded(value: Any) -> Any:
    """Five significant digits for people; no decision is taken on them."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()

"""Train a port's tiny checkpoint on the synthetic world: ``python -m loudfail.golden.train_tiny --port h3``.

Writes ``h3_tiny.safetensors`` (the transformer's own state dict, float32) and ``h3_tiny.json`` (how it was made and how good it is). What is taught
is in `loudfail.golden.lessons`.

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

from loudfail.golden import lessons
from loudfail.golden.lessons import Batch, Lesson
from loudfail.harness import synthetic
from loudfail.harness.case import Case

if TYPE_CHECKING:
    from loudfail.harness.actor import FusedPort


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


def train(lesson: Lesson, settings: Settings, report: Callable[[int, float, float], None] | None = None) -> tuple[Any, list[dict[str, float]]]:
    """Train from scratch.

    Args:
        lesson: what is taught.
        settings: see `Settings`.
        report: called after every step with its number and the video and audio loss.

    Returns:
        The transformer (eval mode) and the losses, averaged over twentieths of the run.
    """
    kind, architecture = lesson.port.transformer(), lesson.port.scales["tiny"]
    with reproducible():
        torch.manual_seed(settings.seed)
        model = kind(**architecture).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=settings.warmup, cycle_momentum=False
        )
        noise = torch.Generator().manual_seed(settings.seed + 1)
        history: list[tuple[float, float]] = []
        for step, batches in enumerate(draw_batches(lesson, settings)):
            optimizer.zero_grad()
            losses = torch.zeros(2)
            for batch in batches:
                errors = velocity_errors(lesson, model, batch, noise)
                ((errors["video"] + errors["audio"]) / len(batches)).backward()
                losses += torch.tensor([errors["video"].item(), errors["audio"].item()]) / len(batches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            history.append((losses[0].item(), losses[1].item()))
            if report is not None:
                report(step, *history[-1])
    return model.eval().requires_grad_(False), _averages(history, 20)


def draw_batches(lesson: Lesson, settings: Settings) -> Iterator[list[Batch]]:
    """The batches of each step, one a prompt."""
    generator = torch.Generator().manual_seed(settings.seed + 2)
    count, axes = 0, lesson.port.extents
    for _ in range(settings.steps):
        batches = []
        for kind, stratum in enumerate(torch.randperm(len(synthetic.PROMPTS), generator=generator).tolist()):
            extent = extent_of(lesson.port)
            if count % settings.vary_every == settings.vary_every - 1:
                extent = {axis: sizes[int(torch.randint(len(sizes), (), generator=generator))] for axis, sizes in axes.items()}
            given = count % settings.given_every == settings.given_every - 1
            requests = count * settings.batch if given else None
            batch = lessons.draw(lesson, extent, kind, settings.batch, settings.seed + count, requests)
            # Stratified over the batches of a step: sigma decides the size of the loss far more than anything else.
            level = (stratum + float(torch.rand((), generator=generator))) / len(synthetic.PROMPTS)
            batch.sigmas = draw_sigmas(lesson, level, generator)
            batches.append(batch)
            count += 1
        yield batches


def extent_of(port: FusedPort) -> dict[str, int]:
    """What most batches are trained on: the size at which `Port.trained_batch` draws."""
    return {axis: sizes[0] for axis, sizes in port.extents.items()}


def shapes(port: FusedPort) -> dict[str, tuple[int, ...]]:
    """Latent shapes of one sample of that size."""
    return port.shapes(Case(extent=extent_of(port)))


def draw_sigmas(lesson: Lesson, level: float, generator: torch.Generator) -> dict[str, float]:
    """Noise levels of both modalities: mostly those of one moment of sampling, but everywhere else too.

    ``level`` in [0, 1] is the unshifted level of the moment, 1 = noise. Checks ask the model about any pair, so it must have seen any pair.
    """
    kind, free = torch.rand(2, generator=generator).tolist()
    often, sometimes = lesson.levels(level)
    pair = often if kind < 0.5 else sometimes if kind < 0.7 else (level, level) if kind < 0.85 else (level, free)
    return {modality: min(max(sigma, 1e-3), 1.0) for modality, sigma in zip(("video", "audio"), pair, strict=True)}


def velocity_errors(
    lesson: Lesson, model: Any, batch: Batch, noise: torch.Generator, told: Mapping[str, float] | None = None, sign: float = 1.0
) -> dict[str, torch.Tensor]:
    """`Lesson.errors` with noise from a generator; ``told`` are noise levels that the model is told, if not the true ones."""
    drawn = {modality: torch.randn(clean.shape, generator=noise) for modality, clean in batch.latents.items()}
    return lesson.errors(model, batch, drawn, told or batch.sigmas, sign)


def sample_by_vendor(
    lesson: Lesson, model: Any, classes: Sequence[int], calls: int, seed: int, given: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Samples of the vendor's own loop, one prompt each: modality → ``(B, *shape)``; ``given`` holds clean first frames ``(B, C, 1, h, w)``."""
    generator, port = torch.Generator().manual_seed(seed), lesson.port
    finals: dict[str, list[torch.Tensor]] = {"video": [], "audio": []}
    with torch.no_grad():
        for index, kind in enumerate(classes):
            frames = None if given is None else {"first": given[index]}
            condition = port.condition(port.tokenize(synthetic.PROMPTS[kind]), frames, seed=seed + index)
            noise = {modality: torch.randn(size, generator=generator) for modality, size in shapes(port).items()}
            last = lesson.denoise(model, noise, calls, condition)[-1].after
            for modality, rows in last.items():
                finals[modality].append(rows)
    return lessons.latents_of(lesson, {modality: torch.stack(rows) for modality, rows in finals.items()}, shapes(port))


def measure(lesson: Lesson, model: Any, count: int = 240) -> dict[str, Any]:
    """How good the model is: rewards of data, of the vendor's samples and of noise, and what a wrong time label or sign costs."""
    with reproducible():
        classes, axis = [index % len(synthetic.PROMPTS) for index in range(count)], lesson.port.time_axis["audio"]
        data = synthetic.sample(shapes(lesson.port), classes, seed=1, audio_time=axis)
        noise = {m: torch.randn(clean.shape, generator=torch.Generator().manual_seed(2)) for m, clean in data.items()}
        rewards = {"data": _scores(data, classes, axis), "noise": _scores(noise, classes, axis)}
        for calls in (8, 16):
            rewards[f"samples of {calls} calls"] = _scores(sample_by_vendor(lesson, model, classes, calls, seed=3), classes, axis)
        given = synthetic.first_frame(data)
        led = sample_by_vendor(lesson, model, classes, 8, seed=4, given=given)
        rewards["samples of 8 calls, first frame given"] = _scores(led, classes, axis)
        follows = torch.corrcoef(torch.stack([led["video"][:, :, 1:].flatten(1).mean(1), given.flatten(1).mean(1)]))[0, 1].item()
        return {"samples": count, "reward": rewards, "brightness_follows_first_frame": follows, "velocity_error": _velocity_errors(lesson, model)}


def _velocity_errors(lesson: Lesson, model: Any) -> dict[str, dict[str, float]]:
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
                batch = lessons.draw(lesson, extent_of(lesson.port), index, 16, 100 + place, None)
                batch.sigmas = {"video": video, "audio": audio}
                errors = velocity_errors(lesson, model, batch, torch.Generator().manual_seed(place), told(batch.sigmas), sign)
                sums = {m: sums[m] + errors[m].item() / len(pairs) for m in sums}
            totals[name] = sums
    return totals


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
    parser = argparse.ArgumentParser(prog="python -m loudfail.golden.train_tiny", description="Train a tiny checkpoint on the synthetic world.")
    parser.add_argument("--port", choices=sorted(lessons.LESSONS), default="h3", help="whose (default %(default)s)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument("--out", type=Path, help="file to write, .safetensors; a .json is put next to it (default: the package's own)")
    chosen = parser.parse_args(arguments)
    lesson = lessons.find(chosen.port)
    chosen.out = chosen.out or lesson.port.checkpoint
    if chosen.out.suffix != ".safetensors" or chosen.steps < 20:
        parser.error("--out must end in .safetensors, and --steps be 20 or more")
    settings, start = Settings(steps=chosen.steps), time.monotonic()

    def report(step: int, video: float, audio: float) -> None:
        if step % 50 == 49 or step + 1 == settings.steps:
            print(
                f"step {step + 1:5d} of {settings.steps}  loss video {video:.4f} audio {audio:.4f}  {time.monotonic() - start:5.0f} s",
                file=sys.stderr,
            )

    model, losses = train(lesson, settings, report)
    seconds = time.monotonic() - start
    quality = measure(lesson, model)
    record = {
        "claim": f"{type(model).__name__}, trained by flow matching on the synthetic world of loudfail.harness.synthetic",
        "command": f"python -m loudfail.golden.train_tiny --port {chosen.port} --steps {settings.steps}",
        "architecture": lesson.port.scales["tiny"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "extent": extent_of(lesson.port),
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


def _scores(latents: Mapping[str, torch.Tensor], classes: Sequence[int], audio_time: int) -> dict[str, float]:
    scores = synthetic.score(latents, classes, audio_time)
    return {"reward": synthetic.reward(scores).mean().item(), **{name: value.mean().item() for name, value in scores.items()}}


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

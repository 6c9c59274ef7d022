"""A synthetic joint audio-video world in latents, small enough for a tiny model to really learn it, with a verifiable reward.

Every prompt names a class, and every class has an audio template. A sample's audio is its *energy* times a template; its video has a *brightness*.
Two things relate the parts, and the data hold to both only sometimes, so that reinforcement learning has something to improve:

- prompt → audio: the template is the prompt's own with a probability that depends on the prompt (`FIDELITY`), another one otherwise;
- audio → video: the brightness is ``energy − 1`` with probability `COUPLING`, unrelated otherwise.

The reward measures exactly these two, as the sub-scores ``clap`` and ``av``. The world knows no model: it is given the latent shapes of two
modalities, video ``(channels, frames, height, width)`` and audio ``(..., width, length)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loudfail.harness.case import Case

#: One prompt a class. Natural, and of unequal length for any tokenizer.
PROMPTS = ("rain", "a bell rings", "two dogs bark", "wind in the tall trees", "a train passes", "the crowd claps and cheers")
#: Probability that a sample's audio belongs to its prompt. Prompts differ in difficulty on purpose: only then do groups have different mean rewards.
FIDELITY = (0.25, 0.35, 0.45, 0.50, 0.60, 0.70)
#: Probability that the brightness follows the energy.
COUPLING = 0.4
#: Range of the energy, of the brightness that does not follow it, and the standard deviation of the noise on every element of both modalities.
ENERGY, BRIGHTNESS, NOISE = (0.4, 1.6), (-0.8, 0.8), 0.25
#: Amplitude of the spatial pattern of a video, and the tolerance (standard deviation) of the ``av`` score in units of brightness.
PATTERN, AV_WIDTH = 0.5, 0.4

MODALITIES = ("video", "audio")


def templates(width: int) -> torch.Tensor:
    """Audio templates ``(classes, width)`` float64: orthogonal, every element ±1, hence of norm ``sqrt(width)``, and exact on every machine.

    Raises:
        ValueError: ``width`` is no multiple of 8.
    """
    if width <= 0 or width % 8:
        raise ValueError(f"audio latents of width {width} have no orthogonal templates; the synthetic world wants a multiple of 8")
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return hadamard[1 : 1 + len(PROMPTS)].repeat(1, width // 8)  # row 0 is constant: left out, so that silence plus an offset is no class


def sample(shapes: Mapping[str, Sequence[int]], classes: Sequence[int], seed: int, audio_time: int = -1) -> dict[str, torch.Tensor]:
    """Draw clean latents for prompts.

    Args:
        shapes: ``video`` → ``(channels, frames, height, width)``, ``audio`` → ``(..., width, length)``; sizes of one sample.
        classes: index into `PROMPTS` of each sample.
        seed: the draw is a pure function of all arguments.
        audio_time: the axis of one sample's audio that is ``length``, wherever a model has it.

    Returns:
        Modality → ``(B, *shape)`` float32.

    Raises:
        ValueError: the shapes are of other modalities or ranks, or a class does not exist.
    """
    shapes = {m: [*torch.empty(*s, device="meta").movedim(audio_time, -1).shape] if m == "audio" and len(s) > 1 else s for m, s in shapes.items()}
    _check(shapes, classes)
    case, count = Case(seed=seed), len(classes)

    def uniform(purpose: str, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=case.generator(f"world/{purpose}"), dtype=torch.float64)

    def normal(modality: str) -> torch.Tensor:
        return torch.randn(count, *shapes[modality], generator=case.generator(f"world/noise/{modality}"))

    own = torch.tensor(list(classes))
    other = (own + 1 + (uniform("other class") * (len(PROMPTS) - 1)).long()) % len(PROMPTS)
    heard = torch.where(uniform("faithful") < torch.tensor(FIDELITY, dtype=torch.float64)[own], own, other)
    energy = uniform("energy", *ENERGY)
    brightness = torch.where(uniform("coupled") < COUPLING, energy - 1, uniform("brightness", *BRIGHTNESS))

    *lead, width, _ = shapes["audio"]
    tone = (energy[:, None] * templates(width)[heard]).view(count, *[1] * len(lead), width, 1)
    audio = tone.float() + NOISE * normal("audio")

    height, across = shapes["video"][2:]
    turns = [torch.arange(size, dtype=torch.float64) / size for size in (height, across)]
    rows, columns, start = (uniform(name).view(count, 1, 1) for name in ("rows", "columns", "phase"))
    phase = 4 * rows * turns[0][:, None] + 4 * columns * turns[1] + start
    pattern = PATTERN * torch.cos(2 * torch.pi * phase)
    pattern = pattern - pattern.mean((1, 2), keepdim=True)  # the pattern must not be brightness
    video = (brightness[:, None, None] + pattern).view(count, 1, 1, height, across).float() + NOISE * normal("video")
    return {"video": video, "audio": audio.movedim(-1, audio_time + (audio_time >= 0)).contiguous()}


def score(latents: Mapping[str, torch.Tensor], classes: Sequence[int], audio_time: int = -1) -> dict[str, torch.Tensor]:
    """Named sub-scores of clean latents, each ``(B,)`` float64 in [0, 1], higher is better.

    ``clap``: how much the audio sounds like the prompt's template, ``(1 + cosine) / 2``; 0.5 for silence and for another class.
    ``av``: how well the brightness matches the energy, ``exp(−(brightness − (energy − 1))² / (2 · 0.4²))``.

    ``audio_time``: as for `sample`.

    Raises:
        ValueError: shapes do not fit, or a class does not exist.
    """
    if "audio" in latents and latents["audio"].ndim > 2:
        latents = {**latents, "audio": latents["audio"].movedim(audio_time + (audio_time >= 0), -1)}
    _check({modality: latents[modality].shape[1:] for modality in latents}, classes)
    if any(latents[modality].shape[0] != len(classes) for modality in MODALITIES):
        raise ValueError(f"{len(classes)} prompts for {[latents[modality].shape[0] for modality in MODALITIES]} samples of {MODALITIES}")
    audio = latents["audio"].detach().cpu().double().movedim(-2, -1).flatten(1, -2).mean(1)  # the mean row
    video = latents["video"].detach().cpu().double()
    wanted = templates(audio.shape[1])[torch.tensor(list(classes))]
    loudness = torch.linalg.vector_norm(audio, dim=1)
    cosine = (audio * wanted).sum(1) / (loudness * audio.shape[1] ** 0.5).clamp_min(1e-12)
    miss = video.flatten(1).mean(1) - (loudness / audio.shape[1] ** 0.5 - 1)
    return {"clap": (1 + cosine) / 2, "av": torch.exp(-(miss**2) / (2 * AV_WIDTH**2))}


def reward(scores: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The reward ``(B,)`` float64: half ``clap``, half ``av``."""
    return 0.5 * scores["clap"] + 0.5 * scores["av"]


def first_frame(latents: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The clean first frame ``(B, channels, 1, height, width)`` of video latents, to be given as a condition."""
    return latents["video"][:, :, :1].clone()


def _check(shapes: Mapping[str, Sequence[int]], classes: Sequence[int]) -> None:
    if sorted(shapes) != sorted(MODALITIES):
        raise ValueError(f"the synthetic world has video and audio, not {', '.join(sorted(shapes)) or 'nothing'}")
    if len(shapes["video"]) != 4 or len(shapes["audio"]) < 2:
        raise ValueError(f"want video (channels, frames, height, width) and audio (..., width, length), got {dict(shapes)}")
    wrong = [index for index in classes if not 0 <= index < len(PROMPTS)]
    if wrong:
        raise ValueError(f"class {wrong[0]} is none of 0 to {len(PROMPTS) - 1}")

"""Scorers without a model.

The synthetic world's reward scores clean latents, not decoded media: a tiny random decoder leaves no meaning in the media. The agreement of loudness
with brightness scores media; it says whether sound and picture arrive, not whether they are good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loudfail.harness import synthetic
from loudfail.trainer.rewards.audio import mix_down
from loudfail.trainer.rewards.scorer import Provenance, Scorer, ScorerFailed, Scores


@dataclass(frozen=True, eq=False)
class LatentMedia:
    """The clean latents of one sample in the place of its media: video ``(channels, frames, height, width)``, audio ``(..., width, length)``."""

    video: torch.Tensor
    audio: torch.Tensor

    @staticmethod
    def split(latents: Mapping[str, torch.Tensor], audio_time: int = -1) -> list[LatentMedia]:
        """One item for each sample of a batch of latents; ``audio_time`` is the axis of one sample's audio that is ``length``."""
        return [LatentMedia(video, audio.movedim(audio_time, -1)) for video, audio in zip(latents["video"], latents["audio"], strict=True)]


class SyntheticScorer(Scorer):
    """How much the audio is the prompt's template, and how well the brightness follows the energy; both in [0, 1]."""

    name = "synthetic"
    outputs = {"synthetic_text_audio": frozenset({"audio", "prompt"}), "synthetic_audio_video": frozenset({"audio", "video"})}

    def measure(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
        unknown = [prompt for prompt in prompts if prompt not in synthetic.PROMPTS]
        if unknown:
            raise ScorerFailed(f"synthetic: the world has no prompt {unknown[0]!r}; it has {synthetic.PROMPTS}")
        latents = {part: torch.stack([torch.as_tensor(getattr(item, part)) for item in media]) for part in ("video", "audio")}
        if not all(torch.isfinite(x).all() for x in latents.values()):
            raise ScorerFailed("synthetic: latents are not finite")
        scores = synthetic.score(latents, [synthetic.PROMPTS.index(prompt) for prompt in prompts])
        return {"synthetic_text_audio": scores["clap"], "synthetic_audio_video": scores["av"]}

    def provenance(self) -> tuple[Provenance, ...]:
        return (Provenance(self.name, "synthetic", "templates and brightness, no model", ("loudfail.harness.synthetic",)),)


class LoudnessBrightnessScorer(Scorer):
    """How well the loudness of each frame's stretch of sound follows the frame's brightness: the mean over frames of ``exp(−(b − l)² / 0.5)``.

    ``b`` is the frame's mean pixel in [0, 1]; ``l`` is twice the root mean square of the sound while the frame is shown, silence beyond its end.
    """

    name = "loudness_brightness"
    outputs = {"loudness_brightness": frozenset({"audio", "video"})}

    def measure(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
        return {"loudness_brightness": torch.tensor([self._agreement(item) for item in media], dtype=torch.float64)}

    def _agreement(self, item: Any) -> float:
        power = torch.cat([torch.zeros(1, dtype=torch.float64), mix_down(item.audio).double().square().cumsum(0)])
        brightness = torch.tensor(item.video.frames).double().mean((1, 2, 3)) / 255
        edges = torch.arange(len(brightness) + 1, dtype=torch.float64) * (item.audio.sample_rate / item.video.fps)
        reached = power[edges.round().long().clamp(max=len(power) - 1)]
        mean = (reached[1:] - reached[:-1]) / (item.audio.sample_rate / item.video.fps)
        return float(torch.exp(-((brightness - 2 * mean.sqrt()) ** 2) / 0.5).mean())

    def provenance(self) -> tuple[Provenance, ...]:
        return (Provenance(self.name, "synthetic", "no model", (f"{type(self).__module__}.{type(self).__qualname__}",)),)

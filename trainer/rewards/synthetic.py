"""The synthetic world's reward as a scorer. It scores clean latents, not decoded media: a tiny random decoder leaves no meaning in the media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loudfail.harness import synthetic
from loudfail.trainer.rewards.scorer import Provenance, Scorer, ScorerFailed, Scores


@dataclass(frozen=True, eq=False)
class LatentMedia:
    """The clean latents of one sample in the place of its media: video ``(channels, frames, height, width)``, audio ``(..., width, length)``."""

    video: torch.Tensor
    audio: torch.Tensor

    @staticmethod
    def split(latents: Mapping[str, torch.Tensor]) -> list[LatentMedia]:
        """One item for each sample of a batch of latents."""
        return [LatentMedia(video, audio) for video, audio in zip(latents["video"], latents["audio"], strict=True)]


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

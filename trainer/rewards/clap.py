"""CLAP text-audio agreement through `transformers.ClapModel`, in process, from a local directory.

The score ``clap`` is the cosine between the prompt's embedding and the audio's, in [-1, 1]. Audio is mixed down to mono, resampled to 48 kHz and cut
into windows that the model takes whole, whose embeddings are averaged and renormalised; nothing is cropped at random and nothing is fused.

Each guard below stands for a way in which this fails in silence with transformers 5: a directory without tokenizer files gives a five-token
tokenizer (every prompt the same), a shared ``padding`` argument switches repeat-padding off, clips beyond the window are cropped at random, fusion
flags a random item of the batch, a missing sample rate is only warned about, and a two-dimensional waveform is taken for a batch of clips.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from loudfail.trainer.rewards.audio import mix_down, resample_soxr, windows
from loudfail.trainer.rewards.scorer import Arrival, Provenance, Scorer, ScorerFailed, Scores

if TYPE_CHECKING:
    from loudfail.harness.media import Media

RATE = 48_000
WINDOW = 480_000  # samples that a released CLAP takes whole: 10 s
TOKENS = 77  # what CLAP was trained on; the text encoder would take more


def hear(media: Sequence[Media], window: int = WINDOW) -> tuple[list[np.ndarray], torch.Tensor]:
    """What CLAP is given: windows ``(samples <= window,)`` float32 at 48 kHz, and for each the position of its sample ``(windows,)`` int64."""
    clips, owner = [], []
    for i, item in enumerate(media):
        for clip in windows(resample_soxr(mix_down(item.audio), item.audio.sample_rate, RATE), window):
            clips.append(np.ascontiguousarray(clip.numpy()))
            owner.append(i)
    return clips, torch.tensor(owner)


def agreement(audio: torch.Tensor, owner: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Cosine ``(batch,)`` float64 between each sample's mean window embedding and its own text embedding.

    Args:
        audio: ``(windows, width)``, one embedding a window.
        owner: ``(windows,)`` position of each window's sample.
        text: ``(batch, width)``.
    """
    audio, text = F.normalize(audio.double(), dim=-1), F.normalize(text.double(), dim=-1)
    mean = torch.stack([audio[owner == i].mean(0) for i in range(text.shape[0])])
    return (F.normalize(mean, dim=-1) * text).sum(-1)


class ClapScorer(Scorer):
    """CLAP through `transformers.ClapModel`; make one with `load` or, in tests, `tiny_random`.

    Raises:
        ValueError: model, tokenizer and feature extractor do not fit each other.
    """

    name = "clap"
    outputs = {"clap": frozenset({"audio", "prompt"})}

    def __init__(
        self, model: Any, tokenizer: Any, extractor: Any, *, weights: Literal["real", "tiny random"], source: str, device: str = "cpu"
    ) -> None:
        config = model.config
        size = len(tokenizer)
        if size != config.text_config.vocab_size:
            raise ValueError(
                f"the tokenizer knows {size} tokens and the text encoder {config.text_config.vocab_size}: tokenizer files are missing from {source};"
                " put tokenizer.json, or vocab.json and merges.txt, there"
            )
        if tokenizer("a")["input_ids"] == tokenizer("b")["input_ids"]:
            raise ValueError(f"the tokenizer gives 'a' and 'b' the same ids {tokenizer('a')['input_ids']}: its files in {source} are incomplete")
        if config.audio_config.enable_fusion or extractor.truncation == "fusion":
            raise ValueError(f"{source} is a fusion checkpoint, which marks a random clip of each batch as long; use an unfused one")
        if extractor.padding != "repeatpad":
            raise ValueError(f"{source} pads short clips with {extractor.padding!r}; CLAP was trained with 'repeatpad'")
        if extractor.sampling_rate != RATE or extractor.feature_size != config.audio_config.num_mel_bins:
            raise ValueError(
                f"the extractor takes {extractor.sampling_rate} Hz and gives {extractor.feature_size} mel bins;"
                f" want {RATE} Hz and the model's {config.audio_config.num_mel_bins}"
            )
        if weights == "real" and extractor.nb_max_samples != WINDOW:
            raise ValueError(f"the extractor's window is {extractor.nb_max_samples} samples; a released CLAP has {WINDOW}")
        self.model = model.eval().to(device=device, dtype=torch.float32)
        self.tokenizer, self.extractor = tokenizer, extractor
        self.weights, self.source, self.device = weights, source, device

    @classmethod
    def load(cls, directory: str | Path, *, device: str = "cpu") -> ClapScorer:
        """A checkpoint in transformers' format, such as `laion/larger_clap_general`, from a local directory; the hub is never asked.

        Raises:
            FileNotFoundError: the directory or one of its files is missing.
            ValueError: weights are missing from the checkpoint, or a part does not fit.
        """
        from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

        folder = Path(directory)
        if not folder.is_dir():
            raise FileNotFoundError(f"no directory {folder}: CLAP is loaded from a local directory only; download the checkpoint and give its path")
        names = {path.name for path in folder.iterdir()}
        if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
            raise FileNotFoundError(f"{folder} has no tokenizer.json, nor vocab.json with merges.txt")
        if not names & {"preprocessor_config.json", "processor_config.json"}:
            raise FileNotFoundError(f"{folder} has no preprocessor_config.json")
        model, info = ClapModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        random = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
        if random:
            raise ValueError(f"{folder} lacks {len(random)} weights, which would stay random, such as {random[0]}")
        return cls(
            model,
            AutoTokenizer.from_pretrained(folder, local_files_only=True),
            ClapFeatureExtractor.from_pretrained(folder, local_files_only=True),
            weights="tiny random" if getattr(model.config, "tiny_random", False) else "real",
            source=str(folder),
            device=device,
        )

    @classmethod
    def tiny_random(cls, seed: int = 0, *, window_seconds: int = 2, device: str = "cpu") -> ClapScorer:
        """The same classes with tiny random weights, for tests: its scores say nothing about a sample, and its provenance says so.

        Args:
            window_seconds: length of the model's window; short, so that little is computed. Released models have 10.
        """
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, RobertaTokenizer

        vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), "<mask>"])}
        text = {
            "vocab_size": len(vocab), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "max_position_embeddings": TOKENS + 3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "projection_dim": 16,
        }  # fmt: skip
        audio = {
            "spec_size": 128, "num_mel_bins": 64, "window_size": 8, "patch_size": 4, "patch_stride": [4, 4], "patch_embeds_hidden_size": 8,
            "depths": [1, 1, 1], "num_attention_heads": [1, 2, 2], "hidden_size": 32, "projection_dim": 16, "enable_fusion": False, "num_classes": 4,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ClapModel(ClapConfig(projection_dim=16, text_config=text, audio_config=audio, tiny_random=True))
            for name, weight in model.named_parameters():
                if weight.ndim >= 2 and "relative_position" not in name:
                    # the library's initial scale is so small that every input would get almost the same embedding
                    torch.nn.init.normal_(weight, std=1.0 if "embedding" in name else weight[0].numel() ** -0.5)
        norm = model.audio_model.audio_encoder.batch_norm  # its statistics are those of decibels
        norm.running_mean.fill_(-40.0)
        norm.running_var.fill_(900.0)
        extractor = ClapFeatureExtractor(
            feature_size=64, sampling_rate=RATE, hop_length=480, max_length_s=window_seconds, fft_window_size=1024,
            frequency_min=50, frequency_max=14000, truncation="rand_trunc", padding="repeatpad",
        )  # fmt: skip
        tokenizer = RobertaTokenizer(vocab=vocab, merges=[], model_max_length=TOKENS)
        return cls(model, tokenizer, extractor, weights="tiny random", source=f"seed {seed}", device=device)

    def save(self, directory: str | Path) -> None:
        """Write model, tokenizer and feature extractor so that `load` reads them."""
        for part in (self.model, self.tokenizer, self.extractor):
            part.save_pretrained(directory)

    def measure(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        clips, owner = hear(media, self.extractor.nb_max_samples)
        # tokenizer and extractor are called apart: through the processor, padding=True would reach the extractor and switch repeat-padding off
        sound = self.extractor(clips, sampling_rate=RATE, truncation="rand_trunc", padding="repeatpad", return_tensors="pt")["input_features"]
        if sound.shape[:2] != (len(clips), 1):
            raise ScorerFailed(f"clap: {len(clips)} windows gave features {tuple(sound.shape)}; a waveform was taken for a batch, or fused")
        text = self.tokenize(prompts)
        audio = self.model.get_audio_features(input_features=sound.to(self.device, torch.float32)).pooler_output
        words = self.model.get_text_features(input_ids=text["input_ids"], attention_mask=text["attention_mask"]).pooler_output
        return {"clap": agreement(audio.cpu(), owner, words.cpu())}

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Ids and mask ``(batch, tokens <= 77)``.

        Raises:
            ScorerFailed: different prompts got the same ids.
        """
        whole = [tuple(ids) for ids in self.tokenizer(list(prompts))["input_ids"]]
        if len(set(whole)) != len(set(prompts)):
            raise ScorerFailed(f"clap: {len(set(prompts))} different prompts became {len(set(whole))} id sequences; the tokenizer is broken")
        long = sum(len(ids) > TOKENS for ids in whole)
        if long:
            warnings.warn(f"clap hears only the first {TOKENS} tokens of {long} of {len(prompts)} prompts", stacklevel=2)
        encoded = self.tokenizer(list(prompts), truncation=True, max_length=TOKENS, padding=True, return_tensors="pt")
        return {key: encoded[key].to(self.device) for key in ("input_ids", "attention_mask")}

    def provenance(self) -> tuple[Provenance, ...]:
        classes = tuple(f"{type(part).__module__}.{type(part).__qualname__}" for part in (self.model, self.extractor, self.tokenizer))
        return (Provenance(self.name, self.weights, self.source, classes),)

    def entries(self) -> Mapping[str, torch.nn.Module]:
        return {"ClapModel.audio_model": self.model.audio_model, "ClapModel.text_model": self.model.text_model}

    def attach(self, arrivals: list[Arrival], stack: ExitStack) -> None:
        super().attach(arrivals, stack)
        extract = type(self.extractor).__call__

        def record(extractor: Any, raw_speech: Any, *args: Any, **kwargs: Any) -> Any:
            copies = [np.array(x) for x in raw_speech] if isinstance(raw_speech, list) else np.array(raw_speech)
            arrivals.append(Arrival("ClapFeatureExtractor", "raw_speech", copies, kwargs.get("sampling_rate")))
            return extract(extractor, raw_speech, *args, **kwargs)

        stack.enter_context(patch.object(type(self.extractor), "__call__", record))

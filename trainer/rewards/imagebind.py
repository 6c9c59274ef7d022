"""ImageBind agreement between audio, video and prompt, with the real `ImageBindModel` of the optional package `imagebind-unofficial`.

The sub-scores are cosines in [-1, 1]. Only the package's model files are imported: its ``__init__`` imports torchaudio, torchvision and pytorchvideo
releases that do not exist together, and its preprocessing is not needed.

ImageBind's code and weights are licensed CC BY-NC-SA 4.0: non-commercial. Nothing of either is part of this project.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from loudfail.harness.violation import Unavailable
from loudfail.trainer.rewards.imagebind_inputs import audio_clips, video_views
from loudfail.trainer.rewards.scorer import Provenance, Scorer, Scores

if TYPE_CHECKING:
    from loudfail.harness.media import Media

LICENCE = "ImageBind code and weights: CC BY-NC-SA 4.0, non-commercial use only"
INSTALL = "pip install --no-deps imagebind-unofficial==0.1.1 && pip install ftfy iopath einops regex"
UNUSED = ("depth", "thermal", "imu")
END_OF_TEXT = 49407


class _NoDropPath(torch.nn.Module):
    """Stands in for timm's stochastic depth, which does nothing in evaluation; timm imports torchvision, which need not be there."""

    def __init__(self, drop_prob: float = 0.0, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("this ImageBind is for scoring only; call eval()")
        return x


@lru_cache(maxsize=1)
def import_imagebind() -> tuple[ModuleType, ModuleType, Path]:
    """The package's model module, its preprocessor module, and its folder, imported without its ``__init__``.

    Raises:
        Unavailable: the package is not installed, or only the empty placeholder of that name is.
    """
    spec = importlib.util.find_spec("imagebind")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folder = next((p for p in folders if (p / "models" / "imagebind_model.py").is_file()), None)
    if folder is None:
        try:
            version = importlib.metadata.version("imagebind")
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable(f"ImageBind is not installed: {INSTALL} ({LICENCE})") from None
        raise Unavailable(f"the package `imagebind` {version} is an empty placeholder: pip uninstall imagebind && {INSTALL} ({LICENCE})")

    bare = ModuleType("imagebind")
    bare.__path__, bare.__spec__ = [str(folder)], spec
    timm, layers = ModuleType("timm"), ModuleType("timm.layers")
    layers.DropPath, layers.trunc_normal_ = _NoDropPath, torch.nn.init.trunc_normal_  # type: ignore[attr-defined]
    timm.layers = layers  # type: ignore[attr-defined]
    sys.modules["imagebind"] = bare
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "timm" or name.startswith("timm.")}
    try:
        sys.modules |= {"timm": timm, "timm.layers": layers}
        model = importlib.import_module("imagebind.models.imagebind_model")
        inputs = importlib.import_module("imagebind.models.multimodal_preprocessors")
    except ImportError as error:
        del sys.modules["imagebind"]
        raise Unavailable(f"ImageBind does not import ({error}): {INSTALL}") from error
    finally:
        for name in ("timm", "timm.layers"):
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
    return model, inputs, folder


class ImageBindScorer(Scorer):
    """ImageBind's three agreements; make one with `load` or, in tests, `tiny_random`. Text beyond 75 tokens is cut off, as in the original."""

    name = "imagebind"
    outputs = {
        "imagebind_audio_video": frozenset({"audio", "video"}),
        "imagebind_text_audio": frozenset({"audio", "prompt"}),
        "imagebind_text_video": frozenset({"video", "prompt"}),
    }

    def __init__(self, model: Any, *, weights: Literal["real", "tiny random"], source: str, size: int = 224, device: str = "cpu") -> None:
        _, inputs, folder = import_imagebind()
        logging.getLogger(__name__).warning(LICENCE)
        for part in (model.modality_preprocessors, model.modality_trunks, model.modality_heads, model.modality_postprocessors):
            for modality in UNUSED:
                part.pop(modality)
        self.model = model.eval().to(device=device, dtype=torch.float32)
        self.tokenizer = inputs.SimpleTokenizer(bpe_path=str(folder / "bpe" / "bpe_simple_vocab_16e6.txt.gz"))
        self.weights, self.source, self.size, self.device = weights, source, size, device
        if int(self.tokenizer("word " * 100)[-1]) != END_OF_TEXT:
            raise ValueError(f"this ImageBind cuts long prompts without their end mark, on which its text encoder relies: {INSTALL}")

    @classmethod
    def load(cls, checkpoint: str | Path, *, device: str = "cpu") -> ImageBindScorer:
        """The released model (1.2 B parameters, 5 GB) from a local ``imagebind_huge.pth``; never downloaded.

        Raises:
            FileNotFoundError: no such file.
            Unavailable: the package is not installed.
            RuntimeError: the checkpoint is of another model.
        """
        path = Path(checkpoint)
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}: ImageBind is loaded from a local checkpoint only; give the path of imagebind_huge.pth")
        model = import_imagebind()[0].imagebind_huge(pretrained=False)
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True), strict=True)
        return cls(model, weights="real", source=str(path), device=device)

    @classmethod
    def tiny_random(cls, seed: int = 0, *, size: int = 56, device: str = "cpu") -> ImageBindScorer:
        """The same classes with tiny random weights, for tests: its scores say nothing about a sample, and its provenance says so.

        Args:
            size: height and width of a view; small, so that little is computed. The released model has 224.
        """
        sizes: dict[str, int] = {"out_embed_dim": 16}
        for modality in ("vision", "audio", "text", *UNUSED):
            sizes |= {f"{modality}_embed_dim": 16, f"{modality}_num_blocks": 1, f"{modality}_num_heads": 2}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = import_imagebind()[0].ImageBindModel(**sizes)
            for name, weight in model.named_parameters():
                if weight.ndim >= 2:
                    # the original's initial scale is so small that every input would get almost the same embedding
                    table = "embedding" in name or "embed" in name or "cls_token" in name
                    torch.nn.init.normal_(weight, std=0.5 if table else weight[0].numel() ** -0.5)
        return cls(model, weights="tiny random", source=f"seed {seed}", size=size, device=device)

    def measure(self, media: Sequence[Media], prompts: Sequence[str]) -> Scores:
        vision = torch.stack([video_views(item.video, self.size) for item in media])
        audio = torch.stack([audio_clips(item.audio) for item in media])
        text = torch.stack([self.tokenizer(prompt) for prompt in prompts])
        # a clip axis everywhere: without one a video is read as a batch of clips
        out = self.model({"vision": vision.to(self.device), "audio": audio.to(self.device), "text": text.to(self.device)})
        unit = {key: F.normalize(value.double().cpu(), dim=-1) for key, value in out.items()}  # the model's own outputs are not unit vectors
        return {
            "imagebind_audio_video": (unit["audio"] * unit["vision"]).sum(-1),
            "imagebind_text_audio": (unit["text"] * unit["audio"]).sum(-1),
            "imagebind_text_video": (unit["text"] * unit["vision"]).sum(-1),
        }

    def provenance(self) -> tuple[Provenance, ...]:
        return (Provenance(self.name, self.weights, self.source, (f"{type(self.model).__module__}.{type(self.model).__qualname__}",), LICENCE),)

    def entries(self) -> Mapping[str, torch.nn.Module]:
        return {"ImageBindModel": self.model}

"""A case: the inputs of one check, as a pure function of a few small numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from loudfail.harness.port import Conditions, Port

Latents = "dict[str, torch.Tensor]"


@dataclass(frozen=True)
class Case:
    """Inputs of one check.

    Attributes:
        seed: everything random comes from it, by name: `generator`.
        extent: size per axis of the port (`Port.extents`), for example latent frames, height, width, audio length.
        prompts: one prompt a sample; their number is the batch size. Samples of one case share the extent, not the prompt.
        given: names of the conditions that are given instead of generated (first frame, last frame); one tuple for all samples.
    """

    seed: int = 0
    extent: Mapping[str, int] = field(default_factory=dict)
    prompts: tuple[str, ...] = ("a bell rings twice",)
    given: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        return len(self.prompts)

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator for one purpose; the same on every machine and in every process."""
        import torch

        digest = hashlib.sha256(f"{self.seed}/{purpose}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def normal(self, purpose: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Standard normal latents, ``(batch, *shape)`` float32 for each modality, drawn modality by modality."""
        import torch

        # In float64 and rounded: float32 normals differ in their last bit between instruction sets.
        generators = {m: self.generator(f"{purpose}/{m}") for m in shapes}
        return {m: torch.randn(self.batch, *shape, generator=generators[m], dtype=torch.float64).float() for m, shape in shapes.items()}

    def addresses(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Latents of which no two values are alike in any modality, so that none can move unseen: odd numbers from 2049 on, which float32 holds and
        neither float16 nor bfloat16 does."""
        import torch

        result, start = {}, 2049
        for modality, shape in shapes.items():
            count = self.batch * math.prod(shape)
            result[modality] = torch.arange(start, start + 2 * count, 2, dtype=torch.float32).view(self.batch, *shape)
            start += 2 * count
        return result

    def sigmas(self, purpose: str, modalities: tuple[str, ...], low: float = 0.02, high: float = 0.98) -> dict[str, torch.Tensor]:
        """One sigma per sample *and* modality, ``(batch,)`` float32, all different from each other (never only 0.5)."""
        import torch

        return {m: low + (high - low) * torch.rand(self.batch, generator=self.generator(f"{purpose}/sigma/{m}")) for m in modalities}


def smallest(port: Port, **fields: Any) -> Case:
    """The port's smallest case, with the given fields replaced."""
    return Case(**({"extent": {axis: min(sizes) for axis, sizes in port.extents.items()}} | fields))


#: Prompts that tokenizers treat differently: unequal lengths, leading space, newline, composed and decomposed accents, emoji with joiner, CJK,
#: right-to-left.
PROMPTS = (
    "a bell rings twice",
    "rain",
    " two dogs bark while a train passes",
    "Schnee fällt;\n\tein Kind lacht",
    "cafe\u0301 noise, caf\u00e9 noise",
    "\U0001f469\u200d\U0001f680 lifts off",
    "\u96e8\u304c\u964d\u308b",
    "\u05e9\u05dc\u05d5\u05dd",
    "<|im_start|> spoken literally",
    "a  double  space",
)


def largest(port: Port, **fields: Any) -> Case:
    """The port's largest case, with `LONG_PROMPT`, and the given fields replaced."""
    return Case(**({"extent": {axis: max(sizes) for axis, sizes in port.extents.items()}, "prompts": (LONG_PROMPT,)} | fields))


def mixed_conditions(port: Port, case: Case) -> list[Conditions]:
    """Conditions of each sample with the port's condition modes in turn, so that one batch holds different ones."""
    modes = [replace(case, given=port.givens[index % len(port.givens)]) for index in range(case.batch)]
    return [port.conditions(mode)[index] for index, mode in enumerate(modes)]


#: A prompt of a few hundred tokens: longer than the 77 and 128 that other models' encoders and padded buffers hold.
LONG_PROMPT = " ".join(f"In scene {n}, a bell rings {n} times while rain falls on the quay and somebody whispers {n * n}." for n in range(2, 7))


def cases(*, batch: tuple[int, int] = (1, 3), given: bool = True, text: bool = False) -> Callable[[Port], SearchStrategy[Case]]:
    """Strategy of cases for a port: seeds, extents, unequal prompts, batch sizes and (``given``) condition modes.

    Args:
        batch: smallest and largest number of samples.
        given: draw condition modes too; otherwise nothing is given.
        text: draw any Unicode prompt instead of one of `PROMPTS`.
    """

    def build(port: Port) -> SearchStrategy[Case]:
        from hypothesis import strategies as st

        prompt = st.text(st.characters(codec="utf-8"), min_size=1, max_size=24) if text else st.sampled_from(PROMPTS)
        return st.builds(
            Case,
            seed=st.integers(0, 2**31 - 1),
            extent=st.fixed_dictionaries({axis: st.sampled_from(list(sizes)) for axis, sizes in port.extents.items()}),
            prompts=st.lists(prompt, min_size=batch[0], max_size=batch[1]).map(tuple),
            given=st.sampled_from(list(port.givens)) if given else st.just(()),
        )

    return build

"""Scorers by name, for recipes and commands. Random weights must be asked for by the word ``tiny-random``; nothing falls back to them."""

from __future__ import annotations

from collections.abc import Callable

from loudfail.harness.violation import Unavailable
from loudfail.trainer.rewards.scorer import Scorer, WeightedSum

TINY = "tiny-random"


def _clap(source: str, device: str) -> Scorer:
    from loudfail.trainer.rewards.clap import ClapScorer

    return ClapScorer.tiny_random(device=device) if source == TINY else ClapScorer.load(source, device=device)


def _imagebind(source: str, device: str) -> Scorer:
    from loudfail.trainer.rewards.imagebind import ImageBindScorer

    return ImageBindScorer.tiny_random(device=device) if source == TINY else ImageBindScorer.load(source, device=device)


def _laion_clap(source: str, device: str) -> Scorer:
    from loudfail.trainer.rewards.clap_remote import LaionClapScorer

    parts = source.split(",")
    if len(parts) != 3:
        raise ValueError(f"laion_clap={source!r}: want CHECKPOINT.pt,HTSAT-tiny|HTSAT-base,TOKENIZER_DIR")
    return LaionClapScorer(parts[0], model=parts[1], tokenizer=parts[2], device=device)


def _event_text(source: str, device: str) -> Scorer:
    from loudfail.trainer.rewards.events import EventTextScorer

    return EventTextScorer(device)


def _synthetic(source: str, device: str) -> Scorer:
    from loudfail.trainer.rewards.synthetic import SyntheticScorer

    return SyntheticScorer()


def _loudness_brightness(source: str, device: str) -> Scorer:
    from loudfail.trainer.rewards.synthetic import LoudnessBrightnessScorer

    return LoudnessBrightnessScorer()


#: Name → its constructor, and whether it must be told where its weights are.
SCORERS: dict[str, tuple[Callable[[str, str], Scorer], bool]] = {
    "clap": (_clap, True),
    "laion_clap": (_laion_clap, True),
    "imagebind": (_imagebind, True),
    "event_text": (_event_text, False),
    "synthetic": (_synthetic, False),
    "loudness_brightness": (_loudness_brightness, False),
}


def make_scorer(spec: str, device: str = "cpu") -> Scorer:
    """The scorer of ``name`` or ``name=source``, such as ``clap=/models/larger_clap_general`` or ``event_text``.

    Raises:
        ValueError: no such scorer, or a source is missing or superfluous.
        FileNotFoundError, Unavailable: the source or a package is not there.
    """
    name, _, source = spec.partition("=")
    if name not in SCORERS:
        raise ValueError(f"no scorer {name!r}; there are {', '.join(SCORERS)}")
    make, needs = SCORERS[name]
    if needs != bool(source):
        raise ValueError(f"{spec!r}: write {name}=PATH to its weights, or {name}={TINY}" if needs else f"{spec!r}: {name} takes no source")
    return make(source, device)


def tiny_reward() -> WeightedSum:
    """The reward that the gate runs on decoded media.

    The real classes of CLAP and, if its package is here, of ImageBind, with tiny random weights; and a synthetic agreement of loudness with
    brightness, so that sound and picture are both scored without ImageBind too. The weights of the sum all differ, so that a mix-up shows.
    """
    scorers = [make_scorer(f"clap={TINY}"), make_scorer("loudness_brightness")]
    missing = {}
    try:
        scorers.append(make_scorer(f"imagebind={TINY}"))
    except Unavailable as error:
        missing["imagebind"] = str(error)
    names = [name for scorer in scorers for name in scorer.outputs]
    return WeightedSum(scorers, {name: 1 / (2 + i) for i, name in enumerate(names)}, missing=missing)

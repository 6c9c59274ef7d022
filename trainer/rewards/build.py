"""Scorers by name, for recipes and commands. Random weights must be asked for by the word ``tiny-random``; nothing falls back to them."""

from __future__ import annotations

from collections.abc import Callable

from loudfail.trainer.rewards.scorer import Scorer

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


#: Name → its constructor, and whether it must be told where its weights are.
SCORERS: dict[str, tuple[Callable[[str, str], Scorer], bool]] = {
    "clap": (_clap, True),
    "laion_clap": (_laion_clap, True),
    "imagebind": (_imagebind, True),
    "event_text": (_event_text, False),
    "synthetic": (_synthetic, False),
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

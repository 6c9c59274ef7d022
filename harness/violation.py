"""The two ways in which a check ends without holding: the claim is violated, or what it needs is not there."""

from __future__ import annotations


class Violation(AssertionError):
    """The claim of an invariant is false, and by how much.

    Args:
        got: what was observed, as a number where there is one (then ``got / bound`` is the margin).
        want: what the oracle says, in words or as a number.
        bound: the largest ``got`` that would have passed, in the same unit; 0 for an exact claim.
        where: the place, in the model's own terms: modality, projection, row, rank, step.
        claim: the sentence that is false; filled in from the invariant's docstring if left out.
    """

    def __init__(self, got: object, want: object, bound: float | None = None, where: str = "", claim: str = "") -> None:
        self.got, self.want, self.bound, self.where, self.claim = got, want, bound, where, claim
        super().__init__(got, want, bound, where, claim)

    def __str__(self) -> str:
        lines = [("claim", self.claim), ("got", show(self.got)), ("want", show(self.want)), ("bound", show(self.bound)), ("where", self.where)]
        return "\n".join(f"{name:>6}: {text}" for name, text in lines if text not in ("", "None"))


class Unavailable(Exception):
    """Something that the check needs is not on this machine (an engine, a GPU, weights); the message names it and how to get it."""


class Uncovered(Exception):
    """The port does not offer the seam that the check needs."""


def show(value: object) -> str:
    """A number with four significant digits; anything else as text of at most 300 characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."

"""The outcome of one check, and of a whole run. The JSON record built from these is the authority; every other report is a view of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["holds", "violated", "expected", "fixed", "uncovered", "unavailable", "error"]
STATUSES: tuple[Status, ...] = ("holds", "violated", "expected", "fixed", "uncovered", "unavailable", "error")
#: Statuses that make a run fail.
FAILING: tuple[Status, ...] = ("violated", "fixed", "error")


@dataclass
class Result:
    """One invariant at one degree.

    Attributes:
        id: ``file::name``.
        claim: the sentence that is checked.
        status: see `STATUSES`.
        degree: tensor-parallel degree, None where the check needs none.
        seconds: wall time.
        examples: inputs that were drawn and tried (1 where nothing is drawn).
        got, bound, where: the worst measurement against its bound, also when it passed.
        violation: ``claim, got, want, bound, where`` and ``example`` of the first violation, as text and numbers.
        diagnosis: of a violation: ``cause``, ``text``, ``residual`` and ``tried`` of `loudfail.harness.diagnose.Diagnosis`; None if none was made.
        message: why it is uncovered, unavailable, an error, or expected.
        traceback: of an error.
        values: named numbers for charts, such as ``delta/<projection>``.
        seed: with it the same inputs are drawn again.
        rerun: a shell command that runs just this check.
    """

    id: str
    claim: str
    status: Status
    degree: int | None = None
    seconds: float = 0.0
    examples: int = 0
    got: float | None = None
    bound: float | None = None
    where: str = ""
    violation: dict[str, Any] | None = None
    diagnosis: dict[str, Any] | None = None
    message: str = ""
    traceback: str = ""
    values: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    rerun: str = ""

    @property
    def name(self) -> str:
        """Id with the degree, for people: ``sync::…[tp2]``."""
        return self.id if self.degree is None else f"{self.id}[tp{self.degree}]"

    @property
    def margin(self) -> float | None:
        """``got / bound``: below 1 it passed; None where nothing was measured against a positive bound."""
        return self.got / self.bound if self.got is not None and self.bound else None

    @property
    def cause(self) -> str:
        """The diagnosis as one line: what explains the violation, or that nothing known does; empty where none was asked for."""
        if self.diagnosis is None:
            return ""
        cause, text = self.diagnosis["cause"], self.diagnosis["text"]
        return f"{cause}: {text}" if cause else str(text)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdict(results: list[Result]) -> Literal["holds", "violated", "error"]:
    """``error`` if any check could not be carried out or none was, else ``violated`` if any failed, else ``holds``."""
    statuses = {result.status for result in results}
    if statuses <= {"uncovered", "unavailable"} or "error" in statuses:
        return "error"
    return "violated" if statuses & {"violated", "fixed"} else "holds"


def counts(results: list[Result]) -> dict[str, int]:
    """Number of results per status, all statuses present; they add up to the number declared."""
    return {status: sum(result.status == status for result in results) for status in STATUSES}

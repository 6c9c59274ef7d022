"""Claims about ranks."""

from loudfail.harness.compare import require
from loudfail.harness.port import Port
from loudfail.harness.registry import invariant


@invariant("engine")
def every_rank_answers(port: Port, tp: int) -> None:
    """Every rank answers with its own number."""
    require(port.engine(tp).numbers() == list(range(tp)), got=port.engine(tp).numbers(), want=list(range(tp)), where=f"TP {tp}")

"""Records on disk: strict JSON, complete or not there at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The value with everything that strict JSON lacks as text: ``nan``, ``inf``, ``-inf``, and whatever is no plain data."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record under a temporary name and rename it.

    Raises:
        OSError: the folder cannot be written; nothing is left behind.
    """
    text = json.dumps(plain(record), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

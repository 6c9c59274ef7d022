"""``loudfail new``: a folder with a port that runs at once, its test, and a CI workflow."""

from __future__ import annotations

import keyword
import re
import string
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from loudfail.harness.options import UsageProblem

#: Template → where it goes; ``{module}`` is the port's module.
FILES = {
    "port.py.txt": "{module}.py",
    "test_port.py.txt": "test_{module}.py",
    "workflow.yml.txt": ".github/workflows/loudfail.yml",
    "readme.md.txt": "README.md",
}


def write(name: str, parent: Path) -> tuple[Path, str, str]:
    """Write the scaffold of a port.

    Args:
        name: of the model, such as ``my-model``.
        parent: folder in which the folder of that name is made.

    Returns:
        The folder, the port's module, and its class.

    Raises:
        UsageProblem: the name gives no Python identifier, the module would hide one that can be imported (``torch``), or something of that name is
            there already.
    """
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
    module, cls = "_".join(words).lower(), "".join(word[0].upper() + word[1:] for word in words)
    if not module.isidentifier() or keyword.iskeyword(module) or not name.isascii() or "/" in name:
        raise UsageProblem(f"{name!r} gives no module name; use letters, digits and dashes, a letter first, such as my-model")
    if find_spec(module) is not None:
        raise UsageProblem(f"{name!r} would hide the module {module} that is installed; take another name, such as my-{module}")
    folder = parent / "-".join(words)
    if folder.exists():
        raise UsageProblem(f"{folder} is there already; nothing was changed")
    try:
        for template, place in FILES.items():
            target = folder / place.format(module=module)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = (files("loudfail.harness") / "templates" / template).read_text(encoding="utf-8")
            target.write_text(_Template(text).substitute(name=folder.name, module=module, cls=cls), encoding="utf-8")
    except OSError as error:
        raise UsageProblem(f"cannot write {folder}: {error.strerror or error}") from None
    return folder, module, cls


class _Template(string.Template):
    """``%name`` instead of ``$name``, which workflows use themselves."""

    delimiter = "%"

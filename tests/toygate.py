"""The command line with `toysuite` in the place of Loudfail's invariants: ``PYTEST_PLUGINS=toyselect python -m toygate gate toyports:Toy``."""

import sys

import toyselect  # noqa: F401

from loudfail.harness.cli import main

if __name__ == "__main__":
    sys.exit(main())

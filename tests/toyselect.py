"""pytest plugin (``PYTEST_PLUGINS=toyselect``): run this suite instead of Loudfail's."""

from loudfail.harness import registry

registry.INVARIANTS_PACKAGE = "toysuite"
registry.FAULTS_PACKAGE = "toysuite.faults"

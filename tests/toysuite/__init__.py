"""A small suite of invariants and faults for tests of the front doors: it stands where `loudfail.invariants` does, see `toyselect`."""

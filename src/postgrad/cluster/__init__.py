"""Where roles and engines run; the only place that imports ray."""

"""Where roles and engines run; the only place that will import ray."""

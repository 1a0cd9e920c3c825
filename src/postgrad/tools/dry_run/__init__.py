"""`postgrad dry-run`."""

"""`postgrad serve-reward`."""

"""`postgrad chat`."""

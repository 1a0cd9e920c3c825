"""What both sides do: how many conversations an update has."""

UPDATE = 64

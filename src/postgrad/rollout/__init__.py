"""Rollout engines, environments, and the sources of a step's samples."""

"""Whole runs that last a second: see helpers.tiny_runs."""

from helpers.tiny_runs import console, make_recipe, models, reward_on_path, trained

__all__ = ["console", "make_recipe", "models", "reward_on_path", "trained"]

"""Environments by the name that a recipe's [environment] uses, and how they speak to the policy."""

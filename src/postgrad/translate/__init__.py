"""`postgrad translate`: recipes from the commands of other systems."""

"""`postgrad dry-run`: what a recipe reads and scores, shown before it trains."""

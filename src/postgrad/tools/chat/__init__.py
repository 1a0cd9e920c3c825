"""`postgrad chat`: a model answers in the terminal."""

"""One algorithm, one file: what it needs, how it credits a batch, and its loss."""

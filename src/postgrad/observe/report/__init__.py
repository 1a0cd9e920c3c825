"""A run as a page: what is read of a run directory, and the HTML that shows it."""

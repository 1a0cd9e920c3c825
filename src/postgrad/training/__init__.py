"""Training runs: start, loop, jobs, saving, memory."""

"""Observing a run: its directory and log files, the console, sentinels, loggers, the report."""

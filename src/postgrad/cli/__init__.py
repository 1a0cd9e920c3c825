"""The command line: a file for each family of subcommands. Heavy imports are inside functions."""

"""The command line: subcommands only, a file for each family; heavy imports inside them."""

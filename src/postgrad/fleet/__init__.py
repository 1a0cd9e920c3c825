"""Where the models of a run live: in this process, or on ranks and workers of a cluster."""

"""One command on a GPU: checks first, then measurements in order of worth (see __main__)."""

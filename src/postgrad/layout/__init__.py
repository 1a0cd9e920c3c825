"""Segments, packing and denominators: how sequences are cut and laid out for a forward pass. Pure."""

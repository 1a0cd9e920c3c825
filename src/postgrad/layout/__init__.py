"""Segments and packing: how sequences are cut and laid out for a forward pass. Pure."""

"""Speed and memory of postgrad and its peers on the same work."""

"""The version, where every room can read it: `postgrad` itself imports the rooms."""

__version__ = "0.1.0"

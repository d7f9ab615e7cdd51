"""The words that every part of sloscope agrees on. Standard library only."""

__version__ = "0.1.0"

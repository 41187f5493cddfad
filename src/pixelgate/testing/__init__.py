"""Tools for testing what talks to engines, usable by other projects too."""

"""Modules of `generate.py`: one per kind of page, and their common parts."""

"""Figures, curves and samples of a run, and the report: one page with all of the above."""

"""Arithmetic of memory and time: which placements fit, how long their steps take, and how schedules change that."""

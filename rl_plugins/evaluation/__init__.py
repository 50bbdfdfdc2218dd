"""Evaluation: statistics of several samples to each prompt, sample files that survive a kill, scoring and comparison.

`statistics.py` and `measures.py` need NumPy alone: validation during training and `rl-plugins evaluate` share them.
"""

"""Evaluation: measures of several samples per prompt, files of samples, scoring and comparison of policies."""

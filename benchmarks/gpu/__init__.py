"""Benchmarks that need GPUs."""

"""Environments beyond reward functions: tools that the policy calls."""

"""Environments beyond reward functions: tools of the policy."""

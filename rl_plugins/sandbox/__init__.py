"""Sandbox for programs of the policy: limits, isolation, and the record of a run."""

"""Sandbox for programs that the policy wrote: limits, isolation, and the record of a run."""

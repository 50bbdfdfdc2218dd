"""Rewards: plain callables named in the configuration. A failure is recorded, and its sample is left out."""

"""Environments beyond reward functions: tools of the policy, agents of the user, and stateful environments."""

"""What all unit tests share."""

from rl_plugins.tests import exact_norms  # noqa: F401

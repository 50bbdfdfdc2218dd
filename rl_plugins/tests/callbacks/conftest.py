"""Fixtures of the tests of callbacks: an MLflow store, and runs in the store."""

from rl_plugins.tests.tracking.fixtures import (  # noqa: F401
    experiment,
    folder,
    quick_sender,
    run,
    store,
    tracking,
)

"""Log-probs of a model in shards: ZeRO-3 in two processes over gloo, gradients against an unsharded model."""

from __future__ import annotations

from rl_plugins.tests.models import zero_log_probs_worker
from rl_plugins.tests.ranks import run_ranks


def test_gradients_of_a_sharded_head() -> None:
    run_ranks(zero_log_probs_worker.check_rank)

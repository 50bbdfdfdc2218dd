"""Log-probs of a model in shards: FSDP2 in two processes over gloo, against an unsharded model."""

from __future__ import annotations

from rl_plugins.tests.models import fsdp_log_probs_worker
from rl_plugins.tests.ranks import run_ranks


def test_response_log_probs_under_fsdp_equal_an_unsharded_model() -> None:
    run_ranks(fsdp_log_probs_worker.check_rank)

"""Log-probs of a model in shards: ZeRO-3 in two processes over gloo, gradients against an unsharded model."""

from __future__ import annotations

import pytest

from rl_plugins.tests.models import zero_log_probs_worker
from rl_plugins.tests.ranks import run_ranks


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("tied", [False, True], ids=["own_head", "tied_head"])
def test_response_log_probs_under_zero_3_give_the_gradients_of_an_unsharded_model(tied: bool, packed: bool) -> None:
    run_ranks(zero_log_probs_worker.check_rank, tied, packed)


def test_response_log_probs_under_zero_3_of_capped_logits() -> None:
    run_ranks(zero_log_probs_worker.check_capped_logits)

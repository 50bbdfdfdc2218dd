"""A run that loses a process of any kind ends with the same bits as a run left alone, and leaves nothing behind.

Other modules kill the driver, training workers and engines (`test_resume`), the actor of a critic (`test_lost_critic`)
and of a teacher (`test_many_machines`), and the tracking server (`test_tracking_outage`).
"""

from __future__ import annotations

import pytest

from integration_tests.campaign import Campaign, Moment

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"))


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("controller", 4),
        ("process of an engine", 4),
        ("reward worker", 5),
        ("environment worker", 4),
        ("raylet", 4),
        ("head", 5),
    ],
)
def test_run_that_loses_a_process_ends_with_the_same_bits_and_leaves_nothing(
    campaign: Campaign, kind: str, step: int
) -> None:
    outcome = campaign.run(kind, 0, Moment(step, 0))
    assert outcome.good, outcome
    assert campaign.results()[-1] == outcome

"""How far sampling runs ahead of training. It is bounded twice.

No group is trained on whose sampling began more than `max_staleness` policies ago: it is waited for before that. And no
more groups are in flight than `ahead` says. Where both say the same, a step trains on the groups that were asked for
`max_staleness` steps before, first in, first out; with fewer in flight than may be stale, stragglers are left for a
later step. With `max_staleness=0` nothing outlives the step: what is in flight beyond its groups is dropped when enough
have finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """How far sampling runs ahead of training.

    Attributes:
        max_staleness: how many updates may lie between the policy with which the sampling of a group began and the one
            that is trained on it; 0 is synchronous.
        ahead: how many steps' worth of groups are in flight beyond those of a step; null is `max_staleness`.
        max_token_age: how many updates old the policy may be that sampled a token that is trained on; older tokens stay
            in their responses and are masked. Null masks none.
    """

    max_staleness: int = 0
    ahead: float | None = None
    max_token_age: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: a number below 0, or more ahead than may be stale.
        """
        if self.max_staleness < 0:
            raise ConfigError(f"schedule.max_staleness={self.max_staleness}: must be 0 or more")
        if self.ahead is not None and not 0 <= self.ahead <= max(self.max_staleness, 1):
            raise ConfigError(
                f"schedule.ahead={self.ahead}: must be from 0 to schedule.max_staleness, or to 1 where that is 0 "
                "(what is ahead is then dropped)"
            )

        age = self.max_token_age
        if age is not None and not 0 <= age <= self.max_staleness:
            raise ConfigError(
                f"schedule.max_token_age={age}: must be from 0 to schedule.max_staleness={self.max_staleness}, for no "
                "token is older than that"
            )

    @property
    def active(self) -> bool:
        """Whether anything is asked for beyond the groups of a step."""
        return self.max_staleness > 0 or bool(self.ahead)

    def in_flight(self, groups: int) -> int:
        """How many groups are in flight at the start of a step that trains on so many."""
        return groups + round(groups * (self.max_staleness if self.ahead is None else self.ahead))

    @property
    def drops(self) -> bool:
        """Whether groups that do not finish with the others are dropped."""
        return self.max_staleness == 0 and bool(self.ahead)

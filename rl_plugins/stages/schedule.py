"""Schedule of sampling ahead of training, with two bounds.

- `max_staleness`: sampling of a trained group began at most `max_staleness` policies ago. A step waits for a group
  before the group becomes older.
- `ahead`: bound on the number of groups in flight.

If both bounds are equal, a step trains on the groups that were submitted `max_staleness` steps before, first in, first
out. If `ahead` is smaller, slow groups are left for a later step. With `max_staleness=0`, no group outlives the step:
the step drops the remaining groups as soon as enough groups have finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Bounds on sampling ahead of training.

    Attributes:
        max_staleness: largest number of updates between the policy that began to sample a group and the policy that is
            trained on the group; 0 is synchronous.
        ahead: extra groups in flight, in multiples of the groups of a step; null means `max_staleness`.
        max_token_age: largest age, in updates, of the policy that sampled a trained token. Older tokens stay in the
            response and are masked. Null masks no token.
    """

    max_staleness: int = 0
    ahead: float | None = None
    max_token_age: int | None = None

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: a bound is negative, or `ahead` or `max_token_age` is above `max_staleness`.
        """
        if self.max_staleness < 0:
            raise ConfigError(f"schedule.max_staleness={self.max_staleness}: must be 0 or more")
        if self.ahead is not None and not 0 <= self.ahead <= max(self.max_staleness, 1):
            raise ConfigError(
                f"schedule.ahead={self.ahead}: must be from 0 to schedule.max_staleness, or from 0 to 1 if "
                "schedule.max_staleness is 0 (extra groups are then dropped)"
            )

        age = self.max_token_age
        if age is not None and not 0 <= age <= self.max_staleness:
            raise ConfigError(
                f"schedule.max_token_age={age}: must be from 0 to schedule.max_staleness={self.max_staleness}, because "
                "no token is older"
            )

    @property
    def active(self) -> bool:
        """True if groups beyond the groups of a step are in flight."""
        return self.max_staleness > 0 or bool(self.ahead)

    def in_flight(self, groups: int) -> int:
        """Return the number of groups in flight at the start of a step that trains on `groups` groups."""
        return groups + round(groups * (self.max_staleness if self.ahead is None else self.ahead))

    @property
    def drops(self) -> bool:
        """True if groups that are unfinished at the end of a step are dropped."""
        return self.max_staleness == 0 and bool(self.ahead)

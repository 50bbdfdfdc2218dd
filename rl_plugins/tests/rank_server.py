"""First import of the server of ranks: the kernel kills the server at the end of the test run, also after a kill.

Ranks are stopped between two tests, so ranks do not see the end of the test run, and the server would wait for ranks.
The kernel kills ranks at the end of the server.
"""

from __future__ import annotations

import os

from rl_plugins.rewards.keeper import end_with_parent

end_with_parent(os.getppid())
_SERVER = os.getpid()


def _end_with_server() -> None:
    # Not a fork of a rank.
    if os.getppid() == _SERVER:
        end_with_parent(_SERVER)


os.register_at_fork(after_in_child=_end_with_server)

"""First import of the server of ranks: the kernel kills the server at the end of the test run, also after a kill.

Ranks are stopped between two tests, so ranks do not see the end of the test run, and the server would wait for ranks.
Ranks end with the server.
"""

from __future__ import annotations

import os

from rl_plugins.rewards.child_process import end_with_parent

end_with_parent(os.getppid())

"""`python -m rl_plugins` is the console script `rl-plugins`."""

import sys

from rl_plugins.commands.main import main

sys.exit(main())

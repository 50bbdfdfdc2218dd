"""Preference optimization on given pairs (DPO and similar losses).

`python -m rl_plugins.recipes.preference_optimization model.path=... data.train_files=[...]`
"""

from rl_plugins.launch.command_line import recipe_main

if __name__ == "__main__":
    recipe_main("preference_optimization")

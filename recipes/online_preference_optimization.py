"""Online preference optimization.

`python -m rl_plugins.recipes.online_preference_optimization model.path=... data.train_files=[...]`
"""

from rl_plugins.launch.command_line import recipe_main

if __name__ == "__main__":
    recipe_main("online_preference_optimization")

"""Reward modelling: `python -m rl_plugins.recipes.reward_modeling model.path=... data.train_files=[...]`."""

from rl_plugins.launch.command_line import recipe_main

if __name__ == "__main__":
    recipe_main("reward_modeling")

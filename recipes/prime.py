"""PRIME: `python -m rl_plugins.recipes.prime model.path=... data.train_files=[...]`."""

from rl_plugins.launch.command_line import recipe_main

if __name__ == "__main__":
    recipe_main("prime")

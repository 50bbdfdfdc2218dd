"""PPO: the recipe of GRPO with a critic. `python -m rl_plugins.recipes.ppo model.path=... data.train_files=[...]`.

`conf/ppo.yaml` chooses the algorithm `ppo`, whose advantages need the values of a critic (`critic.path`).
"""

from rl_plugins.launch.command_line import recipe_main

if __name__ == "__main__":
    recipe_main("ppo")

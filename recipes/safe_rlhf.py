"""Safe RLHF: the recipe of PPO with a bound on the mean cost. `python -m rl_plugins.recipes.safe_rlhf model.path=...`.

`conf/safe_rlhf.yaml` chooses the algorithm `safe_rlhf`. Costs come from a cost model (`cost_model.path`), or from the
reward function (`algorithm.constraint.cost`), and have a critic of their own (`cost_critic.path`).
"""

from rl_plugins.launch.command_line import recipe_main

if __name__ == "__main__":
    recipe_main("safe_rlhf")

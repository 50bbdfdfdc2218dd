"""SFT, a reward model, PPO: `python -m rl_plugins.recipes.sft_rm_ppo model=... data.sft=[...] data.pairs=[...] ...`."""

from rl_plugins.launch.pipeline import pipeline_main

if __name__ == "__main__":
    pipeline_main("sft_rm_ppo")

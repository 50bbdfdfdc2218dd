"""The groups of a recipe's options; `rl_plugins.launch.config` puts them together."""

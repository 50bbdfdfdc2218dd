"""Hydra entry points and configuration groups, one thin file per recipe."""

if __name__ != "rl_plugins.recipes":
    raise ImportError("Import rl_plugins.recipes: under the bare name `recipes` it would load twice")

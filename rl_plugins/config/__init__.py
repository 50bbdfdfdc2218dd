"""Settings of a run: one record for each group of options, with the range of a setting beside its type.

The library takes these records as arguments, and `recipe.RecipeConfig` puts them together as the options of a recipe.
The room imports neither torch nor Lightning.
"""

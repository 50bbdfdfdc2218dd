"""Settings of a run: one record for each group of options, with the range of a setting beside its type.

The library takes these records as arguments, and `recipe.RecipeConfig` puts them together as the options of a recipe.
Where the library and a recipe need different fields, `...Config` is the record of the library and `...Options` the
record of the recipe, and one of the two inherits the other. The room imports neither torch nor Lightning.
"""

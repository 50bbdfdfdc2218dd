"""Parts of the comparison with verl (`benchmarks.against_verl`)."""

"""Memory and time of a step on given devices, and the search for the best placement. No heavy library is imported."""

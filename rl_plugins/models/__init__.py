"""Language models: building, loading, and the log-probs of their responses."""

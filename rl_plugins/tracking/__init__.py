"""Records of a run in MLflow and in its folder: metrics, configuration, provenance, artifacts and registered models."""

"""From a configuration to a running job: checks first, then Ray Train (`ray_train`) or one process (`local`)."""

"""What `rl-plugins doctor` looks at, without importing anything heavy."""

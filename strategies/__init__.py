"""Lightning strategies: sharded training, which shares devices with a rollout engine."""

if __name__ != "rl_plugins.strategies":
    raise ImportError("Import rl_plugins.strategies: under the bare name `strategies` it would load twice")

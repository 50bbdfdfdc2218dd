"""Lightning callbacks: checkpoints, guards, progress, throughput, dumps of rollouts, and artifacts in MLflow."""

if __name__ != "rl_plugins.callbacks":
    raise ImportError("Import rl_plugins.callbacks: under the bare name `callbacks` it would load twice")

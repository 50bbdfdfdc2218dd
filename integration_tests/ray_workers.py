"""Ray's workers in forks of one process with imported libraries.

The interpreters of Ray for its workers find `worker_start/sitecustomize.py` by PYTHONPATH, and ask this server
for forks. The server does not import Ray: Ray reads the number of its job and the kind of its token at its import.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import suppress

import psutil

from integration_tests.fork_server import ROOT, ForkServer
from integration_tests.worker_start.sitecustomize import VARIABLE

SERVER = ForkServer(
    "ray-workers",
    (
        "deepspeed", "grpc.aio", "hydra", "lightning.pytorch", "mlflow.store.tracking.sqlalchemy_store", "peft",
        "uvloop", "vllm.engine.arg_utils", "vllm.entrypoints.pooling.scoring.protocol",
        "vllm.model_executor.models.qwen2", "vllm.v1.engine.output_processor", "vllm.v1.structured_output",
        "vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu_worker", "rl_plugins.launch.preflight",
        "rl_plugins.models.tiny", "rl_plugins.rewards.inline", "rl_plugins.strategies.fsdp",
        "rl_plugins.strategies.single_device", "rl_plugins.strategies.zero",
    ),
    ("ray",),
)  # fmt: skip


def fork_workers(environment: MutableMapping[str, str]) -> None:
    """Start the server, and let clusters with these variables fork their workers."""
    SERVER.start()
    environment[VARIABLE] = SERVER.address
    start = str(ROOT / "integration_tests" / "worker_start")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [start, environment.get("PYTHONPATH")]))


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living descendants of a process. The workers of its Ray are among them."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children(recursive=True)
    for fork in SERVER.forks_of(process.pid for process in list(found)):
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(fork)
            found += [worker, *worker.children(recursive=True)]
    return found

"""Processes for tests that need several ranks, or one with a process group and a DeepSpeed of its own.

They are forked from a server that has imported what takes its time to import and has done nothing else: a process that
has run a backward pass or an OpenMP loop must not fork.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORTED = [
    "deepspeed", "lightning.pytorch", "rl_plugins.strategies.zero", "rl_plugins.tests.stages.canned",
    "rl_plugins.tests.exact_norms",
]  # fmt: skip


def run_ranks(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, timeout_s: float = 250
) -> list[tuple[Any, str]]:
    """`function(rank, *arguments)` in `world_size` processes of one thread; what each returned and printed.

    RANK, WORLD_SIZE and a free port on this machine are in the environment of each, as nodes of one process.
    """
    # DeepSpeed chooses its accelerator when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"rank{rank}" for rank in range(world_size)]
        processes = [
            context.Process(
                target=_rank,
                args=(function, rank, arguments, meeting | {"RANK": str(rank), "NODE_RANK": str(rank)}, file),
                daemon=True,
            )
            for rank, file in enumerate(files)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        for process in processes:
            process.kill()
        printed = [file.with_suffix(".log").read_text() for file in files]
        for rank, process in enumerate(processes):
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}:\n{printed[rank]}"
        return [(pickle.loads(file.read_bytes()), text) for file, text in zip(files, printed, strict=True)]


def _rank(
    function: Callable[..., Any], rank: int, arguments: tuple[Any, ...], environment: dict[str, str], file: Path
) -> None:
    import torch

    from rl_plugins.tests.exact_norms import exact_norms

    log = os.open(file.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        with exact_norms():
            result = function(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        raise
    file.write_bytes(pickle.dumps(result))

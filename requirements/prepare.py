"""The last step of an installation: find out now, once, what every later start would find out slowly.

Importing the heavy libraries writes their byte code (pip is told not to: it would compile 30,000 files of
which some 8,000 are used) and shows a broken installation at once. Meanwhile DeepSpeed's communication op is
built, so that no training process has to wait for a compiler.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What the build itself imports comes first: nothing is left for its thread to import.
FOR_THE_BUILD = ("deepspeed.ops.op_builder.cpu", "torch.utils.cpp_extension")
LIBRARIES = (
    "hydra",
    "lightning",
    "math_verify",
    "matplotlib.pyplot",
    "mlflow",
    "pyarrow.parquet",
    "pytest",
    "ray.train.lightning",
    "tensordict",
    "transformers.integrations",
    "vllm.distributed.weight_transfer",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


def build_communication_op() -> None:
    """Builds DeepSpeed's shared-memory collectives into TORCH_EXTENSIONS_DIR."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)


def main() -> None:
    """Imports everything and builds the op; any failure is raised."""
    from rl_plugins.launch.build_lock import clear_stale_build_locks

    extensions_dir = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    extensions_dir.mkdir(parents=True, exist_ok=True)
    for lock in clear_stale_build_locks(extensions_dir):
        print(f"removed a lock that a killed build left: {lock}")
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in FOR_THE_BUILD:
        importlib.import_module(name)
    with ThreadPoolExecutor(max_workers=1) as pool:
        built = pool.submit(build_communication_op)
        for name in LIBRARIES:
            importlib.import_module(name)
        built.result()


if __name__ == "__main__":
    main()

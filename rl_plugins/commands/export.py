"""Turn a checkpoint of a run into a Hugging Face folder, for transformers, vLLM and everything else.

Of most runs that is the policy, of one that trains a reward model the reward model. It needs neither a cluster nor a
GPU, nor as many processes as trained: shards of FSDP2 or of any ZeRO stage, and of any world size, are put together
here. Of a run with `average.keep` it is the moving average. A run writes its last policy by itself (`policy/`); this is
for the checkpoints before it.

  rl-plugins export outputs/run/checkpoint_00000050 outputs/step_50
  rl-plugins export outputs/run/checkpoint_00000050 outputs/adapter --lora adapter
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="checkpoint_00000050 in the folder of a run")
    parser.add_argument("output", type=Path, help="the Hugging Face folder to write; must not exist")
    parser.add_argument("--model", help="Hugging Face name or folder of the architecture; the run's own by default")
    parser.add_argument(
        "--lora",
        choices=("merged", "adapter"),
        help="of a run with an adapter: whole weights, or the adapter alone; by default as run.export_lora of the run",
    )


def run(arguments: Namespace) -> int:
    """Export."""
    from rl_plugins.launch.export import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.output, arguments.model, lora=arguments.lora)
    print(f"{arguments.checkpoint} is now {arguments.output}")
    return 0

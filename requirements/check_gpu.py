"""Ends `make gpu` in one line if the environment of this Python cannot run the tests on a GPU."""

from __future__ import annotations

import sys

from rl_plugins.launch.gpu_checks import faults_of_software
from rl_plugins.launch.gpus import hidden_gpus, local_gpus, read_machine

faults = [f"{fault.found}: {fault.fix}" for fault in faults_of_software(read_machine())]
if not local_gpus():
    faults.append(f"{hidden_gpus()} hides all GPUs" if hidden_gpus() else "this machine has no NVIDIA GPU")
sys.exit(f"make gpu: {faults[0]}" if faults else 0)

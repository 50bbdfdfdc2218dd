"""Process of one section: `section_process SECTION FUNCTION DEVICE OUTPUT`. The program starts the process."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from integration_tests.gpu.without_vllm.cases import Cases, Place, run_case
from integration_tests.gpu.without_vllm.results import append


def cases_of(function: str) -> Cases:
    """Import the function of a section."""
    module, _, name = function.rpartition(".")
    found: Cases = getattr(import_module(module), name)
    return found


def main() -> None:
    """Run the cases of the section, and append each result to the output."""
    section, function, device, output = sys.argv[1:]
    # DeepSpeed selects its accelerator at its import.
    os.environ["DS_ACCELERATOR"] = device
    with tempfile.TemporaryDirectory() as folder:
        for case in cases_of(function)(Place(device, Path(folder))):
            append(Path(output), run_case(section, case))


if __name__ == "__main__":
    main()

"""Errors of an engine that does not start. A process here stands for vLLM's engine core."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rl_plugins.rollout.vllm.start_errors import errors_of_processes
from rl_plugins.tests.patience import patient

ENGINE_CORE = """
import logging
from rl_plugins.rollout.vllm.start_errors import keep_first_error
keep_first_error()
for error in ({error}, RuntimeError("caused by the first error")):
    try:
        raise error
    except Exception:
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
"""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("ValueError('no room for 256 tokens')", ValueError, "^no room for 256 tokens$"),
        ("OSError('no file')", RuntimeError, "^vLLM does not start: OSError: no file$"),
    ],
)
def test_error_of_the_engine_has_the_first_error_of_another_process(
    error: str, kind: type[Exception], message: str
) -> None:
    script = ENGINE_CORE.format(error=error)
    with pytest.raises(kind, match=message), errors_of_processes():
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=patient(60))
        raise RuntimeError("Engine core initialization failed. See root cause above.")


def test_error_of_the_engine_stays_without_an_error_of_another_process() -> None:
    with pytest.raises(RuntimeError, match=r"^no room$"), errors_of_processes():
        raise RuntimeError("no room")

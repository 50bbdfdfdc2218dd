"""A process of vLLM that ends takes the others with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import multiprocessing, time
from rl_plugins.rollout.vllm.processes import end_with
if __name__ == "__main__":
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    other.start()
    end_with([process.sentinel for process in multiprocessing.active_children()], unless=lambda: {stays})
    other.kill()
    other.join()
    time.sleep(2)
    print("goes on")
"""

DIES = """
import asyncio
from rl_plugins.rollout.vllm.engine_loop import EngineLoop
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

class Engine:
    def add_request(self, *arguments, **options): pass
    def abort_request(self, names): pass
    def step(self): raise EngineDeadError

class LLM:
    llm_engine = Engine()

async def sample():
    loop = EngineLoop(LLM())
    loop.start({"one": ([1], SamplingParams())})
    await loop.wait(["one"], ["one"], 1)

asyncio.run(sample())
"""


@pytest.mark.parametrize(("script", "code"), [(ENDS.format(stays=False), 1), (ENDS.format(stays=True), 0), (DIES, 1)])
def test_a_process_ends_with_the_others_of_its_engine(script: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ("" if code else "goes on\n")
    # It ends, without an error of its own.
    assert "Traceback" not in ended.stderr

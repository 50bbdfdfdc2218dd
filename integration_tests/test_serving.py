"""`vllm serve` answers with an exported policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration_tests.command_server import run_command
from integration_tests.conftest import Recipe
from rl_plugins.rollout.vllm.config import engine_environment
from rl_plugins.tests.patience import patient, wait_until

pytestmark = pytest.mark.extended
QUESTION = [{"role": "user", "content": "17+25="}]


@contextmanager
def served(model: Path, name: str, log: Path) -> Iterator[str]:
    """Serve a model under a name. The block gets the address, and its end kills the server."""
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", name,
        # The system chooses a free port.
        "--host", "127.0.0.1", "--port", "0", "--enforce-eager", "--max-model-len", "64",
    ]  # fmt: skip
    environment = {**os.environ, **engine_environment("cpu", threads=1), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    listening: list[int] = []

    def listens() -> bool:
        assert server.poll() is None, log.read_text()
        connections = psutil.Process(server.pid).net_connections("tcp4")
        listening[:] = [found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN]
        return bool(listening)

    try:
        wait_until(listens, "a server of vLLM that listens", 240, log.read_text)
        yield f"http://127.0.0.1:{listening[0]}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(patient(30))


def test_vllm_serves_an_exported_policy(start_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    run = start_recipe(
        "grpo", "run", "launcher=local", "rollout.engine=transformers", "run.steps=1", "batch.prompts_per_step=4",
        "reward.functions.default={_target_: integration_tests.rewards.shortness}", "tracking.enabled=false",
    )  # fmt: skip
    assert run.wait() == 0, run.tail()
    export = [sys.executable, "-m", "rl_plugins", "export", str(run.run / "checkpoint_00000001"), "step_1"]
    run_command(export, cwd=tmp_path, check=True)
    with served(tmp_path / "step_1", "solver", tmp_path / "server.log") as url:
        question = {"model": "solver", "messages": QUESTION, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=patient(60)) as response:
            answer = json.load(response)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step_1")
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
    (tokens,) = policy.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    expected = tokenizer.decode(tokens[prompt.shape[1] :], skip_special_tokens=True)
    assert answer["usage"]["prompt_tokens"] == prompt.shape[1]
    assert answer["choices"][0]["message"]["content"] == expected

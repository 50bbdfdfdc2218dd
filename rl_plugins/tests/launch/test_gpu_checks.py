"""Each fault of a machine with GPUs is one message with the way out."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rl_plugins.launch import gpu_checks, preflight
from rl_plugins.launch.gpu_checks import check_engine_weights, check_gpus, check_nodes
from rl_plugins.launch.gpus import GpuMachine
from rl_plugins.tests.launch import nvidia_smi as recorded
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.launch.nvidia_smi import A100, H100, machine
from rl_plugins.tests.loops import for_each

GOOD = "nothing is refused"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}
SPLIT = ["placement.rollout=split"]
LOCAL = ["launcher=local", "rollout.engine=transformers"]

FAULTS: list[tuple[GpuMachine, list[str], list[str]]] = [
    (machine(H100), [], [GOOD]),
    (
        machine(H100, torch="2.13.0+cpu", torch_cuda=None),
        [],
        ["torch 2.13.0+cpu is built for CPUs", "fresh environment", "placement.device=cpu"],
    ),
    (machine(H100, torch="2.13.0+cpu", torch_cuda=None), LOCAL, ["is built for CPUs"]),
    (
        machine(H100, driver_cuda=(12, 4)),
        [],
        ["driver 580.95.05 runs CUDA 12.4", "torch 2.13.0 needs CUDA 13.0", "install driver 580 or newer"],
    ),
    (machine(H100, driver_cuda=(12, 4)), LOCAL, ["driver 580 or newer"]),
    (machine(H100, driver_cuda=(12, 4), torch_cuda=(12, 8)), [], [GOOD]),
    (machine(H100, driver_cuda=None), [], ["libcuda is missing", "driver 580 or newer"]),
    (
        machine(smi_error=recorded.NO_DRIVER),
        [],
        ["nvidia-smi fails (NVIDIA-SMI has failed", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
    ),
    (
        machine(H100, H100, A100),
        [],
        ["of different kinds (2 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100", "CUDA_DEVICE_ORDER=PCI_BUS_ID"],
    ),
    (machine(H100, H100, A100, variables={"CUDA_VISIBLE_DEVICES": "0,1"}), [], [GOOD]),
    (machine(H100, A100), LOCAL, [GOOD]),
    (machine(A100, A100, mig=(1,)), [], ["GPU 1 is divided by MIG", "nvidia-smi -mig 0", "CUDA_VISIBLE_DEVICES"]),
    (machine(A100, A100, mig=(1,), variables={"CUDA_VISIBLE_DEVICES": "0"}), [], [GOOD]),
    (
        machine(A100, variables={"CUDA_VISIBLE_DEVICES": "MIG-3c27"}),
        [],
        ["CUDA_VISIBLE_DEVICES=MIG-3c27 names parts of a GPU", "choose whole GPUs"],
    ),
    (
        machine(H100, H100, variables={"CUDA_VISIBLE_DEVICES": "0,2"}),
        [],
        ["CUDA_VISIBLE_DEVICES=0,2 shows 1 of 2 GPUs, and Ray counts 2", "unset the variable"],
    ),
    (
        machine(H100, variables={"CUDA_VISIBLE_DEVICES": ""}),
        [],
        ["CUDA_VISIBLE_DEVICES= shows 0 of 1 GPUs, and Ray counts 0", "an empty value hides all GPUs"],
    ),
    (machine(H100, shm_bytes=64 * 2**20), [], ["/dev/shm has 64 MiB", "at least 1 GiB", "--shm-size=16g"]),
    (machine(H100, shm_bytes=64 * 2**20), LOCAL, [GOOD]),
    (
        machine(H100, variables=EXPANDABLE),
        [],
        [
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True", "CUDA IPC",
            "leave expandable_segments out", "placement.rollout=split",
        ],
    ),
    (machine(H100, variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), [], ["PYTORCH_ALLOC_CONF=exp"]),
    (machine(H100, variables={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}), [], [GOOD]),
    (machine(H100, variables=EXPANDABLE), SPLIT, [GOOD]),
    (machine(H100, variables=EXPANDABLE), ["rollout.engine=transformers"], [GOOD]),
]  # fmt: skip
"""Facts about a machine, overrides, and required words of the message."""


@cache
def configuration(*overrides: str) -> Any:
    return configured("grpo", "model.path=model", "placement.device=cuda", *overrides)


@for_each(("facts", "overrides", "words"), FAULTS)
def test_check_gpus_names_the_fault_and_the_way_out(facts: GpuMachine, overrides: list[str], words: list[str]) -> None:
    message = message_of(lambda: check_gpus(configuration(*overrides), {"this machine": facts}))
    assert [part for part in words if part not in message] == [] and "\n" not in message, message
    assert message == GOOD or message.startswith("this machine: ")


def test_check_gpus_compares_the_gpus_of_machines() -> None:
    machines = {"machine 10.0.0.1": machine(H100, H100), "machine 10.0.0.2": machine(A100)}
    message = message_of(lambda: check_gpus(configuration(), machines))
    assert message.startswith("machine 10.0.0.1 and machine 10.0.0.2: the GPUs are of different kinds (2 x NVIDIA H100")
    assert message_of(lambda: check_gpus(configuration(*LOCAL), machines)) == GOOD


QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip


def test_check_engine_weights_compares_the_weights_with_the_share_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(*overrides: str, model: dict[str, Any] = QWEN_7B) -> str:
        return message_of(lambda: check_engine_weights(configuration(*overrides), model, machine(H100)))

    assert check() == check("rollout.gpu_memory_utilization=0.2") == GOOD
    assert check("rollout.gpu_memory_utilization=0.15") == (
        "rollout.gpu_memory_utilization=0.15: an engine has 11.9 of the 79.6 GiB of a GPU, but its weights take 14.2 "
        "GiB there (bfloat16, rollout.tensor_parallel_size=1): raise one of the two options"
    )
    assert check("rollout.gpu_memory_utilization=0.15", "rollout.tensor_parallel_size=2") == GOOD
    assert "take 28.4 GiB" in check("rollout.gpu_memory_utilization=0.2", "model.precision=32-true")
    assert check("rollout.gpu_memory_utilization=0.15", model={"model_type": "unknown"}) == GOOD
    # The engine has no share.
    assert check("rollout.gpu_memory_utilization=0.15", "+rollout.vllm.kv_cache_memory_bytes=1073741824") == GOOD
    lora = ("model.lora.rank=8", "rollout.lora=adapter")
    small = machine(H100, H100, H100, memory_bytes=28 * 2**30)
    message = message_of(lambda: check_engine_weights(configuration(*lora), QWEN_7B, small))
    assert "2 GPUs would keep 28.4 GiB of weights in the 28.0 GiB of host memory" in message
    merged = configuration(lora[0], "rollout.lora=merged")
    assert message_of(lambda: check_engine_weights(merged, QWEN_7B, small)) == GOOD
    # The preflight reads the file of the model, and asks for the GPUs of this machine.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rl_plugins.models.folder.check_model_folder", lambda option, path, **_: QWEN_7B)
    monkeypatch.setattr(preflight, "read_machine", lambda: machine(H100))
    given = configuration(f"model.path={tmp_path}", "rollout.gpu_memory_utilization=0.15")
    assert "its weights take 14.2 GiB" in message_of(lambda: preflight.check_models(given))


def node(address: str, gpus: float) -> dict[str, Any]:
    """Ray's description of a machine."""
    return {"NodeID": address, "NodeManagerAddress": address, "Resources": {"CPU": 8.0, "GPU": gpus}}


def test_check_nodes_asks_machines_with_gpus_and_compares_with_the_count_of_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    model = f"model.path={tmp_path}"
    machines = {"10.0.0.1": machine(H100, H100), "10.0.0.2": machine(H100, variables={"CUDA_VISIBLE_DEVICES": "0"})}
    asked: list[str] = []

    def read_node(node: str, where: str) -> GpuMachine:
        asked.append(node)
        return machines[node]

    monkeypatch.setattr(gpu_checks, "_read_node", read_node)
    nodes = [node("10.0.0.1", 2), node("10.0.0.2", 1), node("10.0.0.3", 0)]
    check_nodes(configuration(model), nodes)
    assert asked == ["10.0.0.1", "10.0.0.2"]
    small = configuration(model, "rollout.gpu_memory_utilization=0.15")
    assert "its weights take 14.2 GiB" in message_of(lambda: check_nodes(small, nodes))
    # The workers may be on the first machine alone, so the second machine needs no memory for weights of engines.
    machines["10.0.0.2"] = replace(machines["10.0.0.2"], memory_bytes=2**30)
    adapter = configuration(model, "model.lora.rank=8", "rollout.lora=adapter", "placement.num_workers=2")
    assert message_of(lambda: check_nodes(adapter, nodes)) == GOOD
    nodes[1] = node("10.0.0.2", 4)
    message = message_of(lambda: check_nodes(configuration(model), nodes))
    assert message == (
        "machine 10.0.0.2: Ray counts 4 GPUs, but CUDA shows 1 of the 1 GPUs there (CUDA_VISIBLE_DEVICES=0): start Ray "
        "with --num-gpus=1, or correct the variable before ray start"
    )


def test_check_this_machine_checks_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recorded.answer(monkeypatch, recorded.query(H100, A100))
    monkeypatch.setattr("rl_plugins.launch.gpus.driver_cuda", lambda: (13, 0))
    monkeypatch.setattr("rl_plugins.launch.gpus._torch_build", lambda: ("2.13.0", (13, 0)))
    message = message_of(lambda: preflight.check_this_machine(configuration()))
    assert message.startswith("this machine: the GPUs are of different kinds")
    # The run computes on CPU.
    assert message_of(lambda: preflight.check_this_machine(configuration("placement.device=cpu"))) == GOOD


def test_check_this_machine_names_the_variable_that_hides_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recorded.answer(monkeypatch, recorded.query(H100, H100))
    monkeypatch.setattr(preflight, "read_machine", lambda: machine(H100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = message_of(lambda: preflight.check_this_machine(configuration()))
    assert message.startswith("placement.device=cuda, but CUDA_VISIBLE_DEVICES='' hides all GPUs of this machine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    message = message_of(
        lambda: preflight.check_this_machine(configuration("placement.num_workers=4", "placement.cpus_per_worker=0.01"))
    )
    assert "this machine with CUDA_VISIBLE_DEVICES='1' has 1." in message

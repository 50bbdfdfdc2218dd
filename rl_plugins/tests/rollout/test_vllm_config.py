"""vLLM's settings, without vLLM: the transports of each device, and the settings of the engine's process."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.vllm.config import VLLMConfig


@pytest.mark.parametrize(("device", "transport"), [("cpu", "ipc"), ("cpu", "nccl"), ("cuda", "shared_memory")])
def test_vllm_config_refuses_a_transport_that_the_device_does_not_support(device: Any, transport: Any) -> None:
    with pytest.raises(ConfigError, match=f"transport={transport} does not run on device={device}"):
        VLLMConfig("m", device=device, transport=transport)


@pytest.mark.parametrize(
    ("device", "transport", "backend"),
    [
        ("cpu", "auto", "shared_memory"),
        ("cpu", "shared_memory", "shared_memory"),
        ("cuda", "auto", "ipc"),
        ("cuda", "nccl", "nccl"),
    ],
)
def test_backend_of_auto_transport_follows_the_device(device: Any, transport: Any, backend: str) -> None:
    config = VLLMConfig("m", device=device, transport=transport)
    assert config.backend == backend
    arguments = config.engine_arguments()
    assert arguments["weight_transfer_config"] == {"backend": "interruptible_nccl" if backend == "nccl" else backend}
    # The ratio of the policy loss needs the log-probs of the sampled distribution.
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_engine_on_cpu_shares_prompts_by_blocks_of_32_tokens() -> None:
    assert VLLMConfig("model").engine_arguments()["block_size"] == 32
    assert "block_size" not in VLLMConfig("model", device="cuda").engine_arguments()


def test_engine_on_cpu_has_plain_weights_and_one_thread() -> None:
    config = VLLMConfig("m", cpu_kv_cache_gib=3)
    assert config.engine_arguments()["quantization"] == "plain_weights"
    assert config.environment["OMP_NUM_THREADS"] == "1"
    assert VLLMConfig(model="m", threads=3).environment["OMP_NUM_THREADS"] == "3"
    assert config.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_sends_no_usage_report_unless_the_user_asks(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    assert VLLMConfig("m", device=device).environment["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    assert VLLMConfig("m", device=device).environment["VLLM_NO_USAGE_STATS"] == "0"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_arguments_name_the_executor_of_one_or_several_processes(device: Any) -> None:
    for size, executor in ((1, "OneProcessExecutor"), (2, "OneForAllExecutor")):
        arguments = VLLMConfig("m", device=device, tensor_parallel_size=size).engine_arguments()
        assert arguments["distributed_executor_backend"] == f"rl_plugins.rollout.vllm.executor.{executor}"


def test_engine_samples_more_responses_at_once_on_a_gpu() -> None:
    for device, number in (("cpu", 256), ("cuda", 1024)):
        assert VLLMConfig("m", device=device).engine_arguments()["max_num_seqs"] == number
        assert VLLMConfig("m", device=device, max_num_seqs=3).engine_arguments()["max_num_seqs"] == 3
    with pytest.raises(ConfigError, match="max_num_seqs"):
        VLLMConfig("m", max_num_seqs=0)


def test_return_experts_needs_a_gpu_and_cached_prefixes() -> None:
    config = VLLMConfig("model", device="cuda", return_experts=True)
    assert config.engine_arguments()["enable_return_routed_experts"] is True
    assert config.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    plain = VLLMConfig("model", device="cuda")
    assert "enable_return_routed_experts" not in plain.engine_arguments()
    assert "VLLM_USE_V2_MODEL_RUNNER" not in plain.environment
    for options in ({"device": "cpu"}, {"device": "cuda", "prefix_caching": False}):
        with pytest.raises(ConfigError, match="return_experts=True: vLLM returns experts on GPUs and with prefix_cach"):
            VLLMConfig("model", return_experts=True, **options)

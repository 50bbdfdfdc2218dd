"""Arguments of vLLM in `rollout.vllm` and `sampling.vllm`: names are checked before vLLM is imported."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from rl_plugins.config.rollout import OWN_ARGUMENTS, RolloutConfig, check_engine_arguments, engine_argument_names
from rl_plugins.config.sampling import (
    OWN_SAMPLING_ARGUMENTS,
    REFUSED_SAMPLING_ARGUMENTS,
    VLLM_SAMPLING_ARGUMENTS,
    SamplingConfig,
)
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.requests import sampling_parameters
from rl_plugins.tests.loops import for_each


def test_engine_argument_names_are_the_fields_of_vllm_and_cover_the_arguments_of_each_engine() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    assert engine_argument_names() == {field.name for field in dataclasses.fields(arg_utils.EngineArgs)}
    for device in ("cpu", "cuda"):
        for size in (1, 2):
            config = VLLMConfig("model", device=device, tensor_parallel_size=size, lora_rank=8)
            assert config.engine_arguments().keys() <= engine_argument_names()


def test_engine_arguments_contain_the_arguments_of_the_user() -> None:
    own = {
        "max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8", "enforce_eager": True, "enable_expert_parallel": True,
    }  # fmt: skip
    RolloutConfig(vllm=own)
    arguments = VLLMConfig("model", device="cuda", tensor_parallel_size=2, vllm=own).engine_arguments()
    assert {name: arguments[name] for name in own} == own
    assert arguments["gpu_memory_utilization"] == 0.5


def test_engine_with_a_given_kv_cache_asks_vllm_for_no_share_of_a_gpu() -> None:
    """VLLM compares the share with the free memory at the start, also if the share is not used later."""
    config = VLLMConfig("model", device="cuda", vllm={"kv_cache_memory_bytes": 3000})
    assert config.engine_arguments()["gpu_memory_utilization"] == 0.01
    assert config.engine_arguments()["kv_cache_memory_bytes"] == config.needed_bytes(10_000) == 3000
    assert VLLMConfig("model", device="cuda", gpu_memory_utilization=0.4).needed_bytes(10_000) == 4000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_batched_token", "did you mean max_num_batched_tokens"),
        ("zzzzzzzz", "no such engine argument: see vllm.EngineArgs"),
        *[(name, f"use {option}" if option else "leave it out") for name, option in OWN_ARGUMENTS.items()],
    ],
)
def test_check_engine_arguments_refuses_unknown_arguments_and_names_the_option_of_the_package(
    name: str, message: str
) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=rf"vllm\.{name}: .*{message}"):
        check_engine_arguments({name: 1})
    with pytest.raises(ConfigError, match=rf"vllm\.{name}"):
        RolloutConfig(vllm={name: 1})


def test_vllm_config_refuses_arguments_with_a_fixed_value_on_cpu() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.quantization: engines on CPU have a value of their own"):
        VLLMConfig("model", vllm={"quantization": "fp8"})


def test_each_sampling_argument_of_vllm_is_an_option_or_allowed_or_refused() -> None:
    sampling_params = pytest.importorskip("vllm.sampling_params")
    fields = {name for name in sampling_params.SamplingParams.__struct_fields__ if not name.startswith("_")}
    groups = [{*OWN_SAMPLING_ARGUMENTS}, {*VLLM_SAMPLING_ARGUMENTS}, {*REFUSED_SAMPLING_ARGUMENTS}]
    assert set().union(*groups) == fields, "put a new argument of vLLM into one of the three tables"
    assert sum(map(len, groups)) == len(fields), "an argument is in one table only"


@for_each(("name", "reason"), [*REFUSED_SAMPLING_ARGUMENTS.items(), *OWN_SAMPLING_ARGUMENTS.items()])
def test_refused_sampling_arguments_name_the_reason_or_the_option(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"vllm\.{name}: .*{re.escape(reason)}"):
        SamplingConfig(vllm={name: 1})


def test_sampling_arguments_reach_vllm() -> None:
    pytest.importorskip("vllm")
    passed = {
        "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4, "logit_bias": {5: 1.0},
        "structured_outputs": {"choice": ["yes", "no"]},
    }  # fmt: skip
    sampling = SamplingConfig(max_tokens=3, min_p=0.1, vllm=passed)
    parameters = sampling_parameters(sampling, seed=1, excluded=None)
    assert (parameters.min_p, parameters.presence_penalty, parameters.repetition_penalty) == (0.1, 0.5, 1.2)
    assert sampling_parameters(sampling, seed=1, excluded=7).logit_bias == {5: 1.0, 7: -100.0}
    assert parameters.logit_bias == {5: 1.0} and parameters.structured_outputs.choice == ["yes", "no"]
    from_text = SamplingConfig(vllm={"logit_bias": {"5": 1.0}})
    assert sampling_parameters(from_text, seed=1, excluded=None).logit_bias == {5: 1.0}
    # vLLM refuses more tokens than max_tokens.
    assert parameters.min_tokens == 3
    assert {sampling: "a"} == {SamplingConfig(max_tokens=3, min_p=0.1, vllm=passed): "a"}
    assert sampling != SamplingConfig(max_tokens=3, min_p=0.1)


def test_sampling_parameters_read_stop_strings_with_special_tokens() -> None:
    pytest.importorskip("vllm")
    assert not sampling_parameters(SamplingConfig(stop=("<|end|>",)), seed=1, excluded=None).skip_special_tokens


@for_each(
    ("ends", "message"),
    [
        ({"stop": [""]}, r"stop=\[''\]: must be a list of texts, none empty"),
        ({"stop": ("a", "")}, "stop=.*: must be a list of texts"),
        # A text alone would stop at each of its characters.
        ({"stop": "END"}, "stop=END: must be a list of texts"),
        ({"stop_token_ids": [2, -1]}, r"stop_token_ids=\[2, -1\]: must be a list of token ids, 0 or more"),
        ({"stop_token_ids": 2}, "stop_token_ids=2: must be a list of token ids"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids=\['a'\]: must be a list of token ids"),
    ],
)
def test_ends_of_responses_are_texts_with_characters_and_token_ids(ends: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SamplingConfig(**ends)
    assert SamplingConfig(stop=["END", "\n"], stop_token_ids=[0]).stop == ("END", "\n")  # type: ignore[arg-type]


def test_sampling_parameters_give_several_greedy_responses() -> None:
    """vLLM refuses n above 1 with temperature 0."""
    pytest.importorskip("vllm")
    parameters = sampling_parameters(SamplingConfig(num_samples=2, temperature=0.0), seed=1, excluded=None)
    assert (parameters.n, parameters.top_k) == (2, 1)

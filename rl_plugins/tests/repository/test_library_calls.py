"""Calls of vLLM, DeepSpeed, Ray and Lightning fit the installed packages, also calls on a GPU only.

vLLM's build for CPUs has the Python files of the build for GPUs: a changed name or argument fails here. Imported names
are found in the source of the package. The tables below contain methods of objects.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
# The imports take many seconds, outside the time of any test.
import deepspeed.runtime.engine  # noqa: F401
import ray.train.torch
import vllm.v1.worker.gpu_model_runner
import vllm.v1.worker.gpu_worker  # noqa: F401

from rl_plugins.config.rollout import CPU_HEAD_SIZES

LIBRARIES = ("vllm", "deepspeed", "ray", "lightning")
FOLDERS = ("rl_plugins", "strategies", "callbacks")

METHODS = {
    "vllm:LLM": [
        "LLM(**engine_arguments)",
        "sleep(level=0, mode='keep')",
        "wake_up(tags)",
        "init_weight_transfer_engine(request)",
        "start_weight_update()",
        "update_weights(request)",
        "finish_weight_update(weight_version='1')",
        "update_weight_version('1')",
        "get_weight_version()",
        "reset_prefix_cache(reset_running_requests=True)",
        "collective_rpc('device_memory', args=())",
    ],
    "vllm.v1.engine.llm_engine:LLMEngine": [
        "add_request(name, prompt, parameters, lora_request=None)",
        "abort_request(names, internal=True)",
        "add_lora(request)",
        "step()",
    ],
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": ["start_worker_monitor(inline=False)", "_init_executor()"],
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": ["_init_executor()"],
    "vllm.distributed.weight_transfer.base:TrainerWeightTransferEngine": ["send_weights()", "shutdown()"],
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": [
        "init_transfer_engine(init_info)",
        "start_weight_update()",
        "receive_weights(update_info)",
        "finish_weight_update()",
        "shutdown()",
    ],
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": ["register_engine(name, engine)"],
    "vllm.distributed.weight_transfer.ipc_engine:IPCTrainerWeightTransferEngine": [
        "trainer_init(info, client=client, source=source)",
        "_do_send(names=[], dtype_names=[], shapes=[], ipc_handles={}, tensor_sizes=[])",
    ],
    "deepspeed.runtime.engine:DeepSpeedEngine": [
        "set_gradient_accumulation_boundary(True)",
        "get_global_grad_norm()",
        "zero_optimization_stage()",
        "save_checkpoint('folder', tag='zero', exclude_frozen_parameters=False)",
        "load_checkpoint('folder', tag='zero', load_module_strict=True)",
        "_copy_recovery_script('folder')",
    ],
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": [
        "checkpoint_event_prologue()",
        "checkpoint_event_epilogue()",
        "load_state_dict(states, load_from_fp32_weights=True)",
    ],
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": [
        "update_lp_params()",
        "load_state_dict(states, load_from_fp32_weights=True)",
    ],
    "ray.actor:ActorClass": ["options(name='engine', num_cpus=0, num_gpus=0.3, max_restarts=-1, runtime_env=None)"],
    "ray.util.placement_group:PlacementGroup": ["ready()"],
    "lightning.pytorch.strategies:DeepSpeedStrategy": [
        "_init_config_if_needed()",
        "_set_node_environment_variables()",
        "set_world_ranks()",
    ],
}
"""By class: calls in the package, written as in the source."""

ATTRIBUTES = {
    "vllm:LLM": ["llm_engine"],
    "vllm.v1.worker.gpu_worker:Worker": ["model_runner", "weight_transfer_engine"],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ["kv_caches", "model"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ["kv_caches", "model"],
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": ["workers", "shutting_down"],
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": ["parallel_config", "model"],
    "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerWeightTransferEngine": ["model_update_group"],
    "vllm.outputs:CompletionOutput": ["token_ids", "logprobs", "finish_reason", "weight_versions", "routed_experts"],
    "vllm.outputs:RequestOutput": ["request_id", "finished", "outputs", "prompt_logprobs", "prompt_token_ids"],
    "deepspeed.runtime.engine:DeepSpeedEngine": ["optimizer", "module", "global_steps", "skipped_steps"],
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": [
        "optimizer",
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "grad_partitions_flat_buffer",
    ],
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ["optimizer", "single_partition_of_fp32_groups"],
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": ["optimizer", "fp32_groups_flat_partition"],
    "ray.train.v2._internal.exceptions:UserExceptionWithTraceback": ["_base_exc"],
    "lightning.pytorch.strategies:DeepSpeedStrategy": ["_timeout", "_process_group_backend"],
    "lightning.pytorch:LightningModule": ["_current_fx_name", "_log_hyperparams", "_compiler_ctx", "hparams_initial"],
    "lightning.pytorch.loops.fit_loop:_FitLoop": ["_data_source", "epoch_loop"],
    "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop": ["_data_source"],
}
"""By class: attributes of objects, read by the package."""


def calls_of(source: str) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield each name of a library in a module's source, with its call, or None for a name without a call."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                library = alias.name.split(".")[0]
                if library in LIBRARIES:
                    names[alias.asname or library] = f"{alias.name if alias.asname else library}:"
                    yield f"{alias.name}:", None
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in LIBRARIES:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}:{alias.name}"
                yield f"{node.module}:{alias.name}", None

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
            return f"{owner}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield name, node
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield name, None


def resolve(name: str) -> Any:
    """Return the object with a name like `module:name.name`. Submodules among the names are imported."""
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in filter(None, path.split(".")):
        if not hasattr(found, part):
            import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def check_fit(function: Any, call: ast.Call, *, bound: bool) -> None:
    """Raise TypeError if the signature of a function does not accept the arguments of a call.

    Args:
        function: function or class.
        call: call; arguments after a star are not checked.
        bound: True if the function is a method without its object.
    """
    positional = [None] * (bound + sum(not isinstance(argument, ast.Starred) for argument in call.args))
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    open_ended = any(isinstance(argument, ast.Starred) for argument in call.args) or len(keywords) < len(call.keywords)
    signature = inspect.signature(function)
    (signature.bind_partial if open_ended else signature.bind)(*positional, **keywords)


def test_imported_names_of_libraries_exist_and_take_the_arguments_of_each_call(root: Path) -> None:
    found, wrong = set(), []
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        if "tests" in file.relative_to(root).parts:
            continue
        for name, call in calls_of(file.read_text()):
            found.add(name)
            try:
                function = resolve(name)
                if call is not None:
                    check_fit(function, call, bound=False)
            except (ImportError, AttributeError, TypeError) as error:
                wrong.append(f"{file.relative_to(root)}: {name}: {error}")
    assert not wrong, "\n".join(wrong)
    assert {"vllm:LLM", "deepspeed:.initialize", "ray:.util.get_node_ip_address"} <= found


def test_check_fit_refuses_an_argument_that_the_library_does_not_have() -> None:
    source = "import ray\nfrom ray.util import remove_placement_group as remove\nremove()\nray.get(r)"
    calls = {name: call for name, call in calls_of(source) if call is not None}
    check_fit(ray.get, calls["ray:.get"], bound=False)
    with pytest.raises(TypeError, match="missing a required argument: 'placement_group'"):
        check_fit(resolve("ray.util:remove_placement_group"), calls["ray.util:remove_placement_group"], bound=False)


def test_cpu_head_sizes_are_the_sizes_of_vllm() -> None:
    assert resolve("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend").get_supported_head_sizes() == [
        *CPU_HEAD_SIZES
    ]


@pytest.mark.parametrize("owner", METHODS)
def test_methods_of_libraries_take_the_arguments_of_each_call(owner: str) -> None:
    cls = resolve(owner)
    for text in METHODS[owner]:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        name = call.func.id
        method = cls if name == cls.__name__ else getattr(cls, name, None)
        assert method is not None, f"{owner} has no {name}"
        try:
            # A class method has its class already.
            check_fit(method, call, bound=inspect.isfunction(method))
        except TypeError as error:
            raise AssertionError(f"{owner}: {text}: {error}") from None


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_objects_of_libraries_have_the_attributes_that_the_package_reads(owner: str) -> None:
    bases = [base for base in resolve(owner).__mro__ if base.__module__ not in ("builtins", "typing")]
    source = "\n".join(map(inspect.getsource, bases))
    for name in ATTRIBUTES[owner]:
        written = rf"^ *(self\.{name}\b[^=\n]*=[^=]|self\.{name} *:|{name} *:|def {name}\()"
        assert re.search(written, source, re.M), f"{owner} has no attribute {name}"

"""Cases of the program for GPUs without vLLM, on CPU with tiny sizes and on a pretended GPU."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from integration_tests.gpu.without_vllm.cases import Place, run_case
from integration_tests.gpu.without_vllm.program import SECTIONS
from integration_tests.gpu.without_vllm.results import FAILED, PASSED, SKIPPED, Result
from integration_tests.gpu.without_vllm.section_process import cases_of
from integration_tests.gpu.without_vllm.training import save_policy
from rl_plugins.tests.ranks import run_ranks

# Cases of the slow sections; of the other sections, all cases.
SOME = {
    "single_device": ["32-true", "16-mixed"],
    "zero1": ["bf16-mixed"],
    "zero2": ["lora 32-true"],
    "zero3": ["lora bf16-mixed"],
    "fsdp": ["bf16-mixed", "16-mixed"],
    "sequence_parallel": ["1 rank bfloat16"],
}
ON_HOST = {"zero3": ["offload cpu 32-true"], "fsdp": ["offload cpu bf16-mixed"]}
NEEDS_GPU = {
    ("environment", "faults"),
    ("packed_attention", "kernel bfloat16"),
    ("liger", "blocks"),
    ("liger", "output head"),
}


def run_on_cpu(rank: int, sections: Sequence[str], some: Mapping[str, Sequence[str]]) -> list[Result]:
    """Run cases of sections in this process."""
    results = []
    for name in sections:
        with tempfile.TemporaryDirectory() as folder:
            for case in cases_of(SECTIONS[name].function)(Place("cpu", Path(folder))):
                if case.name in some.get(name, [case.name]):
                    results.append(run_case(name, case))
    return results


def compare_on_cpu(rank: int, folder: Path) -> list[Mapping[str, Any]]:
    """Run all variants of `sequence_parallel` as a rank."""
    from integration_tests.gpu.without_vllm import sequence_parallel

    place = Place("cpu", folder)
    return [sequence_parallel.compare(place, variant) for variant in sequence_parallel.VARIANTS.values()]


class ReceiverThread(threading.Thread):
    """The other process of the section `cuda_ipc`, as a thread on the same pretended GPU."""

    def __init__(self, target: Callable[..., None], args: tuple[Connection, Place], daemon: bool) -> None:
        super().__init__(daemon=daemon)
        pipe, place = args
        # A process has a copy of its end of the pipe.
        self.receive = partial(target, Connection(os.dup(pipe.fileno())), place)

    def run(self) -> None:
        from rl_plugins.tests.rollout.cuda_stubs import on_gpu

        with on_gpu("GPU-0"):
            self.receive()

    def kill(self) -> None:
        """Nothing: the thread has ended, or ends with the process."""


def send_on_pretended_gpu(rank: int) -> list[Result]:
    """Run the cases of `cuda_ipc` with little memory of the CPU as that of a GPU."""
    from integration_tests.gpu.without_vllm import cuda_ipc
    from rl_plugins.tests.rollout.cuda_stubs import cuda_on_cpu, on_gpu

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=ReceiverThread)
    small = {"EMBEDDING": 50_000, "LAYER": 3_000, "LAYERS": 40, "_MIB": 400}
    with cuda_on_cpu(), on_gpu("GPU-0"), ExitStack() as patches:
        patches.enter_context(patch.object(cuda_ipc.multiprocessing, "get_context", lambda method: context))
        for name, value in small.items():
            patches.enter_context(patch.object(cuda_ipc, name, value))
        return [run_case("cuda_ipc", case) for case in cuda_ipc.cases(Place("cuda", Path()))]


def test_weights_go_through_cuda_ipc_of_a_pretended_gpu() -> None:
    [(results, _)] = run_ranks(send_on_pretended_gpu, world_size=1)
    assert not [result.message for result in results if result.status != PASSED]
    assert "exceeds buffer_size_bytes" in results[0].figures["message"]
    assert len(results) == 4 and all(result.figures["gb_per_s"] > 0 for result in results[1:])


def call_kernel_of_torch_2_11(rank: int) -> tuple[Any, ...]:
    """Return what the kernel of torch 2.11 gets from the call of `packed_sdpa`."""
    from integration_tests.gpu.without_vllm import kernel
    from rl_plugins.models import packed_attention

    def old_kernel(query: str, *, window_size: tuple[int, int]) -> tuple[Any, ...]:
        return query, window_size

    with (
        patch.object(packed_attention, "varlen_attn", packed_attention.varlen_attn),
        patch.object(kernel, "varlen_attn", old_kernel),
    ):
        kernel.use_kernel_of_this_torch()
        call: Any = packed_attention.varlen_attn
        return kernel.takes_enable_gqa(), call("query", window_size=(-1, 0), enable_gqa=True)


def test_kernel_of_torch_2_11_is_called_without_enable_gqa() -> None:
    [(found, _)] = run_ranks(call_kernel_of_torch_2_11, world_size=1)
    assert found == (False, ("query", (-1, 0)))


def train_at_too_large_a_scale(rank: int) -> list[Result]:
    """Run a training in float16 whose gradients overflow in all steps."""
    with patch("integration_tests.gpu.without_vllm.training.SCALE_POWER", 60):
        return run_on_cpu(rank, ["single_device"], {"single_device": ["16-mixed"]})


def test_training_in_float16_without_a_step_fails() -> None:
    [([result], _)] = run_ranks(train_at_too_large_a_scale, world_size=1)
    assert result.status == FAILED and "3 optimizer steps were left out" in result.message


@pytest.mark.extended
def test_cases_of_all_sections_run_on_cpu() -> None:
    [(results, _)] = run_ranks(run_on_cpu, list(SECTIONS), SOME, world_size=1, timeout_s=540)
    assert {result.section for result in results} == set(SECTIONS)
    assert {name: [r.case for r in results if r.section == name] for name in SOME} == SOME
    assert not [result.message for result in results if result.status == FAILED]
    skipped = {(result.section, result.case) for result in results if result.status == SKIPPED}
    assert {place for place in skipped if place[0] != "cuda_ipc"} == NEEDS_GPU
    assert {result.status for result in results if result.section == "cuda_ipc"} == {SKIPPED}
    gaps = [result.figures["gap"] for result in results if "gap" in result.figures]
    # The case of sequence parallelism compares no log-probs.
    assert len(gaps) == sum(map(len, SOME.values())) - 1 and max(gaps) < 0.3


def test_first_step_with_optimizer_states_on_the_host_equals_the_plain_step() -> None:
    [(results, _)] = run_ranks(run_on_cpu, list(ON_HOST), ON_HOST, world_size=1, timeout_s=540)
    assert not [result.message for result in results if result.status != PASSED]
    assert [result.figures["difference"] for result in results] == [0, 0]


def test_rows_cut_over_two_ranks_have_the_logits_and_gradients_of_whole_rows(tmp_path: Path) -> None:
    save_policy(Place("cpu", tmp_path), tmp_path / "model")
    for results, _ in run_ranks(compare_on_cpu, tmp_path):
        assert len(results) == 3 and all(result["gradients_difference"] > 0 for result in results)

"""What follows from the findings: which ways to run will work, and what keeps the others from it."""

from __future__ import annotations

from collections.abc import Sequence

from rl_plugins.launch.diagnosis.finding import Finding

_WAYS = (
    ("one process", "launcher=local rollout.engine=transformers", ()),
    ("Ray with vLLM", "the default: ZeRO workers and a vLLM engine", ("Ray", "vllm", "DeepSpeed's op")),
    ("FSDP2", "strategy.name=fsdp, nothing is compiled", ("Ray", "vllm")),
    ("offload to files", "strategy.offload.policy=nvme", ("Ray", "vllm", "libaio", "c++", "ninja", "DeepSpeed's op")),
    ("GPU", "vLLM beside the trainers, weights by CUDA IPC", ("Ray", "GPU", "vllm", "c++", "ninja")),
)
_SERVICES = ("Ray", "MLflow")
"""Not every way to run needs them; tracking.enabled=false does without MLflow."""


def outlook(findings: Sequence[Finding]) -> list[Finding]:
    """Whether each way to run will work."""
    broken = [of.name for of in findings if of.state == "broken" and of.name not in _SERVICES]
    lacking = {finding.name for finding in findings if finding.state != "good"}
    ways = []
    for name, how, needs in _WAYS:
        missing = list(dict.fromkeys([*broken, *(need for need in needs if need in lacking)]))
        if missing:
            ways.append(Finding(name, "absent", f"{how}; it lacks {', '.join(missing)}"))
        else:
            ways.append(Finding(name, "good", how))
    return ways

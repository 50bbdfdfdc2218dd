"""Transport of the policy's weights from trainers to rollout engines.

`source.py` describes the weights of a trainer. `layout.py` places an engine's parameters in shared memory.
`shared_memory.py` writes weights to engines on the same host, `gloo.py` sends weights to engines on other hosts, and
`check.py` compares an engine's weights with the policy's. Transports on CUDA belong to vLLM (`rollout/vllm/`).
"""

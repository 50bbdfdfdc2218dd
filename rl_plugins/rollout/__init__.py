"""Rollout engines: they hold a copy of the policy for sampling and take new weights between RL steps.

`engine.py` is the protocol that stages and strategies know; `transformers_engine.py` samples in process;
`vllm/` is the only room that imports vLLM; `weights.py` is the trainer's side of the
weight path, `shared_memory.py` and `shared_parameters.py` are both sides of the one on CPU.
"""

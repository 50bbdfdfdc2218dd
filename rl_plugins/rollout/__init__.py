"""Rollout engines: each engine has a copy of the policy, samples responses, and gets new weights before each sampling.

`engine.py` defines the protocol and its records. `transformers_engine.py` samples in the trainer's process. `vllm/`
samples in Ray actors, and is the only room with imports of vLLM.
"""

"""Program that runs the parts of the package on one GPU, without Ray and vLLM: `-m integration_tests.gpu.without_vllm`.

The machine needs Python 3.11 or 3.12, torch 2.11 or newer, and the libraries of training: transformers, lightning,
tensordict, peft, omegaconf, and DeepSpeed for ZeRO. Each section runs in a process with a deadline. A section is a
function that returns cases, and a case returns figures or fails.
"""

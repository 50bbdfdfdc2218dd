"""`python -m integration_tests.prompt_log_probs FOLDER`: log-probs of prompts in vLLM without any plug-in.

The program reads token ids as JSON from stdin and writes the log-prob of every token of each prompt except the first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.load(sys.stdin)]
    engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
    outputs: Any = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    log_probs = [
        [choices[token].logprob for choices, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
        for o in outputs
    ]
    assert "rl_plugins" not in sys.modules
    print(json.dumps(log_probs))
    sys.stdout.flush()
    # Skip the shutdown of vLLM, which takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()

"""Time of a turn with a tool, beside sampling and the tool itself.

`python -m benchmarks.tool_turns [--conversations 256] [--turns 4]` runs conversations with an engine that answers at
once with a call of the calculator. vLLM's parser `hermes` reads the calls. The time of a turn is the time of all turns,
divided by their number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from typing_extensions import override

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.calculator import calc
from rl_plugins.environments.tools import ToolEnvironment
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.transformers_engine import SynchronousGroups

REPEATS = 5


class InstantEngine(SynchronousGroups):
    """An engine whose every response is the same."""

    def __init__(self, response: Sequence[int]) -> None:
        super().__init__()
        self._response = list(response)

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        count = len(prompts) * sampling.num_samples
        log_probs = [[0.0] * len(self._response)] * count
        return Generations.from_responses([self._response] * count, log_probs, ["stop"] * count, 0)


def main() -> None:
    """Print the time of a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    tokenizer: Any = build_tokenizer(tools=True)
    tools = ToolEnvironment([calc], parser="hermes", max_turns=arguments.turns + 1)
    scorer = InlineScorer({"_target_": "rl_plugins.rewards.scorers.exact_match"})
    question: list[Any] = [{"role": "user", "content": "347*86"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=False, **tools.template_options
    )
    engine: Any = InstantEngine(
        tokenizer.encode('<tool_call>{"name": "calc", "arguments": {"x": "347*86"}}</tool_call><|end|>')
    )
    about = ScoringRequest("products", "", "29842", {}, question)
    sampling = SamplingConfig(num_samples=arguments.conversations, max_tokens=100 * (arguments.turns + 1))
    times = []
    for _ in range(REPEATS):
        talk = Conversations(tools.connect(scorer, tokenizer), tokenizer, arguments.turns + 1).by(engine)
        start = time.perf_counter()
        talk.submit([Opening(0, prompt, 0, about=about)], sampling)
        (generations,) = talk.collect([0], 0).values()
        times.append((time.perf_counter() - start) / (arguments.conversations * arguments.turns))
        calls = sum(ending.counts["tools/calls"] for ending in generations.endings)
        assert calls == arguments.conversations * arguments.turns
    tools.close()
    print(
        f"{arguments.conversations} conversations of {arguments.turns} turns with a tool: "
        f"{1000 * median(times):.2f} ms a turn (median of {REPEATS})"
    )


if __name__ == "__main__":
    main()

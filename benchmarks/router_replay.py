"""Ratios of a mixture of experts after optimizer steps, with and without a replay of routes.

`python -m benchmarks.router_replay` computes old log-probs of random samples, takes optimizer steps on one half of the
samples, and compares the log-probs of the other half: the change of a token's log-prob, with free routes and with the
routes of the old log-probs. A ratio should change because weights change, not because a token meets other experts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.data.experience import Experience
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.router_replay import RouterReplay


def changes(family: str, *, steps: int, lr: float, replays: bool) -> tuple[Tensor, float]:
    """Return the changes of the log-probs in nats [N], and the share of experts that the routers would replace."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_family(family, Path(folder))
        policy = load_causal_lm(folder, dtype=torch.float32)
    ids = torch.randint(250, (32, 40), generator=torch.Generator().manual_seed(0)).tolist()
    trained, held_out = (
        Experience.from_responses([row[:8] for row in half], [row[8:] for row in half], 0)
        for half in (ids[:16], ids[16:])
    )
    optimizer, replay = torch.optim.AdamW(policy.parameters(), lr=lr), RouterReplay()
    replay.install(policy)

    def log_probs(samples: Experience, experts_NLK: Tensor | None) -> Tensor:
        replay.prepare(experts_NLK)
        found = response_log_probs(policy, **samples.forward_inputs, packed=True, router_replay=replay)
        return found.log_probs_BT

    with torch.no_grad():
        old_BT = log_probs(held_out, None)
        experts_NLK = replay.experts_NLK
    for _ in range(steps):
        optimizer.zero_grad()
        (-log_probs(trained, None).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        log_probs(held_out, experts_NLK)
        differing = float(replay.differing_N.mean())
        new_BT = log_probs(held_out, experts_NLK if replays else None)
    return (new_BT - old_BT).flatten(), differing


def main() -> None:
    """Print the changes of the log-probs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["qwen3_moe", "mixtral"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    arguments = parser.parse_args()
    print("| family | experts replaced | routes | mean change | 99th percentile | largest |\n|---|---|---|---|---|---|")
    for family in arguments.families:
        for replays in (False, True):
            changes_N, differing = changes(family, steps=arguments.steps, lr=arguments.lr, replays=replays)
            sizes = changes_N.abs()
            print(
                f"| `{family}` | {differing:.2%} | {'replayed' if replays else 'free'} | {float(sizes.mean()):.5f} | "
                f"{float(sizes.quantile(0.99)):.5f} | {float(sizes.max()):.5f} |"
            )


if __name__ == "__main__":
    main()

"""Replay of routes: the experts of an earlier pass, in padded and packed rows, with the routers' own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from typing_extensions import Unpack

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import LoadingOptions, prepared
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.router_replay import RouterReplay, check_routers
from rl_plugins.tests.models.samples import batch_of, random_samples

MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid",
)  # fmt: skip
LENGTHS = ((3, 5), (4, 2), (1, 6))


def mixture(family: str, folder: Path, **options: Unpack[LoadingOptions]) -> Any:
    save_tiny_family(family, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return prepared(model, options)


def samples() -> Experience:
    return batch_of(random_samples(*LENGTHS))


def log_probs(model: Any, replay: RouterReplay | None, experts_NLK: Tensor | None = None, **options: Any) -> Tensor:
    """Return the log-probs of real response tokens; with a replay, set the experts or record the experts."""
    batch = samples()
    if replay is not None:
        replay.prepare(experts_NLK)
    found = response_log_probs(model, **batch.forward_inputs, router_replay=replay, **options)
    return found.log_probs_BT[batch.response_mask.bool()]


def change_routers(replay: RouterReplay) -> None:
    """Add noise to the weights of the routers."""
    torch.manual_seed(1)
    with torch.no_grad():
        for router in replay._routers:
            for parameter in router.parameters():
                parameter.add_(parameter.std() * torch.randn_like(parameter))


@pytest.mark.parametrize("family", MIXTURES)
def test_router_replay_keeps_the_experts_after_routers_have_changed(family: str, tmp_path: Path) -> None:
    model, replay = mixture(family, tmp_path), RouterReplay()
    free_N = log_probs(model, None)
    replay.install(model)
    replay.install(model)
    assert torch.equal(log_probs(model, replay), free_N)
    experts_NLK = replay.experts_NLK
    assert experts_NLK.shape[0] == sum(map(sum, LENGTHS)) and experts_NLK.dtype == torch.int16
    assert torch.equal(log_probs(model, replay, experts_NLK), free_N)
    assert not replay.differing_N.any()

    change_routers(replay)
    replayed_N = log_probs(model, replay, experts_NLK)
    assert replay.differing_N.any()
    changed_N = log_probs(model, replay)
    changed_NLK = replay.experts_NLK
    # A replay of the experts of the changed routers changes nothing.
    assert torch.equal(log_probs(model, replay, changed_NLK), changed_N)
    assert not torch.allclose(replayed_N, changed_N)


def test_router_replay_takes_the_experts_of_the_blocks_with_routers(tmp_path: Path) -> None:
    # The first block is dense.
    model, replay = mixture("glm4_moe", tmp_path), RouterReplay()
    replay.install(model)
    log_probs(model, replay)
    experts_NLK = replay.experts_NLK
    assert experts_NLK.shape[1] == model.config.num_hidden_layers - 1
    change_routers(replay)
    expected_N = log_probs(model, replay, experts_NLK)
    assert torch.equal(log_probs(model, replay, nn.functional.pad(experts_NLK, (0, 0, 1, 0))), expected_N)


def test_router_replay_weighs_the_experts_with_the_scores_of_the_router(tmp_path: Path) -> None:
    model, replay = mixture("qwen3_moe", tmp_path), RouterReplay()
    replay.install(model)
    first, second = (layer.mlp.gate for layer in model.model.layers)
    hidden_MH = torch.randn(4, model.config.hidden_size)
    best_MK = hidden_MH.matmul(first.weight.T).topk(2).indices
    # Token 1 is padding. Token 0 keeps one of two experts in the first layer, token 2 keeps both, token 3 has no route.
    other = next(expert for expert in range(4) if expert not in best_MK[0])
    set_NLK = torch.stack([torch.tensor([[int(best_MK[0, 1]), other]] * 2), best_MK[2].expand(2, -1)])
    set_NLK[:, 1] = second(hidden_MH)[2][[0, 2]]
    set_NLK = torch.cat([set_NLK, torch.full((1, 2, 2), -1)])
    replay.prepare(set_NLK)
    replay.start(torch.tensor([0, 2, 3]), 4)
    logits_ME, weights_MK, experts_MK = first(hidden_MH)
    second(hidden_MH)
    assert experts_MK[[0, 2]].equal(set_NLK[:2, 0]) and experts_MK[[1, 3]].equal(best_MK[[1, 3]])
    torch.testing.assert_close(weights_MK, logits_ME.softmax(dim=-1).gather(-1, experts_MK))
    assert replay.differing_N.tolist() == [0.25, 0.0, 0.0]


def test_router_replay_sets_the_route_of_the_last_sample_at_a_shared_place() -> None:
    replay = RouterReplay()
    replay._routers = [torch.nn.Identity()]
    replay.prepare(torch.tensor([[[0, 1]], [[2, 3]], [[1, 0]], [[3, 2]]]))
    # Two samples share the first place.
    replay.start(torch.tensor([0, 2, 0, 3]), 5)
    assert replay._set_MLK is not None
    assert replay._set_MLK[:, 0].tolist() == [[1, 0], [-1, -1], [2, 3], [3, 2], [-1, -1]]


def test_router_replay_gives_the_same_experts_in_packed_and_padded_rows(tmp_path: Path) -> None:
    save_tiny_family("qwen3_moe", tmp_path)
    model: Any = prepared(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), {}).eval()
    replay = RouterReplay()
    replay.install(model)
    shared = batch_of([*random_samples((4, 3), (2, 5)), random_samples((4, 3))[0]])

    def run(experts_NLK: Tensor | None, *, packed: bool) -> tuple[Tensor, Tensor]:
        replay.prepare(experts_NLK)
        found = response_log_probs(model, **shared.forward_inputs, router_replay=replay, packed=packed)
        return found.log_probs_BT[shared.response_mask.bool()], replay.experts_NLK

    padded_N, experts_NLK = run(None, packed=False)
    packed_N, packed_NLK = run(None, packed=True)
    assert torch.equal(packed_NLK, experts_NLK)
    change_routers(replay)
    padded_N, packed_N = (run(experts_NLK, packed=packed)[0] for packed in (False, True))
    torch.testing.assert_close(packed_N, padded_N)
    assert replay.differing_N.any()


def test_router_replay_sets_the_experts_again_in_the_backward_pass_of_checkpointed_blocks(tmp_path: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        model, replay = mixture("qwen3_moe", tmp_path, gradient_checkpointing=checkpointing), RouterReplay()
        replay.install(model)
        log_probs(model, replay)
        experts_NLK = replay.experts_NLK
        change_routers(replay)
        log_probs(model, replay, experts_NLK).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain is not None
        torch.testing.assert_close(checkpointed, plain)


def test_router_replay_leaves_other_passes_alone_after_stop(tmp_path: Path) -> None:
    model, replay = mixture("qwen3_moe", tmp_path), RouterReplay()
    replay.install(model)
    ids = torch.arange(6)[None]
    free = model(ids).logits
    log_probs(model, replay, torch.zeros(sum(map(sum, LENGTHS)), 2, 2, dtype=torch.int16))
    replay.stop()
    differing_N = replay.differing_N
    assert torch.equal(model(ids).logits, free)
    # The results of the pass are still there.
    assert torch.equal(replay.differing_N, differing_N)


def test_router_replay_finds_the_choice_in_a_linear_layer_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, replay = mixture("glm4_moe", tmp_path), RouterReplay()
    expected_N = log_probs(model, None)
    # As DeepSpeed does for ZeRO-3, whose function torch does not announce.
    monkeypatch.setattr(nn.functional, "linear", lambda hidden, weight, bias=None: hidden @ weight.T)
    replay.install(model)
    torch.testing.assert_close(log_probs(model, replay), expected_N)
    assert len(replay.experts_NLK) == sum(map(sum, LENGTHS))


def test_router_replay_refuses_a_dense_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="router_replay: the model is not a mixture of experts of transformers: leave router_replay out",
    ):
        RouterReplay().install(mixture("llama", tmp_path))


def test_check_routers_knows_the_classes_of_transformers() -> None:
    check_routers({"model_type": "qwen3_moe"}, "router_losses")
    check_routers({"model_type": "own", "auto_map": {}}, "router_losses")
    for family, text in {"llava": "qwen3_moe", "qwen3_vl_moe": "qwen3_vl_moe_text"}.items():
        check_routers({"model_type": family, "text_config": {"model_type": text}}, "router_replay")
    with pytest.raises(ConfigError, match="router_losses: the model is not a mixture of experts"):
        check_routers({"model_type": "llama"}, "router_losses")


def test_router_replay_refuses_a_router_without_topk(tmp_path: Path) -> None:
    model, replay = mixture("qwen3_moe", tmp_path), RouterReplay()
    router = model.model.layers[1].mlp.gate
    forward = router.forward

    def sorting(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_ME = forward(hidden)[0]
        values_MK, indices_MK = (column[:, :2] for column in logits_ME.softmax(-1).sort(descending=True))
        return logits_ME, values_MK, indices_MK

    replay.install(model)
    router.__dict__["forward"] = sorting
    log_probs(model, replay)
    with pytest.raises(ConfigError, match=r"Qwen3MoeTopKRouter does not choose its experts by torch\.topk"):
        _ = replay.experts_NLK

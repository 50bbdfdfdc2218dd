from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.data.experience import TENSOR_FIELDS, Experience
from rl_plugins.tests.equality import same
from rl_plugins.tests.loops import for_each

OPTIONAL = ("scores", "values", "advantages", "old_log_probs")
counter = itertools.count()


def make(lengths: list[tuple[int, int]], optional: tuple[str, ...] = ()) -> Experience:
    """Samples of the given (prompt, response) lengths, all of whose tokens and columns differ."""
    prompts = [[next(counter) for _ in range(prompt)] for prompt, _ in lengths]
    responses = [[next(counter) for _ in range(response)] for _, response in lengths]
    experience = Experience.from_samples(
        prompts,
        responses,
        [[-float(token) for token in response] for response in responses],
        groups=[index // 2 for index in range(len(lengths))],
        policy_versions=3,
        columns={
            "prompt": [[{"role": "user", "content": str(prompt)}] for prompt in prompts],
            "key": [(index, None) for index in range(len(lengths))],
            "same": ["x"] * len(lengths),
        },
    )
    for name in optional:
        shape = (len(lengths),) if name == "scores" else experience.responses.shape
        setattr(experience, name, torch.rand(shape))
    return experience


def assert_same(a: Experience, b: Experience) -> None:
    assert a.batch_size == b.batch_size
    for name in TENSOR_FIELDS:
        assert same(getattr(a, name), getattr(b, name)), name
    assert set(a.columns.keys()) == set(b.columns.keys())
    for name in sorted(a.columns.keys()):
        assert list(a.columns[name]) == list(b.columns[name])


def sample(experience: Experience, index: int) -> dict[str, Any]:
    """Fields and columns of a sample, without padding."""
    prompt, response = int(experience.prompt_lengths[index]), int(experience.response_lengths[index])
    found: dict[str, Any] = {"prompt_ids": experience.prompts[index, experience.prompts.shape[1] - prompt :].tolist()}
    for name in TENSOR_FIELDS[1:]:
        value = getattr(experience, name)
        if value is not None:
            found[name] = value[index, :response].tolist() if value.ndim == 2 else value[index].item()
    return found | {name: experience.columns[name][index] for name in sorted(experience.columns.keys())}


def samples(experience: Experience) -> list[dict[str, Any]]:
    return [sample(experience, index) for index in range(len(experience))]


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=9)
optionals = st.sets(st.sampled_from(OPTIONAL)).map(tuple)
fast = settings(max_examples=40)


@fast
@given(lengths, optionals)
def test_from_samples_keeps_every_token(lengths, optional):
    experience = make(lengths, optional)
    assert experience.prompts.shape == (len(lengths), max(prompt for prompt, _ in lengths))
    assert experience.responses.shape == (len(lengths), max(response for _, response in lengths))
    for found, (prompt, response) in zip(samples(experience), lengths, strict=True):
        assert len(found["prompt_ids"]) == prompt
        assert found["rollout_log_probs"] == [-float(token) for token in found["responses"]]
        assert found["response_mask"] == [1.0] * response
    assert experience.response_mask.sum() == experience.response_lengths.sum()


@fast
@given(lengths, optionals, st.integers(1, 5))
def test_concat_undoes_chunk(lengths, optional, chunks):
    experience = make(lengths, optional)
    parts = experience.chunk(chunks)
    assert_same(Experience.concat(parts), experience)
    trimmed = Experience.concat([part.trimmed() for part in parts])
    assert samples(trimmed) == samples(experience)


@fast
@given(lengths, lengths, optionals)
def test_concat_of_different_widths_keeps_the_samples(first, second, optional):
    a, b = make(first, optional), make(second, optional)
    assert samples(Experience.concat([a, b])) == samples(a) + samples(b)


@fast
@given(lengths, st.data())
def test_indexing_and_reorder_move_tensors_and_columns_together(lengths, data):
    experience = make(lengths, OPTIONAL)
    whole = samples(experience)
    order = data.draw(st.permutations(range(len(lengths))))
    keep = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    start = data.draw(st.integers(0, len(lengths)))
    assert samples(experience.reorder(order)) == samples(experience[order]) == [whole[i] for i in order]
    assert samples(experience[torch.tensor(keep)]) == [s for s, kept in zip(whole, keep, strict=True) if kept]
    assert samples(experience[start:]) == whole[start:]
    assert samples(experience[torch.tensor(order)]) == [whole[i] for i in order]


@fast
@given(lengths)
def test_input_ids_attention_mask_and_position_ids_follow_the_lengths(lengths):
    experience = make(lengths)
    assert experience.input_ids.shape == experience.attention_mask.shape == experience.position_ids.shape
    for index, (prompt, response) in enumerate(lengths):
        mask = experience.attention_mask[index]
        found = sample(experience, index)
        assert experience.input_ids[index][mask].tolist() == found["prompt_ids"] + found["responses"]
        assert experience.position_ids[index][mask].tolist() == list(range(prompt + response))
        assert experience.position_ids[index].max() == prompt + response - 1
    assert experience.sequence_lengths.tolist() == [prompt + response for prompt, response in lengths]


def test_masks_ignore_token_values():
    experience = Experience.from_samples([[0, 0], [0]], [[0], [0, 0]], [[-1.0], [-1.0, -2.0]], [0, 1], 0)
    assert experience.attention_mask.sum() == 6
    assert experience.response_mask.sum() == 3


def test_from_samples_response_masks_mark_observations():
    experience = Experience.from_samples(
        [[1], [1]],
        [[5, 6, 7], [8]],
        [[-1.0, 0.0, -1.0], [-1.0]],
        [0, 0],
        [[1, 1, 2], [2]],
        response_masks=[[1, 0, 1], [1]],
    )
    assert experience.response_mask.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert experience.policy_versions.tolist() == [[1, 1, 2], [2, 0, 0]]


@for_each(
    ("changes", "message"),
    [
        ({"responses": [[1]]}, "responses has 1 entries for 2 prompts"),
        ({"groups": [0, 0, 1]}, "groups has 3 entries"),
        ({"policy_versions": [[1], []]}, "responses and their versions differ in length"),
        ({"rollout_log_probs": [[-1.0], []]}, "responses and their log-probs differ in length"),
        ({"columns": {"a": [1]}}, "column 'a' has 1 entries for 2 samples"),
    ],
)
def test_from_samples_refuses_samples_that_do_not_match(changes, message):
    good: dict[str, Any] = {
        "prompt_ids": [[1], [2]],
        "responses": [[3], [4]],
        "rollout_log_probs": [[-1.0], [-1.0]],
        "groups": [0, 0],
        "policy_versions": 0,
    }
    Experience.from_samples(**good)
    with pytest.raises(ValueError, match=message):
        Experience.from_samples(**(good | changes))


def test_concat_refuses_parts_that_do_not_match():
    a, b = make([(1, 1)], ("values",)), make([(1, 1)])
    with pytest.raises(ValueError, match="only some of the parts have 'values'"):
        Experience.concat([a, b])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        Experience.concat([])


def test_an_empty_experience_can_be_trimmed_and_concatenated():
    experience = make([(2, 3), (1, 2)], ("values",))
    empty = experience[torch.zeros(2, dtype=torch.bool)]
    assert len(empty.trimmed()) == 0
    assert_same(Experience.concat([empty, experience]), experience)


def test_select_keeps_only_named_fields():
    selected = make([(2, 3)], ("values",)).select("responses", "rows", "row")
    assert selected.prompts is None
    assert selected.values is None
    assert list(selected.columns["same"]) == ["x"]


def test_load_and_pickle_restore_a_saved_experience(tmp_path):
    experience = make([(2, 3), (1, 0)], OPTIONAL)
    experience.save(tmp_path / "new" / "experience.pt")
    assert_same(Experience.load(tmp_path / "new" / "experience.pt"), experience)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["experience.pt"]
    assert_same(pickle.loads(pickle.dumps(experience)), experience)


def test_save_of_a_slice_writes_only_the_slice(tmp_path):
    experience = make([(50, 50)] * 100)
    experience.save(tmp_path / "whole.pt")
    experience[:1].save(tmp_path / "slice.pt")
    assert (tmp_path / "slice.pt").stat().st_size * 5 < (tmp_path / "whole.pt").stat().st_size

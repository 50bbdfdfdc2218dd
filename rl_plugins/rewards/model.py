"""Reward model as a reward function: the model reads the prompt's messages and the response as text.

The model has a tokenizer of its own, so model and policy may belong to different families. The model runs in the reward
workers. A reward model with the policy's tokenizer can run in the trainer instead (see `reward_model` of the stage).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_plugins.config.settings import AT_LEAST_1, check_ranges
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from rl_plugins.data.chat_template import Messages


class ModelReward:
    """Score of the last token of a response under a model with a scalar head. Calls are batched.

    The input has the form of the training data: the messages in the tokenizer's chat template, the response, and the
    end-of-sequence token. A response without an end gets the token, too.
    """

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            path: Hugging Face name or folder of a reward model, such as a result of the recipe reward_modeling.
            device: device of the model. Reward workers see a CUDA device only if the pool reserves GPUs.
            dtype: data type of the parameters, by its name in torch.
            batch_size: largest number of responses in one forward pass. Responses of similar length go together.
            chat_template_kwargs: further variables for the chat template, such as `enable_thinking`.
            trust_remote_code: run Python code that the model's config.json names (`auto_map`).

        Raises:
            ConfigError: the folder has no reward model, an option is out of range, or the device does not exist.
        """
        # Imported here: rewards without a model must not wait for torch.
        import torch

        from rl_plugins.data.chat_template import check_chat_template
        from rl_plugins.data.tokenization import ResponseEnd, load_tokenizer
        from rl_plugins.models.folder import check_model_folder
        from rl_plugins.models.scalar_head import load_scalar_head
        from rl_plugins.vision_language import is_vision_language

        check_ranges(int, AT_LEAST_1, batch_size=batch_size)
        parameter_type = getattr(torch, dtype, None)
        if not isinstance(parameter_type, torch.dtype):
            raise ConfigError(f"ModelReward: dtype={dtype!r} is not a data type of torch: use float32 or bfloat16")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(
                f"ModelReward: device={device}, but this process has no GPU: use device=cpu, or give each reward "
                "worker GPUs with reward.gpus (RewardPool: gpus_per_worker)"
            )
        check_model_folder("ModelReward: path", path, trust_remote_code=trust_remote_code)
        self.batch_size, self.chat_template_kwargs = batch_size, dict(chat_template_kwargs or {})
        self.tokenizer: Any = load_tokenizer(path, trust_remote_code=trust_remote_code)
        self._tried = False
        check_chat_template(self.tokenizer)
        self._end = ResponseEnd.of(self.tokenizer).token
        with _one_thread():
            model: Any = load_scalar_head(
                path, dtype=parameter_type, new_head=False, trust_remote_code=trust_remote_code
            )
        if is_vision_language(model):
            raise ConfigError(
                f"ModelReward: path={path} is a vision-language model, and a reward function gets no images: name the "
                "model in reward_model.path, which scores in the training workers"
            )
        self.model = model.to(device).eval()

    def __call__(self, solution_strs: Sequence[str], prompts: Sequence[Messages | None]) -> list[float]:
        """Score a batch.

        Args:
            solution_strs: text of each response.
            prompts: messages of each prompt.

        Raises:
            ValueError: a sample has no prompt.
        """
        import torch

        from rl_plugins.models.scalar_head import position_scores

        sequences = self._sequences(solution_strs, prompts)
        order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]))
        scores = [0.0] * len(sequences)
        with torch.inference_mode(), _one_thread():
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                inputs, last_B = self._padded([sequences[row] for row in rows])
                scores_BS = position_scores(self.model, **inputs)
                for row, score in zip(rows, scores_BS.gather(-1, last_B[:, None]).squeeze(-1).tolist(), strict=True):
                    scores[row] = score
        return scores

    def _sequences(self, solution_strs: Sequence[str], prompts: Sequence[Messages | None]) -> list[list[int]]:
        if any(not prompt for prompt in prompts):
            raise ValueError("ModelReward reads the prompt's messages, and a sample has no prompt")
        from rl_plugins.data.tokenization import check_round_trip, encode_prompts

        if not self._tried:
            check_round_trip(self.tokenizer, [prompt or () for prompt in prompts])
            self._tried = True
        prompt_ids = encode_prompts([prompt or () for prompt in prompts], self.tokenizer, self.chat_template_kwargs)
        # A special token written by the policy is text for the reward model.
        response_ids = self.tokenizer(list(solution_strs), add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return [[*prompt, *response, self._end] for prompt, response in zip(prompt_ids, response_ids, strict=True)]

    def _padded(self, sequences: Sequence[Sequence[int]]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the arguments of a forward pass, and the index of each sequence's last token [B]."""
        import torch

        from rl_plugins.data.padding import pad_ragged

        pad = self.tokenizer.pad_token_id
        ids_BS, lengths_B = pad_ragged(sequences, value=pad, dtype=torch.int64, side="right")
        last_B = lengths_B - 1
        positions_S = torch.arange(ids_BS.shape[1])
        inputs = {
            "input_ids_BS": ids_BS,
            "attention_mask_BS": positions_S < lengths_B[:, None],
            "position_ids_BS": positions_S.minimum(last_B[:, None]),
        }
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}, last_B.to(self.model.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    # Reward workers share the processors. In the trainer's process, the number of threads must be restored.
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

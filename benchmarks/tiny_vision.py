"""Tiny vision-language models of five families, with random weights, and their processors.

Pictures are 32x32. LLaVA and Gemma 3 have a SigLIP tower. Gemma 3's images see their own later tokens. Qwen2.5-VL and
Qwen3-VL have positions in time, height and width. Qwen3-VL adds features of a layer of its tower to the first layer of
the language model. Without torchvision, vLLM has Idefics 3 alone of the five.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tiny_families import LENGTH, text_sizes
from rl_plugins.models.tiny import END_TOKEN, PAD_TOKEN, ROLE_TOKENS, build_tokenizer

SIZE = 32
"""Width and height of a picture."""
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
"""Sizes of a mixture of experts as the text model of LLaVA."""

_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ 'PLACEHOLDER' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": SIZE, "patch_size": 8, "initializer_range": 0.1,
}  # fmt: skip


def save_tiny_vision(family: str, folder: Path, **sizes: Any) -> Any:
    """Save a tiny model of a family and its processor for `from_pretrained`, and return the model.

    transformers loads the processors of Qwen with torchvision only; without torchvision, `processor` makes them.

    Args:
        family: `llava`, `gemma3`, `qwen2_5_vl`, `qwen3_vl` or `idefics3`.
        folder: folder to write.
        **sizes: options of the configuration of the text model, in the place of the tiny sizes.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = _tokenizer(_SPECIAL[family])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = _CONFIGS[family](tokenizer, text_sizes(tokenizer) | sizes)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    made = processor(family)
    # Without a processor of videos, a processor of Qwen cannot be saved as a whole.
    for part in (made.tokenizer, made.image_processor) if family in _WITH_VIDEOS else (made,):
        part.save_pretrained(folder)
    return model


def processor(family: str) -> Any:
    """Return the processor of a tiny model."""
    return _PROCESSORS[family](_tokenizer(_SPECIAL[family]))


_WITH_VIDEOS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
"""Processors of images and videos, by family."""
_OF_QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>"}
_SPECIAL: dict[str, dict[str, str]] = {
    "llava": {"image_token": "<image>"},
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "qwen2_5_vl": _OF_QWEN,
    "qwen3_vl": {**_OF_QWEN, "vision_end_token": "<|vision_end|>"},
    "idefics3": {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
}  # fmt: skip
"""Special tokens for images, by the attribute of the tokenizer."""


def _tokenizer(special: Mapping[str, str]) -> Any:
    from transformers import Qwen2Tokenizer

    vocabulary = build_tokenizer().get_vocab()
    for token in special.values():
        vocabulary[token] = len(vocabulary)
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # as in `build_tokenizer`
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens={**special, **{role.strip("<|>"): role for role in ROLE_TOKENS}},
        chat_template=_TEMPLATE.replace("PLACEHOLDER", special.get("boi_token", special["image_token"])),
        model_max_length=LENGTH,
    )


def _llava_config(tokenizer: Any, text: dict[str, Any]) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config=_TOWER,
        text_config={"model_type": "qwen2", **text},
        image_token_index=tokenizer.image_token_id,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def _gemma3_config(tokenizer: Any, text: dict[str, Any]) -> Any:
    from transformers import Gemma3Config

    return Gemma3Config(
        vision_config=_TOWER,
        text_config={**text, "sliding_window": 16, "query_pre_attn_scalar": 32},
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        mm_tokens_per_image=4,
        initializer_range=0.08,
    )


def _qwen2_5_vl_config(tokenizer: Any, text: dict[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig

    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": text["hidden_size"],
        "patch_size": 4, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1],
        "tokens_per_second": 2, "initializer_range": 0.1,
    }  # fmt: skip
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    return Qwen2_5_VLConfig(
        vision_config=tower,
        text_config={**text, "rope_parameters": rotary},
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        tie_word_embeddings=True,
    )


def _qwen3_vl_config(tokenizer: Any, text: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig

    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": text["hidden_size"],
        "patch_size": 4, "spatial_merge_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }  # fmt: skip
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return Qwen3VLConfig(
        vision_config=tower,
        text_config={**text, "rope_parameters": rotary},
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def _idefics3_config(tokenizer: Any, text: dict[str, Any]) -> Any:
    from transformers import Idefics3Config

    tower = {name: value for name, value in _TOWER.items() if name != "model_type"}
    return Idefics3Config(
        vision_config=tower,
        text_config={"model_type": "llama", **text},
        image_token_id=tokenizer.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
    )


_CONFIGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "llava": _llava_config,
    "gemma3": _gemma3_config,
    "qwen2_5_vl": _qwen2_5_vl_config,
    "qwen3_vl": _qwen3_vl_config,
    "idefics3": _idefics3_config,
}


def _llava_processor(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor, SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE})
    return LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="full", chat_template=tokenizer.chat_template
    )


def _gemma3_processor(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    return Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)


class _ImagesAlone:
    """Part of a processor without videos, whose processor needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accept every part, also no processor of videos."""
        return type(argument)


def _qwen_processor(tokenizer: Any, family: str) -> Any:
    import transformers

    made = type("ImagesAlone", (_ImagesAlone, getattr(transformers, _WITH_VIDEOS[family])), {})
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=SIZE**2 // 4, max_pixels=SIZE**2
    )
    return made(images, tokenizer, None, chat_template=tokenizer.chat_template)


def _idefics3_processor(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    largest = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=largest, max_image_size=largest, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)


_PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "llava": _llava_processor,
    "gemma3": _gemma3_processor,
    **{family: partial(_qwen_processor, family=family) for family in _WITH_VIDEOS},
    "idefics3": _idefics3_processor,
}

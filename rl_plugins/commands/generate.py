"""Sample responses to the prompts of parquet files.

The output file has the rows and columns of the prompts, and for each row the lists `responses`, `finish_reasons` and
`response_lengths`. The command writes the file in parts: after a kill, the same command continues, and the file is the
same as without the kill. A command with other settings is refused.

A policy in the folder of a run is sampled with the chat template, its variables and the stop strings of the run. For a
copy of such a policy, and for the model before the training, name the config.yaml of the run with --like.

With --recipe, the policy has conversations with the environment of a run: tools, a stateful environment, an agent, or a
reward function that replies. The file gets further lists: `conversations` (messages in JSON), `answers` (last
responses), `turns`, `scores`, `failures` (kinds) and `faults` (reasons).

The policy may be in MLflow: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or an artifact `runs:/ID/FOLDER`. The store
is MLFLOW_TRACKING_URI, or outputs/mlflow.db, the default of the recipes.

  rl-plugins generate outputs/run/policy --data data/test.parquet --output samples.parquet
  rl-plugins generate Qwen/Qwen2.5-0.5B-Instruct --data a.parquet b.parquet --output samples.parquet \\
      --samples 16 --temperature 0.6 --top-p 0.95 --max-tokens 2048
  rl-plugins generate models:/adder@champion --data data/test.parquet --output samples.parquet
  rl-plugins generate outputs/run/policy --data data/test.parquet --output samples.parquet --engine transformers
  rl-plugins generate outputs/run/policy --data test.parquet --output samples.parquet --recipe outputs/run/config.yaml
"""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.commands.main import number, output_path
from rl_plugins.config.sampling import TEMPERATURE
from rl_plugins.config.settings import ABOVE_0_TO_1, AT_LEAST_1, SEED
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import context_window

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.config.recipe import RecipeConfig
    from rl_plugins.data.images import PromptImages
    from rl_plugins.data.parquet import PromptRows
    from rl_plugins.evaluation.generation import Job, Sample
    from rl_plugins.launch.policy_samples import ResponseOptions
    from rl_plugins.rollout.transformers_engine import TransformersRollout
    from rl_plugins.rollout.vllm.offline import OfflineVLLM

_PART_DEADLINE_S = 6 * 3600.0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("policy", help="Hugging Face folder or name, or a model in MLflow, see above")
    parser.add_argument("--data", nargs="+", required=True, help="parquet files of prompts")
    parser.add_argument("--output", type=output_path, required=True, help="the parquet file to write")
    add_sampling_arguments(parser)


def add_sampling_arguments(parser: ArgumentParser) -> None:
    """Declare the sampling options, which `evaluate` has, too."""
    parser.add_argument(
        "--recipe", type=Path, help="config.yaml of a run, with the environment of conversations (default: none)"
    )
    parser.add_argument(
        "--like",
        type=Path,
        help="config.yaml with the chat template, its variables and the stop strings (default: of the policy's run)",
    )
    parser.add_argument(
        "--samples", type=number(int, AT_LEAST_1), default=1, help="responses per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=number(int, AT_LEAST_1),
        default=512,
        help="longest response, or all turns of a conversation, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=number(float, TEMPERATURE), help="0 is greedy (default: 0 for one sample, 1 for several)"
    )
    parser.add_argument(
        "--top-p", type=number(float, ABOVE_0_TO_1), default=1.0, help="nucleus sampling (default: %(default)s)"
    )
    parser.add_argument("--seed", type=number(int, SEED), default=0, help="seed of all samples (default: %(default)s)")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: float32 on CPU, bfloat16 on CUDA)",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the model's config.json names"
    )
    parser.add_argument(
        "--save-every", type=number(int, AT_LEAST_1), default=256, help="prompts per part of the file (default: 256)"
    )


def run(arguments: Namespace) -> int:
    """Sample the missing parts of the file.

    Raises:
        ConfigError: an argument is wrong, or a prompt is too long for the model.
    """
    from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, load_rows
    from rl_plugins.evaluation.generation import generate, open_samples
    from rl_plugins.launch.policy_samples import (
        ConversationSampler,
        ResponseOptions,
        config_of_policy,
        open_conversations,
        recipe_with_conversations,
    )
    from rl_plugins.launch.task_environment import open_environment
    from rl_plugins.models.folder import check_model_folder

    if arguments.recipe is not None and arguments.like is not None:
        raise ConfigError("--recipe and --like: conversations take all options from --recipe: leave --like out")
    recipe = None if arguments.recipe is None else recipe_with_conversations(arguments.recipe)
    options = None if recipe is None else ResponseOptions.of(recipe)
    if options is None and (file := arguments.like or config_of_policy(arguments.policy)):
        options = ResponseOptions.read(file)
        print(f"{arguments.policy}: the chat template, its variables and the stop strings are those of {file}")
    job = _build_job(arguments, recipe, options)
    if arguments.output.suffix != ".parquet":
        raise ConfigError(f"--output {arguments.output}: must end in .parquet")
    rows = load_rows(arguments.data, UNSCORED_COLUMNS if recipe is None else COLUMNS)
    model = _known_model(arguments.policy, arguments.output.parent / ".models")
    trusted = arguments.trust_remote_code
    model_config = check_model_folder("policy", model, trust_remote_code=trusted)
    samples = open_samples(arguments.output, rows, job, model)
    if samples.complete:
        samples.remove_parts()
        print(f"{samples.path} is complete")
        return 0
    _prepare_process(job)
    with samples.open(), ExitStack() as stack:
        num_parts = len(samples.missing())
        print(f"{samples.path}: {len(rows)} prompts x {job.num_samples} samples, {num_parts} parts to make")
        environment = None if recipe is None else stack.enter_context(open_environment(recipe))
        # Tools are a variable of the template, too.
        template_options = job.template_options if environment is None else environment.template_options
        prompt_ids, images, tokenizer = _tokenize(rows, model, job, trusted, template_options)
        longest_prompt = max(map(len, prompt_ids))
        conversations = None
        if recipe is not None and environment is not None:
            conversations = stack.enter_context(open_conversations(recipe, environment, tokenizer))
            # An environment may have first messages of its own.
            longest_prompt = max(longest_prompt, recipe.data.max_prompt_tokens)
            window = context_window(model_config)
            if job.engine == "vllm" and window is not None and longest_prompt + job.max_tokens > window:
                raise ConfigError(
                    f"prompts of up to {longest_prompt} tokens (data.max_prompt_tokens of the recipe, or a row) "
                    f"with --max-tokens {job.max_tokens} are more than the {window} that the model takes: lower one"
                )
        engine = (
            _start_vllm(model, job, longest_prompt, trusted)
            if job.engine == "vllm"
            else _load_transformers(model, job, trusted)
        )
        sample = _single_responses(engine) if conversations is None else ConversationSampler(conversations, engine)
        for progress in generate(samples, rows, prompt_ids, job, tokenizer, sample, images):
            rates = f"{progress['samples_per_s']:.0f} samples/s, {progress['tokens_per_s']:.0f} tokens/s"
            print(f"  part {progress['parts']:.0f} of {num_parts}: {rates}", flush=True)
    print(f"{samples.path} is complete")
    return 0


def _single_responses(engine: OfflineVLLM | TransformersRollout) -> Sample:
    return lambda _, requests, sampling: engine.sample_groups(requests, sampling)


def _build_job(arguments: Namespace, recipe: RecipeConfig | None, options: ResponseOptions | None) -> Job:
    from rl_plugins.evaluation.generation import Job
    from rl_plugins.launch.gpus import local_gpus
    from rl_plugins.launch.policy_samples import digest

    temperature = arguments.temperature
    if temperature is None:
        temperature = float(arguments.samples > 1)
    if arguments.samples > 1 and temperature == 0:
        raise ConfigError(
            f"--samples {arguments.samples} with --temperature 0 would all be the same: raise the temperature"
        )
    if options is not None and options.stop and arguments.engine == "transformers":
        raise ConfigError(
            f"--engine transformers: sampling.stop={list(options.stop)} of the run ends responses at strings, and this "
            "engine ends responses at tokens alone: use --engine vllm"
        )
    if arguments.device == "cuda" and not local_gpus():
        raise ConfigError("--device cuda, but this machine has no NVIDIA GPU: use --device cpu, or leave it out")
    on_gpu = arguments.device == "cuda" or (arguments.device == "auto" and local_gpus() > 0)
    is_folder = Path(arguments.policy).is_dir()
    return Job(
        policy=str(Path(arguments.policy).resolve()) if is_folder else arguments.policy,
        engine=arguments.engine,
        device="cuda" if on_gpu else "cpu",
        dtype=arguments.dtype or ("bfloat16" if on_gpu else "float32"),
        num_samples=arguments.samples,
        max_tokens=arguments.max_tokens,
        temperature=temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        prompts_per_part=arguments.save_every,
        **({} if options is None else vars(options)),
        environment=None if recipe is None else digest(recipe),
    )


def _known_model(policy: str, cache: Path) -> str:
    """Return the folder of a model in MLflow, after a download into `cache`, or a name on the hub with its commit."""
    from rl_plugins.hub.names import model_name, pin
    from rl_plugins.tracking.registry import fetch_model, is_in_mlflow

    if not is_in_mlflow(policy):
        name = model_name(policy)
        return policy if name is None else str(pin(name, "policy"))
    store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('outputs', 'mlflow.db').absolute()}"
    return str(fetch_model("policy", policy, store, cache))


def _prepare_process(job: Job) -> None:
    """Set the environment variables for torch and vLLM before their import."""
    from rl_plugins.rollout.vllm.config import VLLMConfig

    environment = VLLMConfig(job.policy, device=job.device).environment if job.engine == "vllm" else {}
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": job.device, **environment}.items():
        os.environ.setdefault(name, value)
    # Warnings about deprecated calls inside libraries do not concern the user.
    warnings.simplefilter("ignore", FutureWarning)


def _tokenize(
    rows: PromptRows, model: str, job: Job, trust_remote_code: bool, template_options: Mapping[str, Any]
) -> tuple[Sequence[list[int]], Sequence[PromptImages | None] | None, PreTrainedTokenizerBase]:
    """Return the token ids of each prompt, the images of each row (None if no row has images), and the tokenizer."""
    from transformers import AutoConfig

    from rl_plugins.data.chat_template import check_chat_template
    from rl_plugins.data.image_prompts import (
        ImagePromptEncoder,
        has_image_processor,
        load_tokenizer_or_processor,
        tokenizer_of,
    )
    from rl_plugins.data.prompts import tokenize_rows
    from rl_plugins.data.tokenization import check_round_trip
    from rl_plugins.hub.files import model_folder
    from rl_plugins.launch.terminal import quiet_libraries

    quiet_libraries()
    processor = load_tokenizer_or_processor(model, trust_remote_code=trust_remote_code, chat_template=job.chat_template)
    tokenizer = tokenizer_of(processor)
    check_chat_template(tokenizer)
    check_round_trip(tokenizer, (row["prompt"] for row in rows))
    reader = ImagePromptEncoder(processor) if has_image_processor(processor) else None
    prompt_ids, images = tokenize_rows(rows, tokenizer, template_options, reader)
    folder = model_folder(model, weights=False, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    window = context_window(config.get_text_config().to_dict())
    longest = max(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
    if window is not None and len(prompt_ids[longest]) + job.max_tokens > window:
        raise ConfigError(
            f"{rows.location(longest)}: the prompt has {len(prompt_ids[longest])} tokens, with --max-tokens "
            f"{job.max_tokens} more than the {window} that the model takes: lower --max-tokens, or remove the row"
        )
    return prompt_ids, images, tokenizer


def _start_vllm(model: str, job: Job, longest_prompt: int, trust_remote_code: bool) -> OfflineVLLM:
    from rl_plugins.rollout.vllm.config import VLLMConfig
    from rl_plugins.rollout.vllm.offline import OfflineVLLM

    config = VLLMConfig(
        model,
        device=job.device,
        dtype=job.dtype,
        max_model_len=longest_prompt + job.max_tokens,
        # No trainer shares the GPU with this process.
        gpu_memory_utilization=0.9,
        sleep="none",
        # A part may take hours on a CPU.
        generate_timeout_s=_PART_DEADLINE_S,
        trust_remote_code=trust_remote_code,
    )
    return OfflineVLLM(config)


def _load_transformers(model: str, job: Job, trust_remote_code: bool) -> TransformersRollout:
    import torch

    from rl_plugins.rollout.transformers_engine import TransformersRollout

    engine = TransformersRollout(
        model, dtype=getattr(torch, job.dtype), device=job.device, trust_remote_code=trust_remote_code
    )
    engine.connect(0, 1)
    return engine

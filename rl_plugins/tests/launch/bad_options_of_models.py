"""Options of models refused by a recipe: the overrides, and required words of the message."""

from __future__ import annotations

from rl_plugins.tests.launch.bad_options import Case

ADAPTER = ["model.lora.rank=4"]
EXPERTS = ["strategy.name=fsdp", "strategy.expert_parallel=2", "placement.num_workers=2"]

MODEL_CHECKS: dict[str, list[Case]] = {
    "model": [
        (["model.path=./missing"], ["model.path=./missing", "no such folder"]),
        (["model.path=nobody/nothing"], ["model.path=nobody/nothing", "no such folder", "HF_HUB_OFFLINE"]),
        (["model.path=no body"], ["model.path=no body: no such folder", "no name of the hub", "OWNER/NAME"]),
        (["model.path=hf://own/model"], ["model.path=hf://own/model", "has no address", "OWNER/NAME@REVISION"]),
        (["data.train_files=[hf://own/rows]"], ["data.train_files=hf://own/rows: must be hf://datasets/OWNER/NAME"]),
        (["model.path=no_config"], ["no_config", "no config.json"]),
        (["model.path=few_embeddings"], ["ids up to 256", "100 embeddings"]),
        (["model.path=half_weights"], ["half_weights/model.safetensors: not a whole safetensors file", "download"]),
        (["reference.path=half_weights"], ["half_weights/model.safetensors: not a whole safetensors file", "download"]),
        (["critic.path=recurrent"], ["recurrent: layers of the kind linear_attention", "set batch.packing=false"]),
        (["critic.path=unknown_model"], ["unknown_model/config.json: model_type is 'qwen99'", "newer version"]),
        (["model.path=torn_tokenizer"], ["model.path=", "torn_tokenizer: its tokenizer cannot be read", "download"]),
        (
            ["model.path=narrow_heads"],
            ["narrow_heads: the attention heads have a width of 16", "rollout.engine=transformers"],
        ),
        (
            ["model.path=recurrent", "batch.packing=false"],
            ["recurrent: for models of the type qwen3_next, vLLM on CPU computes other log-probs", "transformers"],
        ),
        (["model.path=own_code"], ["own_code: config.json names Python", "model.trust_remote_code=true"]),
        (["critic.path=own_code"], ["critic.path=", "own_code: config.json names Python"]),
        (["model.path=no_template"], ["no_template", "no chat template", "instruction-tuned"]),
        (["model.path=no_end"], ["no_end has no eos_token: the policy could never end", "set tokenizer.eos_token"]),
        (["sampling.max_tokens=250"], ["data.max_prompt_tokens=26", "takes 256", "lower one of the two"]),
        (
            ["rollout.tensor_parallel_size=5"],
            ["rollout.tensor_parallel_size=5", "num_attention_heads=12, num_key_value_heads=2", "use 4"],
        ),
        (
            ["rollout.tensor_parallel_size=3"],
            ["rollout.tensor_parallel_size=3: 3 processes cannot share the heads of model.path=", "use 2"],
        ),
        (
            ["strategy.sequence_parallel=8", "placement.num_workers=8", "placement.cpus_per_worker=0.1"],
            ["strategy.sequence_parallel=8", "use 6"],
        ),
        (["model.attention=egaer"], ["model.attention=egaer", "use one of eager, "]),
        (["model.attention=flash_attention_2"], ["model.attention=flash_attention_2", "runs on GPUs"]),
        (["reference.path=./gone"], ["reference.path=./gone", "no such folder"]),
        (
            ["sampling.top_p=0.9", "algorithm.correction=token_tis"],
            ["sampling.top_p=0.9: training compares", "algorithm.correction", "leave the option out"],
        ),
        (
            ["sampling.min_p=0.1", "+sampling.vllm.presence_penalty=1", "schedule.max_staleness=1"],
            ["sampling.min_p=0.1, sampling.vllm.presence_penalty=1: ", "leave the option out"],
        ),
        (["algorithm.correction=bypass_token_tis"], ["bypass_token_tis", "policy_loss=reinforce"]),
        (["model.lora.rank=-1"], ["model.lora.rank=-1", "0 or more"]),
        (["critic.lora.dropout=1"], ["critic.lora.dropout=1", "from 0 to below 1"]),
        (["critic.lora.rank=4", "critic.lora.dropout=0.1"], ["critic.lora.dropout=0.1", "two passes", "leave"]),
        (["model.lora.rank=4", "model.lora.dropout=0.1"], ["model.lora.dropout=0.1", "compares log-probs", "leave"]),
        (["model.lora.path=gone"], ["model.lora.path=gone: rank=0 trains no adapter: give rank and alpha"]),
        ([*ADAPTER, "model.lora.path=./gone"], ["model.lora.path=./gone: no such folder: name a folder with adapter_"]),
        ([*ADAPTER, "model.lora.path=model"], ["model.lora.path=", "model: the folder has no adapter_config.json"]),
        (["critic.lora.rank=4", "critic.lora.path=model"], ["critic.lora.path=", "the folder has no adapter_config."]),
        (
            [*ADAPTER, "model.lora.path=model", "placement.reference.actors=1", "algorithm.kl.coefficient=0.1"],
            ["placement.reference.actors=1: models of a pool have no adapter", "leave the pool out, or name a model"],
        ),
        (["model.lora.exclude_modules=[1]"], ["model.lora.exclude_modules=[1]", "a list of layers' names", "or null"]),
        ([*ADAPTER, "model.lora.exclude_modules=[mlp]"], ["exclude_modules=mlp: Qwen2ForCausalLM has no such layer"]),
        (["model.lora.target_modules=[1]"], ["model.lora.target_modules=[1]", "all-linear"]),
        (["run.export_lora=adapter"], ["run.export_lora=adapter", "model.lora.rank"]),
        (["model.lora.rank=4", "reference.update_every=1"], ["reference.update_every=1", "the reference has none"]),
        (
            ["model.lora.rank=4", "reference.path=no_template", "reference.update_every=1"],
            ["reference.update_every=1", "the reference has none"],
        ),
        (["strategy.accumulate_shards=true"], ["strategy.accumulate_shards=true", "strategy.name=fsdp"]),
    ],
    "experts": [
        (["strategy.expert_parallel=2"], ["strategy.expert_parallel=2: ZeRO has no", "strategy.name=fsdp"]),
        ([*EXPERTS, "placement.num_workers=3"], ["strategy.expert_parallel=2", "num_workers=3"]),
        (
            [*EXPERTS, "strategy.tensor_parallel=2"],
            ["strategy.expert_parallel=2 and strategy.tensor_parallel=2 cannot be combined: leave one of them out"],
        ),
        (
            [*EXPERTS, "strategy.workers_per_copy=1"],
            ["strategy.expert_parallel=2 and strategy.workers_per_copy=1 cannot be combined: leave one of them out"],
        ),
        ([*EXPERTS, "model.compile=true"], ["model.compile=true", "strategy.expert_parallel=2", "leave one"]),
        ([*EXPERTS, "average.keep=0.9"], ["average.keep=0.9 and strategy.expert_parallel=2", "leave one of them out"]),
        (
            [*EXPERTS, "model.lora.rank=4", "model.lora.experts=true"],
            ["model.lora.experts=true", "strategy.expert_parallel=1, or model.lora.experts=false"],
        ),
        (EXPERTS, ["strategy.expert_parallel=2: model.path=", "has no experts: set strategy.expert_parallel=1"]),
    ],
    "teachers": [
        (["++teacher.paths={a: ./gone}"], ["teacher.paths.a=./gone", "no such folder"]),
        (["teacher.path=model", "++teacher.paths={a: model}"], ["teacher.path=model: paths names several teachers"]),
        (["++teacher.paths={a: model}"], ["teacher.paths: no teacher for data_source 'addition'", "add the missing"]),
        (
            ["++teacher.paths={a: model, b: model}", "++teacher.weights={a: 0.5, b: 0.4}"],
            ["teacher.weights={'a': 0.5, 'b': 0.4}: the sum is 0.9: make the sum 1"],
        ),
        (["++teacher.weights={a: 1}"], ["teacher.weights={'a': 1.0}: 'a' is in only one of weights and paths"]),
        (["++teacher.paths={a: model}", "teacher.update_every=2"], ["teacher.update_every=2: paths", "leave one"]),
        (["teacher.update_every=-1"], ["teacher.update_every=-1: must be 0 or more"]),
        (["teacher.update_every=2", "model.lora.rank=4"], ["teacher.update_every=2", "model.lora.rank", "at 0"]),
        (
            ["teacher.path=model", "teacher.update_every=2", "placement.teacher.actors=1"],
            ["placement.teacher.actors=1", "teacher.update_every=2", "leave one out"],
        ),
        (
            ["++teacher.paths={a: model}", "placement.teacher.actors=1"],
            ["placement.teacher.actors=1, and there is no such model: name it with teacher.path"],
        ),
    ],
}  # fmt: skip

"""Options refused by a recipe: the overrides, and required words of the message."""

from __future__ import annotations

from importlib.util import find_spec

from rl_plugins.tests.launch import own_rows

Case = tuple[list[str], list[str]]

COMPOSING: dict[str, list[Case]] = {
    "unknown options": [
        (["modl.path=x"], ["'modl.path'", "did you mean 'model.path'"]),
        (["run.step=3"], ["'run.step'", "'run.steps'"]),
        (["algorithm.clip_hi=1"], ["algorithm.clip_hi", "policy_loss_options.clip_high"]),
        (
            ["reward.functions.default={_target_: a.b, value: 1}"],
            ["'reward.functions.default.value'", "++reward.functions.default=..."],
        ),
        (["reward.functions.sums={_target_: a.b}"], ["++reward.functions.sums="]),
        (["run={stepp: 3}"], ["'run.stepp'", "'run.steps'"]),
        (["+foo.bar=1"], ["no option 'foo'", "--cfg job"]),
        (["~algorithm.kll"], ["'algorithm.kll'", "did you mean 'algorithm.kl'"]),
        # Options of verl below a group of docs/coming_from.md.
        (["algorithm.filter_groups.enable=true"], ["verl has it, and here it is algorithm.group_filter (algorithm="]),
        (["algorithm.rollout_correction.rollout_is=token"], ["verl has it, and here it is algorithm.correction: docs"]),
        # The first part, alone an option of TRL, is a group here.
        (["model.use_shm=true"], ["no option 'model.use_shm'; did you mean 'model."]),
    ],
    "types and missing values": [
        (["run.steps=abc"], ["'run.steps'", "'abc'", "a whole number"]),
        (["run.steps="], ["'run.steps'", "''", "a whole number"]),
        (["optimizer.lr=fast"], ["'optimizer.lr'", "'fast'", "a number"]),
        (["run.resume=maybe"], ["run.resume=maybe", "true, false or auto"]),
        (["optimizer.betas=3"], ["'optimizer.betas'", "a list"]),
        (["run=3"], ["'run'", "is a group"]),
        (["run.name='${runn.id}'"], ["'run.name'", "runn.id"]),
        (["model.path=???"], ["'model.path'", "Hugging Face name or folder", "add model.path="]),
    ],
    "groups": [
        (["algorithm=grop"], ["algorithm 'grop'", "choose one of ", "grpo"]),
        (["algorithm=null"], ["group", "--help"]),
        (["reward=exact"], ["reward 'exact'", "exact_match"]),
        (["environment=tools"], ["'environment.tools'"]),
    ],
    "syntax": [
        (["data.train_files=[a"], ["'data.train_files=[a'", "key=value"]),
        (["foo"], ["'foo'", "key=value"]),
        (["model.path=/a (b)"], ["'model.path=/a (b)'", "shell's: 'model.path=\"...\"'"]),
        (["+a.b=/größe"], ["'+a.b=/größe'", "shell's: '+a.b=\"...\"'"]),
        (["data.train_files=[a#b]"], ["'data.train_files=[a#b]'", "'data.train_files=[\"...\"]'"]),
        (
            ["model.path=/a,b"],
            ["'model.path'", "'/a,b' has a comma", "'model.path=\"...\"'", "'model.path=[...]'", "--multirun"],
        ),
    ],
}  # fmt: skip
"""Refused by Hydra or by the schema, before any check."""

CHECKS: dict[str, list[Case]] = {
    "words and numbers": [
        (["launcher=slurm"], ["launcher=slurm", "ray, local"]),
        (["launcher=local"], ["launcher=local", "rollout.engine=transformers"]),
        (["strategy.name=ddp"], ["strategy.name=ddp", "zero, fsdp"]),
        (["model.compile=true"], ["model.compile=true", "strategy.zero_stage=2 or strategy.name=fsdp"]),
        (
            ["model.compile=true", "strategy.name=fsdp", "strategy.tensor_parallel=2", "placement.num_workers=2"],
            ["model.compile=true and strategy.tensor_parallel=2", "leave one of them out"],
        ),
        (["optimizer.name=Muon"], ["optimizer.name=Muon", "needs whole matrices", "strategy.name=fsdp"]),
        (["optimizer.name=torch.optim.Muon"], ["optimizer.name=torch.optim.Muon", "needs whole matrices"]),
        (["algorithm=ppo", "critic.optimizer.name=Muon"], ["critic.optimizer.name=Muon", "needs whole matrices"]),
        (
            ["optimizer.name={_target_: torchao.optim.AdamW8bit}"],
            ["optimizer.name=torchao.optim.AdamW8bit", "states of full size", "strategy.name=fsdp"],
        ),
        (
            ["critic.optimizer.name=bitsandbytes.optim.AdamW8bit", "strategy.name=fsdp"],
            ["critic.optimizer.name=bitsandbytes.optim.AdamW8bit", "refuses DTensors", "torchao.optim.AdamW8bit"],
        ),
        (
            [
                "optimizer.name=bitsandbytes.optim.AdamW8bit",
                "strategy.offload.policy=nvme",
                "strategy.offload.folder=x",
            ],
            ["optimizer.name=bitsandbytes.optim.AdamW8bit", "not been tried", "strategy.offload.policy=nvme"],
        ),
        (["model.router_replay=recompute"], ["model.router_replay: the model", "leave model.router_replay out"]),
        (["model.lora.rank=4", "model.lora.experts=true"], ["model.lora.experts=true", "no experts: leave the option"]),
        (["model.lora.quantization=nf4"], ["model.lora.quantization=nf4", "give rank a value"]),
        (
            ["model.lora.quantization=nf4", "model.lora.rank=4", "rollout.lora=adapter"],
            ["model.lora.quantization=nf4", "weights that are not quantised", "rollout.lora=merged"]
            if find_spec("bitsandbytes")
            else ["model.lora.quantization=nf4", "not installed", "pip install 'rl-plugins[bitsandbytes]'"],
        ),
        (["model.router_losses.z=0.1"], ["model.router_losses: the model", "leave model.router_losses out"]),
        (["model.router_replay=rollout", "model.compile=true", "strategy.zero_stage=2"], ["and model.compile=true"]),
        (["model.liger=true"], ["model.liger=true", "not installed", "pip install 'rl-plugins[liger]'"]),
        (["model.float8=e4m3"], ["model.float8=e4m3", "tensorwise", "rowwise"]),
        (
            ["strategy.name=fsdp", "strategy.tensor_parallel=2", "placement.num_workers=2", "model.lora.rank=4"],
            ["model.lora.rank=4", "tensor_parallel=1"],
        ),
        (["strategy.tensor_parallel=2"], ["tensor_parallel=2", "strategy.name=fsdp"]),
        (
            ["strategy.name=fsdp", "strategy.tensor_parallel=2", "placement.num_workers=3"],
            ["tensor_parallel=2", "num_workers=3"],
        ),
        (["strategy.workers_per_copy=2"], ["strategy.workers_per_copy=2", "strategy.name=fsdp"]),
        (
            ["strategy.name=fsdp", "strategy.workers_per_copy=2", "placement.num_workers=3"],
            ["workers_per_copy=2", "num_workers=3"],
        ),
        (
            [
                "strategy.name=fsdp", "strategy.workers_per_copy=2", "strategy.tensor_parallel=2",
                "placement.num_workers=4",
            ],
            ["workers_per_copy=2", "tensor_parallel=2", "leave one of them out"],
        ),
        (["strategy.sequence_parallel=2", "placement.num_workers=3"], ["sequence_parallel=2", "num_workers=3"]),
        (
            [
                "strategy.name=fsdp", "strategy.tensor_parallel=2", "strategy.sequence_parallel=2",
                "placement.num_workers=2",
            ],
            ["tensor_parallel=2", "sequence_parallel=2", "leave one of them out"],
        ),
        (["strategy.name=fsdp", "strategy.zero_stage=2"], ["zero_stage=2", "name=zero"]),
        (["run.time_limit=4 hours"], ["run.time_limit=4 hours", "3h50m"]),
        (["run.time_limit=0m"], ["run.time_limit=0m", "3h50m"]),
        (["guard.action=panic"], ["guard.action=panic", "warn, stop, roll_back"]),
        (["guard.kl=-1"], ["guard.kl=-1", "must be above 0, or null"]),
        (
            ["run.keep_best=2", "run.eval_every=0"],
            ["run.keep_best=2", "val/reward", "does not validate", "run.eval_every"],
        ),
        (["average.keep=1"], ["average.keep=1", "from 0 to below 1"]),
        (["debug.replay=/"], ["debug.replay=/", "run.eval_every=0"]),
        (["debug.replay=/not/there", "run.eval_every=0"], ["debug.replay=/not/there", "no such folder"]),
        (["rollout.transport=tcp"], ["rollout.transport=tcp", "shared_memory"]),
        (
            ["model.lora.rank=4", "rollout.lora=adapter", "rollout.sleep=all"],
            ["rollout.sleep=all", "rollout.sleep=kv_cache", "rollout.lora=merged"],
        ),
        (["model.lora.rank=600", "rollout.lora=adapter"], ["rank 512 at most", "600", "rollout.lora=merged"]),
        (["rollout.sleep=deep"], ["rollout.sleep=deep", "kv_cache, all, none"]),
        (["rollout.engines=0"], ["rollout.engines=0", "per_worker", "at least 1"]),
        (["schedule.max_staleness=-1"], ["schedule.max_staleness=-1", "0 or more"]),
        (["schedule.max_staleness=1", "schedule.ahead=2"], ["schedule.ahead=2", "max_staleness"]),
        (
            ["stage=online_preference_optimization", "schedule.max_staleness=1"],
            ["schedule.max_staleness=1", "not for online_preference_optimization"],
        ),
        (["rollout.engines=many"], ["rollout.engines=many", "per_worker"]),
        (
            ["rollout.engines=per_worker", "rollout.tensor_parallel_size=2", "placement.num_workers=3"],
            ["rollout.tensor_parallel_size=2 does not divide placement.num_workers=3: change one"],
        ),
        (
            ["placement.device=cuda", "rollout.tensor_parallel_size=2", "placement.num_workers=3"],
            ["rollout.tensor_parallel_size=2 does not divide placement.num_workers=3: change one"],
        ),
        (["run.steps=0"], ["run.steps=0", "at least 1"]),
        (["run.epochs=0"], ["run.epochs=0", "above 0, or null"]),
        (["sampling.temperature=-1"], ["sampling.temperature=-1", "0.01 or more"]),
        (["validation.temperature=0.001"], ["validation.temperature=0.001", "0.01 or more"]),
        (["sampling.temperature=0.001"], ["sampling.temperature=0.001", "0.01 or more"]),
        (
            ["+rollout.vllm.speculative_config={method: ngram}", "sampling.min_p=0.1"],
            ["rollout.vllm.speculative_config: ", "no sampling.min_p", "leave it out"],
        ),
        (
            ["validation.samples_per_prompt=4"],
            ["validation.samples_per_prompt=4", "validation.temperature=0", "such as 1"],
        ),
        (["sampling.top_p=1.5"], ["sampling.top_p=1.5", "at most 1"]),
        (["sampling.min_p=-0.1"], ["sampling.min_p=-0.1", "between 0 and 1"]),
        (["+sampling.vllm.repetition_penalty=0"], ["sampling.vllm.repetition_penalty=0", "above 0"]),
        (["+sampling.vllm.logit_bias={5: 101}"], ["sampling.vllm.logit_bias=", "from -100 to 100"]),
        (["+sampling.vllm.logit_bias={word: 1}"], ["sampling.vllm.logit_bias=", "token ids"]),
        (["+sampling.vllm.allowed_token_ids=[a]"], ["sampling.vllm.allowed_token_ids=", "a list of token ids"]),
        (["+sampling.vllm.allowed_token_ids=[]"], ["sampling.vllm.allowed_token_ids=[]", "a list of token ids"]),
        (["+sampling.vllm.bad_words=no"], ["sampling.vllm.bad_words=no", "a list of texts"]),
        (["+sampling.vllm.structured_outputs={regx: a}"], ["sampling.vllm.structured_outputs=", "json, regex"]),
        (["+sampling.vllm.structured_outputs={regex: a, json_object: true}"], ["exactly one of json, regex"]),
        (["+sampling.vllm.thinking_token_budget=-1"], ["thinking_token_budget=-1", "0 or more"]),
        (["+sampling.vllm.extra_args=3"], ["sampling.vllm.extra_args=3", "must be a mapping"]),
        (["+sampling.vllm.min_tokens=7"], ["sampling.vllm.min_tokens=7", "sampling.max_tokens=6"]),
        (["+sampling.vllm.frequency_penaltyy=1"], ["sampling.vllm.frequency_penaltyy", "frequency_penalty?"]),
        (["+sampling.vllm.logprobs=5"], ["sampling.vllm.logprobs: training reads", "leave the argument out"]),
        (["+sampling.vllm.lograts=5"], ["sampling.vllm.lograts", "no such argument", "use one of presence_penalty"]),
        (["+sampling.vllm.n=5"], ["sampling.vllm.n", "use batch.samples_per_prompt"]),
        (
            ["+sampling.vllm.bad_words=[x]", "launcher=local", "rollout.engine=transformers"],
            ["sampling.vllm.bad_words", "rollout.engine=vllm"],
        ),
        (
            ["sampling.stop=[x]", "launcher=local", "rollout.engine=transformers"],
            ["sampling.stop: rollout.engine=transformers", "use sampling.stop_token_ids"],
        ),
        (["optimizer.lr=nan"], ["optimizer.lr=nan", "0 or more"]),
        (["optimizer.lr=inf"], ["optimizer.lr=inf: must be a finite number; must be 0 or more"]),
        (["reference.keep=nan"], ["reference.keep=nan: must be a finite number"]),
        (["reference.keep=1"], ["reference.keep=1", "must be from 0 to below 1"]),
        (["critic.keep_checkpoints=0"], ["critic.keep_checkpoints=0", "must be at least 1, or null"]),
        (["algorithm.kl.coefficient=inf"], ["algorithm.kl.coefficient=inf: must be a finite number"]),
        (["placement.num_workers=3"], ["batch.prompts_per_step=32", "make it 33", "num_workers"]),
        (["batch.updates_per_step=5"], ["batch.updates_per_step=5", "prompts_per_step 35"]),
    ],
    "offload": [
        (["strategy.offload.policy=disk"], ["strategy.offload.policy=disk", "while_sampling, stay, cpu"]),
        (["strategy.offload.teacher=drive"], ["strategy.offload.teacher=drive", "nvme"]),
        (
            ["strategy.name=fsdp", "strategy.offload.policy=nvme", "strategy.offload.folder=files"],
            ["strategy.offload.policy=nvme", "strategy.name=zero, or cpu"],
        ),
        (["strategy.offload.folder='s3://bucket/x'"], ["strategy.offload.folder=s3://bucket/x: ", "a local path"]),
        (["debug.replay='s3://bucket/x'"], ["debug.replay=s3://bucket/x: ", "a local path"]),
        (["strategy.offload.policy=nvme"], ["strategy.offload.policy=nvme", "strategy.offload.folder"]),
        (
            ["strategy.offload.critic=nvme", "strategy.zero_stage=2"],
            ["strategy.offload.critic=nvme", "strategy.zero_stage=3"],
        ),
        (
            ["strategy.offload.reference=cpu", "strategy.zero_stage=1"],
            ["strategy.offload.reference=cpu", "strategy.zero_stage=3"],
        ),
        (
            ["launcher=local", "rollout.engine=transformers", "strategy.offload.policy=cpu"],
            ["strategy.offload.policy=cpu", "launcher=ray"],
        ),
    ],
    "machine": [
        (
            ["rollout.cpu_kv_cache_gib=100000"],
            ["need 100000 GiB", "rollout.engines=1", "rollout.cpu_kv_cache_gib=100000", "GiB of memory: lower"],
        ),
        (
            ["rollout.cpu_kv_cache_gib=100000", "rollout.tensor_parallel_size=2"],
            ["need 200000 GiB", "rollout.tensor_parallel_size=2", "rollout.cpu_kv_cache_gib=100000"],
        ),
        (["placement.teacher.actors=2"], ["placement.teacher.actors=2", "teacher.path", "leave the pool out"]),
        (
            ["placement.reference.actors=1", "placement.cpus_per_worker=0.01"],
            ["placement.reference.actors=1", "uses no reference"],
        ),
        (
            ["placement.reference.actors=1", "reference.update_every=2"],
            ["placement.reference.actors=1", "reference.update_every=2", "leave one out"],
        ),
        (
            ["launcher=local", "rollout.engine=transformers", "placement.teacher.actors=1", "teacher.path=model"],
            ["placement.teacher.actors=1", "launcher=ray"],
        ),
        (
            ["placement.critic.actors=1", "placement.cpus_per_worker=0.01"],
            ["placement.critic.actors=1", "uses no critic"],
        ),
        (
            ["algorithm=ppo", "placement.critic.actors=1", "strategy.offload.critic=cpu"],
            ["placement.critic.actors=1", "leave strategy.offload.critic=cpu out"],
        ),
        (
            ["algorithm=ppo", "launcher=local", "rollout.engine=transformers", "placement.critic.actors=1"],
            ["placement.critic.actors=1", "launcher=ray"],
        ),
        (["placement.critic.deadline_s=0"], ["placement.critic.deadline_s=0", "above 0"]),
        (["reward.num_workers=0"], ["reward.num_workers=0", "set 1 or more", "launcher=local"]),
        (["reward.pass_env=[NO_SUCH_KEY]"], ["reward.pass_env=[NO_SUCH_KEY]", "the environment has no NO_SUCH_KEY"]),
        (["reward.gpus=1.5"], ["reward.gpus=1.5", "from 0 to 1, or a whole number"]),
        (
            ["reward.gpus=0.5", "placement.cpus_per_worker=0.1"],
            ["needs 1 GPUs (reward workers 1 x 0.5)", "has 0", "reward.num_workers, reward.gpus"],
        ),
        (
            ["rollout.transport=nccl", "placement.cpus_per_worker=0.01"],
            ["rollout.transport=nccl", "is on CPU", "placement.device=cuda"],
        ),
        (["placement.rollout=apart"], ["placement.rollout=apart", "colocated, split"]),
        (["placement.strategy=TIGHT"], ["placement.strategy=TIGHT", "PACK, SPREAD"]),
        (["placement.cpus_per_worker=5000"], ["needs 5000 CPUs", "has ", "placement.cpus_per_worker"]),
    ],
    "folders and servers": [
        (["run.output_dir=rewards.py/out"], ["run.output_dir=", "rewards.py/out", "choose another"]),
        (["run.output_dir=s3://bucket/out"], ["run.output_dir=s3://bucket/out", "as run.storage"]),
        (["run.storage=nowhere://bucket"], ["run.storage=nowhere://bucket", "pyarrow does not open"]),
        (["run.storage=train.parquet"], ["run.storage: ", "train.parquet/grpo does not take", "Not a directory"]),
        (["data.train_files=[file:///gone/a.parquet]"], ["data.train_files=file:///gone/a.parquet", "no such file"]),
        (["model.path=file:///gone/model"], ["model.path=file:///gone/model", "no such file or folder"]),
        (["run.name=a/b"], ["run.name=a/b", "the name of a folder"]),
        (["run.name=old"], ["outputs/old exists", "run.resume=true", "run.name"]),
        (["run.resume=true"], ["run.resume=true", "no folder", "outputs/grpo", "without run.resume"]),
        (["run.name=through", "run.resume=true"], ["outputs/through is complete", "run.name"]),
        (["run.name=foreign", "run.resume=auto"], ["outputs/foreign exists and is not", "run.name"]),
        (["model.path=models:/nobody@champion"], ["model.path=models:/nobody", "no MLflow store"]),
        (["tracking.register_as=a/b"], ["tracking.register_as=a/b"]),
        (["tracking.register_as=a", "run.export=false"], ["it needs run.export=true"]),
        (["tracking.uri=http://localhost:abc"], ["localhost:abc", "tracking.enabled=false"]),
        (["tracking.uri=sqlite:////gone/a.db"], ["sqlite:////gone/a.db", "folder /gone"]),
    ],
    "data": [
        (["data.train_files=[]"], ["data.train_files is empty", "parquet"]),
        (["data.train_files=[gone.parquet]"], ["gone.parquet", "no such file", "rl-plugins prepare"]),
        (["data.val_files=[text.parquet]"], ["text.parquet", "not a readable parquet file"]),
        (["data.train_files=[no_column.parquet]"], ["no_column.parquet", "'reward_model' is missing"]),
        (["data.train_files=[bad_row.parquet]"], ["bad_row.parquet, row 1", "'data_source'", "a string"]),
        (["data.train_files=[few.parquet]"], ["has 1 rows", "=32. Lower batch.prompts_per_step"]),
        (["data.max_train_rows=4"], ["has 4 rows", "batch.prompts_per_step", "raise data.max_train_rows=4"]),
        (["data.max_prompt_tokens=2"], ["data.max_prompt_tokens=2", "raise it"]),
        (
            ["data.train_files=[one_long.parquet]", "data.overlong_prompts=error"],
            ["one_long.parquet, row 0", "81 tokens", "data.max_prompt_tokens=26", "filter"],
        ),
        (
            ["data.mixture={a: {files: [train.parquet]}}"],
            ["data.mixture and data.train_files both", "leave one of them out"],
        ),
        (["data.shuffle=false", "data.curriculum.share=0.5"], ["shuffle=false: data.curriculum.share has an order"]),
        (["data.train_files=[]", "data.mixture={a: {weight: 2}}"], ["data.mixture.a.files=[]", "parquet"]),
        (
            ["data.train_files=[]", "data.mixture={a: {files: [train.parquet], weight: 0}}"],
            ["data.mixture.a.weight=0", "above 0"],
        ),
        (["data.train_files=[]", "data.mixture={a: {file: [train.parquet]}}"], ["no option 'data.mixture.a.file'"]),
        (
            [
                "data.train_files=[]", "data.mixture={a: {files: [train.parquet]}, b: {files: [few.parquet]}}",
                "batch.prompts_per_step=8",
            ],
            ["data.mixture.b: 1 rows are too few", "lower its weight"],
        ),
        (["run.epochs=2", "data.train_files=[gone.parquet]"], ["gone.parquet", "no such file"]),
        (["data.curriculum.share=1"], ["data.curriculum.share=1", "below 1"]),
        (
            ["data.curriculum.share=0.5", "batch.samples_per_prompt=1"],
            ["data.curriculum.share=0.5", "batch.samples_per_prompt to 2"],
        ),
        (["data.curriculum.share=0.5", "stage=sft"], ["data.curriculum.share=0.5", "stage=sft"]),
        (["data.curriculum.share=0.01", "batch.prompts_per_step=4"], ["share=0.01 of 4 prompts per step is 0"]),
        (["data.dataset={_target_: no_such.Rows}"], ["data.dataset", "no_such"]),
        (["data.dataset=nan"], ["data.dataset=nan", "must be a mapping with the key _target_"]),
        (["data.dataset={path: rows.py}"], ["data.dataset=", "path and name"]),
        (["data.dataset={path: no_such.py, name: Rows}"], ["data.dataset file", "no_such.py' does not exist"]),
        ([f"data.dataset={{path: {own_rows.__file__}, name: Row}}"], ["data.dataset", "did you mean 'Rows'?"]),
        (
            [f"data.dataset={{path: {own_rows.__file__}, name: Rows, size: 1}}"],
            ["data.dataset 'Rows': its call failed", "unexpected keyword argument 'size'"],
        ),
        (["debug.profiler=simple"], ["debug.profiler=simple", "must be a mapping with the key _target_"]),
        (["data.chat_template=none.jinja"], ["data.chat_template=none.jinja: there is no such file", "name a file"]),
        (
            ["model.path=thinks", "+data.chat_template_kwargs.enable_thinkin=false"],
            ["data.chat_template_kwargs.enable_thinkin: ", "did you mean 'enable_thinking'?"],
        ),
        (
            ["+data.chat_template_kwargs.padding=true"],
            ["data.chat_template_kwargs.padding: the package sets", "leave it out"],
        ),
        (
            ["+data.chat_template_kwargs.chat_template=plain"],
            ["data.chat_template_kwargs.chat_template: an exported policy would have another", "data.chat_template)"],
        ),
        (["data.dataset={_target_: builtins.iter, _args_: [[1]]}"], ["data.dataset", "list_iterator", "list(...)"]),
        (["data.train_files=[rows.csv]"], ["rows.csv", "rl-plugins prepare jsonl"]),
    ],
    "optimizer": [
        (["optimizer.name=AdamWW"], ["optimizer.name=AdamWW", "did you mean AdamW"]),
        (["optimizer.name=no_such.Sgd"], ["optimizer.name=no_such.Sgd", "no_such"]),
        (["optimizer.name=LBFGS"], ["optimizer.name=LBFGS", "needs a closure", "another optimizer"]),
        (["optimizer.name=SGD", "optimizer.betas=[0.9, 0.95]"], ["optimizer.betas=", "SGD has no such argument"]),
        (["optimizer.name=SGD", "+optimizer.options.momentu=0.9"], ["optimizer.options.momentu", "mean momentum?"]),
        (["optimizer.name=SGD", "+optimizer.options.momentum=-1"], ["optimizer.name=SGD", "momentum value: -1"]),
        (["optimizer.name=4"], ["optimizer.name=4", "a dotted path"]),
        (["critic.optimizer.schedule=ReduceLROnPlateau"], ["critic.optimizer.schedule=ReduceLROnPlateau", "a metric"]),
        (
            ["optimizer.schedule=StepLR", "optimizer.warmup_steps=4", "+optimizer.schedule_options.step_size=3"],
            ["optimizer.warmup_steps=4", "schedule=constant or linear or cosine or wsd", "schedule_options"],
        ),
        (["optimizer.decay_steps=4"], ["optimizer.decay_steps=4", "schedule=linear or cosine or wsd"]),
        (["optimizer.schedule=linear"], ["optimizer.decay_steps=0", "schedule=linear needs a number of steps"]),
        (
            ["critic.optimizer.schedule=linear", "critic.optimizer.stable_steps=4", "critic.optimizer.decay_steps=4"],
            ["critic.optimizer.stable_steps=4", "schedule=cosine or wsd"],
        ),
        (["optimizer.schedule=wsd", "optimizer.decay_steps=4"], ["optimizer.stable_steps=0", "schedule=wsd needs"]),
        (["optimizer.schedule=StepLR"], ["optimizer.schedule=StepLR", "step_size"]),
        (["+optimizer.schedule_options.step_size=3"], ["optimizer.schedule_options", "leave schedule_options out"]),
    ],
    "algorithm": [
        (
            ["algorithm=dapo", "algorithm.group_filter.oversampling=1000", "batch.prompts_per_step=16"],
            [" rows, fewer than batch.prompts_per_step=16 x algorithm.group_filter.oversampling=1000"],
        ),
        (["algorithm=dapo", "algorithm.group_filter.oversampling=abc"], ["algorithm.group_filter.oversampling=abc"]),
        (["algorithm.group_filter=5"], ["algorithm.group_filter"]),
        (["run.name=mlflow.db"], ["run.name=mlflow.db: the MLflow store in", "choose another name"]),
        (["run.name=mlartifacts"], ["run.name=mlartifacts: the MLflow store in"]),
        (["~algorithm._target_"], ["algorithm must be a mapping with the key _target_"]),
        (["algorithm._target_=no_such.Thing"], ["algorithm: ", "no_such"]),
        (["algorithm.advantage=grop"], ["algorithm.advantage='grop'", "grpo"]),
        (["algorithm.policy_loss=ppo"], ["algorithm.policy_loss='ppo'", "ppo_clip"]),
        (["algorithm.aggregation=mean"], ["algorithm.aggregation='mean'", "token-mean"]),
        (["algorithm.kl.estimator=k9"], ["algorithm.kl.estimator='k9'", "k3"]),
        (
            ["algorithm.kl.placement=reward", "algorithm.kl.estimator=k3"],
            ["algorithm.kl.estimator=k3: in the reward, only k1", "use estimator=null or k1, or placement=loss"],
        ),
        (["algorithm.policy_loss_options.clip_high=abc"], ["options.clip_high=abc", "a finite number"]),
        (["algorithm.advantage_options.scale=foo"], ["options.scale=foo", "group, batch, none"]),
        (["+algorithm.advantage_options.scal=none"], ["no option 'scal'", "'scale'"]),
        (
            ["algorithm.kl.coefficient=0.1", "algorithm.kl.target=0.1", "algorithm.kl.horizon=3"],
            ["algorithm: horizon=3: one step of 256 sequences could", "set horizon above 51.2"],
        ),
        (["algorithm.kl.coefficient=abc"], ["algorithm.kl.coefficient=abc", "a finite number"]),
        (["algorithm.policy_loss_options.dual_clip=0.5"], ["dual_clip=0.5", "above 1"]),
    ],
}  # fmt: skip
"""Refused by the checks of `run_recipe`."""

"""`rl-plugins plan` from the command line."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.commands.main import main
from rl_plugins.commands.plan import WITH_VALUES, given_values, read_shape, words_of, workload_of
from rl_plugins.config.checks import check_options
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.placement import check_fit, roles_of
from rl_plugins.planning.devices import CPU_FILE, DEVICES, read_cpu
from rl_plugins.planning.search import Cluster, overrides, plans, search
from rl_plugins.planning.workload import PlannedCritic
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.repository.test_import_weight import HEAVY

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
PAIR = Cluster(DEVICES["h100"], 2)


@pytest.fixture
def model(tmp_path):
    """The shape of a model in a file, without a model."""
    path = tmp_path / "qwen.json"
    path.write_text(json.dumps(QWEN_7B))
    return path


def test_plan_prints_the_placements_and_the_options_of_the_best(model, capsys):
    words = ["plan", "grpo", f"model.path={model}", "--device", "h100", "model.precision=bf16-true"]
    assert main([*words, "strategy.zero_stage=3", "--devices", "8"]) == 0
    shown = capsys.readouterr().out
    assert "7.62 B parameters, 32 x 8 samples of 512 + 256 tokens, bf16-true, on 1 x 8 h100" in shown
    lines = shown.splitlines()
    end = lines[1].index("s/step") + len("s/step")
    seconds = [float(line[end - 9 : end]) for line in lines[2:14]]
    assert seconds == sorted(seconds)
    command = shlex.split(lines[-1])
    assert command[:3] == ["python", "-m", "rl_plugins.recipes.grpo"]
    options = command[3:]
    assert {f"model.path={model}", "model.precision=bf16-true"} <= set(options)
    assert len({option.partition("=")[0] for option in options}) == len(options)
    assert {"strategy.zero_stage=3", "placement.rollout=split"} <= set(options)
    config = configured("grpo", "placement.device=cuda", *options)
    check_fit(roles_of(config), [{"CPU": 64.0, "GPU": 8.0}], "the machine")


def test_plan_names_the_deadlines_of_long_responses_unless_given(model, capsys):
    words = ["plan", "grpo", f"model.path={model}", "--device", "h200", "--devices", "8", "model.precision=bf16-true"]
    words += ["batch.prompts_per_step=512", "batch.samples_per_prompt=16", "sampling.max_tokens=30000"]
    assert main([*words, "--response-tokens", "16000"]) == 0

    def printed() -> tuple[float, float]:
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        options = dict(word.split("=", 1) for word in command if "=" in word)
        config = configured("grpo", "placement.device=cuda", *(word for word in command[3:] if "=" in word))
        check_options(config)
        assert int(options["placement.num_workers"]) > 1
        return config.rollout.generate_timeout_s, config.strategy.collective_timeout_s

    wait, longer = printed()
    assert longer > wait > 1800
    for given in ("rollout.generate_timeout_s=20000", "strategy.collective_timeout_s=7200"):
        assert main([*words, "--response-tokens", "16000", given]) == 0
        wait, longer = printed()
        assert longer > wait and float(given.partition("=")[2]) in (wait, longer)
    assert main([*words[:-1], "sampling.max_tokens=256"]) == 0
    assert "timeout_s" not in capsys.readouterr().out


def test_plan_chooses_the_number_of_workers_for_expert_parallelism(tmp_path, capsys):
    (tmp_path / "mixture.json").write_text(json.dumps(MIXTURE))
    divided = ["strategy.name=fsdp", "strategy.expert_parallel=8", "model.precision=bf16-true"]
    words = ["plan", "grpo", f"model.path={tmp_path}/mixture.json", *divided, "--device", "h200", "--devices", "8"]
    assert main(words) == 0
    assert "placement.num_workers=8" in capsys.readouterr().out.splitlines()[-1].split()


def test_plan_of_a_mixture_holds_all_experts_and_computes_the_chosen_experts(tmp_path, capsys):
    dense = {name: size for name, size in MIXTURE.items() if "expert" not in name and "moe" not in name}
    (tmp_path / "dense.json").write_text(json.dumps({**dense, "model_type": "qwen3"}))
    (tmp_path / "mixture.json").write_text(json.dumps(MIXTURE))
    training = []
    for name in ("dense", "mixture"):
        words = ["plan", "grpo", f"model.path={tmp_path / name}.json", "--device", "h100", "--devices", "64"]
        assert main([*words, "model.precision=bf16-true", "strategy.zero_stage=3"]) == 0
        shown = capsys.readouterr().out
        training.append(float(shown.splitlines()[2][shown.splitlines()[1].index("rollout") + 7 :].split()[0]))
    assert "30.53 B parameters (3.04 B for a token), 32 x 8 samples" in shown
    # The shards of all experts are gathered, too.
    assert training[0] < training[1] < 10 * training[0]


def test_plan_counts_the_time_of_images(tmp_path, capsys):
    vision = {
        "model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420,
        "depth": 32, "num_heads": 16, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    model = tmp_path / "vision.json"
    model.write_text(json.dumps({**QWEN_7B, "model_type": "qwen2_5_vl", "vision_config": vision}))
    seconds = []
    for images in (["--images", "0"], [], ["--images", "2", "--image-patches", "4096"]):
        words = ["plan", "grpo", f"model.path={model}", "--device", "h100", "model.precision=bf16-true", *images]
        assert main([*words, "--devices", "16", "strategy.zero_stage=3"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert ("images" in shown[0]) == (images[:2] != ["--images", "0"])
        end = shown[1].index("s/step") + len("s/step")
        seconds.append(float(shown[2][end - 9 : end]))
    assert "512 + 256 tokens, 2 images of 4096 patches, bf16-true" in shown[0]
    assert seconds[0] <= seconds[1] < seconds[2]
    config = configured("grpo", f"model.path={model}", "optimizer.vision_lr=0")
    work = workload_of(config)
    assert (work.images, work.image_patches, work.trains_tower) == (1.0, None, False)
    critic = workload_of(configured("ppo", f"model.path={model}", "critic.optimizer.vision_lr=0")).critics[0]
    assert work.policy.tower is not None
    assert critic.trained == critic.shape.parameters - sum(work.policy.tower.matrices)
    # 448 x 448 pixels.
    assert work.image_flops(work.policy) == work.policy.tower.forward_flops(1024)


def test_plan_has_the_precision_of_a_run_on_the_device(model, capsys):
    for device, precision in (("h100", "bf16-mixed"), ("cpu", "32-true")):
        assert main(["plan", "grpo", f"model.path={model}", "--device", device, "--devices", "8"]) in (0, 2)
        shown = capsys.readouterr()
        assert f" tokens, {precision}, on " in shown.out + shown.err


def test_plan_of_float16_has_the_times_and_bytes_of_bfloat16(model, capsys):
    """Under ZeRO-1, float16 sums micro-batches in float32, and bfloat16 does not."""
    shown = []
    for precision in ("16-mixed", "bf16-mixed"):
        options = [f"model.path={model}", f"model.precision={precision}", "strategy.zero_stage=3"]
        assert main(["plan", "grpo", *options, "--device", "h100", "--devices", "8"]) in (0, 2)
        shown.append(capsys.readouterr().out.replace(precision, "PRECISION"))
    assert shown[0] == shown[1] and "PRECISION" in shown[0]


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("rollout.gpu_memory_utilization=0.90", "rollout.gpu_memory_utilization=0.9"),
        ("model.gradient_checkpointing=True", "model.gradient_checkpointing=true"),
        ("++placement.rollout=colocated", "placement.rollout=colocated"),
        ("batch.updates_per_step=16", "placement.num_workers=2"),
        ("rollout.tensor_parallel_size=4", "rollout.tensor_parallel_size=4"),
        # The search chooses the number of workers.
        ("rollout.engines=per_worker rollout.tensor_parallel_size=4", "rollout.tensor_parallel_size=4"),
        # Sampling ahead of training needs log-probs of the whole distribution: top_p=1.
        ("sampling.top_p=0.9", "schedule.max_staleness=0"),
        # A schedule keeps extra groups in flight, and recomputed routes need old log-probs.
        ("algorithm=dapo algorithm.group_filter.oversampling=4", "schedule.max_staleness=0"),
        ("model.router_replay=recompute", "schedule.max_staleness=0"),
    ],
)
def test_plan_keeps_an_option_of_the_command_line_in_any_spelling(word, kept, model, capsys):
    words = ["plan", "grpo", f"model.path={model}", "--device", "h200", "model.precision=bf16-true", "--devices", "8"]
    assert main([*words, *word.split()]) == 0
    assert kept in capsys.readouterr().out.splitlines()[-1].split()


def test_plan_refuses_the_impossible_and_loads_no_heavy_library(model, root):
    words = ["plan", "grpo", f"model.path={model}", "--device", "l4", "--devices", "1"]
    code = (
        "import sys\nfrom rl_plugins.commands.main import main\n"
        f"status = main({words!r})\nprint('LOADED', *sys.modules)\nsys.exit(status)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert outcome.returncode == 2
    error = outcome.stderr
    assert re.search(
        r"error: none of \d+ placements fits; the nearest, .* lacks [\d.]+ GiB on each .*: (set|lower|train) ", error
    )
    assert set(outcome.stdout.split("LOADED")[1].split()) & HEAVY == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "model.path=M"], "plan is for the stages policy_optimization and prime, and not for sft"),
        (["grpo", "model.path=nowhere/at/all"], "model.path=nowhere/at/all: there is no such folder or file"),
        (
            ["grpo", "model.path=M", "placement.num_workers=7"],
            "no placement on 8 devices agrees with the given options",
        ),
        (["grpo", "model.path=M", "--device", "cpu", "--nodes", "2"], "--nodes: a plan for CPUs is for one machine"),
        (["grpo", "model.path=M", "--devices", "0"], "argument --devices: 0: must be at least 1"),
        (["grpo", "model.path=M", "--rows", "0"], "argument --rows: 0: must be at least 1"),
        (["grpo", "model.path=M", "--response-tokens", "-1"], "argument --response-tokens: -1: must be at least 1"),
        (
            ["grpo", "model.path=M", "rollout.dtype=float16", "--device", "cpu"],
            "rollout.dtype: plan has no rates of a CPU for float16: use another rollout.dtype",
        ),
        (
            ["grpo", "model.path=M", "model.precision=16-mixed", "--device", "cpu"],
            "model.precision: plan has no rates of a CPU for float16: use another model.precision",
        ),
        (["grpo", "model.path=M", "rollout.engine=transformers"], "rollout.engine=transformers: plan places engines"),
        (["grpo", "model.path=M", "strategy.sequence_parallel=2"], "plans give each worker whole samples"),
        (["grpo", "model.path=M", "strategy.name=fsdp", "strategy.tensor_parallel=2"], "plans divide no layer"),
        (["grpo", "model.path=M", "strategy.offload.policy=nvme"], "policy=nvme: plan has no rates of drives"),
        (["grpo", "model.path=M", "batch.samples_per_prompt=0"], "batch.samples_per_prompt=0: must be at least 1"),
        (
            ["grpo", "model.path=M", "batch.updates_per_step=3"],
            "no placement on 8 devices agrees with the given options",
        ),
        (
            ["grpo", "model.path=M", "placement.cpus_per_worker=9", "--device", "cpu"],
            "a run would refuse every placement, the first with the message: the placement needs 9 CPUs",
        ),
        (["grpo", "model.path=M", "--device", "cpu", "--calibration", "no.json"], "calibration file no.json: "),
        (["grpo", "model.path=M", "--images", "-1"], "argument --images: -1: must be 0 or more"),
        (["grpo", "model.path=M", "--images", "1"], "reads text alone: leave --images out"),
        (["grpo", "model.path=M", "--image-patches", "64"], "reads text alone: leave --image-patches out"),
    ],
)
def test_plan_names_a_wrong_option_and_the_correction_in_one_line(words, message, model, capsys):
    devices = [] if "--devices" in words or "--nodes" in words else ["--devices", "8"]
    device = [] if "--device" in words else ["--device", "h100"]
    assert main(["plan", *(word.replace("=M", f"={model}") for word in words), *device, *devices]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_given_values_leaves_out_an_option_that_is_null():
    words = ["rollout.sleep=null", "++rollout.engines=per_worker"]
    assert given_values(compose_config("grpo", words), words) == {"rollout.engines": "per_worker"}


@pytest.mark.parametrize(("content", "fault"), [("{", "not valid JSON"), ("[1]", "not a JSON object")])
def test_read_shape_names_a_damaged_file(content, fault, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"x.json: {fault}"):
        read_shape("model.path", str(path))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[1]", "must be a mapping, not list"),
        (json.dumps({**json.loads(CPU_FILE.read_text()), "core": 4}), "unexpected keyword argument 'core'"),
        ("{", "Expecting property name"),
    ],
)
def test_read_cpu_names_a_file_with_other_content(content, fault, tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^calibration file {path}: .*{fault}.*; `python -m benchmarks\.calibrate"):
        read_cpu(path)
    assert read_cpu(CPU_FILE).is_cpu


def work(recipe, model, *options):
    return workload_of(configured(recipe, f"model.path={model}", *options))


def test_workload_of_refuses_copies_of_the_model(model):
    with pytest.raises(ConfigError, match=r"strategy\.workers_per_copy=2: plans divide a model over all workers"):
        work("grpo", model, "strategy.name=fsdp", "strategy.workers_per_copy=2", "placement.num_workers=2")


def test_plan_counts_averages_offload_of_frozen_models_and_gradients_in_shards(model, capsys):
    shown = []
    options = ["", "strategy.accumulate_shards=true", "average.keep=0.9", "strategy.offload.reference=cpu"]
    for option in [*options, "reference.update_every=1 reference.keep=0.9"]:
        words = ["strategy.name=fsdp", "model.precision=bf16-true", "algorithm.kl.coefficient=0.1", *option.split()]
        assert main(["plan", "grpo", f"model.path={model}", *words, "--device", "h200", "--devices", "2"]) == 0
        shown.append(capsys.readouterr().out.splitlines()[:-1])
    assert shown.count(shown[0]) == 1


def test_workload_of_samples_more_prompts_for_a_group_filter(model):
    plain = work("grpo", model)
    filtered = work("grpo", model, "algorithm=dapo", "algorithm.group_filter.oversampling=4")
    assert filtered.prompts == plain.prompts and filtered.responses == 4 * plain.responses


def test_workload_of_has_the_models_of_the_algorithm(model):
    plain = work("grpo", model)
    assert plain.critics == [] and plain.frozen == {}
    # A scalar head has the place of the output head.
    headless = replace(plain.policy, tied=True)
    critic = PlannedCritic("critic", headless, plain.policy.parameters - 152064 * 3584)
    assert work("ppo", model).critics == [critic]
    adapter = work("ppo", model, "critic.lora.rank=8").critics
    assert adapter == [PlannedCritic("critic", headless, plain.policy.adapter(8))]
    assert work("ppo", model, "critic.lora.rank=8", "critic.lora.quantization=nf4").critics[0].four_bits
    pools = ("placement.critic.actors=1", "placement.reference.actors=1", "algorithm.kl.coefficient=0.1")
    elsewhere = work("ppo", model, *pools)
    assert elsewhere.critics == [] and elsewhere.frozen == {}
    assert set(work("grpo", model, "algorithm.kl.coefficient=0.1").frozen) == {"reference"}
    # The base of an adapter is its reference.
    assert work("grpo", model, "algorithm.kl.coefficient=0.1", "model.lora.rank=8").frozen == {}
    saved = work("grpo", model, "algorithm.kl.coefficient=0.1", "model.lora.rank=8", "model.lora.path=own/adapter")
    assert saved.frozen.keys() == {"reference"}
    assert work("grpo", model, f"reward_model.path={model}").frozen == {"reward_model": headless}
    quantised = work("grpo", model, "++rollout.vllm.quantization=fp8", "++rollout.vllm.kv_cache_dtype=fp8_e5m2")
    assert quantised.matrix_width == quantised.cache_width == 1.0 and plain.matrix_width is plain.cache_width is None
    eight_bit = "optimizer.name={_target_: torchao.optim.AdamW8bit}"
    assert work("grpo", model, eight_bit, "strategy.name=fsdp").moment_width == 1 + 4 / 256
    assert plain.moment_width is None and not plain.muon
    assert work("grpo", model, "optimizer.name=Muon", "strategy.name=fsdp").muon
    eight_bit = work("safe_rlhf", model, "cost_critic.optimizer.name=bitsandbytes.optim.AdamW8bit")
    assert [critic.moment_width for critic in eight_bit.critics] == [None, 1 + 4 / 256]
    assert work("grpo", model, "model.lora.rank=8", "model.lora.quantization=nf4").four_bits and not plain.four_bits
    safe = work("safe_rlhf", model, f"cost_model.path={model}")
    assert safe.critics == [critic, replace(critic, name="cost_critic")]
    assert safe.frozen == {"reference": plain.policy, "cost_model": headless}


def test_with_values_names_the_advantages_whose_functions_take_values():
    asking = {name for name, function in ADVANTAGES.items() if "values_BT" in inspect.signature(function).parameters}
    assert asking == WITH_VALUES


def test_workload_of_prime_has_the_process_reward_model_and_a_reference_of_both_models(model, tmp_path):
    small = tmp_path / "small.json"
    small.write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 7}))
    policy = read_shape("model.path", str(model))
    for path, layers in {"null": 28, str(small): 7}.items():
        shape = replace(policy, layers=layers)
        options = (f"process_reward_model.path={path}", "placement.reference.actors=1")
        planned = work("prime", model, *options, "algorithm.kl.coefficient=0.1")
        assert planned.critics == [PlannedCritic("process_reward_model", shape, shape.parameters)]
        assert planned.frozen == {"process_reference": shape}
        beside = work("prime", model, *options[:1], "algorithm.kl.coefficient=0.1")
        assert beside.frozen == {"reference": policy, "process_reference": shape}


def test_plan_with_the_optimizer_on_the_host_places_every_trained_model_there(model):
    for recipe, trained in {
        "grpo": {"policy"},
        "ppo": {"policy", "critic"},
        "safe_rlhf": {"policy", "critic", "cost_critic"},
        "prime": {"policy", "process_reward_model"},
    }.items():
        planned = work(recipe, model, f"cost_model.path={model}") if recipe == "safe_rlhf" else work(recipe, model)
        on_host = [plan for plan in plans(planned, PAIR) if plan.offload == "cpu"]
        options = (words_of(overrides(planned, plan, PAIR)) for plan in on_host)
        (words,) = {tuple(word for word in each if ".offload." in word) for each in options}
        config = configured(recipe, f"model.path={model}", *words)
        assert {name for name, place in config.strategy.offload.places.items() if place == "cpu"} == trained
    kept = search(work("ppo", model), PAIR, given={"strategy.offload.critic": "cpu"})
    assert {candidate.plan.offload for candidate in kept} == {"cpu"}

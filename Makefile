# Start with `make serve` or `make test`: both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.specray-installed
# Ray's token is off in tests: their clusters listen on loopback only.
# Threads of an operator that wait for the others do not spin on a core that other tests need.
# Bytecode is kept, whatever the environment says: tests start hundreds of processes, which would compile the package anew.
TEST_ENV := RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=
# Each worker takes a file at a time.
TEST_WORKERS ?= 2
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

# All tests that start a Ray, as tests/conftest.py knows them: the others need not be imported to find them.
CLUSTER_TESTS := tests/e2e tests/cluster/test_target_nodes.py

# Cases of make fuzz.
FUZZ_CASES ?= 2000

.PHONY: setup lock serve test test-rest test-all zoo fuzz clients dist docs lint types protos protos-check schema check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call install-pinned,$(BIN)/python,dev)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Installs what the package needs, with the extras $2, into the environment of the interpreter $1: every archive is of a pinned
# version and has a hash of constraints.txt. The pip that comes with Python knows no hashes of constraints.
define install-pinned
	grep '^pip==' constraints.txt | $1 -m pip install --quiet --require-hashes --requirement /dev/stdin
	$1 .ci/requirements.py $2 >$(dir $1)requirements.txt
	$1 -m pip install --quiet --require-hashes --constraint constraints.txt --requirement $(dir $1)requirements.txt
endef

# Pins and hashes anew, after a change of pyproject.toml; UPGRADE=1 takes the newest versions.
lock: setup
	$(BIN)/python .ci/lock.py $(if $(UPGRADE),--upgrade)

# MODEL=qwen2.5-coder-1.5b-instruct: another model than the default (`specray models list`), with the draft that goes with it.
serve: setup
	exec $(BIN)/specray serve $(if $(MODEL),--target $(MODEL))

# What a change waits for: tests of every package, the theorem in pairs of values, and one service on Ray, over HTTP and
# gRPC, whose draft is killed. PYTEST_OPTIONS: more options of pytest.
test: setup
	$(PYTEST) -n $(TEST_WORKERS) -m 'not slow and not cluster and not zoo' $(addprefix --ignore=,$(CLUSTER_TESTS)) $(PYTEST_OPTIONS)
	$(PYTEST) -m 'not slow' $(CLUSTER_TESTS) $(PYTEST_OPTIONS)

# What `make test` leaves out: compilers, interpreted and emulated kernels, long samples, all other services.
# A worker has one service at a time, with a Ray and ports of its own. Each takes about one core, and waits long for what
# was killed or stopped. CLUSTER_WORKERS=1 where memory is short: a service takes about 2 GiB.
CLUSTER_WORKERS ?= 2
test-rest: setup
	$(PYTEST) -n $(TEST_WORKERS) -m 'slow and not cluster and not zoo' $(addprefix --ignore=,$(CLUSTER_TESTS)) $(PYTEST_OPTIONS)
	$(PYTEST) -n $(CLUSTER_WORKERS) -m slow $(CLUSTER_TESTS) $(PYTEST_OPTIONS)

test-all: test test-rest

# Tiny models of all families: each served with the tokens of the library's generate, or refused.
zoo: setup
	$(BIN)/python -m pytest tests/unit/engine/model/test_zoo.py -m 'zoo or not zoo'

# A real service answers whatever schemathesis makes of its OpenAPI document; takes minutes. The unit tests have a short
# run of the same kind. FUZZ_CASES=200: fewer cases.
fuzz: setup .venv-fuzz/.installed
	$(TEST_ENV) PYTHONPATH=. $(BIN)/python tests/fuzz/run.py --schemathesis .venv-fuzz/bin/schemathesis --cases $(FUZZ_CASES)

# Unmodified clients against a running server: make clients URL=http://127.0.0.1:8000. With TARGET=CHECKPOINT, which the
# server serves in float32, the scores that lm_eval reads are compared with a forward of transformers. RECORD=FILE keeps
# what was sent.
SAMPLES := .venv-clients/samples.json
clients: .venv-clients/.installed .venv-clients/.agents $(if $(TARGET),setup)
	test -n "$(URL)" || { echo "URL is not set; for example: make clients URL=http://127.0.0.1:8000" >&2; exit 2; }
	.venv-clients/bin/python -m tests.clients.run $(URL) --samples $(SAMPLES) $(if $(RECORD),--record $(RECORD))
	test -z "$(TARGET)" || $(BIN)/python -m tests.clients.forward $(TARGET) $(SAMPLES)

# Coding agents, of their newest versions; without npm their checks are skipped.
.venv-clients/.agents: .venv-clients/.installed
	-npm install --silent --no-audit --no-fund --prefix .venv-clients @anthropic-ai/claude-code @openai/codex opencode-ai
	touch $@

# Wheel, sdist and the list of what the wheel depends on (CycloneDX), in dist/. The wheel is installed into an environment of
# its own and must serve a request there.
dist: .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist .
	$(PYTHON) -m venv --clear .venv-wheel
	$(call install-pinned,.venv-wheel/bin/python)
	.venv-wheel/bin/python -m pip install --quiet --no-deps dist/specray-*.whl
	.venv-wheel/bin/python -m pip check
	.venv-dist/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/specray.cdx.json .venv-wheel/bin/python
	$(PYTHON) tests/dist/serve_once.py .venv-wheel/bin/specray

# The pages of docs/ as a static site, in build/docs. A link that leads nowhere fails.
docs: .venv-docs/.installed
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo "the site is in build/docs/index.html"

.venv-%/.installed: tests/%/requirements.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd protos && ../$(BIN)/buf lint

types: setup
	$(BIN)/mypy -p specray -p tests.e2e -p tests.cluster -p tests.gpu -p tests.conformance

protos: setup
	$(BIN)/python protos/generate.py

protos-check: protos
	git diff --exit-code -- specray/rpc/pb
	test -z "$$(git status --porcelain -- specray/rpc/pb)"

# Run after a change of specray/config/: it updates the chart's schema.
schema: setup
	$(BIN)/python helm/generate_schema.py

check: lint types protos-check test-all

clean:
	rm -rf $(VENV) .venv-fuzz .venv-clients .venv-dist .venv-docs .venv-wheel dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

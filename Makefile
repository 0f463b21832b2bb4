# Two commands on a bare machine: `make train` and `make test`. Everything is installed into .venv first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: setup train test test-slow test-all test-campaigns gpu gpu-rehearsal check docs wheel torchft store-server data-peers peers faults format clean

setup: $(VENV)/.installed

# Without Debian's python3-venv package, `python3 -m venv` cannot put pip inside: the outer pip then does.
# Bytecode is made on all cores: pip would make it on one, which takes as long as the rest. As pip does, this passes over
# files that are for a newer Python.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		($(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[all]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true
	touch $@

train: setup
	$(BIN)/paceline train transformer_lm --workers 2 --num_steps 400

# Bytecode of tests is kept, even where the environment says otherwise: pytest takes seconds to make it anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q --durations=10

test: setup
	$(PYTEST) -m "not slow"

# Files without a slow test are left out, which halves the time of collecting.
SLOW_FILES = $$(grep -rl "mark\.slow" tests --include="test_*.py")

test-slow: setup
	$(PYTEST) -m "slow and not campaign" $(SLOW_FILES)

test-all: test test-slow

# More kinds of the same: every rule, layout and phase in which a worker is killed, long learning runs. About half an hour.
test-campaigns: setup
	$(PYTEST) -m campaign $(SLOW_FILES)

# For a short loan of a GPU: tests and benchmarks in order of worth; again to go on after 25 minutes.
gpu: setup
	$(BIN)/python tools/gpu_hour.py

gpu-rehearsal: setup
	$(BIN)/python tools/gpu_hour.py --rehearse

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py
	$(BIN)/python tools/check_english.py

docs: setup
	$(BIN)/python -m sphinx -j auto -W --keep-going -q -b html docs docs/_build/html

# Without isolation: what builds it is installed, in the versions of constraints.txt.
wheel: setup
	$(BIN)/python -m build --no-isolation --outdir dist

# Hundreds of trainings whose workers are killed, stopped, cut off or resized, saves killed at every call, and a thousand
# changes of the workers of one training: about two hours.
faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python tools/faults/saves.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/faults/campaign.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/faults/reforms.py

# For `paceline bench data --peers_python .data-peers/bin/python`; with this environment's torch, not one of its own.
data-peers: setup
	$(PYTHON) -m venv --without-pip .data-peers
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$(.data-peers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth
	$(BIN)/python -m pip --python .data-peers/bin/python install --quiet --no-deps webdataset==1.0.2 litdata==0.2.76 \
		braceexpand lightning-utilities boto3 botocore s3transfer jmespath filelock tifffile

# For `paceline bench resilience --sides '["paceline","torchft"]' --torchft_path .torchft`; without its own copy of torch.
torchft: setup
	$(BIN)/python -m pip install --quiet --target .torchft --no-deps torchft==0.2.0
	$(BIN)/python -m pip install --quiet --target .torchft opentelemetry-sdk opentelemetry-exporter-otlp-proto-http

# For tests/data/test_format_peers.py: packages whose files Paceline reads and writes, apart from its own environment.
peers: setup
	$(BIN)/python -m pip install --quiet --target .peers --no-deps webdataset==1.0.2 braceexpand==0.1.7 \
		mosaicml-streaming==0.13.0 tfrecord==1.14.6 crc32c==2.9.post0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 \
		pandas httpx multidict aiohttp aiosignal frozenlist yarl propcache attrs aiohappyeyeballs boto3 botocore jmespath \
		s3transfer zstd Brotli python-snappy cramjam catalogue

# For tests against moto's S3, in an environment of its own: botocore does not go with constraints.txt.
store-server:
	test -x .store_server/bin/pip || $(PYTHON) -m venv .store_server
	.store_server/bin/pip install --quiet 'moto[s3,server]==5.2.*'

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .torchft .store_server .data-peers .peers dist docs/_build docs/api .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

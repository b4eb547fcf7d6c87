# Every target sets up what it needs: a virtual environment in .venv with the versions that were tested.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python may write compiled modules, also of tests: without them, every process first compiles for some seconds.
unexport PYTHONDONTWRITEBYTECODE
# For the small models of the tests, two processes with one thread are faster than one process with two threads. A
# process begins with half of the tests, so that it can reuse what a test file builds.
JOBS ?= 2
# By default, glibc returns freed memory to the system, and the next large tensor takes it again, page by page. About 8 % of
# the tests' time was spent on that. Other C libraries ignore the two settings.
KEPT_MEMORY := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000
PYTEST := OMP_NUM_THREADS=1 $(KEPT_MEMORY) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo docs shown pictures test test-all pytest pytest-all test-slow cases test-browser soak lint types format wheel wheels samples parity versions loaders swaps healing healing-defaults healing-starts healing-smollm ablation bench bench-convert bench-surgery bench-params bench-light bench-audit bench-diff bench-train bench-gpu clean

help:
	@echo "make demo          the tour on the trained samples"
	@echo "make docs          the documentation site, in build/docs"
	@echo "make shown         run the commands in the pages again, and update the outputs that changed"
	@echo "make pictures      draw the pictures in README.md and docs/ again; needs Chromium"
	@echo "make test          lint, types and tests, with a subset of the exhaustive tests"
	@echo "make test-all      lint, types and all tests, except those that take minutes"
	@echo "make test-slow     the tests that take minutes, and variants that show nothing new"
	@echo "make cases         tests of faults that users reported, if the folder ../shared/cases exists"
	@echo "make test-browser  tests of the HTML pages in headless Chromium"
	@echo "make soak          hours: thousands of killed conversions, failing I/O calls, millions of damaged files (KILLS=, FUZZ=, CONFIGS=)"
	@echo "make parity        docs/parity.md, from a run against transformers"
	@echo "make loaders       docs/loaders.md, from runs of transformers 4.57 and mlx-lm on folders written by gptkit"
	@echo "make versions      docs/versions.md, from runs with the pinned and the newest libraries"
	@echo "make swaps         docs/swaps.md, from every swap on the trained samples"
	@echo "make healing       a section of docs/healing.md: the damage of seven swaps, and how much of it training repairs"
	@echo "make healing-defaults  a section of docs/healing.md: heal compared with a plain training loop, on three models"
	@echo "make healing-starts  a table of docs/kv-healing.md: five ways to compute fewer key-value heads, before and after healing"
	@echo "make healing-smollm  a section of docs/kv-healing.md: SmolLM2-135M with one key-value head, healed (WHEEL=)"
	@echo "make ablation      docs/ablation.md: the effect of the steps from GPT-2 to LLaMA (TEXT=tinyshakespeare.txt)"
	@echo "make bench         speed compared with transformers, as ratios"
	@echo "make bench-convert speed of conversion compared with copying, hashing and transformers"
	@echo "make bench-params  run time of gptkit params compared with accelerate estimate-memory"
	@echo "make bench-light   the first number of hf-gptkit from an empty cache, next to hf-mem"
	@echo "make wheels        the wheels of gptkit and of hf-gptkit (without torch), in dist"
	@echo "make bench-audit   gptkit audit of a repository of 30 shards on a local server, from the headers only"
	@echo "make bench-diff    gptkit diff of two checkpoints of 2 GB, compared with cmp and sha256sum"
	@echo "make bench-surgery fitted key-value heads compared with averaged ones; a swap of a 2.2 GB model in 600 MB of memory"
	@echo "make bench-gpu     parity, decoding and training on a GPU, compared with transformers and a plain loop"
	@echo "make bench-train   gptkit train compared with a plain loop, as ratios (TEXT=tinyshakespeare.txt, NANOGPT=FOLDER)"
	@echo "make format        let ruff rewrite the code"
	@echo "make samples       train the samples again (TEXT=tinyshakespeare.txt)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("gptkit needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/gptkit demo

# The build needs no network. A warning is an error (-W). The pages work from the disk, without a server.
docs: $(STAMP)
	rm -rf build/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -n -E -q -d build/doctrees docs build/docs
	@echo "docs: build/docs/index.html"

# Update the outputs in README.md and docs/ if a command now prints something else. Then read the difference.
shown: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/shown.py README.md $$(grep -rlE '^<!-- (output|runs|file|python)' docs --include '*.md')

# Draw every picture in README.md and docs/ again, with the command above it.
pictures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/pictured.py README.md $$(grep -rlE '^<!-- picture' docs --include '*.md')

# Exhaustive tests (all variants by all lengths by all dtypes) run a subset of their cases, which contains every family,
# dtype, swap and command. The type checker uses one core, so the tests start at the same time.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 lint types pytest

pytest: $(STAMP)
	$(PYTEST) -m "not exhaustive and not slow and not soak"

# All cases of all tests, except those marked `slow`: about 40 minutes.
test-all: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 lint types pytest-all

pytest-all: $(STAMP)
	$(PYTEST) -m "not slow and not soak"

test-slow: $(STAMP)
	$(PYTEST) -m slow

# Scripts of faults that users reported, if the folder ../shared/cases exists. They take minutes.
cases: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/test_cases.py

# Uses the system's Chromium, or else that of playwright. Without either, `make test` skips these tests.
test-browser: $(STAMP)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || $(BIN)/playwright install chromium
	@mkdir -p build/screenshots
	OMP_NUM_THREADS=1 GPTKIT_SCREENSHOTS=build/screenshots $(BIN)/python -m pytest -rs $$(grep -rlE 'browser|kaleido' tests/report --include 'test_*.py')
	@echo "screenshots: build/screenshots"

# Random tests for a long time, because short runs may pass by luck. KILLS is the number of conversions that are killed.
# FUZZ is the number of damaged headers and indexes (by default 50 million of safetensors, which take two hours, and 5
# million of GGUF). CONFIGS is the number of hostile config.json per family (half a million).
KILLS ?= 3000
soak: $(STAMP)
	KILLS=$(KILLS) $(BIN)/python -m pytest -m soak

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow an editable install that maps this folder to the name gptkit, so a link has this name.
types: $(STAMP)
	@mkdir -p build/types && ln -sfn ../.. build/types/gptkit
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p gptkit \
		--exclude '^gptkit/(tests|docs|build|benchmarks|examples|wheels|\.venv)/'

# The wheel of gptkit, and that of hf-gptkit, which needs neither torch nor transformers.
wheels: wheel
	$(BIN)/python wheels/light.py dist

wheel: $(STAMP)
	rm -rf dist build/lib build/bdist*
	$(BIN)/python -m build --wheel --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
	@rm -f build.log

# Write docs/parity.md from a comparison with transformers.
parity: $(STAMP)
	$(BIN)/python benchmarks/parity.py

# Write docs/versions.md from a comparison with other releases of the dependencies. NAMES= are the environments.
versions: $(STAMP)
	$(BIN)/python benchmarks/versions.py $(NAMES)

# Write docs/loaders.md: what transformers 4.57 and mlx-lm compute from folders that transformers 5 and gptkit write.
loaders: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/loaders.py

# Write docs/swaps.md from every swap on the trained samples; takes some minutes on two cores.
swaps: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/swaps.py --jobs $(JOBS)

healing: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/healing.py --jobs $(JOBS) --out docs/healing.md

# Takes ten to twenty minutes of one core. An interrupted run continues (build/ablation). The picture needs Chromium.
ablation: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ablation.py --text $(TEXT) --out docs/ablation.md \
		--picture docs/pictures/ablation.svg

# Takes a quarter of an hour of one core. An interrupted run continues (build/healing-defaults.json).
healing-defaults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/healing_defaults.py --out docs/healing.md

healing-starts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kv_starts.py --out docs/kv-healing.md

# Needs 8 GB of disk, 5 GB of memory, and an hour and a half of one core.
healing-smollm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kv_healing.py --out docs/kv-healing.md $(if $(WHEEL),--wheel $(WHEEL))

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# Needs 30 GB of disk, and takes minutes.
bench-convert: $(STAMP)
	$(BIN)/python benchmarks/convert.py

bench-params: $(STAMP)
	$(BIN)/python benchmarks/params.py

bench-light: $(STAMP)
	$(BIN)/python benchmarks/light.py

bench-audit: $(STAMP)
	$(BIN)/python benchmarks/audit.py

# Needs 5 GB of disk.
bench-diff: $(STAMP)
	$(BIN)/python benchmarks/diff.py

# Needs 8 GB of disk, and a wheel of 93 MB, which it downloads unless WHEEL=FILE names it. Takes a quarter of an hour.
bench-surgery: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kv_heads.py $(if $(WHEEL),--wheel $(WHEEL))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/surgery.py

# Needs an NVIDIA GPU and takes eight minutes. For a CPU: $(BIN)/python benchmarks/gpu.py --small.
bench-gpu: $(STAMP)
	@mkdir -p build
	$(BIN)/python benchmarks/gpu.py --out build/gpu.json

TEXT ?= tinyshakespeare.txt
bench-train: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/train.py --text $(TEXT) $(if $(NANOGPT),--nanogpt $(NANOGPT))

samples: $(STAMP)
	$(BIN)/python examples/train_samples.py --text $(TEXT) --out samples

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Every target sets up what it needs: a virtual environment in .venv with the versions that were tested.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, tests' too: without them each process of a run begins with some seconds of compiling.
unexport PYTHONDONTWRITEBYTECODE
# Two processes of one thread each beat one of two on the small models of the tests. Each begins with a half of the
# tests, so that what a file builds once is built once.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo docs shown pictures test test-all pytest pytest-all test-slow cases test-browser soak lint types format wheel samples parity swaps healing healing-defaults healing-starts healing-smollm ablation bench bench-convert bench-surgery bench-params bench-audit bench-diff bench-train bench-gpu clean

help:
	@echo "make demo          the tour on the trained samples"
	@echo "make docs          the documentation site, in build/docs"
	@echo "make shown         what the pages show of outputs, from the commands"
	@echo "make pictures      the pictures in README.md and docs/, by the commands that they belong to; needs a Chromium"
	@echo "make test          lint, types and tests: of what is exhaustive a cover"
	@echo "make test-all      lint, types and all tests but those that take minutes each"
	@echo "make test-slow     the tests that take minutes"
	@echo "make cases         the faults reported from outside, where ../shared/cases is there"
	@echo "make test-browser  the pages of --html in headless Chromium"
	@echo "make soak          thousands of kills, every I/O call refused, millions of broken files (KILLS=, FUZZ=, CONFIGS=)"
	@echo "make parity        docs/parity.md, from a run against transformers"
	@echo "make swaps         docs/swaps.md, from every swap on the trained samples"
	@echo "make healing       docs/healing.md: what seven swaps cost, and what training gives back, with controls"
	@echo "make healing-defaults  a section of docs/healing.md: heal's defaults beside a plain loop, on three models"
	@echo "make healing-starts  docs/kv-healing.md: five closed forms of fewer key-value heads, healed alike"
	@echo "make healing-smollm  SmolLM2-135M with one key-value head, healed (WHEEL=)"
	@echo "make ablation      docs/ablation.md: what each step from GPT-2 to LLaMA gives (TEXT=tinyshakespeare.txt)"
	@echo "make bench         speed against transformers, as ratios"
	@echo "make bench-convert conversion against copying, hashing and transformers"
	@echo "make bench-params  gptkit params against accelerate estimate-memory, as whole processes"
	@echo "make bench-audit   gptkit audit of 30 shards on a hub of our own, by headers alone"
	@echo "make bench-diff    two checkpoints of 2 GB against each other, beside cmp and sha256sum"
	@echo "make bench-surgery fewer key-value heads against mean-pooling; a 2.2 GB model within 600 MB"
	@echo "make bench-gpu    parity, decoding and training on a GPU, against transformers and a plain loop"
	@echo "make bench-train   gptkit train against a plain loop, as ratios (TEXT=tinyshakespeare.txt, NANOGPT=FOLDER)"
	@echo "make format        let ruff rewrite the code"
	@echo "make samples       train the samples again (TEXT=tinyshakespeare.txt)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("gptkit needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/gptkit demo

# Without a network, and -W: a warning fails. The pages need no server and work from the disk.
docs: $(STAMP)
	rm -rf build/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -n -E -q -d build/doctrees docs build/docs
	@echo "docs: build/docs/index.html"

# Every output in README.md and docs/ again, where a command now prints something else; read the difference.
shown: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/shown.py README.md $$(grep -rlE '^<!-- (output|runs|file|python)' docs --include '*.md')

# Every picture in README.md and docs/ again, by the command above it.
pictures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/pictured.py README.md $$(grep -rlE '^<!-- picture' docs --include '*.md')

# Of tests that are exhaustive (all variants by all lengths by all dtypes) a cover: every family, dtype, swap and command.
# The type checker has one core; the tests begin beside it.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 lint types pytest

pytest: $(STAMP)
	$(PYTEST) -m "not exhaustive and not slow and not soak"

# Every case of every test that is not slow: some 40 minutes.
test-all: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 lint types pytest-all

pytest-all: $(STAMP)
	$(PYTEST) -m "not slow and not soak"

test-slow: $(STAMP)
	$(PYTEST) -m slow

# The scripts of faults that were reported from outside, in ../shared/cases, where that folder is there; minutes.
cases: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/test_cases.py

# The system's Chromium where there is one, else playwright's own. Without either, `make test` leaves these tests out.
test-browser: $(STAMP)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || $(BIN)/playwright install chromium
	@mkdir -p build/screenshots
	OMP_NUM_THREADS=1 GPTKIT_SCREENSHOTS=build/screenshots $(BIN)/python -m pytest -rs $$(grep -rlE 'browser|kaleido' tests/report --include 'test_*.py')
	@echo "screenshots: build/screenshots"

# The long runs of the tests that pass by luck on a short one: KILLS conversions are killed, FUZZ broken headers and
# indexes read (by default 50 million of safetensors, two hours, and 5 million of GGUF), CONFIGS hostile config.json of
# each family (half a million).
KILLS ?= 3000
soak: $(STAMP)
	KILLS=$(KILLS) $(BIN)/python -m pytest -m soak

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow an editable install that maps folders to another name, so it reads this folder under that name.
types: $(STAMP)
	@mkdir -p build/types && ln -sfn ../.. build/types/gptkit
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p gptkit \
		--exclude '^gptkit/(tests|docs|build|benchmarks|examples|\.venv)/'

wheel: $(STAMP)
	rm -rf dist build/lib build/bdist*
	$(BIN)/python -m build --wheel --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
	@rm -f build.log

# docs/parity.md, from a run against transformers.
parity: $(STAMP)
	$(BIN)/python benchmarks/parity.py

# docs/swaps.md, from every swap on the trained samples; some minutes on two cores.
swaps: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/swaps.py --jobs $(JOBS)

healing: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/healing.py --jobs $(JOBS) --out docs/healing.md

# Ten to twenty minutes of one core; what stopped goes on where it was (build/ablation). The picture needs a Chromium.
ablation: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ablation.py --text $(TEXT) --out docs/ablation.md \
		--picture docs/pictures/ablation.svg

# A quarter of an hour of one core; what stopped goes on where it was (build/healing-defaults.json).
healing-defaults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/healing_defaults.py --out docs/healing.md

healing-starts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kv_starts.py --out docs/kv-healing.md

# 8 GB of disk, 5 GB of memory, and an hour and a half of one core.
healing-smollm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kv_healing.py --out docs/kv-healing.md $(if $(WHEEL),--wheel $(WHEEL))

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# 30 GB of disk, and minutes.
bench-convert: $(STAMP)
	$(BIN)/python benchmarks/convert.py

bench-params: $(STAMP)
	$(BIN)/python benchmarks/params.py

bench-audit: $(STAMP)
	$(BIN)/python benchmarks/audit.py

# 5 GB of disk.
bench-diff: $(STAMP)
	$(BIN)/python benchmarks/diff.py

# 8 GB of disk, a wheel of 93 MB (WHEEL=FILE where it lies here), and a quarter of an hour.
bench-surgery: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kv_heads.py $(if $(WHEEL),--wheel $(WHEEL))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/surgery.py

# An NVIDIA GPU, and eight minutes; on a CPU: $(BIN)/python benchmarks/gpu.py --small.
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

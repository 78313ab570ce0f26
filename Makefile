# Every target sets up .venv by itself; a fresh machine needs Python and make, nothing else.

PYTHON ?= python3
ARGS ?=
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
SEED ?= $(shell date +%s)

# PyTorch's compiler fails where its own path has a space in it: then the environment lies in
# another folder, and .venv is a link to it.
CACHE := $(if $(word 2,$(HOME)),/var/tmp,$(HOME)/.cache)
VENV ?= $(if $(word 2,$(CURDIR)),$(CACHE)/mcftensor-venv-$(firstword $(shell pwd | cksum)),.venv)
BIN := $(VENV)/bin
# Two threads that sleep while they wait for each other: if they spin, as by default, a training
# beside other work takes twice as long as in one thread.
THREADS ?= 2
PATIENT := OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=PASSIVE
# Workers share the cores, so each computes in one thread. Python keeps its bytecode: each of the many
# programs that tests start would compile the package anew.
WORKING = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) \
	--dist worksteal
# Tests of pages, studies, benchmarks and of other frameworks have targets of their own.
OTHERS := pages studies benchmarks ecosystem
CORE = --doctest-modules mcftensor tests $(OTHERS:%=--ignore=tests/%)
# Kernels that tests compile stay here between runs and workers; test-all begins without.
export MCFTENSOR_TEST_CACHE ?= $(CACHE)/mcftensor-tests

GPUS := /dev/nvidia0 /dev/kfd /dev/dxg
# A PyTorch that finds the GPU here is built for its driver, and is used, whatever its release. Each
# PyTorch for GPUs comes with a Triton of its own.
FITTING = $(if $(wildcard $(GPUS)),$(shell $(PYTHON) -c \
	"import torch; print('torch' if torch.cuda.is_available() else '')" 2> /dev/null))
UNPINNED = $(if $(FITTING),torch|triton,$(if $(wildcard $(GPUS)),triton,-))

.PHONY: help install train train-peers study bert gpt2 findings bench judged works-with gpu gpu-at-hand test test-pages test-studies test-all test-without-double soak fuzz mutations lint docs serve pages package publish-docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1|/' \
		| awk -F '|' '{printf "make %-9s %s\n", $$1, $$2}'

install: $(VENV)/installed ## set up .venv with the library and all that develops it

train: $(VENV)/installed ## pretrain a small GPT in twelve precision strategies and compare (ARGS="--help")
	$(PATIENT) $(BIN)/python studies/pretrain.py $(ARGS)

train-peers: $(VENV)/benchmarks ## train the same GPT with optimizers of other libraries (ARGS="--help")
	$(PATIENT) $(BIN)/python studies/pretrain.py --strategies master,peers --out out/peers $(ARGS)

study: $(VENV)/installed ## measure what updates lose, by strategy, layer, learning rate and beta2 (ARGS="--help")
	$(PATIENT) $(BIN)/python studies/edq_study.py $(ARGS)

bert: $(VENV)/benchmarks ## pretrain a BERT in two phases, in ten strategies, in pieces of nine minutes (ARGS="--help")
	$(PATIENT) $(BIN)/python studies/bert.py --checkpoints out/bert $(ARGS)

gpt2: $(VENV)/installed ## train GPT-2 with 124 million parameters in five strategies, in pieces of nine minutes (ARGS="--help")
	$(PATIENT) $(BIN)/python studies/gpt2.py $(ARGS)

findings: $(VENV)/installed ## answer open questions by hundreds of short trainings, in an hour or two (ARGS="--help")
	$(PATIENT) $(BIN)/python studies/findings.py $(ARGS)

bench: $(VENV)/benchmarks ## install other libraries and compare the time of optimizer steps (ARGS="--device cuda" on a GPU)
	TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python benchmarks/steps.py $(ARGS)

judged: $(VENV)/installed ## judge the library by the tests of others, read from clones (SUITES=folder)
	$(PATIENT) $(BIN)/python benchmarks/judged.py $(SUITES) $(ARGS)

gpu: gpu-at-hand $(VENV)/benchmarks ## check and measure the GPU at hand, in twenty minutes, and write a report (BY="your name")
	@$(BIN)/python -c "import transformer_engine" 2> /dev/null || $(BIN)/pip install \
		--disable-pip-version-check -q "transformer-engine[pytorch]" > /dev/null 2>&1 \
		|| echo "TransformerEngine does not install here, and is left out"
	$(BIN)/python benchmarks/gpu.py $(if $(BY),--by "$(BY)") $(ARGS)

gpu-at-hand:
	@: $(if $(wildcard $(GPUS)),,$(error No GPU is at hand: this machine has none of $(GPUS), so there is nothing to measure))

works-with: $(VENV)/ecosystem ## test the library with the frameworks that people train with, and try them for the page "Works with" (ARGS="name")
	$(WORKING) tests/ecosystem
	HF_HUB_OFFLINE=1 $(PATIENT) $(BIN)/python benchmarks/works_with.py $(ARGS)

test: $(VENV)/installed ## run the tests of the library and the examples in docstrings, except slow cases (ARGS="-k name" goes to pytest)
	$(WORKING) $(CORE) $(ARGS)

test-pages: $(VENV)/installed ## run the code of pages and examples, and look at the site in a browser
	$(WORKING) tests/pages $(ARGS)

test-studies: $(VENV)/installed ## run the tests of studies and benchmarks
	$(WORKING) tests/studies tests/benchmarks $(ARGS)

test-all: $(VENV)/installed ## run all tests with all their cases in random order, without compiled code of earlier runs (SEED=n repeats an order)
	rm -rf "$(MCFTENSOR_TEST_CACHE)"
	$(WORKING) --doctest-modules mcftensor tests -m "" --random-order --random-order-seed=$(SEED) $(ARGS)
	$(MAKE) test-without-double

test-without-double: $(VENV)/installed ## run the tests of training, files, meters, tensors, numerics, formats, kernels, processes and more where each float64 tensor of the library raises
	$(WORKING) --without-float64 tests/training tests/files tests/bridge tests/serving tests/meters \
		tests/tools tests/reproducible tests/patches tests/compile tests/ecosystem tests/kernels tests/distributed tests/tensor tests/numerics tests/wide \
		tests/formats $(ARGS)

soak: $(VENV)/installed ## kill training runs at random; they must end with the bits of an uninterrupted run (ARGS="--help")
	OMP_NUM_THREADS=1 PYTHONPATH=tests:studies $(BIN)/python tests/soak.py $(ARGS)

fuzz: $(VENV)/installed ## run 100,000 random programs inside a step; their tensors must have the bits of eager execution (ARGS="--replay 7" shows one)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/fuzz_steps.py --workers $(WORKERS) $(ARGS)

# A change of the suite is judged by one sample of mutants, before and after.
SAMPLE := 0
mutations: $(VENV)/installed ## change the library at 300 random places, and list the changes that no test notices, in an hour or two (ARGS="arithmetic/eft.py -n 20")
	$(BIN)/python tests/mutations.py --workers $(WORKERS) --seed $(SAMPLE) $(ARGS)

lint: $(VENV)/installed ## check style and format (ruff), types (mypy), and that only mcftensor/patches writes to torch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -k writes_to_torch tests/patches

docs: $(VENV)/installed ## build the site of the documentation in out/site, to open from there; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(PATIENT) $(BIN)/mkdocs build --strict $(ARGS)
	@echo "The site is out/site/index.html: open it in a browser, or run make serve."

serve: $(VENV)/installed ## show the site at http://127.0.0.1:8000, and build it again when a page changes (ARGS="-a 127.0.0.1:8001")
	NO_MKDOCS_2_WARNING=1 $(PATIENT) $(BIN)/mkdocs serve $(ARGS)

pages: $(VENV)/installed ## write the figures and tables of the pages again, from committed results
	$(PATIENT) $(BIN)/python docs/_ext/write.py

package: $(VENV)/installed ## build the wheel and the source archive in dist, and try them in an empty environment
	CONSTRAINTS=$(CONSTRAINTS) .ci/package $(TAG)

publish-docs: $(VENV)/installed ## put the site of VERSION, and as ALIAS, on the branch gh-pages
	PATH="$(CURDIR)/.venv/bin:$$PATH" NO_MKDOCS_2_WARNING=1 MCFTENSOR_VERSIONS=mike $(PATIENT) \
		$(BIN)/mike deploy $(PUSH) --update-aliases $(VERSION) $(ALIAS)
	$(BIN)/mike set-default $(PUSH) $(or $(ALIAS),$(VERSION))

clean: ## remove .venv, caches and outputs
	rm -rf $(VENV) .venv out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find mcftensor tests benchmarks studies examples docs -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(if $(FITTING),--system-site-packages) $(VENV)
	grep -vE '^($(UNPINNED))==' $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(if $(filter-out .venv,$(VENV)),ln -sfn $(VENV) .venv)
	$(BIN)/pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev,examples]"
	touch $@
	@echo "Installed in $(VENV). Next: . $(BIN)/activate, then python examples/quickstart.py (seconds),"
	@echo "make train (minutes) or make docs. In a project of your own: pip install $(CURDIR)"

# Without what these need for GPUs.
$(VENV)/ecosystem: $(VENV)/installed
	$(BIN)/pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[ecosystem]"
	$(BIN)/pip install --disable-pip-version-check -c $(VENV)/constraints.txt --no-deps \
		bitsandbytes torchtitan trl
	touch $@

$(VENV)/benchmarks: $(VENV)/installed
	$(BIN)/pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[benchmarks]"
	touch $@

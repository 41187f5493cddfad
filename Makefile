# `make demo` and `make test` are all a newcomer needs: Python 3.11+, pip, make and a C++17 compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(wildcard src/pixelgate/pixels/native/*)

# gcc's runtime for checking the kernels from inside Python, which is not built for it
SANITIZERS = $(shell $(or $(CXX),g++) -print-file-name=libasan.so) $(shell $(or $(CXX),g++) -print-file-name=libstdc++.so)
FUZZ_SECONDS ?= 30
FUZZ_FILES ?= 2000
SOAK_MINUTES ?= 30

# Environments with real engines; PIP_ARGS goes to pip where they are made.
ENGINES ?= $(VENV)/engines
SGLANG ?= $(VENV)/sglang
TINY := $(addprefix tests/real_engines/,make_tiny.py reference.py chats.py)

.PHONY: demo test test-engines recordings lint fuzz sanitize bench bench-gateway soak ci-full goldens clean

demo: $(VENV)/runtime.stamp
	$(BIN)/pixelgate demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered --cov-fail-under=90

# Real engines on the CPU, fed by the gateway, beside their own answers and those of transformers.
test-engines: $(VENV)/dev.stamp build/engines/transformers.json $(SGLANG)/bin/python
	$(BIN)/python -m pytest tests/real_engines --engines $(ENGINES) --sglang $(SGLANG)

# What the gateway and real engines say to each other, which `make test` replays.
recordings: $(VENV)/dev.stamp build/engines/transformers.json $(SGLANG)/bin/python
	$(BIN)/python -m pytest tests/real_engines/recordings.py --engines $(ENGINES) --sglang $(SGLANG)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Damaged pictures of every format through the intake.
fuzz: $(VENV)/dev.stamp
	$(BIN)/python tests/fuzz/fuzz_intake.py --files $(FUZZ_FILES) --keep build/fuzz/found

# The kernels' tests, and random plans, on kernels built with AddressSanitizer and UBSan.
sanitize: $(VENV)/dev.stamp
	rm -rf build/sanitized
	PIXELGATE_CXXFLAGS='-fsanitize=address,undefined -fno-sanitize-recover=all -g' \
		$(BIN)/python -m pip install --quiet --no-deps --target build/sanitized .
	PYTHONPATH=build/sanitized LD_PRELOAD='$(SANITIZERS)' ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 sh -c "\
		$(BIN)/python -c 'import pixelgate; assert \"sanitized\" in pixelgate.__file__' && \
		$(BIN)/python -m pytest -q -p no:cacheprovider tests/pixels && \
		$(BIN)/python tests/fuzz/fuzz_kernels.py --seconds $(FUZZ_SECONDS)"

# Against transformers and hf-processors-rs, in an environment of their own: several GB the first time.
bench: $(VENV)/peer.stamp
	$(VENV)/peer/bin/python benchmarks/preprocess.py

# The gateway against smg, in an environment of its own: 150 MB, and libturbojpeg0 must be on the system.
bench-gateway: $(VENV)/dev.stamp $(VENV)/smg.stamp
	$(BIN)/python benchmarks/gateway_load.py --smg $(VENV)/smg

# The gateway under mixed load, with engines that die and clients that leave.
soak: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/soak.py --minutes $(SOAK_MINUTES)

# What takes too long for every change: installs transformers in an environment of its own, makes the goldens again and
# compares, asks tiny models through it and through us, and runs the benchmarks against it.
ci-full: lint test $(VENV)/peer.stamp
	$(MAKE) sanitize FUZZ_SECONDS=300
	$(MAKE) fuzz FUZZ_FILES=10000
	$(BIN)/python benchmarks/slow_hosts.py
	$(MAKE) soak SOAK_MINUTES=2
	$(VENV)/peer/bin/python tests/goldens/make.py --out build/goldens
	$(BIN)/python tests/goldens/compare.py build/goldens tests/goldens/data
	$(VENV)/peer/bin/python tests/goldens/make_prompts.py build/prompts.json
	cmp build/prompts.json tests/goldens/data/prompts.json
	$(VENV)/peer/bin/python tests/engines/real_transformers.py
	$(VENV)/peer/bin/python tests/goldens/random_resize.py
	$(VENV)/peer/bin/python tests/goldens/random_sizes.py --count 300
	for family in llava15_clip llava_next llava_onevision mistral3 qwen2_5_vl; do for backend in torchvision pil; do \
		$(VENV)/peer/bin/pixelgate parity tests/goldens/checkpoints/$$family src/pixelgate/demo/receipt.jpg \
			--backend $$backend || exit 1; done; done
	$(VENV)/peer/bin/python benchmarks/preprocess.py

$(VENV)/smg.stamp: benchmarks/requirements-smg.txt
	$(PYTHON) -m venv $(VENV)/smg
	$(VENV)/smg/bin/python -m pip install --quiet --requirement benchmarks/requirements-smg.txt
	touch $@

goldens: $(VENV)/peer.stamp
	$(VENV)/peer/bin/python tests/goldens/make.py
	$(VENV)/peer/bin/python tests/goldens/make_prompts.py

$(VENV)/runtime.stamp: $(SOURCES)
	@echo "installing into $(VENV); the first time this takes a while"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[gateway,reader,fast,hub]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/runtime.stamp
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

$(VENV)/peer.stamp: tests/goldens/requirements.txt benchmarks/requirements.txt $(SOURCES)
	$(PYTHON) -m venv $(VENV)/peer
	$(VENV)/peer/bin/python -m pip install --quiet --requirement tests/goldens/requirements.txt
	$(VENV)/peer/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt --editable '.[fast,gateway]'
	touch $@

$(ENGINES)/bin/vllm:
	tests/real_engines/set_up.sh $(ENGINES)

$(SGLANG)/bin/python: | $(ENGINES)/bin/vllm
	tests/real_engines/set_up_sglang.sh $(SGLANG) $(ENGINES)

build/engines/transformers.json: $(TINY) | $(ENGINES)/bin/vllm
	mkdir -p build/engines/checkpoints
	HF_HUB_OFFLINE=1 $(ENGINES)/bin/python tests/real_engines/make_tiny.py build/engines/checkpoints
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(ENGINES)/bin/python tests/real_engines/reference.py build/engines/checkpoints $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/pixelgate/pixels/*.so

# The two main targets are `make demo` and `make test`. Each creates or reuses .venv, installs its requirements, builds
# the package and runs.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help
.SUFFIXES:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
# Architecture families (cpp/cmake/archs.cmake) of `make test`, and of `make demo`: those of the GPU that is present.
ARCHS ?= all
DEMO_ARCHS ?= native
# Where nvcc comes from: system (the machine), wheel (PyPI) or auto (the machine, else PyPI).
CUDA_FROM ?= auto
# A CUTLASS checkout in place of the headers that requirements/cutlass.txt names.
CUTLASS_DIR ?=
PYTEST_ARGS ?=
RELEASE_PYTHONS ?=
# The wheel that `make smoke` tries; empty: one without kernels, which it builds.
WHEEL ?=

# CMake reads it from the environment too, in the tests that build a program of their own.
override CUTLASS_DIR := $(abspath $(CUTLASS_DIR))
export CUTLASS_DIR

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles a module to bytecode when it is first imported; most of those that are installed never are.
INSTALL := $(PIP) install -qq --no-warn-conflicts --no-compile
STAMPS := $(VENV)/.stamps
REQ := requirements
OLDEST := build/transformers-oldest
SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE \
           $(shell find cpp python emulator -type f ! -name '*.pyc' ! -path 'cpp/tests/consumer/*' ! -path 'emulator/tests/*' 2>/dev/null)

say = printf '==> %s\n' "$(1)"

.PHONY: help
help: ## Print this list
	@echo "fp4gemm: NVFP4 GEMM with every scale vector in the epilogue"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) ARCHS='$(ARCHS)' CUDA_FROM=$(CUDA_FROM) CUTLASS_DIR=$(CUTLASS_DIR) PYTEST_ARGS="

.PHONY: demo
demo: $(STAMPS)/installed-demo $(STAMPS)/demo ## Run real models in NVFP4 on the device that is present
	@$(call say,demo)
	@$(BIN)/python examples/demo.py

.PHONY: bench
bench: $(STAMPS)/installed-demo $(STAMPS)/demo ## Measure this machine: an HTML page with rooflines (docs/benchmarks.md)
	@$(BIN)/python -m bench report --quick

# Every warning is an error, a broken link among them. Nothing is imported or built for it.
.PHONY: docs
docs: $(STAMPS)/docs ## Build the documentation site: build/site/index.html
	@$(call say,docs: build/site/index.html)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/site

# Without the reordering of pytest-xdist, which puts files of few tests last however long they take, so that one worker
# waits for the other at the end.
.PHONY: test
test: $(STAMPS)/installed-test $(STAMPS)/test $(STAMPS)/docs $(STAMPS)/demo $(OLDEST)/installed ## Build every architecture and run the whole suite
	@$(call say,host tests)
	@$(BIN)/ctest --test-dir build/test --output-on-failure -E ptxemu
	@$(call say,pytest)
	@FP4GEMM_CUDA_FROM=$(CUDA_FROM) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=emulator --ignore=tests/emulated --ignore=tests/oracles --ignore=tests/engines $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-emulated

# A build without SM100 and SM120 has nothing to emulate.
.PHONY: test-emulated
test-emulated: $(STAMPS)/installed-test $(STAMPS)/test ## Calibrate the PTX emulator and run the Blackwell kernels on it
	@if [ ! -e build/test/libfp4gemm_emulated.so ]; then $(call say,no emulation: this build has no Blackwell kernels); exit 0; fi; \
	$(call say,emulator: building NVIDIA's kernels for the calibration); \
	$(BIN)/cmake --build build/test --target ptxemu_calibration_programs > build/calibration.log 2>&1 \
	  || { tail -n 40 build/calibration.log; exit 1; }; \
	$(call say,emulator: its own tests and the calibration); \
	rm -f build/test/emulator/calibration/stats/*/*.json; \
	$(BIN)/ctest --test-dir build/test --output-on-failure -R ptxemu -j 2 > build/ctest-emulator.log \
	  || { tail -n 60 build/ctest-emulator.log; exit 1; }; \
	tail -n 6 build/ctest-emulator.log; \
	$(BIN)/cmake --build build/test --target ptxemu_calibrated > /dev/null || exit 1; \
	$(call say,emulator: every Blackwell kernel); \
	$(BIN)/python -m pytest -n 2 tests/emulated

.PHONY: test-oldest-cutlass
test-oldest-cutlass: $(STAMPS)/build ## `make test` with the CUTLASS of requirements/cutlass-oldest.txt
	@$(INSTALL) --no-deps -r $(REQ)/cutlass-oldest.txt
	@$(MAKE) --no-print-directory test \
	  CUTLASS_DIR="$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/cutlass_library/source"

# The producers lie in an environment of their own, so that none of them gets into .venv.
.PHONY: test-oracles
test-oracles: $(STAMPS)/installed-test $(STAMPS)/test $(STAMPS)/demo ## Compare with ModelOpt, llm-compressor, peft and TransformerEngine
	@$(call say,oracles: installing requirements/oracles.txt into build/oracles)
	@$(BIN)/python -m venv build/oracles
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$(build/oracles/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@build/oracles/bin/python -m pip install --quiet --no-deps --requirement requirements/oracles.txt
	@$(call say,oracles: pytest)
	@build/oracles/bin/python -m pytest tests/oracles $(PYTEST_ARGS)

# vLLM lies in an environment of its own, with the torch that it wants; fp4gemm's package is linked into it. A pip that
# installs into a folder asks nothing of what is there, so the newest sources are only unpacked.
SERVING := build/serving
.PHONY: test-serving
test-serving: $(STAMPS)/installed-test ## Run vLLM's engine on the CPU with the plug-in, and check the newest vLLM and SGLang
	@$(call say,serving: installing requirements/serving.txt into $(SERVING)/venv)
	@$(BIN)/python -m venv --clear $(SERVING)/venv
	@$(SERVING)/venv/bin/python -m pip install --quiet --requirement $(REQ)/serving.txt
	@$(SERVING)/venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(call say,serving: the newest sources into $(SERVING)/sources)
	@rm -rf $(SERVING)/sources $(SERVING)/linked && mkdir -p $(SERVING)/linked
	@$(BIN)/python -m pip install --quiet --no-deps --target $(SERVING)/sources --requirement $(REQ)/serving-sources.txt
	@cd $(SERVING)/linked && ln -s "$$($(abspath $(BIN))/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"/fp4gemm* .
	@$(call say,serving: pytest)
	@PYTHONPATH=$(abspath $(SERVING))/linked FP4GEMM_ENGINE_SOURCES=$(abspath $(SERVING))/sources \
	  $(SERVING)/venv/bin/python -m pytest tests/engines $(PYTEST_ARGS)

# For a machine without a network: docs/serving.md.
.PHONY: engine-pack
engine-pack: $(STAMPS)/venv ## Pack vLLM's engine for one Hopper GPU: build/engine/engine.tar.xz
	@$(call say,engine-pack: the wheels of requirements/engine.txt)
	@$(BIN)/python -m bench.engine.pack

.PHONY: build
build: $(STAMPS)/installed-test ## Build every architecture and install the package into .venv

.PHONY: wheel
wheel: $(STAMPS)/toolchain-test ## Build a wheel into dist/
	@$(call say,wheel)
	@$(call pip_build,wheel --wheel-dir dist,test,$(ARCHS))

# The wheel is that of `make wheel`, checked and renamed. RELEASE_PYTHONS names some Pythons in place of all.
# The wheel's libraries are checked, and its host code is executed where qemu-aarch64 is installed.
# pip takes the wheels for any glibc that a release of torch or CUDA names. The platform that Python reports names the wheel.
AARCH64 := build/aarch64
.PHONY: wheel-aarch64
wheel-aarch64: $(STAMPS)/toolchain-test $(STAMPS)/release $(AARCH64)/wheels ## Build a wheel for 64-bit Arm on x86-64 into dist/
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo "aarch64-linux-gnu-g++ was not found: apt install g++-aarch64-linux-gnu" >&2; exit 1; }
	@$(call say,wheel for aarch64)
	@rm -rf $(AARCH64)/dist && mkdir -p $(AARCH64)/dist
	@export FP4GEMM_AARCH64_WHEELS=$(abspath $(AARCH64))/wheels _PYTHON_HOST_PLATFORM=linux-aarch64; \
	  $(call pip_build,wheel --wheel-dir $(AARCH64)/dist --config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=$(abspath cpp/cmake/aarch64.cmake),aarch64,$(ARCHS))
	@$(BIN)/python .ci/release.py aarch64 $(AARCH64)/dist/*.whl --archs "$(ARCHS)"
	@$(BIN)/python .ci/release.py manylinux $(AARCH64)/dist/*.whl dist

$(AARCH64)/wheels: $(REQ)/aarch64.txt $(STAMPS)/build
	@$(call say,$<)
	@rm -rf $@ && $(INSTALL) --no-deps --only-binary :all: --target $@ --python-version 3.12 \
	  $(foreach glibc,17 24 27 28 34 35,--platform manylinux_2_$(glibc)_aarch64) --platform manylinux2014_aarch64 -r $<
	@touch $@

.PHONY: release
release: $(STAMPS)/toolchain-test $(STAMPS)/release ## Build the sdist and a manylinux wheel, and try them with every Python
	@$(call say,release: versions)
	@$(BIN)/python .ci/release.py versions
	@rm -rf build/release dist && mkdir -p build/release dist
	@$(call say,release: sdist)
	@$(BIN)/python -m build --sdist --no-isolation --outdir dist . > build/release/sdist.log 2>&1 || { cat build/release/sdist.log; exit 1; }
	@$(call say,release: wheel)
	@$(call pip_build,wheel --wheel-dir build/release,test,$(ARCHS))
	@$(BIN)/python .ci/release.py manylinux build/release/*.whl dist
	@$(call say,release: clean environments)
	@$(BIN)/python .ci/release.py smoke dist/*.tar.gz dist/*.whl --python $(RELEASE_PYTHONS)
	@$(MAKE) --no-print-directory smoke WHEEL="$$(echo dist/*.whl)"

# A root without a shell, a compiler, a network and this checkout. It has no GPU.
.PHONY: smoke
smoke: $(STAMPS)/build ## Install a wheel (WHEEL=) into an empty root, and run README.md there
	@if [ -z "$(WHEEL)" ]; then $(call say,smoke: a wheel without kernels); \
	  rm -rf build/smoke-wheel; $(call pip_build,wheel --wheel-dir build/smoke-wheel,smoke,none); fi
	@$(call say,smoke: an empty root)
	@$(BIN)/python .ci/release.py root $(or $(WHEEL),build/smoke-wheel/*.whl)

.PHONY: lint
lint: $(STAMPS)/dev ## Run every check of .pre-commit-config.yaml on every tracked file
	@$(BIN)/pre-commit run --all-files --show-diff-on-failure

.PHONY: format
format: $(STAMPS)/dev ## Format Python, C++ and CUDA sources
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .
	@find cpp emulator -regex '.*\.\(h\|hpp\|c\|cpp\|cu\|cuh\)' -print0 | xargs -0 $(BIN)/clang-format -i

.PHONY: clean
clean: ## Remove build folders and wheels
	rm -rf build dist $(STAMPS)/installed-* $(STAMPS)/toolchain-*

.PHONY: distclean
distclean: clean ## Remove .venv too
	rm -rf $(VENV)

# ---- the environment: a stamp file for each step, so that a second run does nothing ------------------------------------
.PHONY: venv
venv: $(STAMPS)/build ## Create .venv and install what the build needs

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; install Python >= 3.10, or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), must be at least Python 3.10; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(call say,$(VENV) of $$($(PYTHON) -V))
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv --clear $(VENV); \
	elif $(PYTHON) -m virtualenv --version >/dev/null 2>&1; then $(PYTHON) -m virtualenv --quiet --clear $(VENV); \
	else echo "$(PYTHON) cannot create a virtual environment: its venv and ensurepip modules are missing. On Debian and" \
	  "Ubuntu, apt install python3-venv (or python3-virtualenv), then run make again." >&2; exit 1; fi
	@mkdir -p $(STAMPS) && touch $@

# pip comes first: older versions lack repeated --config-settings and some metadata. torch comes next, so that no later
# step installs another version of it.
$(STAMPS)/build: $(REQ)/build.txt $(REQ)/constraints.txt $(STAMPS)/venv
	@$(call say,torch and the build tools (requirements/build.txt; the first time downloads them))
	@$(INSTALL) "$$(grep '^pip==' $<)"
	@$(INSTALL) -r $<
	@touch $@

$(STAMPS)/%: $(REQ)/%.txt $(REQ)/constraints.txt $(STAMPS)/build
	@$(call say,$<)
	@$(INSTALL) -r $<
	@if [ -f $(REQ)/$*-nodeps.txt ]; then $(INSTALL) --no-deps -r $(REQ)/$*-nodeps.txt; fi
	@touch $@

# The site needs no torch, and so nothing of what a build needs.
$(STAMPS)/docs: $(REQ)/docs.txt $(REQ)/constraints.txt $(STAMPS)/venv
	@$(call say,$<)
	@$(INSTALL) -r $<
	@touch $@

$(STAMPS)/demo: $(REQ)/demo-nodeps.txt

# Another version of transformers, in a folder that only tests/integrations puts into a path.
$(OLDEST)/installed: $(REQ)/transformers-oldest.txt $(STAMPS)/demo
	@$(call say,$<)
	@rm -rf $(OLDEST) && $(INSTALL) --no-deps --target $(OLDEST) -r $<
	@touch $@

# $(call toolchain,ARCHS): fetches CUTLASS if kernels are built, and nvcc's wheels if there is no toolkit to build them.
define toolchain
nvcc=$$($(BIN)/cmake -DPython3_EXECUTABLE=$(BIN)/python "-DFP4GEMM_CUDA_ARCHS=$(1)" -DFP4GEMM_CUDA_FROM=$(CUDA_FROM) \
	  -P cpp/cmake/find_nvcc.cmake) || exit 1; \
	if [ "$$nvcc" = missing ]; then $(call say,no CUDA toolkit: nvcc from its wheels (requirements/cuda.txt)); \
	  $(INSTALL) -r $(REQ)/cuda.txt || exit 1; fi; \
	if [ "$$nvcc" != unneeded ]; then $(INSTALL) --no-deps -r $(REQ)/cutlass-oldest.txt || exit 1; \
	  if [ -z "$(CUTLASS_DIR)" ]; then $(BIN)/python cpp/cmake/unpack_cutlass.py || exit 1; fi; fi
endef

# $(call configured,FOLDER,ARCHS): records the options of a build in a file that becomes newer than the stamps when they
# change. A compiler or a CUTLASS from another place needs a fresh CMake cache.
define configured
new='$(2) | $(CUDA_FROM) $(CUTLASS_DIR)'; old=$$(cat $@ 2>/dev/null || true); \
	if [ "$$new" != "$$old" ]; then \
	  if [ "$${new##*|}" != "$${old##*|}" ]; then rm -rf build/$(1)/CMakeCache.txt build/$(1)/CMakeFiles; fi; \
	  echo "$$new" > $@; fi
endef

.PHONY: FORCE
$(STAMPS)/configured-test: FORCE | $(STAMPS)/venv
	@$(call configured,test,$(ARCHS))

$(STAMPS)/configured-demo: FORCE | $(STAMPS)/venv
	@$(call configured,demo,$(DEMO_ARCHS))

$(STAMPS)/toolchain-test: $(REQ)/cuda.txt $(REQ)/cutlass.txt $(REQ)/cutlass-oldest.txt $(STAMPS)/build $(STAMPS)/configured-test
	@$(call toolchain,$(ARCHS))
	@touch $@

$(STAMPS)/toolchain-demo: $(REQ)/cuda.txt $(REQ)/cutlass.txt $(REQ)/cutlass-oldest.txt $(STAMPS)/build $(STAMPS)/configured-demo
	@$(call toolchain,$(DEMO_ARCHS))
	@touch $@

# ---- the build: build/test and build/demo differ in architectures; .venv holds the build that was installed last --------
# $(call pip_build,SUBCOMMAND,FOLDER,ARCHS): compiles in build/FOLDER, shows Ninja's steps and writes build/FOLDER.log.
define pip_build
mkdir -p build; $(PIP) $(1) --verbose --no-deps --no-build-isolation --config-settings=build-dir=build/$(2) \
	  "--config-settings=cmake.define.FP4GEMM_CUDA_ARCHS=$(3)" --config-settings=cmake.define.FP4GEMM_CUDA_FROM=$(CUDA_FROM) \
	  $(if $(CUTLASS_DIR),"--config-settings=cmake.define.CUTLASS_DIR=$(CUTLASS_DIR)") \
	  --config-settings=cmake.define.FP4GEMM_BUILD_TESTS=$(if $(filter test,$(2)),ON,OFF) . 2>&1 \
	  | tee build/$(2).log | { grep --line-buffered -E '^ *(\[[0-9]+/[0-9]+\] (Build|Link)|-- fp4gemm)' || true; } \
	  || { tail -n 60 build/$(2).log; echo "The build failed; the whole log is in build/$(2).log" >&2; exit 1; }
endef

# $(call install,FOLDER,ARCHS)
define install
$(call say,building and installing fp4gemm for: $(2)); began=$$SECONDS; \
	rm -f $(STAMPS)/installed-*; \
	$(call pip_build,install,$(1),$(2)); \
	echo "    done in $$((SECONDS - began)) s"
endef

$(STAMPS)/installed-test: $(SOURCES) $(STAMPS)/toolchain-test
	@$(call install,test,$(ARCHS))
	@touch $@

$(STAMPS)/installed-demo: $(SOURCES) $(STAMPS)/toolchain-demo
	@$(call install,demo,$(DEMO_ARCHS))
	@touch $@

# The repository's commands. `make test` and `make demo` are each enough on a fresh machine with Python >= 3.10,
# a C++20 compiler and pip: they make .venv, install requirements-dev.txt into it and build what they need.
#
# .venv is brought up to date when requirements-dev.txt, pyproject.toml or setup.py change. The extension is built
# here (preset dev, into pycomm/), so the editable install brings the Python side only. CMake's cache is dropped
# before every configuration: it would hold on to a Python, ninja or pybind11 that has moved; the objects stay,
# so nothing is compiled twice.
#
#   PYTHON=python3.12   the Python to build with       CI=true   a missing GoogleTest, Google Benchmark or libsodium fails

PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CXX_FILES = git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cu' 'csrc/*.cuh' 'tests/cpp/*.h' 'tests/cpp/*.cc' \
  'tests/cuda_on_cpu/*.h' 'tests/cuda_on_cpu/*.cc' 'tests/fuzz/*.h' 'tests/fuzz/*.cc' 'tests/gpu/*.cc' 'tests/python/*.cc' \
  'bench/cpp/*.cc' 'bench/cpp/*.h'
REQUIRED := $(if $(filter true,$(CI)),-DPYCOMM_TESTS=ON -DPYCOMM_BENCH=ON -DPYCOMM_SODIUM=ON)
# ThreadSanitizer wants its addresses where it expects them; where setarch is not allowed it may do without.
FIXED_ADDRESSES = $$(setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: demo test build venv test-cpp test-python test-torch test-trainers lint format types layers tsan asan fuzz chaos cuda emulated emulated-python bench \
  test-gpu bench-gpu build-gpu clean
.DEFAULT_GOAL := test

test: test-cpp test-python

demo: build
	$(BIN)/python -m pycomm.demo

venv: $(READY)

$(READY): requirements-dev.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit( \
	  f"pycomm needs Python 3.10 or newer, $(PYTHON) is {v[0]}.{v[1]}: run make PYTHON=python3.12")'
	@command -v $${CXX:-c++} >/dev/null || { echo "pycomm needs a C++20 compiler, and $${CXX:-c++} was not found:" \
	  "install g++ 11 or clang 14 (or newer), or set CXX"; exit 1; }
	@# Debian's python3 without python3-venv has no ensurepip; the pip outside then serves.
	$(BIN)/python -m pip --version 2>/dev/null || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	PYCOMM_EXTENSION=OFF $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps -e .
	touch $@

# $(call configure,preset,options): CMake with this virtual environment's tools.
configure = rm -f build/$(1)/CMakeCache.txt && $(BIN)/cmake --preset $(1) -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
  -DPython_EXECUTABLE=$(BIN)/python -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) --log-level=NOTICE -Wno-unused-cli $(2)

build: $(READY)
	@$(call configure,dev,$(REQUIRED))
	@$(BIN)/cmake --build --preset dev

test-cpp: build
	@if grep -q 'PYCOMM_HAS_TESTS:INTERNAL=ON' build/dev/CMakeCache.txt; then $(BIN)/ctest --preset dev; else \
	  echo; echo "*** THE C++ TESTS DID NOT RUN: GoogleTest was not found."; \
	  echo "*** Install it (Debian: libgtest-dev, Fedora: gtest-devel) and run make test again."; echo; fi

test-python: build
	$(BIN)/python -m pytest -n 2
	@grep -q 'PYCOMM_HAS_TESTS:INTERNAL=ON' build/dev/CMakeCache.txt || \
	  echo "*** The Python tests passed; THE C++ TESTS DID NOT RUN (no GoogleTest, see above)."

# torch's own tests of torch.distributed, on gloo and on pycomm (about twenty minutes of two cores); writes the table.
test-torch: build
	$(BIN)/python tests/python/torch_backend_table.py --write docs/torch-compatibility.md

# Accelerate, Lightning and Ray Train on the backend "pycomm" (about four minutes of two cores); installs them.
test-trainers: build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-trainers.txt
	$(BIN)/python -m pytest -m trainers -o faulthandler_timeout=390 tests/python/test_trainers.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(CXX_FILES) | xargs $(BIN)/clang-format --dry-run -Werror

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(CXX_FILES) | xargs $(BIN)/clang-format -i

# stubtest imports the built extension and compares it with pycomm/_C/.
types: build
	$(BIN)/python -m mypy
	@test -f pycomm/_C/__init__.pyi || { echo "pycomm/_C/__init__.pyi is missing: it describes the extension to mypy"; exit 1; }
	$(BIN)/python -m mypy.stubtest pycomm._C

layers: $(READY)
	$(BIN)/python tools/check_layers.py

tsan asan: $(READY)
	@$(call configure,$@)
	@$(BIN)/cmake --build --preset $@
	$(if $(filter tsan,$@),$(FIXED_ADDRESSES)) $(BIN)/ctest --preset $@

# Every parser of bytes from other hosts against libFuzzer, FUZZ_SECONDS (20) each; needs clang.
fuzz:
	@tests/fuzz/run.sh

# Real faults in real jobs, on hosts made of network namespaces (root); writes the table (about ten minutes of two cores).
chaos: build
	$(BIN)/python tests/chaos --write docs/reliability.md

# The CUDA kernels: by nvcc for all architectures, with the assertions on the machine code (no GPU needed); and
# executed on the CPU, optimised (tsan and asan execute them as well).
cuda: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	@$(call configure,cuda)
	@$(BIN)/cmake --build --preset cuda
	$(BIN)/python tools/check_sass.py build/cuda/libpycomm_cuda.a

emulated: $(READY)
	@$(call configure,emulated)
	@$(BIN)/cmake --build --preset emulated
	$(BIN)/ctest --preset emulated
	$(BIN)/python tests/cuda_on_cpu/run_python.py build/emulated

# The Python tests of collectives and DDP on emulated devices.
emulated-python: $(READY)
	@$(call configure,emulated)
	@$(BIN)/cmake --build --preset emulated --target _C loopback_nccl
	$(BIN)/python tests/cuda_on_cpu/run_python.py build/emulated

bench: build
	@for program in build/dev/bench/cpp/*_bench; do [ ! -x $$program ] || $$program || exit 1; done
	$(BIN)/pycomm bench all_reduce -b 4 -e 64M -f 4 --ranks 2 --peer gloo

# What needs a GPU, built for the GPUs that are here (needs nvcc). Without one test-gpu says "SKIPPED: no GPU: …" and
# bench-gpu fails with that reason. BENCH_FLAGS: --json, --bytes 64M, --repeats 50 (docs/results/README.md).
# GPU_PYTHON: another Python than .venv's, whose torch has CUDA, and pytest and pytest-timeout beside it.
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	@reason=$$(tests/gpu/architectures.sh 2>&1 >/dev/null) || { echo "SKIPPED: $$reason"; exit 0; }; \
	  $(MAKE) --no-print-directory build-gpu && \
	  PYCOMM_NCCL_LIB=$${PYCOMM_NCCL_LIB:-$$(find $(VENV)/lib -name libnccl.so.2 | head -n 1)} $(BIN)/ctest --preset gpu && \
	  $(GPU_PYTHON) tests/gpu/run_python.py build/gpu

bench-gpu:
	@tests/gpu/architectures.sh >/dev/null
	@$(MAKE) --no-print-directory build-gpu >&2
	@for program in build/gpu/bench/cpp/cuda/*_bench; do $$program $(BENCH_FLAGS) || exit 1; done

build-gpu: $(READY)
	@$(call configure,gpu,-DPython_EXECUTABLE=$$(command -v $(GPU_PYTHON)) \
	  -DPYCOMM_CUDA_ARCHITECTURES="$${GPU_ARCHITECTURES:-$$(tests/gpu/architectures.sh)}")
	@$(BIN)/cmake --build --preset gpu

clean:
	rm -rf build dist demo_out *.egg-info pycomm/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

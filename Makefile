# The one door: every task of this repository is a target here, and `make help` lists them.
# Targets set themselves up: the environment is rebuilt only when the lock, the project file or the set-up changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.in-step-with-the-lock
export PYTHON ?=

# Every run starts half a dozen processes, and tests start thousands. Without byte code each compiles JAX's sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Each is passed on only where it was given, so that every command keeps its own default.
BENCH_FLAGS = $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

EXPERIMENTS = $(notdir $(basename $(wildcard benchmarks/experiments/*.toml)))
EXPERIMENT_FLAGS = $(BENCH_FLAGS) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SCALE),--scale $(SCALE)) $(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only $(ONLY)) $(if $(LIST),--list) $(if $(PUBLISHED),--published docs/results/raw)

# Benchmarks and schedules share broken links and builders with the tests.
BENCH = PYTHONPATH=$(CURDIR)/tests $(PY)

# Each worker takes the next module when it is done with one, in the order of tests/conftest.py. Tests of the first tier wait for
# nearly half of their time, so there are four workers for two cores; those of the second start many processes each, and three
# keep two cores busy.
# `$(call PYTEST,WORKERS)`; what ARGS says counts more.
PYTEST = $(if $(LOAD),$(PY) tests/support/under_load.py $(LOAD)) $(PY) -m pytest --durations 15 --numprocesses $(1) --dist loadscope --no-loadscope-reorder $(if $(SEED),--randomly-seed=$(SEED)) $(ARGS)
SCHEDULED = $(if $(SCHEDULES),SCHEDULES=$(SCHEDULES))

.PHONY: help setup demo test test-all test-cluster coverage lines docs docs-build wheel release lint types check compose-check compose-test deploy-check bench bench-takeover bench-fidelity bench-simulator bench-broker bench-regions bench-memory bench-round bench-bandwidth bench-goodput bench-peers bench-scale newest-nats trace chaos chaos-cluster race dst bench-dst fuzz attacks bench-hostile bench-data bench-transformers bench-loops experiment experiments results results-check clean mutants mutants-planted mutants-page

help:  ## list the targets and the variables
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1|/' | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'
	@printf '\nVariables (make TARGET NAME=value):\n'
	@grep -hE '^#: ' $(MAKEFILE_LIST) | sed -E 's/^#: /  /'

#: PYTHON=python3.12   the interpreter of the environment (setup); 3.11 or newer
#: OUT=runs/mine       where the run writes (demo)
#: MINUTES=5           about how long a benchmark may take (bench and every bench-..., experiment, experiments), each run
#:                     (chaos), a simulation (dst) or a search (fuzz)
#: SEEDS=3             how many seeds are compared (bench-peers, experiment, experiments)
#: LEARNERS=2          with how many learners a first model is trained, one number or several (bench-peers)
#: NAME=m-scaling      which experiment (experiment)
#: SCALE=0.02          token budgets times this: a quick look that is not published (experiment, experiments)
#: JOBS=2              how many cells run at a time (experiment, experiments)
#: PUBLISHED=1         cells of the pages in docs/results count as done, made with whatever sources (experiment, experiments)
#: LIST=1              only say how many cells are left and how long they take (experiment, experiments)
#: SHORT=1             break one container of each kind, and cut for a little less (compose-test); few syncs and tokens (bench-peers)
#: AGAIN=1             measure again what was measured before with the same sources (bench-peers)
#: SEED=7              the seed of a benchmark (bench and every bench-..., chaos), of the order of tests (test, test-all), or of the one
#:                     schedule to show (dst)
#: RATES=1,4,16        faults per minute of the storms (chaos)
#: KILLS=200           how many kills end the gauntlet (chaos)
#: GAUNTLET=32         faults per minute of the gauntlet (chaos)
#: ONLY=storm-4        do this run alone; what was measured before is kept (chaos); rows with AXIS=VALUE (experiment); one loop
#:                     (bench-loops); one part: crowds, rounds or large (bench-scale), syncs or training (bench-peers)
#: HOSTILE=1           only schedules with hostile peers (dst)
#: REPLICATED=1        only schedules with a broker of several nodes, whose streams lose their leaders (dst)
#: RESUME=build/dst.json  the file of a campaign that goes on from night to night (dst)
#: SAMPLE=10           try every tenth mutant (mutants); ONLY=round.py those of one file, FRESH=1 also those that are known
#: SCHEDULES=2000      how many simulated fault schedules are played (dst, bench-dst, test, test-all)
#: VERSION=0.3.0      the version to cut (release)
#: ARGS="-k round"     more arguments for pytest (test, test-all, coverage)
#: PART=2/6            about one of every six tests, the second such part (test-all)
#: LOAD=8              so many processes keep the machine busy meanwhile (test, test-all)

setup: $(READY)  ## make .venv from uv.lock; needs Python 3.11 or newer and git

$(READY): uv.lock pyproject.toml infra/bootstrap.txt infra/setup.sh
	@infra/setup.sh $(VENV)

demo: $(READY)  ## train across three islands on this machine and write a report
	$(VENV)/bin/atoll up --again --out $(or $(OUT),runs/demo)

test: $(READY)  ## run the first tier of the tests: every module, every contract, a run, a takeover; five minutes on two cores
	$(SCHEDULED) $(call PYTEST,4) -m "not second_tier and not cluster_faults"

test-all: $(READY)  ## run the second tier: the tests that `make test` leaves out, but for those of `make test-cluster`
	$(SCHEDULED) $(call PYTEST,3) $(if $(PART),--part $(PART)) -m second_tier

test-cluster: $(READY)  ## run the tests that kill, freeze and cut off nodes of a broker
	$(call PYTEST,2) -m cluster_faults

coverage: $(READY)  ## run the first tier and hold branch coverage against the floors of packages that have one
	mkdir -p build/coverage && rm -f build/coverage/.data*
	$(PY) -m coverage run -m pytest -q --numprocesses 2 --dist loadscope --no-loadscope-reorder -m "not second_tier and not cluster_faults" $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage json -q -o build/coverage/coverage.json
	$(PY) -m tests.coverage_floors build/coverage/coverage.json

lines: $(READY)  ## count the lines of code that training needs, and the rest
	$(PY) infra/count_lines.py

mutants: $(READY)  ## change protocol, merge and outer in every small way and see which changes the tests notice
	$(PY) tests/mutants/run.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only $(ONLY)) $(if $(FRESH),--fresh)

mutants-planted: $(READY)  ## make every mistake of tests/mutants/planted.toml and see what catches it, and how soon
	$(PY) tests/mutants/planted.py $(ONLY)

mutants-page: $(READY)  ## write docs/results/mutants.md from what the two found
	$(PY) tests/mutants/page.py

wheel: $(READY)  ## build the wheel into dist/, from which pip installs Atoll anywhere
	rm -rf dist && $(PY) -m hatchling build -t wheel -d dist

release: $(READY)  ## cut VERSION=0.3.0: write it down, close the changelog, commit and tag
	infra/release.sh $(VERSION)

lint: $(READY)  ## check style, formatting, import contracts and declared dependencies
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/deptry shared services

types: $(READY)  ## check types (mypy --strict)
	$(PY) -m mypy

compose-check: $(READY)  ## check docker-compose.yml against its schema and the Dockerfile with hadolint
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(VENV)/bin/hadolint infra/docker/Dockerfile

compose-test: $(READY)  ## run docker-compose.yml in podman from nothing, and kill, cut and heal what it runs (Linux, root)
	$(BENCH) -m benchmarks.faults.containers $(if $(SEED),--seed $(SEED)) $(if $(SHORT),--short)

deploy-check: $(READY)  ## render examples/deployment.toml, and let kubectl, systemd, compose's schema and SkyPilot read what it gives
	infra/deploy_check.sh $(VENV)

check: lint types compose-check docs-build test  ## lint, types, compose file, documents and the first tier

docs: $(READY)  ## read the documentation in a browser, and see changes at once
	$(PY) infra/docs/docs_site.py --serve

docs-build: $(READY)  ## build the documentation into build/docs/site; a broken link fails
	$(PY) infra/docs/docs_site.py

newest-nats: $(READY)  ## test the NATS adapter on the newest nats-py in the allowed range (skips without an index)
	infra/newest_nats.sh $(VENV)

trace: $(READY)  ## count the modules and functions that one contribution passes on its way
	$(BENCH) -m benchmarks.network.trace $(if $(SEED),--seed $(SEED))

bench: $(READY)  ## measure what the protocol costs a learner's step
	$(BENCH) -m benchmarks.network.overhead $(BENCH_FLAGS)

bench-takeover: $(READY)  ## kill the owner of a shard over and over and measure what the learners notice
	$(BENCH) -m benchmarks.faults.takeover $(BENCH_FLAGS)

bench-memory: $(READY)  ## measure what a fragment of 2 GB costs a shard and a learner in memory
	$(BENCH) -m benchmarks.arithmetic.large_fragments $(if $(SEED),--seed $(SEED))

bench-broker: $(READY)  ## measure blobs through a broker beside stock nats-py and a bare socket
	$(BENCH) -m benchmarks.network.broker $(if $(SEED),--seed $(SEED))

bench-regions: $(READY)  ## cut a region off while its learners write, and measure how it comes back
	$(BENCH) -m benchmarks.network.regions $(BENCH_FLAGS)

bench-round: $(READY)  ## measure a whole round of merging beside what memory allows, and beside what others do
	$(BENCH) -m benchmarks.arithmetic.merge_round $(if $(SEED),--seed $(SEED))

bench-bandwidth: $(READY)  ## compute the published bandwidth figures from the planner's model, and compare
	$(BENCH) -m benchmarks.network.bandwidth $(if $(SEED),--seed $(SEED))

bench-goodput: $(READY)  ## fit the simulated fleets on four of the paper's cells and check the others (docs/explanation/goodput.md)
	$(BENCH) -m benchmarks.fleet.goodput_fit $(BENCH_FLAGS)

bench-fidelity: $(READY)  ## run one scenario by real processes and by the simulator, and compare what comes out
	$(BENCH) -m benchmarks.fleet.fidelity $(BENCH_FLAGS)

bench-simulator: $(READY)  ## measure how fast simulated learners step, beside a bare loop of the same steps
	$(BENCH) -m benchmarks.fleet.simulator $(BENCH_FLAGS)

chaos: $(READY)  ## kill and freeze everything at random, and read from the event log what it cost
	$(BENCH) -m benchmarks.faults.chaos $(BENCH_FLAGS) $(if $(RATES),--rates $(RATES)) $(if $(KILLS),--kills $(KILLS)) $(if $(GAUNTLET),--gauntlet $(GAUNTLET)) $(if $(ONLY),--only $(ONLY))

race: $(READY)  ## train one model in four regions over shaped links: Atoll, data-parallel training, DiLoCo of torchft
	$(BENCH) -m benchmarks.network.race $(BENCH_FLAGS)

bench-peers: $(READY)  ## race two participants' syncs, and a first model, against gloo, torchft, hivemind, DDP, and JAX and torch by themselves
	$(BENCH) -m benchmarks.network.bench_peers $(if $(SHORT),--short) $(if $(LEARNERS),--learners $(LEARNERS)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again)

chaos-cluster: $(READY)  ## kill, freeze and cut off every node of a replicated broker while a run trains
	$(BENCH) -m benchmarks.faults.cluster_outages $(BENCH_FLAGS)

dst: $(READY)  ## play simulated schedules of faults on all cores until one fails, the time is up or enough are played
	$(BENCH) -m schedules --results $(if $(HOSTILE),--hostile) $(if $(REPLICATED),--replicated) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(SEED),--seed $(SEED)) $(if $(RESUME),--resume $(RESUME))

bench-dst: $(READY)  ## plant every mutant and measure how many simulated schedules it takes to catch it
	$(BENCH) -m benchmarks.fleet.dst $(BENCH_FLAGS) $(if $(SCHEDULES),--schedules $(SCHEDULES))

fuzz: $(READY)  ## feed every decoder and every handler of messages wrong inputs, and keep what breaks something
	$(BENCH) -m fuzzing $(BENCH_FLAGS)

attacks: $(READY)  ## try a table of attacks on a locked broker while a run trains
	$(BENCH) -m benchmarks.faults.attacks $(BENCH_FLAGS)

bench-hostile: $(READY)  ## measure what hostile messages cost a run: pace, memory, loss
	$(BENCH) -m benchmarks.faults.hostile $(BENCH_FLAGS)

bench-data: $(READY)  ## measure how fast text becomes token shards, and in how much memory; MEGABYTES=100 is a short run
	$(BENCH) -m benchmarks.training.prepare $(if $(MEGABYTES),--megabytes $(MEGABYTES)) $(if $(SEED),--seed $(SEED))

bench-transformers: $(READY)  ## compare logits with Transformers, of its models in Atoll and of Atoll's in it; makes an environment of its own
	$(BENCH) -m benchmarks.training.hugging_face $(if $(SEED),--seed $(SEED))

bench-scale: $(READY)  ## measure what 8, 32 and 128 learners cost, and memory under fragments of 500 MB, for MINUTES (30)
	$(BENCH) -m benchmarks.network.scale $(BENCH_FLAGS) $(if $(ONLY),--only $(ONLY))

bench-loops: $(READY)  ## play every loop of examples/ undisturbed and with killed islands; ONLY=cnn is one loop
	$(BENCH) -m benchmarks.training.loops $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED))

experiment: $(READY)  ## run one experiment of benchmarks/experiments, or go on with it
	$(BENCH) -m benchmarks.experiments.experiment $(or $(NAME),$(error give NAME=…, one of $(EXPERIMENTS))) $(EXPERIMENT_FLAGS)

experiments: $(READY)  ## run every experiment, or go on with them
	$(BENCH) -m benchmarks.experiments.experiment $(EXPERIMENT_FLAGS)

results: $(READY)  ## write the tables of docs/results from what was measured
	$(BENCH) -m benchmarks.lib.publish

results-check: $(READY)  ## compute the pages of the storm and of the experiments again from their raw files, and compare
	$(BENCH) -m benchmarks.lib.publish --check

clean:  ## remove caches, build outputs and the environments; runs/ stays
	rm -rf build dist .venv-new $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

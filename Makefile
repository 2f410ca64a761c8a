# make demo    simulates a day of vLLM traffic in two minutes, attaches the exporter and prints the URL
# make test    all tests, quick ones first
# make check   two minutes: format, lint, types, and tests that need only Python
PY := .venv/bin/python

.PHONY: setup demo check test format bench judge real fuzz docs screenshots lowest audit \
  audit-packages audit-python audit-image lock

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

# Judges verdicts on random servers; JUDGE="--explain 17" explains one of them.
JUDGE := --seeds 1..2000 --write
judge: setup
	$(PY) -m bench.judge $(JUDGE)

# Checks verdicts, forecasts and advice on a real vLLM on the CPU: 20 minutes, 2.5 GB; for a new vLLM release
# REAL="--version N". Its recordings are in .venv/real/recordings.
real: setup
	$(PY) -m bench.real $(REAL)

fuzz: setup
	cd tests && ../$(PY) -m fuzz

docs: setup
	$(PY) -m docs.generator.reference .
	$(PY) -m exporter rules --format prometheusrule >deploy/kustomize/monitoring/prometheusrule.yaml

screenshots: setup
	@.ci/programs
	$(PY) -m bench.screenshots
	$(PY) -m dashboards.render

# Runs the tests with the lowest versions that pyproject.toml allows, in a separate environment. Packages that only
# the tests need have the locked versions.
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

# Reports known vulnerabilities of the locked packages (PyPI's advisories), a Python in the image that is not the latest
# patch release, and what trivy or grype finds in the image. Needs the network and a built image, which no test does.
IMAGE := vllm-preemption-exporter
audit:
	@$(MAKE) --no-print-directory -k audit-packages audit-python audit-image

audit-packages: setup
	$(PY) -m pip install -q uv
	$(PY) -m uv tool run pip-audit --strict --disable-pip -r requirements.lock

# No advisory feed for Python itself can be read through PyPI, but the newest uv knows each release.
audit-python: setup
	$(PY) -m pip install -q --upgrade uv
	@has=$$(sed -n 's/^FROM python:\([0-9.]*\).*/\1/p' Dockerfile); \
	latest=$$($(PY) -m uv python list --only-downloads "$${has%.*}" | sed -n 's/^cpython-\([0-9.]*\)-.*/\1/p' | head -1); \
	echo "The image has Python $$has; the latest is $${latest:-unknown}."; [ "$$has" = "$$latest" ]

audit-image:
	@if command -v trivy >/dev/null; then trivy image --exit-code 1 --ignore-unfixed --severity HIGH,CRITICAL $(IMAGE); \
	elif command -v grype >/dev/null; then grype --only-fixed --fail-on high $(IMAGE); \
	else echo "The image was not checked: install trivy or grype, run \"docker build -t $(IMAGE) .\", and try again."; \
	  exit 1; fi

lock: setup
	$(PY) -m pip install -q uv
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --extra test \
	  --upgrade pyproject.toml --output-file requirements-test.lock
	@# The image's locks: the exporter's dependencies with bcrypt, and its build tools, as tested.
	sed -n 's/^\([a-z].*\) \\$$/\1/p' requirements-test.lock >.venv/constraints.txt
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --extra auth --constraint .venv/constraints.txt pyproject.toml --output-file requirements.lock
	echo hatchling | $(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --constraint .venv/constraints.txt - --output-file requirements-build.lock

"""A bounded run of the fuzzer, and every stored input."""

import pytest

from fuzz.run import run
from fuzz.targets import TARGETS, corpus_files

FILES = list(corpus_files())
SECONDS = 2.5  # per target
SEED = 20


@pytest.mark.parametrize(("name", "path"), FILES, ids=[f"{name}-{path.name}" for name, path in FILES])
def test_every_stored_input_is_survived(name, path):
    """What once broke something, and what was thought of by hand."""
    target = TARGETS[name][0]()
    for _ in range(2):
        target(path.read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_mutants_are_survived(name):
    """The same ones at every run; `make fuzz` looks for others. What is found is shown, to be stored."""
    outcome = run(name, SEED, seconds=SECONDS)
    assert outcome.inputs > 10
    assert not outcome.found, f"{outcome.found[0].problem}\n{outcome.found[0].input!r}"

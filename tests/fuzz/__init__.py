"""Fuzzing by mutation: what comes from outside is read, whatever it is, or refused by the own error.

``python -m fuzz`` (in ``tests/``; `make fuzz`) feeds a million mutants of a stored corpus and of the recorded
bodies to every reader. A fault is printed with its input, to be stored in the corpus.
"""

"""Shared by tests: bodies, scenes, recordings, servers, processes, real programs."""

# Folders in which every test needs a program. A run without programs does not load their modules: the driver
# of the browser and the models of Kubernetes take as long to import as all other tests together.
PROGRAMS_ONLY = ("browser", "deploy")

"""Judges the exporter's verdicts on servers and loads drawn at random.

Each seed gives a server, a load and perhaps a fault (`draw`). The load is simulated (`machine`), printed as
vLLM prints it (`dialects`) and fed to the real pipeline (`trial`). The truth comes from the same arrivals
simulated again with more of one resource (`truth`): what removes most of the waiting is what is short.
"""

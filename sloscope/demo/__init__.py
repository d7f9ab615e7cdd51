"""The whole chain on one machine: `python -m sloscope.demo`. Every part runs as its own process, started by its own
command.
"""

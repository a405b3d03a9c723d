"""Runs a whole network on one machine: storage, chain and neurons, each part as a process."""

"""A whole network on one machine: storage, chain and neurons, every part a process."""

"""Nodes: the work of a miner, a validator or an aggregator in each window."""

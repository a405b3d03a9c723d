"""A node: what a miner or a validator does in each window."""

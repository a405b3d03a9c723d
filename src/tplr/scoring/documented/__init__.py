"""The scores of documented networks: ratings of ranks, moving averages and penalties, as those networks define them."""

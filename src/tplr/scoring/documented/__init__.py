"""The scores of documented networks, as those networks define them: ratings of ranks, moving averages, penalties."""

"""The live view of a network: of a localnet, of any run by its public records, or of one node's events."""

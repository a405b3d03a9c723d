"""The live view of a network: of a localnet, of any run from what is public, or of a node's events."""

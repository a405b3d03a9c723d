"""The chain: blocks, registered neurons, commitments and weights. Importing it imports no SDK."""

from tplr.chain.base import Block, Chain, Commitment, Metagraph, Neuron
from tplr.chain.manager import ChainManager

__all__ = ["Block", "Chain", "ChainManager", "Commitment", "Metagraph", "Neuron"]

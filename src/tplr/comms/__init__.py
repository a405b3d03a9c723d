"""A neuron's access to the chain's directory and to everyone's buckets, by what is exchanged."""

from tplr.comms.neuron import Comms, Wallet

__all__ = ["Comms", "Wallet"]

"""A neuron's access to the chain's directory and to all buckets; one module for each kind of object."""

from tplr.comms.neuron import Comms, Wallet

__all__ = ["Comms", "Wallet"]

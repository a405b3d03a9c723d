"""``Chain`` on real subtensor nodes: the only package that imports bittensor (11.3)."""

from tplr.chain.subtensor.adapter import SubtensorChain
from tplr.chain.subtensor.endpoints import EndpointHead, endpoints_of, probe_endpoints

__all__ = ["EndpointHead", "SubtensorChain", "endpoints_of", "probe_endpoints"]

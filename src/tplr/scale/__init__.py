"""A network of the size of a subnet, and of a size that no subnet has: simulated, and computed.

No I/O: the protocol's own decisions (``Election``, ``WindowQuestion``, ``UploadBounds``, ``earned_peers``) run on
simulated links, stores and participants.
"""

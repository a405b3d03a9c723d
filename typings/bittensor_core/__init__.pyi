"""What tplr uses of a compiled module that has no stubs (0.1)."""

CRYPTO_ED25519: int
CRYPTO_SR25519: int

class KeyfileError(Exception): ...

class Keypair:
    ss58_address: str
    public_key: bytes
    def __init__(self, ss58_address: str, *, crypto_type: int = ...) -> None: ...
    @classmethod
    def create_from_seed(cls, seed: bytes) -> Keypair: ...
    @classmethod
    def create_from_uri(cls, uri: str, crypto_type: int = ...) -> Keypair: ...
    def sign(self, data: bytes) -> bytes: ...
    def verify(self, data: bytes, signature: bytes) -> bool: ...

def serialized_keypair_to_keyfile_data(keypair: Keypair) -> bytes: ...
def deserialize_keypair_from_keyfile_data(data: bytes) -> Keypair: ...
def get_encrypted_commit_v2(
    *,
    uids: list[int],
    weights: list[int],
    version_key: int,
    last_epoch_block: int,
    pending_epoch_at: int,
    subnet_epoch_index: int,
    tempo: int,
    blocks_since_last_step: int,
    current_block: int,
    subnet_reveal_period_epochs: int,
    block_time: float,
    hotkey: bytes,
) -> tuple[bytes, int]: ...

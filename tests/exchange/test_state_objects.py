"""Gathered states do not block the event loop; `comms/test_states.py` has the other cases."""

import threading
from typing import Any

from tplr.exchange.state_objects import gather_states, state_rules
from tplr.exchange.states import State, encode_state, parse_state
from tplr.keys import state_key
from tplr.schemas import ANYTIME
from tplr.storage import MemoryStore


async def test_states_are_merged_in_a_thread() -> None:
    threads: set[threading.Thread] = set()

    class Noted(dict[str, Any]):
        def get(self, *args: Any) -> Any:
            threads.add(threading.current_thread())
            return super().get(*args)

    def decode(body: bytes) -> State:
        state, step = parse_state(body)
        return State(Noted(state), step)

    stores = {uid: MemoryStore(str(uid)) for uid in (3, 4)}
    for uid, store in stores.items():
        await store.put(state_key("gradient", 7, uid, "1"), encode_state({"both": uid, f"only-{uid}": uid}, 1))
    rules = state_rules("gradient", 7, "1", max_bytes=1000, timeout=5.0, bounds=ANYTIME, decode=decode)
    found = await gather_states(stores, rules, upload_bytes=0)
    assert found.state_dict == {"both": [3, 4], "only-3": [3, None], "only-4": [None, 4]}
    assert threads
    assert threading.current_thread() not in threads

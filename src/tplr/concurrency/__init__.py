"""Read-ahead, worker pools and semaphores that the rooms share; no I/O of their own."""

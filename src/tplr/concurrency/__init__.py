"""Read-ahead, a worker pool and a semaphore that all packages share; no I/O of their own."""
